"""Results of the conformance suite on plugins, and what runs, tables and cards say of them."""

from __future__ import annotations

import pytest

from dpgen_bench.store.checks import Check, checks_of, is_plugin, keep_check, plugin_note
from dpgen_bench.store.folders import Store
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.formats import to_markdown
from tests.table_toys import fake_run, table_of

PASSED = Check("mine.Mine", True, "2026-11-26", "48 made-up records; fast")


@pytest.mark.parametrize(
    ("target", "plugin"),
    [
        ("methods.dpgan.DPGAN", False),
        ("dpgen_bench.x.Y", False),
        ("methods_of_mine.X", True),
        ("methods.mine.Mine", True),  # of a user's own package `methods`
    ],
)
def test_methods_of_other_packages_are_plugins(target, plugin):
    assert is_plugin(target) is plugin


def test_a_later_result_replaces_an_earlier_one_of_the_same_source(tmp_path):
    assert checks_of(tmp_path, "ab12") == []
    failed = Check("mine.Mine", False, "2026-11-27", "48 made-up records; fast")
    for check in (PASSED, failed):
        keep_check(tmp_path, "ab12", check)
        assert checks_of(tmp_path, "ab12") == [check]
    assert checks_of(tmp_path, "cd34") == []
    (tmp_path / "checks" / "cd34.json").write_text("{")
    assert checks_of(tmp_path, "cd34") == []


def a_run(results, target, **arguments):
    folder = Store(results).folder("ab")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_json("identity.json", {"method": {"name": "mine", "_target_": target, **arguments}})
    (folder.path / "source").write_text("ab12")
    return folder


def test_the_note_on_a_plugin_has_the_last_result_for_the_source_of_the_run(tmp_path):
    keep_check(tmp_path, "another source", PASSED)
    assert plugin_note(a_run(tmp_path, "methods.dpgan.DPGAN")) == ""
    run = a_run(tmp_path, "mine.Mine")
    beginning = "the class mine.Mine is not of the bench, and ε proven rests on its source, which "
    assert plugin_note(run) == f"{beginning}`dpgen check` has not checked here"
    keep_check(tmp_path, "ab12", PASSED)
    assert plugin_note(run) == f"{beginning}passed `dpgen check` on 2026-11-26 (48 made-up records; fast)"
    keep_check(tmp_path, "ab12", Check("mine.Mine", False, "2026-11-27", "at"))
    assert plugin_note(run) == f"{beginning}FAILED `dpgen check` on 2026-11-27 (at)"


def test_a_check_with_other_settings_says_so_and_does_not_hide_a_failure(tmp_path):
    """A plugin with an option that copies records could be checked without it."""
    beginning = "the class mine.Mine is not of the bench, and ε proven rests on its source, which "
    run = a_run(tmp_path, "mine.Mine", how="keep", steps=9, betas=[0.5, 0.9])
    keep_check(tmp_path, "ab12", Check("mine.Other", True, "2026-11-25", "at"))
    assert plugin_note(run) == f"{beginning}`dpgen check` has not checked here"
    keep_check(tmp_path, "ab12", Check("mine.Mine", True, "2026-11-26", "at", {"how": "none", "betas": (0.5, 0.9)}))
    other = f"{beginning}passed `dpgen check` with other settings, how='none', on 2026-11-26 (at)"
    assert plugin_note(run) == other
    keep_check(tmp_path, "ab12", Check("mine.Mine", False, "2026-11-27", "at", {"how": "keep", "betas": (0.5, 0.9)}))
    keep_check(tmp_path, "ab12", Check("mine.Mine", True, "2026-11-28", "at", {"how": "none", "betas": (0.5, 0.9)}))
    assert plugin_note(run) == f"{beginning}FAILED `dpgen check` on 2026-11-27 (at)"
    assert plugin_note(a_run(tmp_path, "mine.Mine", how="none", betas=[0.5, 0.9])).endswith("on 2026-11-28 (at)")
    third = plugin_note(a_run(tmp_path, "mine.Mine", how="third", betas=[0.5, 0.9]))
    assert third == f"{beginning}FAILED `dpgen check` with other settings, how='keep', on 2026-11-27 (at)"


def test_a_table_has_the_note_below_it(tmp_path):
    overrides = ["method=uniform_noise", "method._target_=tests.toys.MeanImage", "method.name=mine", "seed=0"]
    line = " ".join([*overrides, "privacy.epsilon=10"])
    fake_run(tmp_path, [*overrides, "privacy.epsilon=10", "protocol=quick"], 90.0)
    bench = "experiment=demo/dp_merf privacy.epsilon=10 seed=0"
    fake_run(tmp_path, [*bench.split(), "protocol=quick"], 80.0)
    page = to_markdown(assemble("t", table_of(sweeps=[line, bench], metrics=["acc_logreg_pct"]), tmp_path))
    assert page.count("The class tests.toys.MeanImage is not of the bench") == 1
    assert "dp_merf.DPMERF is not of the bench" not in page
