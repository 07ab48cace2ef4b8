"""The functions for notebooks and scripts: run, load_generator, export, check_method, account, evaluate_images and
results.

All of them can be imported from `dpgen_bench`. Overrides are those of the command line, such as "method=dpgan",
"privacy.epsilon=1", "scale=quick" or "seed=3".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.protocol import build_metrics, evaluate_each
from dpgen_bench.generator import EXPORTED_WEIGHTS, WEIGHTS, Generator
from dpgen_bench.outcomes.export import export_run
from dpgen_bench.outcomes.listing import epsilon_number
from dpgen_bench.outcomes.sample_files import read_samples
from dpgen_bench.privacy.accountants.table import epsilon_table
from dpgen_bench.privacy.events import RELATIONS, Event
from dpgen_bench.privacy.expect import expect_integer
from dpgen_bench.runs.execute import execute
from dpgen_bench.runs.measure import FOR_RELEASE, is_for_release
from dpgen_bench.runs.plan import plan
from dpgen_bench.runs.samples import sample_by_protocol
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.testing import check_method
from dpgen_bench.utils.environment import choose_device

__all__ = ["Evaluation", "account", "check_method", "evaluate_images", "export", "load_generator", "results", "run"]


def run(*overrides: str) -> RunFolder:
    """Make the run that the overrides describe, or what is missing of it: train, account, sample, measure.

    Returns:
        The run's folder: `id`, `path`, and the content of its files.

    Raises:
        TypeError: if an override is no text.
        ValueError: if the overrides describe no run.
        RunFailed: for an error during the run, which its folder keeps.
    """
    _expect_texts(overrides)
    return execute(compose_config(list(overrides)), overrides)


def load_generator(folder: str | Path | RunFolder) -> Generator:
    """The generator of a run, by what `run` returns or the path of its folder; or that of an exported folder.

    `generator.sample(labels, seed)` gives uint8 images [n, c, h, w]. No training record is needed or read. Images of
    runs with `privacy.noise=seeded`, the default, carry no guarantee: anyone can compute their noise. `dpgen sample`
    refuses to give them away, this function does not.

    Raises:
        FileNotFoundError: if the folder contains no trained generator.
        ValueError: if an exported folder names anything but a generator and its networks.
    """
    return Generator.load(folder.path if isinstance(folder, RunFolder) else Path(folder))


def export(
    run: str | Path | RunFolder,
    folder: str | Path,
    *,
    benchmark: bool = False,
    overwrite: bool = False,
    license_id: str = "other",
) -> Path:
    """Write the generator of a finished run to a folder that a model hub accepts, with a model card.

    Args:
        run: what `run` returned, or the path of its folder.
        benchmark: also export a generator that must not be released as private, such as one with seeded noise.
        overwrite: replace the folder if it is an earlier export.
        license_id: the hub's name of the license of the weights.

    Returns:
        The folder, from which `load_generator` reads the generator.

    Raises:
        LookupError: if `run` is no run's folder.
        NotForRelease: if `benchmark` is false and the run must not be released as private.
        ValueError: if the run is not finished, or the folder exists and is not replaced.
    """
    path = run.path if isinstance(run, RunFolder) else Path(run)
    return export_run(path.parent.parent, str(path), Path(folder), benchmark, overwrite, license_id)


def account(*overrides: str, events: Sequence[Event] = (), delta: float | None = None) -> pd.DataFrame:
    """Epsilon by every accountant (rows) under both neighbouring relations (columns), of a run or of events.

    Args:
        overrides: those of the run, whose mechanisms are planned; no record is touched.
        events: in place of overrides, the releases to compose (`dpgen_bench.privacy.events.Event`).
        delta: default: that of the run's budget.

    Returns:
        Cells are numbers; "not available: why", for an accountant without a proof for these releases; or the time limit
        that was exceeded.

    Raises:
        TypeError: if an override is no text, or `events` no list of events.
        ValueError: for both or neither of overrides and events, events without delta, or overrides of no run.
    """
    _expect_texts(overrides)
    if not isinstance(events, Sequence) or not all(isinstance(each, Event) for each in events):
        raise TypeError(f"expected a list of events, account(events=[Event(...)], delta=1e-5), got {events!r}.")
    if bool(overrides) == bool(events):
        raise ValueError("expected overrides or events, and not both; for example account('method=dpgan').")
    if overrides:
        ledger = plan(list(overrides))
        events, delta = ledger.events, ledger.budget.delta if delta is None else delta
    if delta is None:
        raise ValueError("expected delta together with events, for example account(events=[...], delta=1e-5).")
    table = epsilon_table(events, delta)
    return pd.DataFrame({relation: table[relation] for relation in RELATIONS})


@dataclass(frozen=True)
class Evaluation:
    """What a protocol measured.

    Attributes:
        values: by name; percentages end in `_pct`.
        unmeasured: why a metric was not measured or failed, by its key.
        notes: what has to be known of the values.
    """

    values: dict[str, float]
    unmeasured: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def evaluate_images(
    images: Tensor | np.ndarray | str | Path | RunFolder | Generator,
    labels: Tensor | np.ndarray | None = None,
    *,
    dataset: str = "digits",
    protocol: str = "quick",
    seed: int = 0,
    overrides: Sequence[str] = (),
) -> Evaluation:
    """Measure images against the test records of a dataset, by a protocol of conf/protocol.

    Of a run for release (`privacy.noise=os`), nothing is computed from training records, as when the run itself is
    measured. Images alone do not say which run they are of.

    Args:
        images: uint8 [n, c, h, w], with `labels` [n]; a generator, what `run` returns, or the folder of a run or of an
            export, from which as many images are drawn as the protocol says; a .npz file with `images` and `labels`; or
            a folder with one folder of images for each class (both as `dpgen sample` writes them).
        labels: integers [n], class numbers from 0.
        dataset: name of a file in conf/dataset.
        protocol: name of a file in conf/protocol.
        seed: of samples and classifiers, an integer >= 0.
        overrides: more of them, such as "data_root=DIR" or "runtime.device=cpu".

    Raises:
        TypeError: if an override is no text.
        ValueError: for images or labels of another form, of another shape or of other classes than the dataset's, for
            no images, or for another seed.
    """
    _expect_texts(overrides)
    seed = expect_integer(seed, "seed", minimum=0, advice="give an integer such as 0")
    config = compose_config([f"dataset={dataset}", f"protocol={protocol}", *overrides])
    spec, metrics = build_dataset(config), build_metrics(config.protocol)
    test = spec.load("test")
    source = _source(images)
    samples = _samples(source, labels, config.protocol, seed, spec.class_names)
    _expect_records_of(dataset, samples, test, spec.num_classes)
    ctx = EvalContext(
        seed=seed,
        device=choose_device(config.runtime.device),
        num_classes=spec.num_classes,
        cache=Path(str(config.results)) / "cache",
        dataset=spec,
        train_closed=FOR_RELEASE if _is_run_for_release(images) else None,
        set_size=source.set_size if isinstance(source, Generator) else None,
    )
    done: dict[str, dict[str, Any]] = {}
    evaluation = Evaluation({})
    for key, result in evaluate_each(metrics, samples, test, ctx, config.runtime.workers, done, str(protocol)):
        done[key] = {"values": result.values}
        evaluation.values.update(result.values)
        evaluation.notes.extend(f"{key}: {note}" for note in result.notes)
        if result.status != "measured":
            evaluation.unmeasured[key] = f"{result.status}: {result.reason}"
    return evaluation


def results(folder: str | Path = "results") -> pd.DataFrame:
    """Every value that the runs of a folder of results measured: one row for each run, protocol, repeat and value.

    Columns: run, status, method, dataset, scale, seed, delta, relation, unit, epsilon_budget, epsilon_proven,
    epsilon_claimed, protocol, repeat, name, value. Without privacy epsilon is infinite; it is NaN where there is none
    (no budget, no claim, not accounted yet). A run that has measured nothing has no row.

    Raises:
        ValueError: if the folder contains no runs/.
    """
    if not (Path(folder) / "runs").is_dir():
        raise ValueError(
            f"expected a folder of results, which contains runs/, got {str(folder)!r}; make a run first, or pass the "
            "folder that the override results=DIR named (of a run, run.path.parent.parent)."
        )
    rows = [row for found in Store(Path(folder)).runs() for row in _rows(found)]
    return pd.DataFrame(rows, columns=COLUMNS)


COLUMNS = ["run", "status", "method", "dataset", "scale", "seed", "delta", "relation", "unit"]
COLUMNS += ["epsilon_budget", "epsilon_proven", "epsilon_claimed", "protocol", "repeat", "name", "value"]


def _rows(folder: RunFolder) -> list[dict[str, Any]]:
    measurements = folder.measurements.all()
    if not measurements:
        return []
    config, ledger, status = folder.config, folder.read_json("ledger.json"), folder.status()
    epsilon, budget = ledger.get("epsilon"), config.privacy.epsilon
    common = {
        "run": folder.id,
        "status": status,
        "method": str(config.method.name),
        "dataset": str(config.dataset.name),
        "scale": str(config.scale.name),
        "seed": int(config.seed),
        "delta": float(config.privacy.delta),
        "relation": str(config.privacy.relation),
        "unit": ledger.get("unit", "record"),
        "epsilon_budget": float("nan") if budget is None else float(budget),
        **{f"epsilon_{kind}": epsilon_number(epsilon, kind) for kind in ("proven", "claimed")},
    }
    return [
        {**common, "protocol": measurement["protocol"]["name"], "repeat": repeat, "name": name, "value": value}
        for measurement in measurements
        for repeat, content in enumerate(measurement["repeats"])
        for result in content["metrics"].values()
        for name, value in result["values"].items()
    ]


def _expect_texts(overrides: Any) -> None:
    """Raise TypeError unless the overrides are several texts; a text alone would be read letter by letter."""
    if isinstance(overrides, str) or not all(isinstance(text, str) for text in overrides):
        got = overrides if isinstance(overrides, str) else next(each for each in overrides if not isinstance(each, str))
        raise TypeError(f"expected overrides as texts, such as 'method=dpgan', 'seed=3', got {got!r}.")


def _source(images: Any) -> Any:
    """The generator, if `images` is a run or the folder of a generator; or else `images`."""
    if isinstance(images, RunFolder):
        return load_generator(images)
    if isinstance(images, str | Path) and any((Path(images) / name).exists() for name in (WEIGHTS, EXPORTED_WEIGHTS)):
        return load_generator(images)
    return images


def _is_run_for_release(images: Any) -> bool:
    """Whether `images` is a run, or the folder of one, whose images may be released as private."""
    if not isinstance(images, str | Path | RunFolder):
        return False
    folder = images if isinstance(images, RunFolder) else RunFolder(Path(images))
    return (folder.path / "config.yaml").exists() and is_for_release(folder.config)


def _samples(images: Any, labels: Any, protocol: Any, seed: int, class_names: Sequence[str] = ()) -> Records:
    """The images to measure, with their labels: samples of a generator, or images in memory or in files."""
    if isinstance(images, Generator):
        return sample_by_protocol(images, protocol, seed)
    if isinstance(images, str | Path):
        read = read_samples(Path(images), class_names)
        images, labels = read.images, read.labels
    if labels is None:
        raise ValueError("expected labels together with images: int64 [n], one class for each image.")
    images, labels = torch.as_tensor(images), torch.as_tensor(labels)
    if images.dtype != torch.uint8:
        raise ValueError(f"expected uint8 images within 0..255, got {images.dtype}; scale and round them.")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"expected labels to be integers, got {labels.dtype}; convert them with .to(torch.int64).")
    return Records(images, labels.to(torch.int64))


def _expect_records_of(dataset: str, samples: Records, test: Records, num_classes: int) -> None:
    """Raise ValueError unless there are samples, which have the shape and the classes of the dataset's records."""
    if samples.images.shape[1:] != test.images.shape[1:]:
        shapes = tuple(samples.images.shape[1:]), tuple(test.images.shape[1:])
        raise ValueError(f"expected images of the shape of {dataset}, {shapes[1]}, got {shapes[0]}; resize them.")
    if not len(samples):
        raise ValueError("expected at least one image, got none; metrics compare images with the test records.")
    if (highest := int(samples.labels.max())) >= num_classes:
        raise ValueError(
            f"expected labels of {dataset} below {num_classes}, its number of classes, got {highest}; number the "
            "classes from 0."
        )
