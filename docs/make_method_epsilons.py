"""Makes the picture of each method's page: the epsilon that is claimed, proven and certified, in one plot.

Its lines are the settings of which there are records in results/records, and those of docs/method_epsilons.yaml. Of
the latter, claimed and proven values are computed as `dpgen account` computes them, certified ones as `dpgen audit`
does, and all are kept in docs/method_epsilons.csv, because some take minutes. Run it again after a record has changed:

    .venv/bin/python docs/make_method_epsilons.py                       # the pictures, from the records and the CSV
    .venv/bin/python docs/make_method_epsilons.py --account [METHOD...] # and the CSV; needs MNIST
    .venv/bin/python docs/make_method_epsilons.py --audit METHOD...     # and what audits of its runs certify
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import yaml
from matplotlib.axes import Axes
from omegaconf import OmegaConf

from docs.page_records import records_of
from dpgen_bench.audit.cases import case_files, load_case
from dpgen_bench.audit.certified import why_nothing_is_certified
from dpgen_bench.audit.count_test import certify_count
from dpgen_bench.audit.methods import audit_method, method_spec
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import dataset_name, relation_name
from dpgen_bench.config.spec import build_spec
from dpgen_bench.outcomes.listing import NOT_AUDITED, epsilon_number, format_certified, format_epsilon, least_certified
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.accountants.table import claimed_epsilon
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.plan import plan
from dpgen_bench.store.records import Record

ROOT = Path(__file__).resolve().parent.parent
SPEC, VALUES = ROOT / "docs" / "method_epsilons.yaml", ROOT / "docs" / "method_epsilons.csv"
PICTURES = ROOT / "results" / "pictures"
COUNTS = 100_000  # trials of a case, whose exact rates of error are what the picture shows

# Colours in light and in dark mode: text, background, lines, and those of the three values.
TEXT, BACKGROUND, GRID = "#1f1f1f", "#fefefe", "#dddddd"
INTERVAL, PROVEN, MORE, CLAIMED = "#9ecae1", "#0072b2", "#d55e00", "#444444"
DARK = {
    TEXT: "#e8e8e8",
    BACKGROUND: "#1e1e22",
    GRID: "#3c3c42",
    INTERVAL: "#2f5f7a",
    PROVEN: "#56b4e9",
    CLAIMED: "#c8c8c8",
}
FIELDS = ("method", "label", "relation", "claimed", "proven", "certified", "why")


@dataclass(frozen=True)
class Row:
    """One line of a picture; numbers are text as in the CSV, "" where there is none, and `why` says so of certified."""

    method: str
    label: str
    relation: str
    claimed: str
    proven: str
    certified: str
    why: str = ""

    def texts(self) -> tuple[str, str, str, str, str]:
        """The label, the relation, and the three values for readers."""
        proven = "none" if float(self.proven) == math.inf else format_epsilon(float(self.proven))
        claimed = format_epsilon(float(self.claimed)) if self.claimed else "–"
        certified = format_certified(float(self.certified)) if self.certified else NOT_AUDITED
        return self.label, relation_name(self.relation), claimed, proven, certified


def methods() -> list[str]:
    """The methods that have a page."""
    return sorted(path.stem for path in (ROOT / "docs" / "methods").glob("*.md") if path.stem != "index")


def picture(method: str) -> Path:
    """The picture of a method's page."""
    return PICTURES / f"epsilons_{method}.svg"


def recorded(method: str) -> list[Row]:
    """A row for each data set, budget and first stage of which there are records of the method.

    Without a budget, each proven epsilon has a row. With one, settings can prove different shares of it, and the row
    has the largest proven value.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records_of(method):
        config = record.config
        stage, budget = OmegaConf.select(config, "init.name", default="none"), config.privacy.epsilon
        proven = epsilon_number(record.content["ledger"]["epsilon"], "proven")
        key = (str(config.dataset.name), str(config.privacy.relation), budget, stage)
        groups.setdefault((*key, f"{proven:.3g}" if budget is None else ""), []).append(record)
    rows = []
    for (dataset, relation, budget, stage, _), records in sorted(groups.items(), key=str):
        epsilons = [record.content["ledger"]["epsilon"] for record in records]
        proven = max(float(epsilon_number(each, "proven") or 0.0) for each in epsilons)
        claims = [claim for each in epsilons if (claim := epsilon_number(each, "claimed")) is not None]
        audit = least_certified(epsilons)
        number = audit.get("epsilon")
        without = budget is None or not 0.0 < float(str(budget)) < math.inf
        label = dataset_name(str(dataset)) + ("" if without else f", ε = {budget}")
        label += "" if stage == "none" else f", init={stage}"
        rows.append(
            Row(
                method,
                label,
                str(relation),
                f"{max(claims):.6g}" if claims else "",
                f"{proven:.6g}",
                "" if number is None else f"{float(number):.6g}",
                audit.get("reason", "") or ("" if audit else NOT_AUDITED),
            )
        )
    return rows


def stated() -> list[dict[str, str]]:
    """The settings of the yaml, each with its method."""
    return [{"method": name, **each} for name, entries in yaml.safe_load(SPEC.read_text()).items() for each in entries]


def kept() -> dict[tuple[str, str], Row]:
    """The rows of the CSV by method and label."""
    with open(VALUES, newline="") as file:
        return {(line["method"], line["label"]): Row(**line) for line in csv.DictReader(file)}


@cache
def rows(method: str) -> list[Row]:
    """The rows of a picture: those of records, then those of the yaml whose settings no record has."""
    known, measured = kept(), recorded(method)
    shown = {(row.label, row.relation) for row in measured}
    others = [known[each["method"], each["label"]] for each in stated() if each["method"] == method]
    return measured + [row for row in others if (row.label, row.relation) not in shown]


def account(entry: dict[str, str]) -> Row:
    """The claimed and the proven epsilon of an entry, and of a case what attacks on it certify."""
    overrides = entry["run"].split()
    ledger = plan(overrides)
    events, delta = [each.event for each in ledger.entries.values()], ledger.budget.delta
    claimed = claimed_epsilon(build_spec(compose_config(overrides)).method(), events, delta)
    certified, why = "", why_nothing_is_certified(ledger)
    relation = ledger.budget.relation
    if "case" in entry:
        case = load_case(case_files()[entry["case"]])
        (attacked,) = case.attacked
        assert case.above is not None
        relation, claimed = case.relation, case.epsilon
        certificate = certify_count(attacked, case.above, case.delta, case.relation, trials=COUNTS)
        certified = f"{certificate.strongest:.6g}"
    proven = _proven(ledger, relation)
    stated_claim = "" if claimed is None else f"{float(claimed):.6g}"
    return Row(entry["method"], entry["label"], relation, stated_claim, f"{proven:.6g}", certified, why)


def _proven(ledger: Ledger, relation: str) -> float:
    for accountant in ("pld", "rdp"):
        try:
            return epsilon(ledger.events, ledger.budget.delta, relation, accountant)  # type: ignore[arg-type]
        except NotCovered:
            continue
    return math.inf


def audited(entry: dict[str, str], row: Row) -> Row:
    """The row with what an audit of its run certifies."""
    result = audit_method(method_spec(entry["run"].split()), echo=print)
    if result.failed or result.certificate is None:
        raise ValueError(f"expected an audit of {entry['run']} without a fault, got one; see `dpgen audit`.")
    return Row(**{**asdict(row), "certified": f"{result.certificate.strongest:.6g}"})


def update(names: Sequence[str], audit: bool) -> None:
    """Compute the rows of these methods again, or of all, and write the CSV after each."""
    known = kept() if VALUES.exists() else {}
    entries = stated()
    for entry in entries:
        key = entry["method"], entry["label"]
        if names and entry["method"] not in names:
            continue
        if not audit:
            row, before = account(entry), known.get(key)
            same = before is not None and (before.proven, before.relation) == (row.proven, row.relation)
            known[key] = Row(
                **{**asdict(row), "certified": row.certified or (before.certified if same and before else "")}
            )
        elif "case" not in entry and not known[key].why:
            known[key] = audited(entry, known[key])
        print(known[key])
        ordered = [
            asdict(known[each["method"], each["label"]]) for each in entries if (each["method"], each["label"]) in known
        ]
        with open(VALUES, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(ordered)


def description(method: str) -> str:
    """The values of a picture as text, which is stored in it, so that a test can compare them."""
    return "; ".join(" | ".join(row.texts()) for row in rows(method))


def draw(method: str) -> None:
    """Draw the picture of a method: a line for each setting, with its values as points on an axis and as text."""
    import matplotlib

    matplotlib.use("Agg")
    fonts = {"svg.fonttype": "none", "svg.hashsalt": "dpgen_bench", "font.size": 9, "text.color": TEXT}
    matplotlib.rcParams.update(fonts)
    import matplotlib.pyplot as plt
    from matplotlib.textpath import TextPath

    lines = rows(method)
    # Texts: what the line is, to the left of the axis, and its values to the right.
    texts = [(-1, "", ("◇ claimed", "● proven", "▶ certified"), "bold")]
    texts += [(y, ", ".join(row.texts()[:2]), row.texts()[2:], "normal") for y, row in enumerate(lines)]
    # Sizes in inches: the axis is 3.25 wide, the values are right of it, and the longest label has room to its left.
    left = 0.3 + max(TextPath((0, 0), label, size=9).get_extents().width for _, label, *_ in texts[1:]) / 72
    width, height = left + 6.1, 0.34 * len(lines)
    whole = height + 0.85
    figure = plt.figure(figsize=(width, whole), facecolor=BACKGROUND)
    axes = figure.add_axes((left / width, 0.5 / whole, 3.25 / width, height / whole), facecolor=BACKGROUND)
    ends = limits(lines)
    for y, row in enumerate(lines):
        draw_points(axes, row, y, ends)
    for y, label, values, weight in texts:
        for x, text in zip((-0.05, 1.2, 1.46, 1.85), (label, *values), strict=True):
            transform = axes.get_yaxis_transform()
            axes.text(x, y, text, ha="right", va="center", fontweight=weight, transform=transform)
    axes.set(xscale="log", xlim=ends, ylim=(len(lines) - 0.5, -0.5), yticks=[])
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", which="both", color=GRID, labelcolor=TEXT)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    meaning = " (orange: more is proven than claimed)" if any(map(exceeds_claim, lines)) else ""
    axes.set_xlabel(f"ε{meaning}", color=TEXT, labelpad=1)
    for side in axes.spines.values():
        side.set_color(GRID)
    path = picture(method)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Description": description(method), "Date": None, "Creator": None}
    figure.savefig(path, facecolor=BACKGROUND, metadata=metadata)
    plt.close(figure)
    path.write_text(_with_dark_mode(path.read_text()))


def limits(lines: Sequence[Row]) -> tuple[float, float]:
    """The ends of the axis, which has at least a factor of 30; 0 and infinity are drawn at its ends."""
    values = [float(each) for row in lines for each in (row.claimed, row.proven, row.certified) if each]
    finite = [value for value in values if 0.0 < value < math.inf] or [0.3, 10.0]
    low, high = 0.4 * min(finite), 2.5 * max(finite)
    return min(low, high / 30.0), max(high, 30.0 * low)


def exceeds_claim(row: Row) -> bool:
    """Whether more is proven than claimed."""
    return bool(row.claimed) and float(row.proven) > 1.1 * float(row.claimed)


def draw_points(axes: Axes, row: Row, y: int, ends: tuple[float, float]) -> None:
    """The points of one line, and the interval from the certified to the proven value, in which the truth lies."""
    points = partial(axes.plot, linestyle="none", clip_on=False)
    colour = MORE if exceeds_claim(row) else PROVEN
    certified, proven, claimed = (
        min(max(float(text), ends[0]), ends[1]) if text else None for text in (row.certified, row.proven, row.claimed)
    )
    if certified is not None:
        axes.plot([certified, proven], [y, y], color=INTERVAL, linewidth=6, zorder=1, solid_capstyle="butt")
        points(certified, y, marker=5, color=colour, markersize=8, zorder=3)
    shape = ">" if float(row.proven) == math.inf else "<" if float(row.proven) == 0.0 else "o"
    points(proven, y, marker=shape, color=colour, markersize=6, zorder=3)
    if claimed is not None:
        points(claimed, y, marker="D", markerfacecolor="none", color=CLAIMED, markersize=8, zorder=4)


def _with_dark_mode(svg: str) -> str:
    """The picture with other colours where the reader's system is in dark mode."""
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark} !important}}[style*="stroke: {light}"]{{stroke:{dark} !important}}'
        for light, dark in DARK.items()
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda match: match[1] + style, svg, count=1)


def main(arguments: list[str]) -> None:
    """Compute the values that are asked for, and draw the pictures."""
    names = [each for each in arguments if not each.startswith("--")]
    for option in ("--account", "--audit"):
        if option in arguments:
            update(names, audit=option == "--audit")
    for method in methods():
        draw(method)


if __name__ == "__main__":
    main(sys.argv[1:])
