"""Makes the tables of docs/results.md from results/records: accuracies by `league`, all other values, and costs.

Run it again after a new record; `make tables` does, too:

    .venv/bin/python docs/make_results.py
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.page_records import records
from docs.page_tables import page_with, table
from dpgen_bench.config.display import counted, dataset_name, method_name, metric_with_value, relation_name
from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.store.measurements import cost_of_fit
from dpgen_bench.store.records import Record
from dpgen_bench.store.statistics import format_value
from dpgen_bench.store.values import mean_values
from dpgen_bench.training.cost import cost_values

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
OPERATIONS = ROOT / "results" / "bench" / "operations.json"
BEGIN, END = "<!-- tables: made by docs/make_results.py -->", "<!-- end of the tables -->"
LEAGUE = "league"
ACCURACIES = ("acc_cnn_pct", "acc_mlp_pct", "acc_logreg_pct")
HEADER = ("method", "data set", "ε", "settings", "seeds", "CNN", "MLP", "logistic regression", "fit, seconds")
OTHER_HEADER = ("method", "data set", "ε", "settings", "seeds", "protocol", "values")
COST_HEADER = (
    "method",
    "data set",
    "settings",
    "scale",
    "runs",
    "steps",
    "parameters",
    "10^12 operations",
    "processor-seconds",
    "memory, MiB",
)
COSTS = (
    "What fits cost with one thread. `python -m tests.bench operations` counts the floating-point operations of matrix "
    "products, convolutions and attention, for runs of the league. Memory is the largest of the process; what uniform "
    "noise takes is that of Python, its libraries and the records. `≤` is the shortest time on the clock, of runs that "
    "did not count processor time. `≥` leaves out the warm start of GS-WGAN's critics, which was taken from the cache:"
)
CPU, GPU = "seconds on a CPU", "seconds that include an accelerator's"
CACHED = 0.3  # seconds that reading critics from the cache takes at most; one without iterations takes two
# Overrides that have a column of their own, or change neither the generator nor what is measured.
NOT_SETTINGS = (
    *("method=", "dataset=", "seed=", "protocol=", "~protocol.metrics."),
    *("privacy.epsilon=", "privacy.relation=", "runtime."),
)

# Data set, ε, method, relation and settings, protocol: what runs with other seeds have in common.
Line = tuple[str, float, str, str, str, str]


def line_of(record: Record, protocol: str) -> Line:
    """The line to which the values of a record by one protocol belong."""
    config, budget = record.config, record.config.privacy.epsilon
    if budget is None:  # a run at a stated noise
        budget = record.content["ledger"]["epsilon"]["proven"]
    settings = [
        text
        for text in record.content["command"]
        if not text.startswith(NOT_SETTINGS) or text.startswith("runtime.precision=")  # which changes what is trained
    ]
    shown = ", ".join(f"`{text.removeprefix('experiment=').removeprefix('method.')}`" for text in settings)
    return (
        config.dataset.name,
        float(budget),
        config.method.name,
        config.privacy.relation,
        shown or "–",
        protocol,
    )


def values_of(record: Record) -> dict[str, dict[str, float]]:
    """The values of a record by protocol and metric, each protocol's of one fit: the one with most metrics.

    All fits of real data are one, because they release the same images.
    """
    one_fit = record.path.parent.name == "real_data"
    by_fit: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for each in record.measurements.all():
        fit = "" if one_fit else json.dumps(cost_of_fit(each))
        by_fit[each["protocol"]["name"], fit].update(mean_values(each))
    values: dict[str, dict[str, float]] = {}
    for (protocol, _), of_fit in by_fit.items():
        if len(of_fit) > len(values.get(protocol, {})):
            values[protocol] = of_fit
    return values


def measured() -> dict[Line, dict[str, list[float]]]:
    """The values of each line by metric, one for each seed, and the seconds of fits, under `CPU` or `GPU`."""
    lines: dict[Line, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records():
        seconds = cost_values(record.content["cost"])["seconds_total"]
        for protocol, of_metrics in values_of(record).items():
            values = lines[line_of(record, protocol)]
            values[CPU if on_a_cpu(record) else GPU].append(seconds)
            for metric, value in of_metrics.items():
                if "_num_" not in metric:  # numbers of images belong to the protocol
                    values[metric].append(value)
    return lines


def seconds_of(runs: Sequence[ReadableRun]) -> str:
    """The mean processor time of fits, or a bound of it: time on the clock contains that of other programs.

    If no run counted that of its own fit, it is of their other fits. Fits that took the warm start of their critics
    from the cache count only where there are no others: `≥`. A dash if neither bound holds.
    """
    own = [run.read_json("training.json") for run in runs]
    known = own if any("cpu_seconds" in cost for cost in own) else [run.cost for run in runs]
    whole = [cost for cost in known if not 0.0 < cost["seconds"].get("warm_start", 0.0) < CACHED]
    values, mark = [cost_values(cost) for cost in whole or known], "" if whole else "≥ "
    if times := [each["cpu_seconds"] for each in values if "cpu_seconds" in each]:
        return f"{mark}{statistics.fmean(times):,.0f}"
    return f"≤ {min(each['seconds_total'] for each in values):,.0f}" if whole else "–"


def cost_line(record: Record) -> tuple[str, ...]:
    """The line of the table of costs to which a record belongs: its method, data set, settings and scale."""
    method, dataset, _, settings = about(line_of(record, ""))
    return method, dataset, settings, record.config.scale.name


def on_a_cpu(record: Record) -> bool:
    """Whether the whole fit was computed without an accelerator, also its sessions on other machines."""
    environment = record.content["environment"]
    return all(each["machine"]["device"] == "cpu" for each in (environment, *environment.get("earlier", [])))


def counts_of(counted: dict[str, dict[str, Any]], line: str, runs: Sequence[Record]) -> dict[str, Any] | None:
    """The counted operations of a line; None if they are of another run, as after a change of its preset."""
    counts = counted.get(line, {})
    return counts if counts.get("run") in {run.id for run in runs} else None


def costs() -> str:
    """The table of what fits on a CPU cost; runs of all seeds and ε with the same other settings share a line."""
    lines: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records():
        search = record.config.dataset.name.startswith("validation_")  # has other settings, and similar costs
        if not search and on_a_cpu(record):
            lines[cost_line(record)].append(record)
    counted_lines = json.loads(OPERATIONS.read_text())["lines"]

    def row(line: tuple[str, ...], runs: list[Record]) -> tuple[str, ...]:
        cost = runs[0].content["cost"]
        steps, parameters = sum(cost["steps"].values()), cost["parameters"].get("released_generator", 0)
        memory = max(record.content["cost"]["peak_memory_mib"]["host"] for record in runs)
        operations = counts_of(counted_lines, " | ".join(line), runs)
        teraflops = f"{operations['all'] / 1e12:.2g}" if operations else "–"
        cells = (str(len(runs)), f"{steps:,}", f"{parameters:,}", teraflops, seconds_of(runs), f"{memory:,.0f}")
        return (*line, *cells)

    return table(COST_HEADER, (row(line, runs) for line, runs in sorted(lines.items())))


def shown(values: list[float]) -> str:
    """The mean, and the standard deviation over three seeds or more: `95.0 ± 0.3`."""
    if not values:
        return "–"
    mean = statistics.fmean(values)
    text = format_value(mean)
    return f"{text} ± {format_value(statistics.stdev(values), mean)}" if len(values) > 2 else text


def of_no_table(metric: str) -> bool:
    """Whether a value is about how another one was measured: by the classifier on real data, or on parts of samples."""
    return metric.endswith(("_real_pct", "_calibrated_pct", "_std_subsets", "_subset_size"))


def about(line: Line) -> tuple[str, ...]:
    """The cells that both tables begin with: method, data set, ε and settings."""
    dataset, epsilon, method, relation, settings, _ = line
    page = f"[{method_name(method)}](methods/{method}.md)"
    has_page = (ROOT / "docs" / "methods" / f"{method}.md").exists()
    budget = "∞" if math.isinf(epsilon) else f"{epsilon:.3g}" if epsilon < 1000 else f"{epsilon:,.0f}"
    if relation != "replace_one":
        budget += f" ({relation_name(relation)})"
    return page if has_page else method_name(method), dataset_name(dataset), budget, settings


def tables() -> str:
    """The tables in Markdown; lines of one data set and one ε are sorted by the CNN's accuracy."""
    league, others = [], []
    lines = measured()
    public = {record.config.method.name: record.content["ledger"].get("public_data") for record in records()}

    def order(line: Line) -> tuple[str, float, float]:
        return line[0], line[1], -statistics.fmean(lines[line].get(ACCURACIES[0], [0.0]))

    for line in sorted(lines, key=order):
        values = dict(lines[line])
        on_cpu, on_gpu = values.pop(CPU, []), values.pop(GPU, [])
        seeds = str(len(on_cpu) + len(on_gpu))
        seconds = f"{statistics.fmean(on_cpu):.0f}" if on_cpu else f"{statistics.fmean(on_gpu):.0f} (GPU)"
        method, *cells = about(line)
        if also := public[line[2]]:
            method += f", public data: {also}"
        if line[-1] == LEAGUE:
            accuracies = (shown(values.get(name, [])) for name in ACCURACIES)
            league.append((method, *cells, seeds, *accuracies, seconds))
        else:
            named = (metric_with_value(name, shown(values[name])) for name in sorted(values) if not of_no_table(name))
            others.append((method, *cells, seeds, f"`{line[-1]}`", "; ".join(named)))
    runs = counted(len(records()), "record")
    heading = (
        f"From {runs}. By the protocol `{LEAGUE}`, accuracies in percent. Times of fits are on the clock, those on a "
        "GPU only where there are no others; those of GS-WGAN leave out a warm start that was taken from the cache:"
    )
    values_by = [heading, table(HEADER, league), "By other protocols:", table(OTHER_HEADER, others)]
    return "\n\n".join([*values_by, COSTS, costs()])


def page() -> str:
    """The page with its tables made again."""
    return page_with(PAGE, BEGIN, tables(), END)


if __name__ == "__main__":
    PAGE.write_text(page())
