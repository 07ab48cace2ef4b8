"""Hostile or wrong input to the privacy core: no code of a method sees noise, and wrong input is refused."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.bounds import PerRecord, PerRecordGradient, PerRow, Whole
from dpgen_bench.privacy.clipping import clip_rows
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.isolation import UNNAMED, public_type
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Invalidated, Ledger
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import EveryShard, Full, OneShard, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.votes import Votes


def open_data(n=6, fill=0.5):
    ledger = Ledger(Budget(1e4), n)
    images, labels = torch.full((n, 1, 1, 2), fill), torch.zeros(n, dtype=torch.int64)
    return PrivateData(images, labels, 2, Services(ledger, Key.seeded("hostile"))), ledger


def make_mechanism(data, name="sum", bound=None, **options):
    options = {"times": 3, "std": 10.0, **options}
    sample = options.pop("sample", Full())
    return data.mechanism(name, sample=sample, bound=bound or PerRow(C=1.0, shape=(1, 2)), **options)


class Spy(torch.Tensor):
    """A subclass that sees each operation on it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        cls.seen.append(name)
        if name in ("add", "__add__"):
            raise ValueError("a secret")
        return super().__torch_function__(func, types, args, kwargs or {})


def spy(tensor):
    spied = tensor.as_subclass(Spy)
    Spy.seen.clear()
    return spied


# --- no code of a method sees noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bound", [PerRecord(C=1.0, shape=(2,)), PerRow(C=1.0, shape=(6, 2)), Whole(C=1.0, shape=(6, 2))]
)
def test_rows_of_a_tensor_subclass_are_refused_and_mark_the_run(bound):
    data, ledger = open_data()
    release = make_mechanism(data, bound=bound)
    with pytest.raises(ValueError, match=r"expected a plain torch.Tensor, got Spy; .*as_subclass"):
        release(lambda images, labels: spy(images.flatten(1)))
    assert not {"add", "__add__", "detach", "reshape"} & set(Spy.seen)
    assert [failure.what for failure in ledger.failures] == ["release 0 of 'sum' raised ValueError"]
    with pytest.raises(Invalidated):
        release(lambda images, labels: images.flatten(1))


@pytest.mark.parametrize("value", ["rows", None, [1.0, 2.0], np.ones((1, 2))])
def test_values_that_are_no_tensor_are_refused_and_mark_the_run(value):
    data, ledger = open_data()
    with pytest.raises(ValueError, match=f"expected a plain torch.Tensor, got {type(value).__name__}"):
        make_mechanism(data)(lambda images, labels: value)
    assert len(ledger.failures) == 1


def test_losses_and_parameters_of_a_tensor_subclass_are_refused():
    net = nn.Linear(2, 1)
    data, ledger = open_data()
    release = make_mechanism(data, bound=PerRecordGradient(C=1.0, module=net))
    odd = nn.Linear(2, 1)
    odd.weight = nn.Parameter(spy(odd.weight.detach()))
    refused = make_mechanism(data, "odd", bound=PerRecordGradient(C=1.0, module=odd))
    with pytest.raises(ValueError, match="parameter 'weight' of the module: expected a plain"):
        refused(lambda images, labels: odd(images.flatten(1)).flatten())
    rows = make_mechanism(data, "public", bound=PerRecordGradient(C=1.0, module=net, public_rows=1))
    public = (spy(torch.zeros(1, 1, 1, 2)), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="public rows: expected a plain"):
        rows(lambda images, labels, mask: net(images.flatten(1)).flatten(), public)
    assert ledger.failures == []  # no record was used
    with pytest.raises(ValueError, match="expected a plain"):
        release(lambda images, labels: spy(net(images.flatten(1)).flatten()))
    assert len(ledger.failures) == 1


def test_a_norm_that_is_too_small_is_refused_before_a_record_is_seen():
    net = nn.Linear(2, 1)
    data, ledger = open_data()
    release = make_mechanism(data, bound=PerRecordGradient(C=1e-7, module=net))
    with pytest.raises(ValueError, match="expected max_norm >= 1e-06"):
        release(lambda images, labels: net(images.flatten(1)).flatten())
    assert ledger.failures == []


def test_an_error_while_noise_is_added_marks_the_run(monkeypatch):
    def fails(*_):
        raise RuntimeError("a secret")

    data, ledger = open_data()
    monkeypatch.setattr("dpgen_bench.privacy.mechanism.add_noise", fails)
    with pytest.raises(RuntimeError):
        make_mechanism(data)(lambda images, labels: torch.ones(1, 2))
    assert [failure.what for failure in ledger.failures] == ["release 0 of 'sum' raised RuntimeError"]


def test_private_state_of_a_tensor_subclass_is_refused_and_marks_the_run():
    for how in ("start", "release"):
        data, ledger = open_data()
        shards = OneShard(2, "public_balanced")

        def start(records, rng, how=how):
            zeros = torch.zeros(len(records), 1)
            return {"x": spy(zeros) if how == "start" else zeros}

        state = data.private_state("critics", sample=shards, start=start, identity={})
        release = make_mechanism(data, sample=shards, state=state)
        with pytest.raises(ValueError, match=r"private state: expected a plain torch.Tensor, got Spy"):
            release(lambda images, labels, state, rng: (torch.ones(1, 2), {"x": spy(state["x"])}))
        assert ledger.failures
        assert ledger.invalidated


class FunctionSpy(TorchFunctionMode):
    def __init__(self):
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class DispatchSpy(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spy_mode", [FunctionSpy, DispatchSpy])
@pytest.mark.parametrize("key", [Key.seeded("a"), Key.from_os(bytes(32))], ids=["seeded", "os"])
def test_no_mode_of_pytorch_sees_noise_or_clipping_and_each_is_active_again_afterwards(spy_mode, key):
    rows = torch.tensor([[3.0, 4.0], [0.1, 0.2]])
    expected = clip_rows(rows, 1.0), add_noise(rows, 2.0, key)
    with spy_mode() as mode:
        results = clip_rows(rows, 1.0), add_noise(rows, 2.0, key)
        assert mode.calls == 0
        rows + 1
        assert mode.calls == 1
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# --- settings that are changed after the approval ---------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["the caller's", "the mechanism's"])
def test_a_bound_that_is_changed_after_its_approval_bounds_as_before(changed):
    """Rows of norm 3 are clipped to C = 1, and not to the 100 that the method sets afterwards."""
    data, ledger = open_data()
    bound = PerRecord(C=1.0, shape=(2,))
    release = make_mechanism(data, bound=bound, std=0.5)
    object.__setattr__(bound if changed == "the caller's" else release.bound, "C", 100.0)
    value = release(lambda x, y: torch.tensor([3.0, 0.0]).repeat(len(x), 1))
    assert 3.0 < value.norm() < 9.0  # six rows of norm 1 and a little noise, where rows of norm 3 would have 18
    assert ledger.entries["sum"].bound["C"] == 1.0


@pytest.mark.parametrize("changed", ["the caller's", "the mechanism's"])
def test_a_sampling_that_is_changed_after_its_approval_draws_as_before(changed):
    data, ledger = open_data(n=1000)
    sample = Poisson(0.1)
    release = make_mechanism(data, sample=sample, bound=PerRecord(C=1.0, shape=(2,)))
    object.__setattr__(sample if changed == "the caller's" else release.event.sampling, "rate", 1.0)
    drawn = []
    release(lambda x, y: drawn.append(len(x)) or torch.zeros(len(x), 2))
    assert 0 < sum(drawn) < 500
    assert ledger.entries["sum"].event.sampling.rate == 0.1


def test_the_partition_of_private_state_cannot_be_changed_before_its_mechanism_is_requested():
    """With another partition a record would change the state of one shard and the answer of another."""
    data, _ = open_data()
    sample = EveryShard(3)
    state = data.private_state("teachers", sample=sample, start=lambda records, rngs: {}, identity={})
    changed = EveryShard(3, seed=sample.seed + 1)
    for each in (sample, state.sampling):
        object.__setattr__(each, "seed", changed.seed)
    with pytest.raises(ValueError, match="expected the sampling of private state 'teachers'"):
        data.mechanism("votes", sample=changed, bound=Votes(bins=2, voters="shards"), times=1, std=10.0, state=state)


def test_noise_that_is_changed_after_its_approval_is_as_before():
    data, ledger = open_data()
    release = make_mechanism(data, bound=PerRecord(C=1.0, shape=(2,)))
    object.__setattr__(release.event, "std", 0.0)
    assert release(lambda x, y: torch.zeros(len(x), 2)).norm() > 0
    assert release.std == ledger.entries["sum"].event.std == 10.0


# --- names of types in public text ------------------------------------------------------------------------------------


def test_types_of_a_method_are_not_named():
    own = type("SECRET0_3072", (Exception,), {})
    posing = type("ValueError", (Exception,), {"__module__": "builtins"})
    hidden = type("SECRET", (Exception,), {"__module__": "torch"})

    class Meta(type):
        def __hash__(cls):
            return hash(ValueError)

        def __eq__(cls, other):
            return True

    odd = Meta("SECRET", (ValueError,), {})
    torch.SECRET = hidden
    try:
        assert {public_type(kind()) for kind in (own, posing, hidden, odd)} == {UNNAMED}
    finally:
        del torch.SECRET
    known = ValueError, KeyboardInterrupt, torch.OutOfMemoryError, np.linalg.LinAlgError, Invalidated
    assert [public_type(kind("x")) for kind in known] == [kind.__name__ for kind in known]


def test_no_name_made_of_records_is_in_the_ledger():
    data, ledger = open_data()

    def fn(images, labels):
        raise type(f"SECRET{float(images.mean())}", (Exception,), {})

    with pytest.raises(Exception) as raised:  # noqa: PT011, its type is made of records
        make_mechanism(data)(fn)
    assert type(raised.value).__name__ == "SECRET0.5"
    assert [failure.what for failure in ledger.failures] == [f"release 0 of 'sum' raised {UNNAMED}"]


# --- names of mechanisms ----------------------------------------------------------------------------------------------


def test_a_used_name_is_refused_and_mechanisms_cannot_be_removed():
    data, ledger = open_data()
    release = make_mechanism(data)
    assert dict(data.mechanisms) == {"sum": release}
    with pytest.raises(AttributeError):
        data.mechanisms.pop("sum")
    with pytest.raises(TypeError):
        del data.mechanisms["sum"]
    with pytest.raises(AttributeError):
        data.mechanisms = {}
    with pytest.raises(ValueError, match="which is in use"):
        make_mechanism(data)
    resumed = Ledger.from_dict(copy.deepcopy(ledger.to_dict()))  # another process may request it again
    images, labels = torch.zeros(6, 1, 1, 2), torch.zeros(6, dtype=torch.int64)
    assert make_mechanism(PrivateData(images, labels, 2, Services(resumed, Key.seeded("hostile")))).std == release.std


@pytest.mark.parametrize("name", ["../../evil", "", "a/b", "a.b", ".", "1", "a\n", "a" * 101, 3, None])
def test_names_that_can_name_no_file_are_refused(name, tmp_path):
    data, _ = open_data()
    for of in (
        lambda: make_mechanism(data, name),
        lambda: data.private_state(name, sample=OneShard(2), start=None, identity={}),
        lambda: Journal(tmp_path / "private").put(name, 0, 1, {"value": torch.zeros(1)}),
        lambda: Journal(tmp_path / "private").get(name, 0, torch.device("cpu")),
    ):
        with pytest.raises(ValueError, match=r"a word that can name a file.*got " + re.escape(repr(name))):
            of()
    assert list(tmp_path.iterdir()) == []
    assert not data.mechanisms


# --- wrong input ------------------------------------------------------------------------------------------------------

ROW = {"C": 1.0, "shape": (1,)}
RNG = RecordRng(Key.seeded("rng"), torch.arange(2))
NET = nn.Linear(2, 1)
SHAPES = ((), ()), ((0,), 0), ((1.5,), 1.5), ("ab", "ab"), (3, 3)  # a wrong shape, and the value that the error names
WRONG = {
    **{f"times={x!r}": (lambda d, x=x: make_mechanism(d, times=x), x) for x in ("3", math.nan, -1, 0, 1.5, True)},
    **{f"std={x!r}": (lambda d, x=x: make_mechanism(d, std=x), x) for x in ("a", math.inf, -1.0, math.nan, True)},
    "share='a'": (lambda d: make_mechanism(d, std=None, share="a"), "a"),
    **{f"C={x!r}": (lambda d, x=x: PerRow(C=x, shape=(1,)), x) for x in ("a", True, 0.0, -1.0, math.nan, None)},
    **{f"shape={x!r}": (lambda d, x=x: Whole(C=1.0, shape=x), got) for x, got in SHAPES},
    **{f"rate={x!r}": (lambda d, x=x: Poisson(x), x) for x in ("a", True, 0.0, 1.1, math.nan)},
    **{f"PerRecord microbatch={x!r}": (lambda d, x=x: PerRecord(**ROW, microbatch=x), x) for x in ("a", 1.5, 0)},
    **{
        f"PerRecordGradient {name}={x!r}": (lambda d, n=name, x=x: PerRecordGradient(C=1.0, **{"module": NET, n: x}), x)
        for name, x in (("microbatch", "a"), ("public_rows", -1), ("backend", "x"), ("module", 3))
    },
    "rng.normal('ab')": (lambda d: RNG.normal("ab"), "ab"),
    "rng.normal(2.0)": (lambda d: RNG.normal(2.0), 2.0),
    "rng.uniform(-1)": (lambda d: RNG.uniform(-1), -1),
    "rng.integers(0.5, 9.9)": (lambda d: RNG.integers(0.5, 9.9), 0.5),
    "rng.integers(0, 9.9)": (lambda d: RNG.integers(0, 9.9), 9.9),
    "fn=3": (lambda d: make_mechanism(d)(3), 3),
}


@pytest.mark.parametrize(("do", "got"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input_is_refused_with_a_clear_error_before_any_record_is_used(do, got, monkeypatch):
    def used(*_):
        raise AssertionError("a record was used")

    monkeypatch.setattr("dpgen_bench.privacy.batch.unit_range", used)
    data, ledger = open_data()
    with pytest.raises(ValueError, match=r"expected .*got " + re.escape(repr(got)) + r".*[;.] ?\w+"):
        do(data)
    assert ledger.unproven == []


def test_numbers_of_numpy_are_accepted_and_kept_as_pythons():
    data, ledger = open_data()
    bound = PerRecord(C=np.float32(0.5), shape=(np.int64(2),), microbatch=np.int32(4))
    release = make_mechanism(data, bound=bound, times=np.int64(2), std=None, share=np.float32(0.3))
    assert type(Poisson(np.float64(0.5)).rate) is float
    assert ledger.entries["sum"].share == float(np.float32(0.3))
    assert [type(value) for value in (release.times, bound.C, bound.microbatch, *bound.shape)] == [int, float, int, int]
    ledger.to_dict()
    assert release(lambda images, labels: images.flatten(1)).shape == (2,)
    assert RNG.integers(np.int64(0), np.int64(9), (np.int64(3),)).shape == (2, 3)
