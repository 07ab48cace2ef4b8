"""A small paper's table, and runs that reproduce its rows, for the tests of tables and of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.store.folders import Store
from dpgen_bench.tables.expand import lines_of, parent_ids
from dpgen_bench.tables.lines import BuiltTable
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.rows import TableRow, rows_of
from dpgen_bench.tables.spec import TableSpec, parse_table

RUN = "experiment=demo/dp_merf privacy.epsilon=10 scale=paper"  # any run that is quick to describe
ROW = {"method": "Our DPGAN", "variant": "D_lr/G_lr=5; n_D=1; B=128; sigma=1"}  # Table 8: FID 251.8, accuracy 45.0


def paper_table(*entries, **more) -> dict[str, Any]:
    """The content of a paper's table, as its yaml has it."""
    content = {
        "title": "Table 8",
        "paper": "dpgan_revisited",
        "published": "8",
        "protocol": "dpgan_revisited",
        "rows": list(entries),
    }
    return {**content, **more}


def a_table(*entries, **more) -> TableSpec:
    return parse_table("t", paper_table(*entries, **more))


def table_of(**content: Any) -> TableSpec:
    """A table with a title and a protocol, unless they are given."""
    return parse_table("t", {"title": "t", "protocol": "quick", **content})


def write_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> TableSpec:
    """Let `demo` be a table whose runs the tests make; the bench's own changes with its methods."""
    methods = ("dpgan", "dp_sinkhorn", "gs_wgan")
    sweeps = ["experiment=demo/dp_merf privacy.epsilon=1,10,inf seed=0,1"]
    sweeps += [f"experiment=demo/{method} privacy.epsilon=10,inf seed=0" for method in methods]
    content = {"title": "Demo", "protocol": "quick", "sweeps": sweeps, "metrics": ["acc_logreg_pct", "acc_mlp_pct"]}
    (folder / "conf" / "table").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(content), folder / "conf" / "table" / "demo.yaml")
    monkeypatch.setattr("dpgen_bench.tables.names.CONF", folder / "conf")
    return load_table("demo")


def measured(
    results: Path, line: str, protocol: str, values_by_key: dict[str, dict[str, float]], seed: int = 0, repeats: int = 1
) -> str:
    """A finished run with values by metric key, as if measured by that protocol."""
    spec = build_spec(compose_config([*line.split(), f"seed={seed}", f"protocol={protocol}", f"results={results}"]))
    folder = Store(results).folder(spec.id)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(spec.config))
    folder.write_json("identity.json", spec.training)
    folder.write_json("ledger.json", ledger(spec.config.privacy))
    folder.write_json("training.json", {"seconds": {"train": 1.0}, "steps": {"train": 10}, "device": "cpu"})
    metrics = {
        key: {"status": "measured", "values": values, "reason": None, "notes": []}
        for key, values in values_by_key.items()
    }
    repeats = [{"seed": seed, "samples": {"notes": []}, "metrics": metrics}] * repeats
    folder.measurements.write({"protocol": spec.protocol_record(), "repeats": repeats, "complete": True})
    folder.finish()
    return spec.id


def fake_run(results: Path, overrides: list[str], accuracy: float | list[float] | None, protocol=None) -> str:
    """A finished run's files without the training, with one accuracy for each repeat; None: only failed."""
    spec = build_spec(compose_config([*overrides, f"results={results}"]))
    folder = Store(results).folder(spec.id)
    folder.path.mkdir(parents=True)
    (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(spec.config))
    folder.write_json("identity.json", spec.training)
    if accuracy is None:
        folder.mark("failed", "train", RuntimeError("no"))
        return spec.id
    folder.write_json("ledger.json", ledger(spec.config.privacy, claimed=None))
    repeats = [
        {
            "seed": r,
            "samples": {"notes": []},
            "metrics": {
                "logreg": {
                    "status": "measured",
                    "values": {"acc_logreg_pct": value},
                    "reason": None,
                    "notes": ["few"] if value < 91 else [],
                }
            },
        }
        for r, value in enumerate(np.atleast_1d(accuracy).tolist())
    ]
    content = {"protocol": protocol or spec.protocol_record(), "repeats": repeats, "complete": True}
    folder.measurements.write(content)
    folder.finish()
    return spec.id


def ledger(privacy, **epsilon) -> dict[str, Any]:
    """A run's ledger without releases, with the parts that tables read."""
    terms = {key: privacy[key] for key in ("delta", "relation", "accountant")}
    values_by_key = {"proven": 9.5, "claimed": 10.0, **terms, **epsilon}
    budget = None if privacy.epsilon is None else float(privacy.epsilon)
    return {
        "unit": "record",
        "budget": {"epsilon": budget, **terms},
        "records": 1437,
        "noise": {"mode": privacy.noise},
        "diagnostics": privacy.diagnostics,
        "entries": [],
        "unproven": [],
        "epsilon": values_by_key,
    }


def every_column(built: BuiltTable) -> pd.DataFrame:
    """All that a table knows of its lines as text: what names them, each metric, and how it was measured."""
    lines = []
    for line in built.lines:
        values: dict[str, str] = {}
        for metric, cell in line.cells.items():
            values |= {metric: cell.text}
            if built.published:
                values |= {f"{metric} published": cell.printed, f"Δ {metric}": cell.distance}
        lines.append({**line.head, **values, **line.tail})
    return pd.DataFrame(lines).fillna("–")


def line_for(built, **of):
    (line,) = [
        line for line in built.lines if line.printed and all(getattr(line.printed, k) == v for k, v in of.items())
    ]
    return line


def table_rows(table: TableSpec, results: Path, scale: str = "paper") -> list[TableRow]:
    """The rows of a table's own runs, in the order of its lines."""
    return rows_of(lines_of(table, scale), results, parent_ids(table, results, scale))
