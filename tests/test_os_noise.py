"""privacy.noise=os: exact noise on a grid, cryptographic draws, and attacks that succeed against seeded noise.

Keys are fixed, so no test is random. Over random keys, each test has a false-alarm probability of at most 1e-6.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri
from torch import nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRecord, PerRecordGradient, PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.noise import _BLOCK, add_noise
from dpgen_bench.privacy.rounded_normal import MARGIN, grid_step, rounded_normal
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, OneShard, Poisson
from dpgen_bench.privacy.services import Services
from tests import float_attack
from tests.toys import records

ALARM = 1e-6


def os_key(text: str) -> Key:
    return Key.from_os(hashlib.sha256(text.encode()).digest())


def key_of(mode: str, text: str) -> Key:
    return os_key(text) if mode == "os" else Key.seeded(text)


# --- attacks on the floating-point representation ---------------------------------------------------------------------


class WholeTensor:
    """60,000 numbers, std 4, proven epsilon 1.99; the exact value is zero, or a tensor of norm 0.9 C."""

    std, distance, base, size = 4.0, 0.9, 0.0, 60_000
    C = 1.0

    def __init__(self) -> None:
        shift = np.random.default_rng(0).standard_normal(self.size)
        self.zero = np.zeros(self.size, dtype=np.float32)
        self.zero[0] = self.base
        self.one = (self.zero + shift * (self.distance / np.linalg.norm(shift))).astype(np.float32)
        self.bound = Whole(C=self.C, shape=(self.size,))

    def fn(self, truth: int):
        value = torch.from_numpy((self.zero, self.one)[truth])
        return lambda images, labels: value

    def flat(self, released) -> np.ndarray:
        return released.numpy()


class SmallNoiseLargeValue(WholeTensor):
    """Noise of std 0.001 on a tensor with an entry of 1,000; the candidates differ by 2e-4."""

    std, distance, base, size = 1e-3, 2e-4, 1000.0, 30_000
    C = 2000.0


class Gradient:
    """A gradient in two parts, of one record: zero, or clipped to C; std is no power of two."""

    std, distance = 1.3, 0.25

    def __init__(self) -> None:
        self.module = nn.Linear(200, 100)
        self.bound = PerRecordGradient(C=self.distance, module=self.module)
        from dpgen_bench.privacy.gradients import clipped_gradient_sum

        images = records(1, (1, 10, 20))[0].float() / 255.0
        total = clipped_gradient_sum(self.module, lambda x: self.fn(1)(x, None), (images,), self.distance)
        self.one = self.flat(total.gradients)
        self.zero = np.zeros_like(self.one)

    def fn(self, truth: int):
        return lambda images, labels: truth * self.module(images.flatten(1)).sum(1)

    def flat(self, released) -> np.ndarray:
        return torch.cat([released[name].flatten() for name in ("weight", "bias")]).numpy()


def attacked(setting, mode: str, releases: int) -> tuple[dict[str, int], np.ndarray]:
    """How often each attack names the right candidate, and the last release."""
    images, labels = records(1, (1, 10, 20))
    data = PrivateData(images, labels, 10, Services(Ledger(Budget(math.inf), 1, mode), key_of(mode, "attack")))
    release = data.mechanism("m", sample=Full(), bound=setting.bound, times=releases, std=setting.std)
    right = {"membership": 0, "residue": 0}
    for index in range(releases):
        truth = index % 2
        released = setting.flat(release(setting.fn(truth)))
        arguments = (setting.zero, setting.one, released, setting.std)
        right["membership"] += float_attack.by_membership(*arguments) == truth
        right["residue"] += float_attack.by_residue(*arguments) == truth
    return right, released


@pytest.mark.parametrize("setting", [WholeTensor, SmallNoiseLargeValue, Gradient])
def test_the_float_attacks_fail_against_os_noise(setting):
    case = setting()
    right, released = attacked(case, "os", 200)
    # The success probability of the best attack on the Gaussian mechanism itself, at the candidates' distance.
    best = stats.norm.cdf(case.distance / case.std / 2)
    for attack, successes in right.items():
        assert successes <= stats.binom.isf(ALARM, 200, best), attack
    on_grid = released.astype(np.float64) / grid_step(case.std)
    assert (on_grid == np.rint(on_grid)).all()


@pytest.mark.parametrize("setting", [WholeTensor, SmallNoiseLargeValue, Gradient])
def test_the_same_attacks_succeed_against_seeded_noise(setting):
    case = setting()
    right, _ = attacked(case, "seeded", 30)
    assert right["membership"] == 30
    if setting is WholeTensor:  # about ten numbers of each release are informative here, and fewer in other settings
        assert right["residue"] >= 27
        event = Event(Full(), case.bound.sensitivity, case.std, 1)
        assert epsilon([event], 1e-5, "add_remove", "pld") == pytest.approx(1.99, abs=0.005)


def test_the_attack_models_the_sampler_exactly():
    drawn = np.random.Generator(np.random.Philox(1)).standard_normal(10**6, dtype=np.float32)
    near = drawn[np.abs(drawn) < 0.01]
    assert float_attack.reachable(np.zeros_like(near), near, 1.0).all()
    others = np.random.default_rng(0).uniform(-1e-3, 1e-3, 2000).astype(np.float32)
    assert float_attack.reachable(np.zeros_like(others), others, 1.0).mean() < 0.2


# --- exactness --------------------------------------------------------------------------------------------------------


def in_high_precision(x: float, std: float, word: int, more, digits: int = 90) -> float:
    """round((x + std Φ⁻¹(U)) / g) g with 320 bits of U, computed in mpmath."""
    context = mpmath.MPContext()
    context.dps = digits
    tail = context.ldexp(context.mpf(((word % 2**63) << 256) + more(256)), -320)
    z = -context.sqrt(2) * context.erfinv(1 - 2 * tail)
    z = -z if word >> 63 else z
    step = context.mpf(grid_step(std))
    return float(context.floor((context.mpf(x) + context.mpf(std) * z) / step + context.mpf(1) / 2) * step)


def all_in_high_precision(exact, std, words, more) -> list[float]:
    return [in_high_precision(x, std, int(words[i]), more(i)) for i, x in enumerate(exact)]


def drawn(text: str, n: int):
    key = os_key(text)
    return key.words("words", n), partial(key.bits, "more")


@pytest.mark.parametrize("std", [4.0, 1.3, 1e-3, 7e11])
@pytest.mark.parametrize("size", [0.0, 1e-30, 0.3, 1e5])
def test_a_release_is_the_rounded_sum_in_high_precision(std, size):
    words, more = drawn(f"{std} {size}", 25)
    exact = np.random.default_rng(1).standard_normal(25) * size * std
    rounded = rounded_normal(exact, std, words, more)
    assert rounded.tolist() == all_in_high_precision(exact, std, words, more)


@pytest.mark.parametrize("off", [0.0, 2e-9, 1e-13, -0.9 * MARGIN, 1.1 * MARGIN, -1.1 * MARGIN])
def test_rounding_is_right_next_to_the_middle_between_two_points(off):
    """x is chosen so that the sum is within `off` steps of such a middle, or as near as float64 can represent."""
    std, n = 1.3, 40
    step = grid_step(std)
    words, more = drawn("near", n)
    z = ndtri(((words % 2**63).astype(np.float64) + 0.5) * 2.0**-64) * np.where(words >> np.uint64(63), -1, 1)
    exact = ((np.arange(n) - 20 + 0.5 + off) - std / step * z) * step
    rounded = rounded_normal(exact, std, words, more)
    assert rounded.tolist() == all_in_high_precision(exact, std, words, more)
    sides = np.sign(rounded / step - (np.arange(n) - 20 + 0.5))
    assert (len(set(sides)) == 2) == (abs(off) < 1e-12)  # as near as this, both sides occur


def _same(bits, i):
    return bits


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("agreeing", [70, 200, 700])
def test_bits_are_drawn_until_rounding_is_decided(sign, agreeing):
    """The uniform number agrees with the middle's probability in `agreeing` bits, and is then above or below."""
    context = mpmath.MPContext()
    context.prec = 2000
    std, x = 1.3, 0.7
    step = Fraction(grid_step(std))
    middle = (3000 + Fraction(1, 2)) * step - Fraction(x)  # of the noise
    middle = middle if sign else -2 * Fraction(x) - middle  # below: the reflection, whose middle is -3000.5 steps
    c = context.mpf(abs(middle).numerator) / abs(middle).denominator / context.mpf(std)
    digits = int(context.floor(context.ldexp(context.erfc(c / context.sqrt(2)) / 2, 1000)))
    rounded = []
    for larger in (0, 1):
        last = (digits >> (1000 - agreeing)) + (1 if larger else -1)
        bits = last << (1000 - agreeing)
        word = (bits >> 936) + (sign << 63)

        def more(n: int, rest: int = bits % 2**936) -> int:
            return rest >> (936 - n) if n <= 936 else rest << (n - 936)

        rounded.append(rounded_normal(np.array([x]), std, np.array([word], dtype=np.uint64), partial(_same, more))[0])
    inner, outer = (3000, 3001) if sign else (-3000, -3001)  # a larger tail probability is less noise
    assert rounded == [outer * grid_step(std), inner * grid_step(std)]


def test_the_extreme_tails_and_the_centre():
    words = np.array([0, 1, 2**63, 2**63 + 1, 2**63 - 1, 2**64 - 1], dtype=np.uint64)
    _, more = drawn("tails", 6)
    rounded = rounded_normal(np.full(6, 0.1), 1.0, words, more)
    assert rounded.tolist() == all_in_high_precision([0.1] * 6, 1.0, words, more)
    assert rounded[0] < -9.0 < 9.0 < rounded[2]


def test_ndtri_is_as_accurate_as_the_margin_assumes():
    """Its relative error below 2^-40 leaves 2^-16 of the margin: 2^11 · 5.8 · 2^-40 steps of 2^-20."""
    context = mpmath.MPContext()
    context.dps = 40
    low = np.exp(np.random.default_rng(0).uniform(math.log(2.0**-28), math.log(0.5), 1500))
    for p in [*low, *(0.5 - np.geomspace(1e-16, 0.4, 300)), 2.0**-28, 0.5 - 2.0**-54, *np.linspace(0.13, 0.14, 100)]:
        z = float(ndtri(p))
        density = context.npdf(z)
        error = abs((context.ncdf(z) - context.mpf(p)) / density)
        assert error <= abs(z) * 2.0**-40 + 2.0**-1000, p


def test_large_values_keep_their_integer_part_and_no_sign_of_zero_is_left():
    words, more = drawn("large", 20_000)
    exact = np.array([1e300, -3.0 * 2.0**60, 2.0**52 + 1.0, math.nan, *np.full(19_996, -1e-9)])
    rounded = rounded_normal(exact, 1.0, words, more)
    assert rounded[0] == 1e300
    assert abs(rounded[1] + 3.0 * 2.0**60) <= 2.0**10
    assert abs(rounded[2] - 2.0**52) < 20.0
    assert math.isnan(rounded[3])
    zeros = rounded[rounded == 0.0]
    assert len(zeros) > 0
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize("std", [1e-40, 1e40, math.inf, math.nan])
def test_a_std_that_float32_cannot_hold_on_a_grid_is_refused(std):
    with pytest.raises(ValueError, match="expected a noise std between"):
        add_noise(torch.zeros(3), std, os_key("x"))


@pytest.mark.parametrize("epsilon", [None, math.inf])
def test_such_a_std_is_refused_before_it_is_approved(epsilon):
    images, labels = records(4)
    ledger = Ledger(Budget(epsilon), 4, "os")
    data = PrivateData(images, labels, 10, Services(ledger, os_key("small")))
    with pytest.raises(ValueError, match="expected a noise std between"):
        data.mechanism("sum", sample=Full(), bound=PerRecord(C=1e-40, shape=(1,)), times=1, std=1e-40)
    assert ledger.entries == {}


@pytest.mark.parametrize("std", [4.0, 3.9999, 1.3, 0.7e-3])
def test_the_grid_is_a_power_of_two_near_a_thousandth_of_the_std(std):
    mantissa, _ = math.frexp(grid_step(std))
    assert mantissa == 0.5
    assert 2.0**10 <= std / grid_step(std) < 2.0**11


# --- the law ----------------------------------------------------------------------------------------------------------


def test_the_noise_has_its_law():
    n, std = 200_000, 1.3
    exact = torch.from_numpy(np.random.default_rng(2).standard_normal(n) * 0.1)
    noise = (add_noise(exact, std, os_key("law")).double() - exact).numpy() / std
    assert abs(noise.mean()) * math.sqrt(n) < stats.norm.isf(ALARM / 2)
    assert ALARM / 2 < stats.chi2.cdf(np.sum(noise**2), n) < 1 - ALARM / 2
    assert stats.kstest(noise, "norm").pvalue > ALARM
    # The lowest bits are uniform and do not depend on the fraction of the exact value.
    cells = np.rint((noise * std + exact.numpy()) / grid_step(std)).astype(np.int64) % 8
    fraction = (exact.numpy() / grid_step(std) % 1.0 * 4).astype(np.int64)
    counts = np.histogram2d(fraction, cells, bins=(4, 8))[0]
    assert stats.chi2_contingency(counts).pvalue > ALARM
    assert stats.chisquare(counts.sum(0)).pvalue > ALARM


def test_noise_repeats_for_one_key_and_is_independent_of_that_of_any_other():
    n, key = 100_000, os_key("noise")
    noise = add_noise(torch.zeros(n), 1.0, key.derive("m", 0))
    assert torch.equal(noise, add_noise(torch.zeros(n), 1.0, key.derive("m", 0)))
    others = [key.derive("m", 1), key.derive("n", 0), key.derive("m", "0"), os_key("x").derive("m", 0)]
    pairs = [(noise, add_noise(torch.zeros(n), 1.0, other)) for other in others]
    for one, two in [*pairs, (noise[:-_BLOCK], noise[_BLOCK:])]:  # the last pair: blocks of one stream
        assert stats.pearsonr(one.numpy(), two.numpy()).pvalue > ALARM
        assert stats.pearsonr(one.abs().numpy(), two.abs().numpy()).pvalue > ALARM


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_exact_value_is_not_rounded_before_the_noise(dtype):
    exact = (torch.arange(6, dtype=torch.float64).reshape(2, 3) / 7).to(dtype)
    noisy = add_noise(exact, 1e-3, os_key("dtype"))
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy, add_noise(exact.double(), 1e-3, os_key("dtype")))


@pytest.mark.gpu
def test_the_noise_is_the_same_on_an_accelerator():
    if not torch.cuda.is_available():
        pytest.skip("this machine has no accelerator")
    exact = torch.arange(70_000).double() / 7
    noisy = add_noise(exact.cuda(), 1.3, os_key("accelerator"))
    assert noisy.is_cuda
    assert torch.equal(noisy.cpu(), add_noise(exact, 1.3, os_key("accelerator")))


# --- keys and draws ---------------------------------------------------------------------------------------------------


def test_a_key_keeps_its_mode_and_the_ledger_must_have_the_same():
    assert os_key("a").derive("b", 1).mode == "os"
    assert Key.seeded("a").derive("b", 1).mode == "seeded"
    with pytest.raises(ValueError, match="use add_noise"):
        os_key("a").normal((2,), 1.0)
    with pytest.raises(ValueError, match="expected a noise key of 32 bytes, got 31"):
        Key.from_os(bytes(31))
    images, labels = records(4)
    for mode, other in (("os", "seeded"), ("seeded", "os")):
        with pytest.raises(ValueError, match=f"expected a key of the ledger's noise mode, privacy.noise={mode}"):
            PrivateData(images, labels, 10, Services(Ledger(Budget(1.0), 4, mode), key_of(other, "a")))


def test_poisson_draws_from_the_cryptographic_stream_have_their_rate_and_belong_to_ids():
    key, ids, rate, rounds = os_key("rate"), np.arange(500), 0.1, 200
    draws = [Poisson(rate).draw(ids, key.derive(t), t) for t in range(rounds)]
    assert stats.binomtest(sum(map(len, draws)), 500 * rounds, rate).pvalue > ALARM
    rest = ids[ids != 7]
    assert set(rest[Poisson(rate).draw(rest, key.derive(0), 0)]) == set(draws[0]) - {7}
    assert len(Poisson(1.0).draw(ids, key, 0)) == 500
    words = key.words("coins", 500)
    limit = int(words[3])
    assert key.bernoulli("coins", math.nextafter(limit / 2**64, 1.0), 500)[3]
    assert not key.bernoulli("coins", math.nextafter(limit / 2**64, 0.0), 500)[3]


def test_shards_clients_and_subsets_are_uniform():
    key, n = os_key("uniform"), 5000
    for turn in (OneShard(7).shard, OneClient(7).client):
        counts = np.bincount([turn(key.derive(t), t) for t in range(n)], minlength=7)
        assert stats.chisquare(counts).pvalue > ALARM
    fixed = FixedSize(2, 4)
    draws = [tuple(fixed.draw(np.arange(4), key.derive(t), t)) for t in range(n)]
    assert {len(draw) for draw in draws} == {2}
    assert stats.chisquare(np.unique(draws, axis=0, return_counts=True)[1]).pvalue > ALARM


def test_an_integer_is_drawn_again_where_the_range_does_not_divide(monkeypatch):
    """Of 2^64 words the last 2^64 mod 3 = 1 is refused."""
    stream = (2**64 - 1).to_bytes(8, "big") + (5).to_bytes(8, "big")
    monkeypatch.setattr(Key, "bits", lambda self, purpose: lambda n: int.from_bytes(stream[: n // 8], "big"))
    assert os_key("a").integer("x", 3) == 5 % 3


# --- the three places where noise is added ----------------------------------------------------------------------------


def test_clients_and_servers_add_the_same_noise():
    from tests.client_toys import SCALE, Toy

    images, labels = records(12)
    clients, std = np.arange(12) // 3, 1.3
    answers = []
    for noise_at, sample, bound in (
        ("client", OneClient(4, "public_balanced"), PerRow(C=1.0, shape=(2, 3))),
        ("server", Full(), PerRecord(C=1.0, shape=(2, 3))),
    ):
        ledger = Ledger(Budget(math.inf, relation="replace_one"), 12, "os")
        data = PrivateData(images, labels, 10, Services(ledger, os_key("fed")), clients=clients, num_clients=4)
        ask = data.grouped("client").mechanism(
            "m", program=Toy(keeps=False), sample=sample, bound=bound, noise_at=noise_at, times=2, std=std
        )
        answers += [ask(SCALE), ask(SCALE)]
    for answer in answers:
        on_grid = answer.double() / grid_step(std)
        assert torch.equal(on_grid, on_grid.round())
        assert len(answer.unique()) == answer.numel()
    assert len(torch.stack(answers).unique()) == 4 * 6
