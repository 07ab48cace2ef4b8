"""Draws the picture of README: the league on MNIST at one epsilon, with samples next to each line.

Lines, places and values are those of docs/make_league.py, samples those of the records. `make tables` makes it again:

    .venv/bin/python docs/make_picture.py
"""

from __future__ import annotations

import sys
import textwrap

import matplotlib

from dpgen_bench.outcomes.listing import format_epsilon

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from docs import make_league
from docs.make_league import NONE, ROOT, Line, accuracies, end_of, lines_at, records_of
from dpgen_bench.config.display import method_name, relation_name

EPSILON = 10.0
PICTURE = ROOT / "results" / "pictures" / "league_eps10.png"
METRICS = {"acc_cnn_pct": "CNN %", "acc_mlp_pct": "MLP %"}
WIDTH, ROW, TOP, BOTTOM = (
    10.5,
    0.56,
    0.95,
    0.75,
)  # inches: the picture's width, and heights of a line and of the margins
COLUMNS = {"place": 0.01, "method": 0.04, "steps": 0.215, "samples": 0.335, "ε proven": 0.645, "ε claimed": 0.725}
COLUMNS |= dict(zip(METRICS.values(), (0.815, 0.91), strict=True))  # left ends, as shares of the width


def lines() -> list[Line]:
    """The lines at `EPSILON` that have a place, between real data and what uses no records."""
    known = lines_at(make_league.lines("league_mnist"), EPSILON)
    return [line for line in known if end_of(line) is not None or line["place"] != NONE]


def texts(line: Line) -> dict[str, str]:
    """The texts of a line by column. The ends of the scale have no place and no steps, and no one claims an epsilon."""
    values, end = accuracies(line), end_of(line)
    stage = f"\ninit={line['init']}" if line["init"] != "none" else ""
    fonts = f"\n{line['fonts']}" if line["fonts"] not in ("None", NONE) else ""
    steps = f"{int(line['steps']):,}\n" if line["steps"].isdigit() else ""
    return {
        "place": "" if end is not None else line["place"],
        "method": method_name(line["method"]) + stage + fonts,
        "steps": "" if end is not None else f"{steps}scale {line['scale']}",
        "ε proven": epsilon_text(line["epsilon_proven"]),
        "ε claimed": NONE if end is not None else epsilon_text(line["epsilon_claimed"]),
        **{title: values[metric].text() if metric in values else NONE for metric, title in METRICS.items()},
    }


def epsilon_text(value: str) -> str:
    """An epsilon of the CSV with three digits."""
    return value if value == NONE else "∞" if value == "inf" else format_epsilon(float(value))


def grids() -> list[np.ndarray]:
    """The grids of samples of the lines, each of the record of its first seed."""
    montages = [records_of(line)[0].montage(2) for line in lines()]
    return [np.broadcast_to(grid, (*grid.shape[:2], 3)) for grid in montages]


def description(shown: list[Line]) -> str:
    """The values of the picture as text, which is stored in it, so that a test can compare them with the table."""
    return "; ".join(" ".join(text.replace("\n", " ") for text in texts(line).values()) for line in shown)


def caption(shown: list[Line]) -> str:
    """What has to be known of the values."""
    first = next(line for line in shown if end_of(line) is None)
    seeds = " or ".join(map(str, sorted({len(line["runs"].split()) for line in shown})))
    text = (
        f"MNIST, a proven ε of {EPSILON:g} for each line with a place ({relation_name(first['relation'])}, δ = "
        f"{float(first['delta']):g}, accountant {first['accountant']}). Protocol {first['protocol']}, mean ± standard "
        f"deviation over {seeds} seeds; one seed has no ±. Samples are the first two of each class, of the "
        "first seed. Lines of scale paper have their authors' number of steps and widths, if there are authors; only "
        "Sim-PE has a size of ours. It also uses fonts that are public; samples of these fonts alone use no record "
        "(ε = 0)."
    )
    return textwrap.fill(text, 150)


def main() -> None:
    """Write the picture."""
    shown = lines()
    if all(end_of(line) is not None for line in shown):
        sys.exit(
            f"expected lines with a place on MNIST at ε = {EPSILON:g}, got none; `dpgen sweep league_mnist` makes runs."
        )
    height = TOP + ROW * len(shown) + BOTTOM
    figure = plt.figure(figsize=(WIDTH, height), dpi=130)
    figure.text(0.01, 1 - 0.3 / height, "League at ε = 10", fontsize=13, weight="bold")
    for title, left in COLUMNS.items():
        figure.text(left, 1 - 0.75 / height, title.replace("place", ""), fontsize=10, color="0.35")
    for number, (line, grid) in enumerate(zip(shown, grids(), strict=True)):
        y = 1 - (TOP + ROW * (number + 0.5)) / height
        for column, text in texts(line).items():
            size, weight = (12, "bold") if column == "place" else (10 if column == "steps" else 10.5, "normal")
            figure.text(COLUMNS[column], y, text, fontsize=size, weight=weight, va="center", linespacing=1.1)
        axes = figure.add_axes((COLUMNS["samples"], y - 0.47 * ROW / height, 0.29, 0.94 * ROW / height))
        axes.imshow(grid, interpolation="nearest")
        axes.axis("off")
        axes.set_anchor("W")
    figure.text(0.01, 0.1 / height, caption(shown), fontsize=8.5, color="0.3", linespacing=1.4)
    figure.savefig(PICTURE, metadata={"Description": description(shown), "Software": None})


if __name__ == "__main__":
    main()
