"""The table of tightness in docs/audit.md is what `python docs/make_tightness.py` makes of docs/tightness.csv."""

from __future__ import annotations

from docs import make_tightness as made
from dpgen_bench.privacy.events import RELATIONS


def test_the_page_is_made_from_the_values():
    assert made.PAGE.read_text() == made.page(), "call `python docs/make_tightness.py`"


def test_every_method_has_both_relations_and_no_certified_epsilon_is_above_the_proven_one():
    lines = made.known()
    assert lines.keys() == {(method, relation) for method in made.METHODS for relation in RELATIONS}
    for line in lines.values():
        assert line["settings"] == made.METHODS[line["method"]]
        assert all(0.0 < float(share) <= 1.0 for share in line["moved"].split())
        assert all(float(line[key]) <= float(line["proven"]) for key in ("gdp", "model_free") if line[key])
