"""Makes the table and the plot of docs/published_epsilons.md: what published values of epsilon are worth.

The claims are in docs/published_epsilons.yaml, printed accuracies in results/published, and measured ones in
results/records. Proven values are computed as `dpgen account` computes them, and kept in
docs/published_epsilons.csv, because some take minutes. Run it again after a record or a claim has changed:

    .venv/bin/python docs/make_published_epsilons.py             # the page and the plot, from the CSV
    .venv/bin/python docs/make_published_epsilons.py --account   # and the CSV; needs MNIST
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from docs.page_records import records_of
from docs.page_tables import page_with, table
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import counted, relation_name
from dpgen_bench.config.identity import NOT_ARGUMENTS
from dpgen_bench.config.spec import build_spec
from dpgen_bench.outcomes.listing import format_epsilon
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.accountants.table import claimed_epsilon
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, OneShard
from dpgen_bench.runs.plan import plan
from dpgen_bench.store.values import mean_values
from dpgen_bench.tables.published import published_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "published_epsilons.md"
SPEC = ROOT / "docs" / "published_epsilons.yaml"
VALUES = ROOT / "docs" / "published_epsilons.csv"
PLOT = ROOT / "results" / "pictures" / "published_epsilons.png"
BEGIN, END = "<!-- table: made by docs/make_published_epsilons.py -->", "<!-- end of the table -->"
BEGIN_FASHION = "<!-- table: Fashion-MNIST, made by docs/make_published_epsilons.py -->"
END_FASHION = "<!-- end of the table of Fashion-MNIST -->"
METRIC, DELTA = "acc_cnn_pct", 1e-5
MNIST, FASHION = ("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")  # a data set in configs and in printed tables
MARKERS = {"add_remove": "o", "replace_one": "s"}
PROTOCOLS = ("league", "standard_utility")  # their CNN is the same
HEADER = (
    *("method", "claimed", "by", "proven", "certified", "flaw", "printed"),
    "ours, at a proven ε of the claimed size",
)
HEADER_FASHION = (*HEADER[:3], *HEADER[-2:])

Entry = Mapping[str, Any]
Found = tuple[tuple[str, str], dict[str, str], float]  # (scale, relation), settings of the method, accuracy of a run


def entries() -> list[dict[str, Any]]:
    """The claims."""
    return list(yaml.safe_load(SPEC.read_text())["entries"])


def name(entry: Entry) -> str:
    """The name of an entry in the CSV: its method, who claims, and the claimed value if it states one."""
    return ", ".join(str(entry[key]) for key in ("method", "by", "claimed") if key in entry)


def events(entry: Entry) -> list[Event]:
    """The releases of an entry."""
    if "run" in entry:
        return plan(str(entry["run"]).split()).events
    found = []
    for release in entry.get("releases", ()):
        add_remove, replace_one = (math.sqrt(float(square)) for square in release["sensitivity2"])
        sampling = OneShard(release["shards"], "random") if "shards" in release else Full()
        std = float(release["std"]) if "std" in release else _noise_multiplier(entry["noise_for"])
        found.append(Event(sampling, Sensitivity(add_remove, replace_one), std, int(release["times"])))
    return found


def _noise_multiplier(target: Mapping[str, Any]) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    return float(
        get_noise_multiplier(
            target_epsilon=float(target["epsilon"]),
            target_delta=DELTA,
            sample_rate=float(target["q"]),
            steps=int(target["steps"]),
            accountant="rdp",
        )
    )


def account(entry: Entry) -> dict[str, str]:
    """The line of an entry in the CSV: its claimed and its proven epsilon; inf if nothing is proven."""
    releases = events(entry)
    claimed: Any = entry.get("claimed")
    if claimed is None:
        method = build_spec(compose_config(str(entry["run"]).split())).method()
        claimed = claimed_epsilon(method, releases, DELTA)
    proven = epsilon(releases, DELTA, entry["relation"], "pld") if releases else math.inf
    return {"entry": name(entry), "claimed": f"{float(claimed):.6g}", "proven": f"{proven:.6g}"}


def accounted() -> dict[str, dict[str, str]]:
    """The lines of the CSV by entry."""
    with open(VALUES, newline="") as file:
        return {line["entry"]: line for line in csv.DictReader(file)}


def printed(entry: Entry, data: tuple[str, str] = MNIST) -> str:
    """The printed accuracy of an entry in percent; values that the yaml states are of MNIST."""
    cell = entry.get("printed")
    if cell is None or ("value" in cell and data != MNIST):
        return "–"
    if "value" in cell:
        return f"{cell['value']}"
    for row in published_rows(cell["paper"], cell["table"]):
        wanted = (cell["method"], cell.get("variant", row.variant), cell["epsilon"], data[1])
        if (row.method, row.variant, row.epsilon, row.dataset) == wanted and cell["metric"] in row.cells:
            value = row.cells[cell["metric"]].value
            return "–" if value is None else f"{value:g}"
    raise ValueError(f"expected a printed row of {dict(cell)}, got none; correct {SPEC.name}.")


def certified(entry: Entry) -> str:
    """The epsilon that an audit certifies without a model of the attack, or a dash."""
    return str(entry["audit"]["certified"]) if "audit" in entry else "–"


def measured(entry: Entry, data: tuple[str, str] = MNIST) -> str:
    """The accuracy that records have for a method at the proven epsilon of the claim, with its seeds and scale.

    Runs with a first stage (`init`) are left out, because no claim is about them.
    """
    same = entry.get("same")
    if same is None:
        return "–"
    found: list[Found] = []
    for record in records_of(same["method"]):
        config, privacy = record.config, record.config.privacy
        if config.dataset.name != data[0] or (privacy.epsilon, privacy.delta) != (same["epsilon"], DELTA):
            continue
        if "init" in config and config.init.name != "none":
            continue
        for each in record.measurements.all():
            value = mean_values(each).get(METRIC) if each["protocol"]["name"] in PROTOCOLS else None
            if value is not None:
                own = settings(record.content["identity"]["method"])
                found.append(((config.scale.name, config.privacy.relation), own, value))
                break
    return cell_of(found, same.get("names", {}), same.get("sizes", "of a paper")) or "–"


def settings(method: Mapping[Any, Any]) -> dict[str, str]:
    """The settings of a method as texts, without those that a run without a first stage does not use.

    A run's identity has them without options that the method got later, where these have their defaults.
    """
    return {str(key): str(setting) for key, setting in method.items() if key not in NOT_ARGUMENTS}


def cell_of(found: Sequence[Found], names: Mapping[str, str] | None = None, sizes: str = "of a paper") -> str:
    """Means over seeds, one for each scale, relation and settings of the method; settings that differ are named.

    Args:
        names: what runs with a setting, written key=value, are called instead of by all settings that differ.
        sizes: "ours" if no paper states the method's sizes, so that no scale is comparable with the printed value.
    """
    groups: dict[tuple[str, str, str, str], list[float]] = {}
    for place, own, value in found:
        others = [other for where, other, _ in found if where == place]
        differing = ", ".join(f"{key}={own[key]}" for key in own if any(each.get(key) != own[key] for each in others))
        own_settings = {f"{key}={setting}" for key, setting in own.items()}
        named = ", ".join(name for setting, name in (names or {}).items() if setting in own_settings)
        groups.setdefault((*place, differing, named), []).append(value)
    cells = []
    for (scale, relation, differing, named), values in sorted(groups.items()):
        about = [counted(len(values), "seed"), relation_name(relation), *filter(None, [named or differing])]
        limits = [f"scale {scale}"] * (scale != "paper") + ["sizes are ours"] * (sizes == "ours")
        if limits:
            about.append(f"{', '.join(limits)}: not comparable")
        cells.append(f"{statistics.fmean(values):.1f} ({', '.join(about)})")
    return "; ".join(cells)


def shown(value: str) -> str:
    """An epsilon with three digits."""
    number = float(value)
    return "none" if math.isinf(number) else format_epsilon(number)


def rows() -> list[tuple[str, ...]]:
    """The cells of the table; the relation of a proven value is that of the claim."""
    known, cells = accounted(), []
    for entry in entries():
        line = known[name(entry)]
        proven = shown(line["proven"])
        proven = f"**{proven}**" + ("" if proven == "none" else f" ({relation_name(entry['relation'])})")
        claim = f"{float(line['claimed']):.4g}"
        about = (entry["method"], claim, entry["by"], proven, certified(entry), entry["flaw"])
        cells.append((*about, printed(entry), measured(entry)))
    return cells


def rows_fashion() -> list[tuple[str, ...]]:
    """The cells of the table of Fashion-MNIST: the published claims of which an accuracy on it is printed."""
    known, cells = accounted(), []
    for entry in entries():
        if (value := printed(entry, FASHION)) != "–":
            claim = f"{float(known[name(entry)]['claimed']):.4g}"
            cells.append((entry["method"], claim, entry["by"], value, measured(entry, FASHION)))
    return cells


def page() -> str:
    """The page with its tables made again."""
    text = page_with(PAGE, BEGIN, table(HEADER, rows()), END)
    return page_with(PAGE, BEGIN_FASHION, table(HEADER_FASHION, rows_fashion()), END_FASHION, text)


def description() -> str:
    """The values of the plot as text, which is stored in it, so that a test can compare them with the table."""
    return "; ".join(" ".join(cells[:5]) for cells in rows())


def draw() -> None:
    """Draw claimed and proven values, one line for each claim."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = accounted()
    lines = [(entry, *(float(known[name(entry)][key]) for key in ("claimed", "proven"))) for entry in entries()]
    finite = [proven for _, _, proven in lines if math.isfinite(proven)]
    end = 10 * max(finite)  # where "none" is drawn
    figure, axes = plt.subplots(figsize=(8.5, 0.32 * len(lines) + 1.0), dpi=120, layout="constrained")
    for y, (entry, claimed, proven) in enumerate(lines):
        nothing = math.isinf(proven)
        x = end if nothing else proven
        color = "0.6" if nothing else "#d55e00" if x > 1.1 * claimed else "#0072b2"
        style, marker = ("dotted", ">") if nothing else ("solid", MARKERS[entry["relation"]])
        axes.plot([claimed, x], [y, y], color=color, linewidth=2, linestyle=style, zorder=1)
        axes.scatter(claimed, y, facecolor="white", edgecolor="black", zorder=2)
        axes.scatter(x, y, color=color, marker=marker, zorder=3)
        if "audit" in entry:
            axes.scatter(float(certified(entry)), y, color="black", marker="x", zorder=4)
        axes.annotate(
            shown(str(proven)), (max(x, claimed), y), (7, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(lines)), [f"{e['method']} ({e['by']})" for e, _, _ in lines], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=4 * end)
    axes.set_xlabel(
        "ε at δ = 1e-5: claimed (white), certified by an audit (cross),\n"
        "proven (circle: add/remove, square: replace-one; dotted: nothing is proven)"
    )
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, metadata={"Description": description(), "Software": None})


def main(arguments: list[str]) -> None:
    """Write the CSV if it is asked for, and the page and the plot."""
    if "--account" in arguments:
        lines = [account(entry) for entry in entries()]
        with open(VALUES, "w", newline="") as file:
            writer = csv.DictWriter(file, ("entry", "claimed", "proven"), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    PAGE.write_text(page())
    draw()


if __name__ == "__main__":
    main(sys.argv[1:])
