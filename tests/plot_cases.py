"""A synthetic store for tests of plots: run folders with the files that plots read, without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from safetensors.numpy import save_file

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.measurements import Measurement
from dpgen_bench.tables.rows import TableRow


@lru_cache
def spec_of(line: str) -> RunSpec:
    """The run of one line of overrides; composed once for all tests."""
    return build_spec(compose_config(line.split()))


def measurement_of(spec: RunSpec, values: Mapping[str, float]) -> Measurement:
    result = {"status": "measured", "values": dict(values), "notes": [], "reason": ""}
    repeat = {"seed": 0, "samples": {"notes": []}, "metrics": {"made": result}}
    return {"protocol": spec.protocol_record(), "repeats": [repeat], "complete": True}


def make_run(
    results: Path,
    line: str,
    metrics: Mapping[str, float] | None = None,
    proven: float | str | None = "inf",
    claimed: float | None = None,
) -> RunFolder:
    """A trained run with its ledger's epsilons and, with `metrics`, finished: measured by its config's protocol."""
    spec = spec_of(line)
    folder = Store(results).folder(spec.id)
    folder.path.mkdir(parents=True)
    (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(spec.config))
    folder.write_json("identity.json", spec.training)
    folder.write_json("generator.json", {"kind": "a.Generator"})
    save_file({}, folder.path / "generator.safetensors")
    bound = {"kind": "PerRow", "C": 1.0}
    entry = {"name": "query", "bound": bound}
    privacy = spec.config.privacy
    terms = {key: privacy[key] for key in ("delta", "relation", "accountant")}
    ledger = {
        "unit": "record",
        "budget": {"epsilon": str(privacy.epsilon), **terms},
        "diagnostics": "off",
        "unproven": [],
    }
    epsilon = {"proven": proven, "claimed": claimed, **terms}
    folder.write_json("ledger.json", {**ledger, "entries": [entry], "epsilon": epsilon})
    folder.write_json("training.json", {"steps": {"train": 400}})
    if metrics is not None:
        folder.measurements.write(measurement_of(spec, metrics))
        folder.finish()
    return folder


def keep_step(folder: RunFolder, line: str, step: int, epsilon: float | str, metrics: Mapping[str, float]) -> None:
    """A measured generator that was kept during training."""
    place = RunFolder(folder.path / "steps" / str(step))
    place.path.mkdir(parents=True)
    place.write_json("step.json", {"step": step, "epsilon": epsilon})
    place.measurements.write(measurement_of(spec_of(line), metrics))


def write_log(folder: RunFolder, rows: Sequence[Mapping[str, Any]], end: str = "") -> None:
    (folder.path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def write_samples(folder: RunFolder, n: int = 40, classes: int = 10, channels: int = 1, side: int = 28) -> None:
    """Samples whose brightness is their class's."""
    labels = np.arange(n) % classes
    shades = (labels * 25).astype(np.uint8)[:, None, None, None]
    images = np.broadcast_to(shades, (n, channels, side, side))
    np.savez_compressed(folder.path / "samples.npz", images=images, labels=labels, made_by="")


def row_of(results: Path, *lines: str) -> TableRow:
    """The row of these lines, which differ in their seed alone."""
    specs = tuple(spec_of(line) for line in lines)
    return TableRow(specs, tuple(Store(results).folder(spec.id) for spec in specs))
