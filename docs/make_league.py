"""Makes the tables of docs/league.md: one for each data set and ε, between real data and what uses no records, one of
lines above the league's limit of computing, one of longer training, and two of the fidelity of samples.

Lines and places are those of results/tables/league_*.csv, values those of the records. Run it again after the tables;
`make tables` does, too:

    .venv/bin/python docs/make_league.py
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from omegaconf import OmegaConf

from docs.make_results import ACCURACIES, LEAGUE, on_a_cpu, seconds_of, values_of
from docs.page_tables import page_with, table
from dpgen_bench.config.display import method_name
from dpgen_bench.outcomes.listing import current_protocol, setting_of
from dpgen_bench.store.records import Record, find_record
from dpgen_bench.store.statistics import LEAST_SEEDS, Summary, summarise
from dpgen_bench.store.values import metric_values
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.ranking import SPENT

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "league.md"
BEGIN, END = "<!-- tables: made by docs/make_league.py -->", "<!-- end of the tables -->"
LEAGUES = {"MNIST": "league_mnist", "Fashion-MNIST": "league_fashion_mnist"}
FIDELITIES = {"MNIST": "league_fidelity", "Fashion-MNIST": "league_fidelity_fashion_mnist"}
# The league of longer training: its title on the page, and its table.
HOUR = ("MNIST, up to two processor-hours", "league_hour")
HEADER = ("#", "method", "ε, add/remove", "seeds", "CNN", "MLP", "log. reg.", "CPU, s")
LIMIT_S = 1200.0  # processor-seconds of a fit, the league's limit
ABOVE_HEADER = ("data", "ε", "method", "with AVX-512", "with AVX2")
FIDELITY_HEADER = ("ε", "method", "FID", "KID", "precision", "recall", "CNN")
# The metrics of these columns, with their formats.
FIDELITY = {"fid": ".1f", "kid": ".3f", "precision": ".2f", "recall": ".2f", ACCURACIES[0]: ".1f"}
NONE = "–"
# What of a method is by the authors of the bench, if it is not the algorithm of a paper.
OWN = {"dp_gauss": "ours", "pate_gan": "our votes"}

Line = dict[str, str]


def lines(name: str) -> list[Line]:
    """The lines of a league with a run, in the order of its table: those with a place before the others of their ε."""
    frame = pd.read_csv(ROOT / "results" / "tables" / f"{name}.csv", dtype=str, keep_default_na=False)
    by_runs = frame[frame["runs"] != ""].drop_duplicates("runs").to_dict("records")
    return sorted(
        ({str(key): str(value) for key, value in line.items()} for line in by_runs),
        key=lambda line: float(line["epsilon_budget"]),
    )


def end_of(line: Line) -> float | None:
    """Infinity for real data and 0 for what uses no records, which stand at the ends of each table; None for others."""
    epsilon = float(line["epsilon_budget"])
    return epsilon if epsilon in (0.0, math.inf) else None


def name_of(line: Line, others: Sequence[str] = ()) -> str:
    """The method of a line, linked to its page, and what sets the line apart.

    That is its first stage, its fonts, the settings `others`, what of it is the bench's own, that its fonts are public
    data, the scale if it is reduced, and the proven epsilon if it is less than 98 % of the budget.
    """
    shown = f"[{method_name(line['method'])}](methods/{line['method']}.md)"
    if line.get("init", "none") != "none":
        shown += f", `init={line['init']}`"
    if line.get("fonts", NONE) not in ("None", NONE):
        shown += f", {line['fonts']}"
    shown += "".join(f", `{name}={line[name]}`" for name in others)
    more = [OWN[line["method"]]] if line["method"] in OWN else []
    if line.get("public_data") and line["method"] != "public_fonts":
        more.append(f"public {line['public_data']}")
    more += [] if line["scale"] == "paper" else [line["scale"]]
    if end_of(line) is None and float(line["epsilon_proven"]) < SPENT * float(line["epsilon_budget"]):
        more.append(f"ε proven {float(line['epsilon_proven']):.3g}")
    return shown + (f" ({', '.join(more)})" if more else "")


def records_of(line: Line) -> list[Record]:
    """The records of a line, one for each seed."""
    return [find_record(ROOT / "results", run) for run in line["runs"].split()]


def accuracies(line: Line) -> dict[str, Summary]:
    """The accuracies of a line's records over seeds; the CSV has ten digits, which can round to another decimal."""
    protocol = current_protocol(line["protocol"])
    of_protocol = [metric_values(record.measurements.assembled(protocol)) for record in records_of(line)]
    found = {metric: [values[metric] for values in of_protocol if metric in values] for metric in ACCURACIES}
    return {metric: summarise(values) for metric, values in found.items() if values}


def with_interval(summary: Summary) -> str:
    """`95.0 [94.2, 95.7]`: the mean, with its 95 % interval over seeds where there are enough of them."""
    text = f"{summary.mean:.1f}"
    if summary.seeds < LEAST_SEEDS or summary.ci95 is None:
        return text
    low, high = max(summary.ci95[0], 0.0), min(summary.ci95[1], 100.0)  # three seeds can give more than percents can be
    return f"{text} [{low:.1f},\u00a0{high:.1f}]"  # one line in a narrow column


def cells(line: Line) -> tuple[str, ...]:
    """The cells of a line."""
    is_end, values = end_of(line) is not None, accuracies(line)
    cnn, *others = (values.get(metric) for metric in ACCURACIES)
    return (
        NONE if is_end else line["place"],
        name_of(line),
        NONE if is_end else f"{float(line['epsilon_add_remove']):.3g}",
        str(len(line["runs"].split())),
        with_interval(cnn) if cnn else NONE,
        *(f"{summary.mean:.1f}" if summary else NONE for summary in others),
        NONE if is_end else seconds(records_of(line)),
    )


def seconds(runs: Sequence[Record]) -> str:
    """The processor time of the fits on a CPU, or if there are none, of those on an accelerator."""
    on_cpu = [record for record in runs if on_a_cpu(record)]
    text = seconds_of(on_cpu or runs)
    return text if on_cpu else f"{text} (GPU)"


def lines_at(known: Sequence[Line], epsilon: float) -> list[Line]:
    """Those of a league's lines at one budget, with real data on top and what uses no records at the bottom."""
    ends = {bound: [line for line in known if end_of(line) == bound] for bound in (0.0, math.inf)}
    for several in ends.values():
        several.sort(key=lambda line: -max((each.mean for each in accuracies(line).values()), default=0.0))
    return [*ends[math.inf], *(line for line in known if float(line["epsilon_budget"]) == epsilon), *ends[0.0]]


def league(title: str, name: str) -> str:
    """The tables of one data set in Markdown."""
    known = lines(name)
    budgets = sorted({float(line["epsilon_budget"]) for line in known if end_of(line) is None})
    return "\n\n".join(
        f"### {title}, ε = {budget:g}\n\n{table(HEADER, map(cells, lines_at(known, budget)))}" for budget in budgets
    )


def instructions(record: Record) -> set[str]:
    """The instruction sets of the processors that computed the sessions of a fit."""
    environment = record.content["environment"]
    return {each["machine"].get("instructions", "") for each in (environment, *environment.get("earlier", []))}


def above_the_limit() -> str:
    """The lines whose fits take more than the limit in the mean, with the processor-seconds of each seed.

    A fit that was computed on other processors than those of the table's columns, or on several, is an error.
    """
    rows = []
    for title, line in ((title, line) for title, name in LEAGUES.items() for line in lines(name)):
        runs = [record for record in records_of(line) if "cpu_seconds" in record.content["cost"]]
        spent = [record.content["cost"]["cpu_seconds"] for record in runs]
        if end_of(line) is None and spent and statistics.fmean(spent) > LIMIT_S:
            columns: dict[str, list[str]] = {"AVX512": [], "AVX2": []}
            for run, cpu_seconds in zip(runs, spent, strict=True):
                (instruction_set,) = instructions(run)
                columns[instruction_set].append(f"{cpu_seconds:,.0f}")
            of_seeds = (", ".join(each) or NONE for each in columns.values())
            rows.append((title, f"{float(line['epsilon_budget']):g}", name_of(line), *of_seeds))
    return f"### MNIST and Fashion-MNIST, lines above the limit\n\n{table(ABOVE_HEADER, rows)}"


def fidelity_values(line: Line) -> dict[str, float]:
    """The values of a line of the table of fidelity, which has one run, and the CNN's accuracy of the same run."""
    (record,) = records_of(line)
    values = values_of(record)
    return values.get(LEAGUE, {}) | values[line["protocol"]]


def is_of_a_second_fit(line: Line) -> bool:
    """Whether the protocol of a line with one run was measured on a run made again with the same settings and seed."""
    (record,) = records_of(line)
    return any("fit" in each for each in record.measurements.all() if each["protocol"]["name"] == line["protocol"])


def differing(line: Line, league: Sequence[Line], settings: Sequence[str]) -> list[str]:
    """Those of the settings in which a line differs from its preset in the league.

    A line and its preset have the same method, budget and fonts.
    """
    identity = ("method", "epsilon_budget", "fonts")
    (preset,) = (each for each in league if all(each.get(key) == line.get(key) for key in identity))
    config, of_preset = (OmegaConf.create(records_of(each)[0].content["config"]) for each in (line, preset))
    return [name for name in settings if setting_of(config, name) != setting_of(of_preset, name)]


def fidelity(title: str) -> str:
    """The fidelity on a data set: real data, the lines at each budget by their FID, and what uses no records."""
    name = FIDELITIES[title]
    known = [(line, fidelity_values(line)) for line in lines(name)]
    league, settings = lines(LEAGUES[title]), load_table(name).settings
    rows = [
        (
            NONE if end_of(line) is not None else f"{float(line['epsilon_budget']):g}",
            name_of(line, differing(line, league, settings)) + (" †" if is_of_a_second_fit(line) else ""),
            *(format(values[metric], digits) if metric in values else NONE for metric, digits in FIDELITY.items()),
        )
        for line, values in sorted(known, key=lambda each: (*order(each[0]), each[1].get("fid", math.inf)))
    ]
    return f"### Fidelity, {title}\n\n{table(FIDELITY_HEADER, rows)}"


def order(line: Line) -> tuple[bool, bool, float]:
    """Sorts real data before the budgets, smallest first, and these before what uses no records."""
    return end_of(line) != math.inf, end_of(line) == 0.0, float(line["epsilon_budget"])


def page() -> str:
    """The page with its tables made again."""
    leagues = (league(title, name) for title, name in LEAGUES.items())
    parts = [*leagues, above_the_limit(), league(*HOUR), *map(fidelity, FIDELITIES)]
    return page_with(PAGE, BEGIN, "\n\n".join(parts), END)


if __name__ == "__main__":
    PAGE.write_text(page())
