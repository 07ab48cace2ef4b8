"""The page of results is what `python docs/make_results.py` makes from the records."""

from __future__ import annotations

from docs import make_results as made


def test_the_tables_are_those_of_the_records() -> None:
    """After a new record: `python docs/make_results.py`."""
    assert made.PAGE.read_text() == made.page()


def test_a_line_has_all_seeds_of_its_settings() -> None:
    lines = made.measured()
    gauss = lines["mnist", 1.0, "dp_gauss", "replace_one", "`dp_gauss/mnist`", "league"]
    assert len(gauss["acc_cnn_pct"]) == len(gauss["seconds"]) == 3
    assert made.shown(gauss["acc_cnn_pct"]) == "95.0 ± 0.3"


def test_a_spread_needs_three_values() -> None:
    assert [made.shown(values) for values in ([], [1.0, 2.0], [1.0, 2.0, 3.0])] == ["–", "1.5", "2.0 ± 1.0"]
