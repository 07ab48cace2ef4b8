"""Noise for release on an accelerator: the values of the host, bit by bit, from bits that were made ahead."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from scipy.special import ndtri
from torch import nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy import device_normal, noise
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.device_normal import _inverse_of_tail, _probability, rounded_normal_on_device
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.noise import NoiseAhead, add_noise
from dpgen_bench.privacy.rounded_normal import grid_step, rounded_normal
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.execute import RunFailed, execute
from dpgen_bench.store.folders import Store
from tests import toys
from tests.run_toys import config

CPU = torch.device("cpu")


def os_key(text: str) -> Key:
    return Key.from_os(hashlib.sha256(text.encode()).digest())


def signed(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int64).copy())


def on_device(exact: np.ndarray, std: float, words: np.ndarray, more: np.ndarray) -> tuple[list[float], list[bool]]:
    values, undecided = rounded_normal_on_device(torch.from_numpy(exact), std, signed(words), signed(more))
    return values.tolist(), undecided.tolist()


def on_host(exact: np.ndarray, std: float, words: np.ndarray, more: np.ndarray, rest: int = 0) -> list[float]:
    """`rounded_normal` with `rest`, 512 bits, after the second word of each coordinate."""
    bits = lambda i: lambda n: ((int(more[i]) << 512) + rest) >> (576 - n)  # noqa: E731
    return rounded_normal(exact, std, words, bits).tolist()


@pytest.mark.parametrize("std", [4.0, 1.3, 1e-3, 7e11])
@pytest.mark.parametrize("size", [0.0, 1e-30, 0.3, 1e5, 1e30])
def test_a_value_is_that_of_the_host(std, size):
    n = noise._BLOCK + 700
    exact = torch.from_numpy(np.random.default_rng(1).standard_normal(n) * size * min(std, 1e3))
    key = os_key(f"{std} {size}")
    ahead = NoiseAhead(std, CPU)
    noisy = ahead.add(0, key, {"a": exact.reshape(2, -1), "b": exact[:3].float(), "none": exact[:0]})
    assert torch.equal(noisy["a"], add_noise(exact.reshape(2, -1), std, key.derive("a")))
    assert torch.equal(noisy["b"], add_noise(exact[:3].float(), std, key.derive("b")))
    assert noisy["none"].shape == (0,)
    assert all(value.dtype == torch.float32 for value in noisy.values())
    ahead.expect_decided()


@pytest.mark.parametrize("off", [0.0, 2e-9, 1e-13, -1e-16])
def test_rounding_is_right_next_to_the_middle_between_two_points(off):
    """x is chosen so that the sum is within `off` steps of such a middle, or as near as float64 can represent."""
    std, n, key = 1.3, 150, os_key("near")
    step = grid_step(std)
    words, more = key.words("words", n), key.words("second words", n)
    z = ndtri(((words % 2**63).astype(np.float64) + 0.5) * 2.0**-64) * np.where(words >> np.uint64(63), -1, 1)
    exact = ((np.arange(n) - n // 2 + 0.5 + off) - std / step * z) * step
    values, undecided = on_device(exact, std, words, more)
    assert values == on_host(exact, std, words, more)
    assert not any(undecided)


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize(("agreeing", "is_decided"), [(70, True), (80, True), (127, False), (200, False)])
def test_what_128_bits_do_not_decide_is_reported(sign, agreeing, is_decided):
    """The uniform number agrees with the middle's probability in `agreeing` bits, and is then above or below."""
    context = mpmath.MPContext()
    context.prec = 2000
    std, x = 1.3, 0.7
    step = Fraction(grid_step(std))
    middle = (3000 + Fraction(1, 2)) * step - Fraction(x)  # of the noise
    middle = middle if sign else -2 * Fraction(x) - middle
    c = context.mpf(abs(middle).numerator) / abs(middle).denominator / context.mpf(std)
    digits = int(context.floor(context.ldexp(context.erfc(c / context.sqrt(2)) / 2, 640)))
    for larger in (0, 1):
        bits = ((digits >> (640 - agreeing)) + (1 if larger else -1)) << (640 - agreeing)
        words = np.array([(bits >> 576) + (sign << 63)], dtype=np.uint64)
        more = np.array([bits >> 512 & (2**64 - 1)], dtype=np.uint64)
        exact = np.array([x])
        values, undecided = on_device(exact, std, words, more)
        assert undecided == [not is_decided]
        if is_decided:
            assert values == on_host(exact, std, words, more, bits % 2**512)


def test_the_normal_quantile_has_an_error_below_what_the_margin_assumes():
    """docs/noise.md assumes 2^-89; also in the tails, and for the largest correction that is accepted."""
    context = mpmath.MPContext()
    context.prec = 300
    key = os_key("quantile")
    tails = [int(word) % 2**63 for word in key.words("words", 600)]
    tails += [int(2**63 * 2.0 ** (-i / 8)) - 1 for i in range(400)] + [1, 2, 3, 2**62, 2**62 - 1, 2**63 - 1, 0]
    more = key.words("second words", len(tails))
    z, correction, too_rough = _inverse_of_tail(_probability(torch.tensor(tails), signed(more)))
    assert not too_rough.any()
    for i, tail in enumerate(tails):
        p = context.ldexp(context.mpf((tail << 64) + int(more[i])), -128)
        found = context.mpf(float(z[i])) + context.mpf(float(correction[i]))
        error = (context.erfc(found / context.sqrt(2)) / 2 - p) / context.npdf(found)
        assert abs(error) < 2.0**-92, tail


def test_extreme_values():
    words = np.array([0, 1, 2**63, 2**63 - 1, 2**64 - 1, 5, 7, 9], dtype=np.uint64)
    more = np.array([0, 3, 0, 2**64 - 1, 2**64 - 1, 0, 0, 0], dtype=np.uint64)
    exact = np.array([0.1, 0.1, 0.1, 0.1, 0.1, math.nan, math.inf, -1e-9])
    values, undecided = on_device(exact, 1.0, words, more)
    assert undecided == [True, False, True, False, False, False, False, False]  # a tail of 2^-128 is too far out
    assert values[1] < -8.9
    possible = np.array([1, 3, 4])  # bits that are all zero decide nothing
    assert [values[i] for i in possible] == on_host(exact[possible], 1.0, words[possible], more[possible])
    assert math.isnan(values[5])
    assert not math.isfinite(values[6])


def gradient_releases(times: int = 4, executed: int = 0) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(64, 10)
    images, labels = toys.records(40, (1, 8, 8))
    data = PrivateData(images, labels, 10, Services(Ledger(Budget(math.inf), 40, "os"), os_key("run")))
    bound = PerRecordGradient(C=1.0, module=net)
    release = data.mechanism("m", sample=Poisson(0.3), bound=bound, times=times, std=0.5)
    data._services.resume_at({"m": executed})
    return [release(lambda x, y: net(x.flatten(1)).square().sum(1)) for _ in range(executed, times)]


def test_releases_of_an_accelerator_are_those_of_the_host_and_a_resumed_run_repeats_them(monkeypatch):
    host = gradient_releases()
    monkeypatch.setattr(noise, "ON_HOST", frozenset())
    made, add, used = [], NoiseAhead.make, []
    monkeypatch.setattr(
        NoiseAhead,
        "make",
        lambda self, index, key, sizes: made.append((index, key.secret)) or add(self, index, key, sizes),
    )
    plain = NoiseAhead.add
    monkeypatch.setattr(
        NoiseAhead,
        "add",
        lambda self, index, key, exact: used.append((index, list(self._made))) or plain(self, index, key, exact),
    )
    device = gradient_releases()
    assert used == [(0, []), (1, [1]), (2, [2]), (3, [3])]  # bits of the next release alone are ready, and are dropped
    assert len({key for _, key in made}) == len({index for index, _ in made}) == 4
    for releases in (device, host[:2] + gradient_releases(executed=2)):
        for one, other in zip(host, releases, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_with_an_undecided_value_repeats_its_last_releases_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(noise, "ON_HOST", frozenset())
    monkeypatch.setattr(Journal, "stores", lambda *_: False)
    monkeypatch.setattr(device_normal, "MARGIN", 1.0)
    keys, read = [], Key.from_os
    monkeypatch.setattr(Key, "from_os", lambda secret=None: keys.append(secret) or read(secret))
    make = partial(config, tmp_path, "privacy.noise=os", "runtime.checkpoint_s=1000")
    with pytest.raises(RunFailed, match="too near to the middle between two points of the grid for the accelerator"):
        execute(make())
    (folder,) = Store(tmp_path).runs()
    assert not (folder.path / "checkpoints").exists()
    assert (folder.path / "private" / "host_noise").stat().st_mode & 0o077 == 0
    assert not Ledger.load(folder.path / "ledger.json").failures
    assert execute(make()).done
    assert keys[-1] == keys[-2] is not None
    assert not list((folder.path / "private").glob("host_noise"))
