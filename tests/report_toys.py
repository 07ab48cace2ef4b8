"""Run folders as `dpgen run` writes them, without training, and a table, for the tests of the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from PIL import Image
from safetensors.numpy import save_file

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.statistics import summarise
from dpgen_bench.tables.lines import BuiltTable, Cell, Line

SECRET = "the-secret-of-the-private-folder"
PLACE = "/home/somebody/of this machine/data"
DEMO = "experiment=demo/dp_merf"


def write_report(folder: RunFolder, protocol: dict, values: dict[str, float], **other) -> None:
    """A complete measurement with one drawing of samples and one metric."""
    result = {"status": "measured", "values": values, "reason": None, "notes": ["a note"], "seconds": 1.0, **other}
    repeat = {"seed": 0, "samples": {"n": 10, "notes": []}, "metrics": {"all": result}}
    folder.measurements.write({"protocol": protocol, "repeats": [repeat], "complete": True})


def make_run(
    results: Path,
    *overrides: str,
    fid: float = 50.0,
    change: dict | None = None,
    steps: int = 200,
    finish: bool = True,
    proven: float | None = None,
) -> RunFolder:
    """The folder of a finished run as `dpgen run` writes it, without training.

    Args:
        change: config keys that are set directly.
        proven: the proven epsilon; None: the budget.
    """
    config = compose_config([f"results={results}", "data_root=/somewhere", *overrides])
    spec = build_spec(config)
    for key, value in (change or {}).items():
        OmegaConf.update(config, key, value)
        OmegaConf.update(holder := OmegaConf.create(spec.training), key, value)
        spec = RunSpec(config, OmegaConf.to_container(holder))
    folder = Store(results).folder(spec.id)
    folder.write_json("identity.json", spec.training)
    (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    ledger = spec.new_ledger(1437)
    event = Event(Poisson(0.25), Sensitivity(1.0, 2.0), std=7.5, times=40)
    ledger.approve(Entry("mean_embedding", {"kind": "PerRecord", "C": 1.0, "rows": 1}, event, 40, "std"))
    budget = "inf" if spec.budget().without_privacy else spec.budget().epsilon
    terms = {key: config.privacy[key] for key in ("delta", "relation", "accountant")}
    ledger.epsilon = {"proven": budget if proven is None else proven, "claimed": 12.5, "conditional": None, **terms}
    ledger.epsilon["table"] = {"add_remove": {"rdp": 9.5, "pld": 8.25}, "replace_one": {"rdp": "inf", "pld": 16.5}}
    folder.write_json("ledger.json", ledger.to_dict())
    machine = {"device": "cpu", "system": "Linux-somehost", "hostname": "somehost", "cores": 2}
    folder.write_json("environment.json", {"machine": machine, "packages": {"torch": "2.0"}, "overrides": [*overrides]})
    training = {"seconds": {"train": 6.0}, "steps": {"train": steps} if steps else {}}
    folder.write_json("training.json", {**training, "parameters": {"released_generator": 166161}})
    write_report(folder, spec.protocol_record(), {"fid": fid, "acc_mlp_pct": 80.0})
    shades = np.random.default_rng(spec.seed).integers(0, 256, (60, 80), dtype=np.uint8)
    Image.fromarray(np.repeat(shades[..., None], 3, axis=2)).save(folder.path / "samples.png")
    for name in ("noise.key", "diagnostics.jsonl"):
        (folder.path / "private").mkdir(exist_ok=True)
        (folder.path / "private" / name).write_text(SECRET)
    folder.write_json("generator.json", {"kind": "a.Generator"})
    save_file({}, folder.path / "generator.safetensors")
    folder.mark("running", "train")
    if finish:
        folder.finish()
        (folder.path / "private" / "noise.key").write_text(SECRET)
    return folder


def cell(printed: float | None, measured: float | None, caveat: str = "", **other) -> Cell:
    summary = None if measured is None else summarise([[measured]])
    return Cell(
        published=printed, measured=summary, text="–" if summary is None else summary.text(), caveat=caveat, **other
    )


def built(name: str = "t", scale: str = "paper", measured: bool = True, published: bool = True) -> BuiltTable:
    """A table whose differences are 4, 10, 30 and 60 percent of what is printed."""

    class Made(BuiltTable):
        measured = property(lambda _: measured)

    cells = {
        "a": cell(100.0, 104.0, tolerance=10.0),
        "b": cell(100.0, 90.0, "scale reduced"),
        "c": cell(10.0, 13.0, "scale reduced", note="two readings"),
        "d": cell(-50.0, -20.0, "seconds on other machines", published_std=0.5),
        "e": cell(None, 3.0, illegible=True),
        "f": cell(None, 7.0),
        "g": cell(5.0, None),
    }
    head = {"method": "<i>DPGAN", "dataset": "mnist", "ε against the server": "–"}
    tail = {"seeds": "–", "scale": "–", "protocol": "–", "status": "not run"}
    return Made(name, "A <b>title", "", scale, list(cells), [Line(head, cells, tail)], ["a remark"], published)
