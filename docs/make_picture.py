"""Draws the picture of README: the league on MNIST at one epsilon, with samples next to each line.

It reads results/tables/league_mnist.csv, and the values and pictures of the records. `make tables` makes it again:

    .venv/bin/python docs/make_picture.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from dpgen_bench.runs.display import method_name, relation_name
from dpgen_bench.runs.records import find_record
from dpgen_bench.runs.statistics import summarise
from dpgen_bench.runs.values import metric_values

ROOT = Path(__file__).resolve().parent.parent
EPSILON = 10.0
PICTURE = ROOT / "results" / "pictures" / "league_eps10.png"
METRICS = {"acc_cnn_pct": "CNN %", "acc_mlp_pct": "MLP %"}
COLUMNS_OF_VALUES = ("ε proven", "ε claimed", *METRICS.values())
LEFT_ENDS = (0.035, 0.165, 0.285, 0.62, 0.7, 0.785, 0.895)  # of the columns, as shares of the width
COLUMNS = dict(zip(("method", "steps", "samples", *COLUMNS_OF_VALUES), LEFT_ENDS, strict=True))


def lines() -> list[dict[str, str]]:
    """The lines on MNIST of the league at `EPSILON` that have a place, in the order of their places."""
    table = pd.read_csv(ROOT / "results" / "tables" / "league_mnist.csv", dtype=str)
    table = table[(table["epsilon_budget"].astype(float) == EPSILON) & (table["dataset"] == "mnist")]
    table = table[table["place"] != "–"]
    table["steps"] = table["steps"].fillna("")  # of a method without such a setting
    shown = []
    for (place, method), rows in table.groupby(["place", "method"]):
        first = rows.iloc[0]
        line = {
            key: first[key]
            for key in ("steps", "init", "scale", "seeds", "relation", "delta", "accountant", "protocol", "runs")
        }
        line |= {"place": str(place), "method": str(method)}
        for kind in ("proven", "claimed"):
            value = str(first[f"epsilon_{kind}"])
            line[f"ε {kind}"] = value if value == "–" else f"{float(value):.3g}"
        line |= {
            title: mean_and_spread(line["runs"].split(), line["protocol"], metric) for metric, title in METRICS.items()
        }
        shown.append(line)
    return sorted(shown, key=lambda line: int(line["place"].rstrip("=")))


def mean_and_spread(runs: list[str], protocol: str, metric: str) -> str:
    """A metric over the runs as the tables print it.

    It is computed from the records by the functions of the tables. The CSV has ten digits, and a value of
    62.849999999999994 that is rounded to them first is 62.85, and then 62.9 instead of 62.8.
    """
    records = [find_record(ROOT / "results", run) for run in runs]
    measured = [
        each for record in records for each in record.measurements.all() if each["protocol"]["name"] == protocol
    ]
    return summarise([metric_values(each)[metric] for each in measured]).text()


def grids() -> list[np.ndarray]:
    """The grids of samples of the lines, each of the record of its first seed."""
    records = [find_record(ROOT / "results", line["runs"].split()[0]) for line in lines()]
    return [np.broadcast_to(grid, (*grid.shape[:2], 3)) for grid in (record.montage(2) for record in records)]


def description(shown: list[dict[str, str]]) -> str:
    """The values of the picture as text, which is stored in it, so that a test can compare them with the table."""
    keys = ("place", "method", "steps", "scale", *COLUMNS_OF_VALUES)
    return "; ".join(" ".join(line[key] for key in keys) for line in shown)


def caption(shown: list[dict[str, str]]) -> str:
    """What has to be known of the values."""
    first = shown[0]
    relation = relation_name(first["relation"])
    seeds = " or ".join(map(str, sorted({int(line["seeds"]) for line in shown} - {1})))
    return (
        f"MNIST, a proven ε of {EPSILON:g} for each line ({relation}, δ = {float(first['delta']):g}, accountant "
        f"{first['accountant']}). Protocol {first['protocol']}, mean ± standard deviation over {seeds} seeds, or one "
        "seed where no ± stands.\nSamples are the first two of each class, of the first seed. Lines of scale paper "
        "have their authors' number of steps and widths; Sim-PE also uses fonts that are public."
    )


def main() -> None:
    """Write the picture."""
    shown = lines()
    if not shown:
        sys.exit(
            f"expected lines with a place on MNIST at ε = {EPSILON:g}, got none; `dpgen sweep league_mnist` makes runs."
        )
    row = 0.7 / len(shown)
    figure = plt.figure(figsize=(10.5, 1.17 + 0.6825 * len(shown)), dpi=130)
    figure.text(0.01, 0.93, "League at ε = 10", fontsize=13, weight="bold")
    for title, left in COLUMNS.items():
        figure.text(left, 0.85, title, fontsize=10, color="0.35")
    for number, (line, grid) in enumerate(zip(shown, grids(), strict=True)):
        y = 0.74 - row * number
        figure.text(0.01, y, line["place"], fontsize=12, va="center", weight="bold")
        first_stage = f"\ninit={line['init']}" if line["init"] != "none" else ""
        figure.text(COLUMNS["method"], y, method_name(line["method"]) + first_stage, fontsize=11, va="center")
        steps = (f"{int(line['steps']):,}\n" if line["steps"].isdigit() else "") + f"scale {line['scale']}"
        figure.text(COLUMNS["steps"], y, steps, fontsize=10, va="center")
        axes = figure.add_axes((COLUMNS["samples"], y - 0.47 * row, 0.32, 0.94 * row))
        axes.imshow(grid, interpolation="nearest")
        axes.axis("off")
        axes.set_anchor("W")
        for title in COLUMNS_OF_VALUES:
            figure.text(COLUMNS[title], y, line[title], fontsize=11, va="center")
    figure.text(0.01, 0.02, caption(shown), fontsize=8.5, color="0.3", linespacing=1.4)
    figure.savefig(PICTURE, metadata={"Description": description(shown), "Software": None})


if __name__ == "__main__":
    main()
