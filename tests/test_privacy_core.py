"""Tests bounds, draws, noise, ledgers and mechanisms by closed forms and by laws that hold for all inputs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.allowance import AllowanceExhausted
from dpgen_bench.privacy.bounds import Batch, PerRecord, PerRecordGradient, PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full, Poisson
from dpgen_bench.privacy.services import Services


def open_data(n=12, epsilon=10.0, key="test", journal=None, ledger=None, diagnostics=None, **budget):
    images = torch.arange(n * 4, dtype=torch.uint8).reshape(n, 1, 2, 2)
    ledger = ledger or Ledger(Budget(epsilon, **budget), n)
    labels = torch.arange(n) % 3
    services = Services(ledger, Key.seeded(key), journal=journal or Journal(None), diagnostics=diagnostics)
    return PrivateData(images, labels, 3, services), ledger


class Untouchable:
    """Raises an error at any access."""

    def __getattr__(self, name):
        raise AssertionError("a record was touched")


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_sensitivities_of_the_bounds():
    row = {"C": 0.5, "shape": (9, 4)}
    assert PerRecord(**row).sensitivity == Sensitivity(0.5, 1.0)
    assert PerRow(**row).sensitivity == Sensitivity(3.0, 3.0)  # 2 C sqrt(9)
    assert Whole(**row).sensitivity == Sensitivity(1.0, 1.0)


@pytest.mark.parametrize("bound", [PerRow(C=1.0, shape=(3, 5)), Whole(C=1.0, shape=(3, 5))])
@given(seed=st.integers(0, 10**6))
def test_values_of_any_two_functions_differ_by_at_most_the_sensitivity(bound, seed):
    rng = torch.Generator().manual_seed(seed)
    batch = Batch(torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64), torch.arange(2), Key.seeded("batch"))
    a, b = (bound.value(lambda *_: 3 * torch.randn(3, 5, generator=rng), batch, None)["value"] for _ in range(2))
    assert float((a - b).double().norm()) <= bound.sensitivity.replace_one


def test_the_declared_sensitivity_of_rows_is_reached_by_opposite_rows():
    bound = PerRow(C=1.0, shape=(4, 2))
    batch = Batch(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64), torch.arange(0), Key.seeded("batch"))
    up = bound.value(lambda *_: torch.tensor([[9.0, 0.0]] * 4), batch, None)["value"]
    down = bound.value(lambda *_: torch.tensor([[-9.0, 0.0]] * 4), batch, None)["value"]
    assert float((up - down).norm()) == pytest.approx(bound.sensitivity.replace_one, rel=1e-5)


def test_the_sum_of_rows_does_not_depend_on_the_microbatch():
    data, _ = open_data(epsilon=math.inf)
    bounds = {f"m{size}": PerRecord(C=0.3, shape=(1, 2, 2), microbatch=size) for size in (1, 5, None)}
    mechanisms = [data.mechanism(name, sample=Full(), bound=bound, times=1) for name, bound in bounds.items()]
    sums = [release(lambda x, y: x) for release in mechanisms]
    torch.testing.assert_close(sums[0], sums[1])
    torch.testing.assert_close(sums[0], sums[2])


@pytest.mark.parametrize(
    ("shape", "n", "sizes"),
    [
        ((1, 2, 2), 1001, [1000, 1]),  # small rows: a thousand records
        ((2**10, 2**10), 19, [8, 8, 3]),  # 32 bytes for each of 2^20 numbers: eight rows in 256 MiB
        ((2**22 + 1,), 2, [1, 1]),  # two rows are more than that
    ],
)
def test_rows_of_any_size_are_summed_in_bounded_memory(shape, n, sizes):
    data, _ = open_data(n=n, epsilon=math.inf)
    release = data.mechanism("rows", sample=Full(), bound=PerRecord(C=1e9, shape=shape), times=1)
    sizes_seen = []

    def fn(x, y):
        sizes_seen.append(len(y))
        return y.float().reshape(-1, *[1] * len(shape)).expand(-1, *shape)

    total = release(fn)
    assert sizes_seen == sizes
    assert (total == sum(i % 3 for i in range(n))).all()


def test_values_must_have_the_declared_shape():
    data, _ = open_data(epsilon=math.inf)
    release = data.mechanism("rows", sample=Full(), bound=PerRow(C=1.0, shape=(2, 3)), times=1)
    with pytest.raises(ValueError, match=r"expected the function to return shape \(2, 3\), got \(12, 1, 2, 2\)"):
        release(lambda x, y: x)


def test_the_number_of_public_rows_is_fixed_with_the_bound():
    data, _ = open_data(epsilon=math.inf)
    module = torch.nn.Linear(4, 1)
    bound = PerRecordGradient(C=1.0, module=module, public_rows=2)
    release = data.mechanism("gradient", sample=Full(), bound=bound, times=2)
    fakes = torch.zeros(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected 2 public rows in each release.*got 3"):
        release(lambda x, y, public: module(x.flatten(1)).squeeze(1), public=fakes)
    with pytest.raises(ValueError, match=r"expected 2 public rows in each release.*got 0"):
        release(lambda x, y: module(x.flatten(1)).squeeze(1))


def test_public_rows_are_added_to_the_sum_and_marked():
    data, _ = open_data(epsilon=math.inf)
    module = torch.nn.Linear(4, 1, bias=False)
    bound = PerRecordGradient(C=1e6, module=module, public_rows=2)
    release = data.mechanism("gradient", sample=Full(), bound=bound, times=1)
    fakes = torch.full((2, 1, 2, 2), 0.5), torch.zeros(2, dtype=torch.int64)

    def fn(x, y, public):
        assert public.tolist() == [False] * 12 + [True] * 2
        return torch.where(public, -1.0, 1.0) * module(x.flatten(1)).squeeze(1)

    expected = torch.arange(48.0).reshape(12, 4).sum(0) / 255 - 2 * 0.5
    torch.testing.assert_close(release(fn, public=fakes)["weight"].squeeze(0), expected)


# --- draws and noise --------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 10**6), st.integers(0, 39))
def test_the_draw_of_a_record_does_not_depend_on_other_records(n, seed, gone):
    key, ids = Key.seeded(str(seed)), np.arange(n)
    everyone = set(Poisson(0.4).draw(ids, key, 0))
    rest = ids[ids != gone % n]
    without = set(rest[Poisson(0.4).draw(rest, key, 0)])
    assert without == everyone - {gone % n}


def test_poisson_draws_have_their_rate_and_are_independent_across_releases():
    """The probability of a false alarm is 1e-9 for the rate, and below 1e-7 for the pairs.

    Pairs overlap, so their number varies 18% more than a binomial number.
    """
    key, ids, q, rounds = Key.seeded("rate"), np.arange(500), 0.1, 200
    draws = [Poisson(q).draw(ids, key.derive("m", t), t) for t in range(rounds)]
    assert stats.binomtest(sum(map(len, draws)), 500 * rounds, q).pvalue > 1e-9
    both = sum(len(np.intersect1d(a, b)) for a, b in itertools.pairwise(draws))
    assert stats.binomtest(both, 500 * (rounds - 1), q * q).pvalue > 1e-9


def test_noise_is_normal_reproducible_and_differs_by_every_part_of_its_key():
    key = Key.seeded("noise")
    noise = key.derive("m", 0).normal((20000,), 3.0)
    assert stats.kstest(noise.numpy() / 3.0, "norm").pvalue > 1e-6
    assert torch.equal(noise, key.derive("m", 0).normal((20000,), 3.0))
    others = [key.derive("m", 1), key.derive("n", 0), key.derive("m", "0"), Key.seeded("x").derive("m", 0)]
    for other in others:
        assert abs(np.corrcoef(noise.numpy(), other.normal((20000,), 3.0).numpy())[0, 1]) < 0.05


def test_keys_from_the_operating_system_differ():
    assert Key.from_os() != Key.from_os()


# --- mechanism, budget, ledger ----------------------------------------------------------------------------------------


def test_a_release_beyond_the_allowance_raises_and_is_not_counted():
    data, ledger = open_data()
    release = data.mechanism("sum", sample=Full(), bound=PerRecord(C=1.0, shape=(1, 2, 2)), times=2)
    release(lambda x, y: x)
    release(lambda x, y: x)
    with pytest.raises(AllowanceExhausted, match="release 3 is refused"):
        release(lambda x, y: x)
    assert ledger.entries["sum"].executed == 2


def test_a_plan_over_budget_is_refused_before_data_is_touched():
    data, ledger = open_data(epsilon=1.0)
    data._PrivateData__images = Untouchable()
    bound = PerRecord(C=1.0, shape=(1, 2, 2))
    with pytest.raises(BudgetExceeded, match="would bring epsilon to"):
        data.mechanism("sum", sample=Full(), bound=bound, times=10, std=0.5)
    assert not ledger.entries


def test_a_second_mechanism_gets_the_rest_of_the_budget():
    data, _ledger = open_data(epsilon=2.0)
    bound = PerRecord(C=1.0, shape=(1, 2, 2))
    data.mechanism("first", sample=Full(), bound=bound, times=1, std=4.0)
    second = data.mechanism("second", sample=Full(), bound=bound, times=1)
    # Two Gaussians of sensitivity 1 compose to one with 1/s² = 1/4² + 1/std²; alone, epsilon 2 needs a std of 1.9...
    alone = open_data(epsilon=2.0)[0].mechanism("only", sample=Full(), bound=bound, times=1)
    assert 1 / second.std**2 + 1 / 4.0**2 == pytest.approx(1 / alone.std**2, rel=1e-3)
    with pytest.raises(BudgetExceeded):
        data.mechanism("third", sample=Full(), bound=bound, times=1, std=4.0)


@pytest.mark.parametrize(("epsilon", "sigma"), [(10.0, 0.4999), (1.0, 3.7306), (0.2, 16.30)])
def test_dp_merf_noise_is_calibrated_exactly(epsilon, sigma):
    """The exact Gaussian values for replace-one sensitivity 2/m, delta 1e-5: sigma of noise 2 sigma / m."""
    data, _ = open_data(epsilon=epsilon, relation="replace_one")
    release = data.mechanism("mean", sample=Full(), bound=PerRecord(C=1.0, shape=(1, 2, 2)), times=1)
    assert release.std / 2 == pytest.approx(sigma, rel=3e-4)


def test_noise_without_clipping_and_subclasses_of_a_bound_are_refused():
    class Subclass(PerRecord):
        pass

    data, _ = open_data(epsilon=math.inf)
    with pytest.raises(ValueError, match="noise without clipping"):
        data.mechanism("a", sample=Full(), bound=PerRecord(C=math.inf, shape=(1,)), times=1, std=1.0)
    with pytest.raises(ValueError, match="expected a bound of the harness"):
        data.mechanism("b", sample=Full(), bound=Subclass(C=1.0, shape=(1,)), times=1)
    with pytest.raises(ValueError, match="`times`, `std` or both"):
        data.mechanism("c", sample=Full(), bound=PerRecord(C=1.0, shape=(1,)))


def test_an_empty_draw_is_released_with_noise():
    data, _ = open_data(n=1, epsilon=10.0)
    bound = PerRecord(C=1.0, shape=(1, 2, 2))
    release = data.mechanism("sum", sample=Poisson(1e-9), bound=bound, times=1, std=50.0)
    noisy = release(lambda x, y: x)
    assert float(noisy.norm()) > 0


def test_a_ledger_with_infinities_can_be_read_back(tmp_path):
    ledger = Ledger(Budget(math.inf), 12, path=tmp_path / "ledger.json")
    data, _ = open_data(ledger=ledger)
    data.mechanism("sum", sample=Full(), bound=PerRecord(C=math.inf, shape=(1, 2, 2)), times=1)(lambda x, y: x)
    ledger.save()
    again = Ledger.load(tmp_path / "ledger.json")
    assert again.to_dict() == ledger.to_dict()
    assert again.events == ledger.events == [Event(Full(), Sensitivity(math.inf, math.inf), 0.0, 1)]


def test_an_allowance_is_on_disk_before_its_first_release(tmp_path):
    ledger = Ledger(Budget(1.0), 12, path=tmp_path / "ledger.json")
    data, _ = open_data(ledger=ledger)
    data.mechanism("sum", sample=Full(), bound=PerRecord(C=1.0, shape=(1, 2, 2)), times=3)
    assert Ledger.load(tmp_path / "ledger.json").entries["sum"].event.times == 3


def test_a_resumed_mechanism_must_be_the_one_that_was_approved():
    data, ledger = open_data()
    bound = PerRecord(C=1.0, shape=(1, 2, 2))
    data.mechanism("sum", sample=Full(), bound=bound, times=3)
    resumed, _ = open_data(ledger=Ledger.from_dict(ledger.to_dict()))
    with pytest.raises(ValueError, match="a resumed run must make the same requests"):
        resumed.mechanism("sum", sample=Full(), bound=bound, times=4)
    again, _ = open_data(ledger=Ledger.from_dict(ledger.to_dict()))
    assert again.mechanism("sum", sample=Full(), bound=bound, times=3).std == data.mechanisms["sum"].std


def test_a_journaled_release_is_repeated_and_not_made_again(tmp_path):
    first, _ = open_data(journal=Journal(tmp_path), key="one")
    bound = PerRecord(C=1.0, shape=(1, 2, 2))
    noisy = first.mechanism("sum", sample=Full(), bound=bound, times=1)(lambda x, y: x)
    second, ledger = open_data(journal=Journal(tmp_path), key="other noise")
    again = second.mechanism("sum", sample=Full(), bound=bound, times=1)(lambda x, y: pytest.fail("made twice"))
    assert torch.equal(noisy, again)
    assert ledger.entries["sum"].executed == 1


def test_private_diagnostics_are_written_only_on_request(tmp_path):
    bound = PerRecord(C=1.0, shape=(1, 2, 2))
    for name, path in (("off", None), ("unsafe", tmp_path / "private" / "diagnostics.jsonl")):
        data, _ = open_data(diagnostics=path)
        data.mechanism(name, sample=Full(), bound=bound, times=1)(lambda x, y: x)
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["diagnostics.jsonl"]
    assert '"drawn": 12' in (tmp_path / "private" / "diagnostics.jsonl").read_text()


def test_private_data_has_no_public_tensor():
    data, _ = open_data()
    public = {name: value for name, value in vars(data).items() if not name.startswith("_")}
    assert not any(isinstance(value, torch.Tensor) for value in public.values())


def test_the_journal_returns_parts_in_the_order_of_their_release(tmp_path):
    """A method may iterate over gradients and parameters together; safetensors sorts by dtype and name."""
    parts = {"2.weight": torch.ones(3), "0.weight": torch.zeros(2, 2), "0.bias": torch.ones(2)}
    Journal(tmp_path).put("critic", 0, 1, parts)
    read = Journal(tmp_path).get("critic", 0, torch.device("cpu"))
    assert list(read) == list(parts)
    assert all(torch.equal(read[name], value) for name, value in parts.items())
