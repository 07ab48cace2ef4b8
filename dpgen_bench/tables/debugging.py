"""`dpgen debugging`: from a table's finished runs, which models saw the bug, by what they draw; the detector's errors.

A model is the generator of one run on `dpgen_bench.data.debugging.DebuggingClients`. Two models that differ in
`dataset.select` alone are a pair, one on suspected clients and one on the others; pairs that differ in seed alone are a
group. Only the test split is read, which is public, and where a classifier chose the clients its choice is made again.
"""

from __future__ import annotations

import contextlib
import json
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dpgen_bench.data.debugging import DebuggingClients, error_rate, expected_intensity, inverted_score, verdict
from dpgen_bench.data.records import DatasetSpec
from dpgen_bench.generator import Generator
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.runs.config import RunSpec
from dpgen_bench.runs.listing import epsilon_figure, format_epsilon, make_console
from dpgen_bench.runs.samples import sample_labels
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.tables.rows import load_table, table_rows
from dpgen_bench.utils.files import atomic, write_atomic

SAMPLES = 2_000  # images whose mean is taken
SHOWN = 50  # of them in the picture, ten in a line
PAIR = ("suspected", "others")
BUG = {True: "bug", False: "no bug"}
COLUMNS = (
    "seed, clients, ε proven, ε against the server, mean intensity, expected, inverted score, verdict, truth, status"
)
Fact = Callable[[DatasetSpec], float]

EXPLAINED = f"""\
Of each pair of models one was trained on the clients that are suspected of inverted pixels and one on the others.
Whoever looks at what both draw sees the bug without seeing a record. Here a detector, which is ours, stands in for that
person. It takes the mean intensity of {SAMPLES:,} images that a model draws, as many of each class, and that of the
real test images, e, which is public. Its score, (mean - e) / (1 - 2e), is 0 as expected and 1 if fully inverted; above
0.5 the verdict is "bug". Grey noise has a score of 0.5, too: a model that learnt nothing gets a verdict that is worth
nothing. The truth is known because the bug was put there: it is "bug" where more than half of the model's clients have
it."""


@dataclass(frozen=True)
class Finding:
    """What one model's samples tell, and what is true.

    images: the first samples, uint8 [n, c, h, w], n <= SHOWN. mean: mean intensity of all samples, in [0, 1]; expected:
    of the test split. share: which part of the model's clients has the bug.
    """

    images: Tensor
    mean: float
    expected: float
    share: float

    @property
    def score(self) -> float:
        return inverted_score(self.mean, self.expected)

    @property
    def bug(self) -> bool:
        """The detector's verdict."""
        return verdict(self.mean, self.expected)

    @property
    def truth(self) -> bool:
        return self.share > 0.5


@dataclass(frozen=True)
class Model:
    """One run: its ledger as far as there is one, and what its samples tell; `status` says why where they do not."""

    spec: RunSpec
    status: str
    ledger: dict[str, Any]
    finding: Finding | None = None

    @property
    def select(self) -> str:
        return str(self.spec.config.dataset.select)

    def epsilon(self, name: str) -> Any:
        """The ledger's "proven" epsilon, against outsiders, or the one against the "server"; None if it has none."""
        return epsilon_figure(self.ledger.get("epsilon"), name)

    def reasons(self) -> list[str]:
        """Why an epsilon is infinite though another was asked for, and what else must be known."""
        epsilon = self.ledger.get("epsilon") or {}
        figures = {"proven": epsilon, "against the server": epsilon.get("server") or {}}
        told = [f"ε {who} is infinite: {figure['reason']}" for who, figure in figures.items() if "reason" in figure]
        if self.finding and self.spec.training["dataset"].get("by") == "classifier":
            told.append("the truth was computed from records, as was the classifier's choice; no epsilon covers it")
        return told


@dataclass(frozen=True)
class Group:
    """Models that differ in seed and choice of clients alone, in this order, and in what they differ from others."""

    models: tuple[Model, ...]
    settings: dict[str, str]

    @property
    def title(self) -> str:
        config = self.models[0].spec.config
        words = [f"{config.method.name} on {config.dataset.name}", f"ε = {budget_text(config.privacy.epsilon)}"]
        return ", ".join([*words, f"scale {config.scale.name}", *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def found(self) -> list[Finding]:
        return [model.finding for model in self.models if model.finding]

    def errors(self) -> str:
        """How many of the detector's verdicts are wrong."""
        outcomes = [(finding.bug, finding.truth) for finding in self.found]
        wrong = f"{sum(found != true for found, true in outcomes)} of {len(outcomes)} wrong"
        return f"{wrong} (error rate {error_rate(outcomes):.0%})" if outcomes else "no model yet"

    def by_seed(self) -> dict[int, dict[str, Model]]:
        """The models of each seed by their choice of clients."""
        seeds: dict[int, dict[str, Model]] = {}
        for model in self.models:
            seeds.setdefault(model.spec.seed, {})[model.select] = model
        return seeds

    def unpaired(self) -> list[str]:
        """Seeds of which one model has samples and the other has none, or is not in the table."""
        lines = []
        for seed, models in self.by_seed().items():
            lacking = [select for select in PAIR if select not in models or not models[select].finding]
            whys = [f"{select}: {models[select].status if select in models else 'no such run'}" for select in lacking]
            if lacking and not (len(lacking) == 2 and set(PAIR) <= set(models)):
                lines.append(f"seed {seed} is unpaired ({'; '.join(whys)})")
        return lines

    def remarks(self) -> list[str]:
        """The terms of the proven epsilons, what must be known of them, and what is unpaired; no line comes twice."""
        privacy = self.models[0].spec.config.privacy
        unit = next((model.ledger["unit"] for model in self.models if "unit" in model.ledger), None)
        terms = f"{privacy.relation} of {unit}s, δ = {privacy.delta:g}, accountant {privacy.accountant}"
        told = [] if privacy.epsilon == math.inf or unit is None else [f"ε is under {terms}"]
        told += [reason for model in self.models for reason in model.reasons()]
        return list(dict.fromkeys([f"the detector: {self.errors()}", *told, *self.unpaired()]))


def inspect_runs(table: DictConfig, results: Path) -> list[Group]:
    """The table's runs in groups, in the order of its sweeps, each with what its samples tell.

    Raises:
        ValueError: if a run is on other data than a federation with a bug.
        MissingData: if a finished run's test split is not there.
    """
    rows = table_rows(table, results)  # two of them may hold one run, measured by two protocols
    runs = {spec.id: (spec, folder) for row in rows for spec, folder in zip(row.specs, row.folders, strict=True)}
    alike: dict[str, list[Model]] = {}
    # Once for each data set: a test split may be large, and a choice may take the training of a classifier.
    expected = cache(lambda federation: expected_intensity(federation.load("test").images))
    share = cache(lambda dataset: float(np.isin(dataset.chosen_clients(), dataset.inverted_clients()).mean()))
    for spec, folder in runs.values():
        anyone = {**spec.training, "seed": None, "dataset": {**spec.training["dataset"], "select": None}}
        alike.setdefault(json.dumps(anyone, sort_keys=True), []).append(_inspect(spec, folder, expected, share))
    groups = [sorted(models, key=lambda model: (model.spec.seed, model.select != PAIR[0])) for models in alike.values()]
    settings = _differences([models[0].spec.training for models in groups])
    return [Group(tuple(models), told) for models, told in zip(groups, settings, strict=True)]


def print_debugging(name: str, results: Path) -> None:
    """Print the report of a table's runs; write results/tables/NAME_report.md and .csv and results/pictures/NAME.png.

    Nothing is written while there is no finished run.
    """
    table = load_table(name)
    groups = inspect_runs(table, results)
    console = make_console()
    for group in groups:
        shown = Table(*COLUMNS.split(", "), title=Text(group.title))
        for model in group.models:
            shown.add_row(*map(Text, _cells(model)))
        console.print(shown)
        for remark in group.remarks():
            console.print(f"  {remark}", highlight=False, markup=False, soft_wrap=True)
    if not any(group.found for group in groups):
        console.print(f"no run is finished yet, so no file is written; `dpgen sweep {name}` makes the runs")
        return
    report, picture = results / "tables" / f"{name}_report.md", results / "pictures" / f"{name}.png"
    draw_models(groups, picture)
    paragraphs = [f"# {table.title}: is the bug seen?", str(table.get("note", "")), EXPLAINED, *map(_section, groups)]
    paragraphs.append(f"![The first {SHOWN} images of a pair of models in each group](../pictures/{picture.name})")
    write_atomic(report, "\n\n".join(part for part in paragraphs if part) + "\n")
    write_atomic(report.with_suffix(".csv"), report_frame(groups).to_csv(index=False))
    console.print(f"written: {report}, {report.with_suffix('.csv').name}, {picture}", markup=False, soft_wrap=True)


def report_frame(groups: list[Group]) -> pd.DataFrame:
    """One line per run, with unrounded numbers; empty cells where a run has none."""

    def line(group: Group, model: Model) -> dict[str, Any]:
        config, finding = model.spec.config, model.finding
        return {
            "method": config.method.name,
            "dataset": config.dataset.name,
            "settings": " ".join(f"{name}={value}" for name, value in group.settings.items()),
            "epsilon_budget": config.privacy.epsilon,
            "scale": config.scale.name,
            "seed": model.spec.seed,
            "clients": model.select,
            "epsilon_proven": model.epsilon("proven"),
            "epsilon_server": model.epsilon("server"),
            "mean_intensity": finding and finding.mean,
            "expected_intensity": finding and finding.expected,
            "inverted_score": finding and finding.score,
            "verdict": finding and BUG[finding.bug],
            "share_with_bug": finding and finding.share,
            "truth": finding and BUG[finding.truth],
            "status": model.status,
            "remarks": "; ".join(model.reasons()),
            "run": model.spec.id,
        }

    return pd.DataFrame([line(group, model) for group in groups for model in group.models])


def draw_models(groups: list[Group], picture: Path) -> None:
    """A line for each group with a model: its first seed with most of them, suspected clients left, others right."""
    from matplotlib.figure import Figure
    from torchvision.utils import make_grid  # as long to import as torch

    drawn = [group for group in groups if group.found]
    figure = Figure(figsize=(10.0, 3.4 * len(drawn)), layout="constrained")
    for group, panels in zip(drawn, figure.subplots(len(drawn), 2, squeeze=False), strict=True):
        pair = max(group.by_seed().values(), key=lambda models: sum(bool(model.finding) for model in models.values()))
        # Models on "all" clients are of no pair, and stand where those on suspected ones do.
        for panel, model in zip(panels, (pair.get(PAIR[0], pair.get("all")), pair.get(PAIR[1])), strict=True):
            panel.set_axis_off()
            if model:
                panel.set_title(_caption(group, model), fontsize=9)
            if model and model.finding:
                grid = make_grid(model.finding.images.float() / 255, nrow=10, padding=2, pad_value=0.5)
                panel.imshow(grid.permute(1, 2, 0).numpy())
            elif model:
                panel.text(0.5, 0.5, textwrap.fill(model.status, 50), ha="center", va="center", fontsize=9)
    with atomic(picture) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def model_samples(folder: RunFolder, seed: int) -> Tensor:
    """SAMPLES images of a finished run or a few less, evenly many of each class by turns, drawn by `seed`; uint8.

    `seed` is the run's own, so that samples.npz often has these very images (image i depends on seed, i and its label
    alone); they are read from there if it does, and else drawn, and not kept. A generator with labels of its own is
    asked for those.
    """
    generator = Generator.load(folder.path)
    classes = generator.num_classes
    labels = sample_labels(max(SAMPLES // classes, 1) * classes, classes, "balanced", seed)
    own = generator.draw_labels(len(labels), seed)
    kept = _kept(folder.path / "samples.npz", labels, seed) if own is None else None
    return generator.sample(labels if own is None else own, seed) if kept is None else kept


def _kept(path: Path, labels: Tensor, seed: int) -> Tensor | None:
    """The first images of samples.npz, if it is whole and they were drawn as whole pixels by `seed` for `labels`."""
    with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as kept:
        how = {**json.loads(str(kept["made_by"])), "n": None}
        alike = how == {"n": None, "labels": "balanced", "rounding": "uint8", "floor": None, "seed": seed}
        if alike and np.array_equal(kept["labels"][: len(labels)], labels.numpy()):
            return torch.from_numpy(kept["images"][: len(labels)])
    return None


def _inspect(spec: RunSpec, folder: RunFolder, expected: Fact, share: Fact) -> Model:
    dataset, ledger = spec.dataset(), {}
    if not isinstance(dataset, DebuggingClients):
        raise ValueError(
            f"expected runs on clients with a bug (dataset=debugging_...), got one on {dataset.name!r}: name another "
            "table, or print this one by `dpgen tables`."
        )
    try:
        ledger = folder.read_json("ledger.json")
        if not folder.done:
            return Model(spec, _why_not(folder), ledger)
        images = model_samples(folder, spec.seed)
        mean = expected_intensity(images)
    except Exception as error:  # one damaged run must not hide the others
        return Model(spec, textwrap.shorten(f"failed: {type(error).__name__}: {error}", 200), ledger)
    return Model(spec, "finished", ledger, Finding(images[:SHOWN], mean, expected(dataset.federation), share(dataset)))


def _why_not(folder: RunFolder) -> str:
    status = folder.status()
    if status != "failed":
        return "not run" if status == "empty" else status
    error = folder.read_json("status.json").get("error")
    return textwrap.shorten(f"failed {folder.failed_during()}: {error}", 200)


def _cells(model: Model) -> list[str]:
    told = ["–"] * 5
    if found := model.finding:
        truth = f"{BUG[found.truth]} ({found.share:.0%} of its clients)"
        told = [f"{found.mean:.3f}", f"{found.expected:.3f}", f"{found.score:.2f}", BUG[found.bug], truth]
    epsilons = [format_epsilon(model.epsilon(name)) for name in ("proven", "server")]
    return [str(model.spec.seed), model.select, *epsilons, *told, model.status]


def _section(group: Group) -> str:
    columns = COLUMNS.split(", ")
    lines = [columns, ["---"] * len(columns), *map(_cells, group.models)]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {group.title}\n\n{table}\n\n" + "\n".join(f"- {remark}" for remark in group.remarks())


def _caption(group: Group, model: Model) -> str:
    proven, server = (format_epsilon(model.epsilon(name)) for name in ("proven", "server"))
    clients = f"{model.select.replace('others', 'other')} clients"
    lines = [group.title, f"{clients}, seed {model.spec.seed}, ε proven {proven} (outsiders), {server} (server)"]
    if found := model.finding:
        lines.append(f"inverted score {found.score:.2f}: {BUG[found.bug]} (truth: {BUG[found.truth]})")
    return "\n".join(textwrap.fill(line, 70) for line in lines)


def _differences(trainings: list[dict[str, Any]]) -> list[dict[str, str]]:
    """For each training, the settings, but those shown, in which it differs from others of its method and dataset."""
    parts = ("method", "dataset", "privacy", "scale", "faults")
    shown = ("dataset.select", "privacy.epsilon", "scale.name")
    # One by one: in a common frame whole numbers become others where one training lacks the setting.
    flat = [pd.json_normalize({part: one.get(part) for part in parts}).iloc[0].to_dict() for one in trainings]
    told = []
    for own in flat:
        peers = [one for one in flat if all(one[name] == own[name] for name in ("method.name", "dataset.name"))]
        differ = [name for name, value in own.items() if any(str(one.get(name)) != str(value) for one in peers)]
        told.append({str(name): str(own[name]) for name in differ if name not in shown})
    return told
