"""The table of searched settings is what `python docs/make_searches.py` makes, and its page says what it shows."""

import re

import pytest

from docs import make_searches as made
from docs.make_results import ACCURACIES
from dpgen_bench.config.display import method_name

CNN = ACCURACIES[0]
SETTINGS = made.searched()


def test_the_page_is_made_from_the_tables() -> None:
    """After a new record: `make tables`."""
    assert made.PAGE.read_text() == made.page()


def test_all_settings_have_all_classifiers() -> None:
    assert not SETTINGS[list(ACCURACIES)].isna().any(axis=None)


def test_the_settings_have_the_runs_that_the_page_counts() -> None:
    _, rows = made.PAGE.read_text().split("| method | runs | at ε | data |\n")
    stated: dict[str, int] = {}
    for row in rows.split("\n\n")[0].splitlines()[1:]:
        _, methods, number, *_ = (cell.strip() for cell in row.split("|"))
        first = re.match(r"\d+", number)
        assert first is not None, row
        stated |= dict.fromkeys(methods.removesuffix(" (ours)").split(", "), int(first[0]))
    counted = SETTINGS["runs"].str.split().str.len().groupby(SETTINGS["method"]).sum()
    assert {method_name(name): number for name, number in counted.items()} == stated


@pytest.mark.parametrize("epsilon", [1.0, 10.0])
def test_on_mnist_each_setting_of_dp_gauss_is_above_each_of_the_others(epsilon: float) -> None:
    at = SETTINGS[(SETTINGS["dataset"] == "validation_mnist") & (SETTINGS["epsilon"] == epsilon)]
    own = at["method"] == "dp_gauss"
    assert at.loc[own, CNN].min() > at.loc[~own, CNN].max()


def test_on_fashion_mnist_at_epsilon_1_most_settings_of_dp_gauss_are_below_dp_ntks() -> None:
    at = SETTINGS[(SETTINGS["dataset"] == "validation_fashion_mnist") & (SETTINGS["epsilon"] == 1.0)]
    own, dp_ntk = (at.loc[at["method"] == method, CNN] for method in ("dp_gauss", "dp_ntk"))
    assert ((own < dp_ntk.min()).sum(), (own > dp_ntk.max()).sum(), len(own)) == (10, 4, 15)
