"""Makes the table of docs/league_presets.md with the least and the most accurate setting of each method's search.

It reads the tables of runs on held-out training records. `make tables` makes it again:

    .venv/bin/python docs/make_searches.py
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from docs.make_results import ACCURACIES
from docs.page_tables import page_with, table
from dpgen_bench.config.display import dataset_name, method_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "league_presets.md"
BEGIN, END = "<!-- table: made by docs/make_searches.py -->", "<!-- end of the table -->"
TABLES = ("search_mnist", "search_fashion_mnist", "dp_gauss_ablations", "dp_ntk_bias")
HEADER = ("data", "ε", "method", "settings", "CNN", "MLP", "log. reg.")
KEYS = ["dataset", "epsilon", "method"]


def searched() -> pd.DataFrame:
    """The accuracy of each setting that was measured on held-out records, the mean of its seeds, by each classifier.

    Columns: dataset, epsilon, method, runs (the ids of the setting's runs) and the names of `ACCURACIES`, in percent.
    """
    lines = pd.concat(pd.read_csv(ROOT / "results" / "tables" / f"{name}.csv") for name in TABLES)
    lines = lines[(lines["protocol"] == "search") & lines["metric"].isin(ACCURACIES)]
    lines = lines.dropna(subset=["runs", "mean"]).drop_duplicates(["runs", "metric"])
    lines["epsilon"] = lines["epsilon_budget"].astype(float)
    return lines.pivot(index=[*KEYS, "runs"], columns="metric", values="mean").reset_index()


def ends(accuracies: pd.Series[float]) -> str:
    """`91.7 to 93.6`: the least and the most of the settings; one number for one setting."""
    return " to ".join(dict.fromkeys(f"{end:.1f}" for end in (accuracies.min(), accuracies.max())))


def made() -> str:
    """The table in Markdown: at each ε of each data set, the method whose best setting is the most accurate first."""
    groups = [(keys, settings) for keys, settings in searched().groupby(KEYS)]
    groups.sort(key=lambda each: (each[0][0] != "validation_mnist", each[0][1], -each[1][ACCURACIES[0]].max()))
    rows = [
        (
            dataset_name(dataset.removeprefix("validation_")),
            f"{epsilon:g}",
            method_name(method),
            str(len(settings)),
            *(ends(settings[metric]) for metric in ACCURACIES),
        )
        for (dataset, epsilon, method), settings in groups
    ]
    return table(HEADER, rows)


def page() -> str:
    """The page with its table made again."""
    return page_with(PAGE, BEGIN, made(), END)


if __name__ == "__main__":
    PAGE.write_text(page())
