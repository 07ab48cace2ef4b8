"""Results of every method are those of its `version`: if these values change, the version must be raised."""

from __future__ import annotations

import json

import pytest

from dpgen_bench.utils.paths import CONF
from tests.behaviour import CASES, Case, computed, difference, stored


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_method_computes_what_its_version_computed(case: Case) -> None:
    now, before = json.loads(json.dumps(computed(case))), stored()[case.name]
    remedy = "raise the method's `version` and run `python -m tests.behaviour`."
    assert now["version"] == before["version"], f"the values are those of version {before['version']}: {remedy}"
    assert now["steps"] == before["steps"], remedy
    assert now["counters"] == before["counters"], remedy
    assert now["log"] == before["log"], remedy
    assert len(now["ledger"]) == len(before["ledger"]), remedy
    for entry, old in zip(now["ledger"], before["ledger"], strict=True):
        assert entry == {**old, "std": entry["std"]}, remedy
        assert float(entry["std"]) == pytest.approx(float(old["std"]), rel=1e-6), remedy
    far = difference(now, before)
    assert far <= before["tolerance"], f"samples differ by {far:.3f} grey levels: {remedy}"


def test_every_method_of_the_bench_has_cases():
    assert {case.method for case in CASES} == {path.stem for path in (CONF / "method").glob("*.yaml")}
    assert {case.name for case in CASES} == stored().keys()
