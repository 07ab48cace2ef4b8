"""Tests the entries of ledgers: their modes, which runs can be parents, and which images may be released."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpgen_bench.data.datasets import Digits
from dpgen_bench.outcomes.listing import is_unbounded
from dpgen_bench.outcomes.sample_command import NotForRelease, sample_run
from dpgen_bench.outcomes.soundness import budget_problem, release_problems
from dpgen_bench.outcomes.spent import read_spent
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import Whole
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.ledger import Entry, Ledger, unproven_reasons
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.report.runs import ledger_panel, read_runs
from dpgen_bench.runs.execute import execute
from dpgen_bench.runs.plan import plan
from dpgen_bench.store.folders import Store
from tests.run_toys import config
from tests.test_privacy_core import open_data

EVENT = Event(Full(), Sensitivity(1.0, 2.0), 5.0, 1)


@pytest.mark.parametrize("times", [1.5, 1.0, -1, True, "1", None, math.nan])
def test_an_event_has_a_whole_number_of_releases(times):
    with pytest.raises(ValueError, match="times of an event: expected a whole number >= 0, got"):
        Event(Full(), Sensitivity(1.0, 2.0), 5.0, times)


@pytest.mark.parametrize("std", [-1.0, -math.inf, math.nan, True, "5", None, [5.0]])
def test_the_noise_of_an_event_is_a_number_from_zero(std):
    with pytest.raises(ValueError, match="expected a noise std >= 0, got"):
        Event(Full(), Sensitivity(1.0, 2.0), std, 1)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, True, "1", None, [1.0]])
def test_sensitivities_are_positive_numbers(wrong):
    for values in ((wrong, 1.0), (1.0, wrong), (wrong, wrong)):
        with pytest.raises(ValueError, match="expected 0 < add_remove <= replace_one <= 2"):
            Sensitivity(*values)


def test_events_take_numbers_of_numpy_and_limits():
    event = Event(Full(), Sensitivity(np.float32(1.0), np.int64(2)), np.float64(5.0), np.int64(1))
    assert (event, type(event.times)) == (EVENT, int)
    assert Event(Full(), Sensitivity(1.0, 2.0), math.inf, 1).multiplier("add_remove") == math.inf
    unclipped = Event(Full(), Sensitivity(math.inf, math.inf), 0, 0)
    assert (unclipped.std, unclipped.times, unclipped.multiplier("add_remove")) == (0.0, 0, 0.0)


def ledger(noise: str = "os", diagnostics: str = "off", name: str = "sum") -> Ledger:
    one = Ledger(Budget(10.0), 12, noise=noise, diagnostics=diagnostics)
    one.approve(Entry(name, {"kind": "PerRecord", "C": 1.0, "rows": 1}, EVENT))
    return one


def modes(ledger: Ledger) -> dict[str, tuple[str | None, str | None]]:
    return {name: (entry.noise, entry.diagnostics) for name, entry in ledger.entries.items()}


def test_an_entry_keeps_its_noise_mode_through_two_restarts_and_files():
    grandparent, parent, child = ledger("os", "unsafe"), ledger("seeded"), ledger("seeded", name="more")
    parent.inherit(grandparent, "g")
    child.inherit(Ledger.from_dict(parent.to_dict()), "p")
    assert modes(Ledger.from_dict(child.to_dict())) == {
        "more": ("seeded", "off"),
        "p/sum": ("seeded", "off"),
        "p/g/sum": ("os", "unsafe"),
    }
    assert child.entries["p/g/sum"].inherited_from == "g"


def old(ledger: Ledger) -> dict:
    """The content of the file of an older ledger, whose entries had no modes."""
    content = ledger.to_dict()
    for row in content["entries"]:
        del row["noise"], row["diagnostics"]
    del content["failures"]
    return content


def test_entries_of_older_ledgers_take_the_ledgers_own_modes_unless_inherited():
    child = ledger("os")
    child.inherit(ledger("os", name="first"), "p")
    assert modes(Ledger.from_dict(old(child))) == {"sum": ("os", "off"), "p/first": ("unknown", "unknown")}
    child = ledger("seeded", "unsafe")
    child.inherit(ledger("os", name="first"), "p")
    assert set(modes(Ledger.from_dict(old(child))).values()) == {("seeded", "unsafe")}


@pytest.mark.parametrize(
    ("noise", "diagnostics", "modes_of_parent"),
    [
        ("seeded", "off", "privacy.noise=seeded and privacy.diagnostics=off"),
        ("os", "unsafe", "privacy.noise=os and privacy.diagnostics=unsafe"),
    ],
)
def test_a_run_for_release_refuses_a_parent_that_is_not(noise, diagnostics, modes_of_parent):
    parent, child = ledger(noise, diagnostics), Ledger(Budget(10.0), 12, noise="os")
    with pytest.raises(
        ValueError, match=f"release 'sum' of run p was made with {modes_of_parent}.*start without restart"
    ):
        child.inherit(parent, "p")
    assert child.entries == {}
    grandchild, middle = Ledger(Budget(10.0), 12, noise="os"), ledger("seeded")
    middle.inherit(parent, "p")
    middle.entries = {"p/sum": middle.entries["p/sum"], "own": ledger("os").entries["sum"]}
    with pytest.raises(ValueError, match=f"release 'p/sum' of run p was made with {modes_of_parent}"):
        grandchild.inherit(middle, "m")
    Ledger(Budget(10.0), 12, noise="seeded").inherit(parent, "p")  # allowed for a benchmark run


def test_a_parent_without_releases_is_accepted():
    Ledger(Budget(10.0), 12, noise="os").inherit(Ledger(Budget(10.0), 12, noise="seeded"), "p")
    Ledger(Budget(10.0), 12, noise="os").inherit(ledger("os"), "p")


def test_a_parent_is_refused_before_a_record_is_read(tmp_path, monkeypatch):
    parent = execute(config(tmp_path, small=False))
    parts = [f"restart={{run: {parent.id}, checkpoint: last}}", "privacy.noise=os", "seed=1"]

    def load(*_):
        pytest.fail("records were read")

    monkeypatch.setattr(Digits, "load", load)
    with pytest.raises(ValueError, match="whose releases were all made with"):
        execute(config(tmp_path, *parts, small=False))
    with pytest.raises(ValueError, match="whose releases were all made with"):
        plan(["method=dp_merf", f"results={tmp_path}", parts[0], "privacy.noise=os"])
    assert [run.id for run in Store(tmp_path).runs()] == [parent.id]


def test_a_parent_that_is_not_trained_is_refused(tmp_path):
    """Its releases after the child has read its ledger would not be counted."""
    parent = execute(config(tmp_path, small=False))
    (parent.path / "DONE").unlink()
    (parent.path / "generator.safetensors").unlink()
    parent.mark("preempted", "train")
    with pytest.raises(ValueError, match=rf"restart.run={parent.id} to be trained.*it is preempted"):
        execute(config(tmp_path, f"restart={{run: {parent.id}}}", "seed=1", small=False))
    assert [run.id for run in Store(tmp_path).runs()] == [parent.id]


def test_images_may_be_released_only_if_all_entries_allow_it(tmp_path):
    run = execute(config(tmp_path, "privacy.noise=os"))
    content = run.read_json("ledger.json")
    assert release_problems(content) == []
    inherited = {**content["entries"][0], "name": "p/sum", "inherited_from": "p"}
    for changed, why in (
        ({"noise": "seeded"}, "its noise of 'p/sum', which it inherited, is 'seeded'"),
        ({"diagnostics": "unsafe"}, "private diagnostics of 'p/sum', which it inherited, were kept"),
        ({"noise": None, "diagnostics": None}, "does not state the mode of the noise of 'p/sum', which it inherited"),
    ):
        entries = [*content["entries"], {**inherited, **changed}]
        (reason,) = release_problems({**content, "entries": entries})
        assert why in reason
        run.write_json("ledger.json", {**content, "entries": entries})
        with pytest.raises(NotForRelease, match=why):
            sample_run(tmp_path, run.id, 5, 0, tmp_path / "a.npz", "balanced", benchmark=False)
    assert release_problems({**content, "epsilon": None}) == ["its epsilon was not computed"]
    assert release_problems(ledger("seeded").to_dict())[0].startswith("its noise is 'seeded'")
    assert math.isfinite(float(content["epsilon"]["proven"]))


@pytest.mark.parametrize(
    ("marks", "reasons"),
    [
        ({"unproven": []}, []),
        ({"unproven": ["a"]}, ["a"]),
        ({"doubts": ["a", "b"]}, ["a", "b"]),
        ({"unproven": [], "doubts": ["a"]}, ["a"]),
        ({"unproven": ["a"], "doubts": ["b", "a"]}, ["a", "b"]),
        ({"doubts": "a text instead of a list"}, ["a text instead of a list"]),
    ],
)
def test_reasons_are_read_under_the_key_of_older_ledgers_too(marks, reasons):
    content = ledger().to_dict()
    del content["unproven"]
    content |= marks
    assert unproven_reasons(content) == reasons
    again = Ledger.from_dict(content)
    assert again.unproven == reasons
    assert (again.to_dict()["unproven"], "doubts" in again.to_dict()) == (reasons, False)


@pytest.mark.parametrize("key", ["unproven", "doubts"])
def test_a_marked_run_of_any_version_never_looks_proven(key, tmp_path):
    folder = execute(config(tmp_path, "privacy.noise=os"))
    content = folder.read_json("ledger.json")
    privacy = folder.config.privacy
    assert (budget_problem(content, privacy), is_unbounded(content), release_problems(content)) == ("", False, [])
    del content["unproven"]
    content[key] = ["why"]
    folder.write_json("ledger.json", content)
    assert budget_problem(content, privacy) == "nothing is proven: why"
    assert is_unbounded(content)
    assert release_problems(content) == ["its proven epsilon is infinite"]
    (run,) = read_runs(tmp_path)
    assert "nothing is proven: why" in ledger_panel(run)["warnings"]
    (spent,), _ = read_spent(tmp_path)
    assert spent.unproven == [f"run {folder.id}: why"]
    child = Ledger(Budget(10.0), 12, noise="os")
    child.inherit(Ledger.load(folder.path / "ledger.json"), "p")
    assert child.unproven == ["p, from which it was restarted: why"]


def test_public_data_are_stated_by_the_ledger_and_inherited(tmp_path):
    parent, child = Ledger(Budget(1.0), 10, public_data="fonts"), Ledger(Budget(2.0), 10, public_data="a net")
    assert Ledger.from_dict(parent.to_dict()).public_data == "fonts"
    child.inherit(parent, "0123456789ab")
    assert child.to_dict()["public_data"] == "a net, fonts"
    assert "public_data" not in Ledger(Budget(1.0), 10).to_dict()  # ledgers of other methods are unchanged


def test_a_budget_of_zero_allows_no_release_and_proves_zero():
    data, ledger = open_data(epsilon=0)
    for options in ({"times": 1}, {"times": 1, "std": 1e9}, {"std": 1e9}, {"times": 1, "share": 0.5}):
        with pytest.raises(BudgetExceeded, match=r"expected privacy.epsilon > 0 for a method that uses records, got 0"):
            data.mechanism("sum", sample=Full(), bound=Whole(C=1.0, shape=(1,)), **options)
    assert epsilon(ledger.events, 1e-5, "replace_one", "pld") == 0.0
