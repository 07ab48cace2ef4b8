"""Tests of exported generators: they load elsewhere, say what is proven, and hold nothing that must not leave."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
import yaml

from dpgen_bench import export, load_generator
from dpgen_bench.cli import main
from dpgen_bench.outcomes import export as module
from dpgen_bench.outcomes.export import FILES
from dpgen_bench.outcomes.sample_command import NotForRelease
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFolder
from tests.run_toys import config

SMALL = ["method.features=40", "method.steps=3", "method.batch_size=8"]
PLACE = "/home/someone/records"


@pytest.fixture(scope="module")
def seeded(tmp_path_factory) -> RunFolder:
    return execute(config(tmp_path_factory.mktemp("seeded")))


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> RunFolder:
    """A run for release, of a method of the bench; its ledger names a place on this machine."""
    place = [f"privacy.population='people at {PLACE}'", "privacy.noise=os"]
    return execute(config(tmp_path_factory.mktemp("os"), *SMALL, *place, target=None))


def card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_snippet_of_the_card_draws_the_samples_of_the_run_elsewhere(private, tmp_path, monkeypatch):
    made = export(private, tmp_path / "model")
    elsewhere = Path(shutil.move(made, tmp_path / "elsewhere"))
    [snippet] = re.findall(r"```python\n(.*?)```", card(elsewhere), re.DOTALL)
    monkeypatch.chdir(elsewhere)
    names: dict[str, torch.Tensor] = {}
    exec(snippet, names)
    assert names["images"].shape == (80, *load_generator(private).image_shape)
    assert torch.equal(names["images"], load_generator(private).sample(names["labels"], seed=0))


def test_an_export_has_these_files_and_nothing_of_this_machine(private, tmp_path):
    made = export(private, tmp_path / "model")
    assert sorted(os.listdir(made)) == sorted(FILES)
    assert PLACE in (private.path / "ledger.json").read_text()
    for name in FILES:
        content = (made / name).read_bytes()
        for path in (PLACE, str(private.path), str(tmp_path), str(Path.home())):
            assert path.encode() not in content, (name, path)
        if not name.startswith(("model", "samples")):
            assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", content.decode()), name
    ledger = json.loads((made / "ledger.json").read_text())
    assert ledger["epsilon"] == private.read_json("ledger.json")["epsilon"]
    assert (made / "model.safetensors").read_bytes() == (private.path / "generator.safetensors").read_bytes()


def test_nothing_computed_from_private_records_outside_of_epsilon_leaves(private, tmp_path):
    """Neither the run's id, a hash of all records, nor values measured against test records; ids of parents neither."""
    made = export(private, tmp_path / "model")
    for name in ("README.md", "config.json", "ledger.json"):
        text = (made / name).read_text()
        assert private.id not in text, name
        assert "brightness" not in text, name
    inherited = {"entries": [{"name": "0123456789ab/sum", "inherited_from": "0123456789ab", "std": 0.123456789012}]}
    assert module.without_run_ids(inherited) == {
        "entries": [{"name": "[run]/sum", "inherited_from": "[run]", "std": 0.123456789012}]
    }


def test_the_card_has_front_matter_epsilons_and_metrics(private, tmp_path):
    text = card(export(private, tmp_path / "model", license_id="cc-by-4.0"))
    _, front, body = text.split("---\n", 2)
    front_matter = yaml.safe_load(front)
    assert (front_matter["license"], front_matter["library_name"]) == ("cc-by-4.0", "dpgen_bench")
    assert {"differential-privacy", "dp-merf"} <= set(front_matter["tags"])
    ledger = private.read_json("ledger.json")
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", body, re.MULTILINE))
    assert rows["ε proven"] == f"{ledger['epsilon']['proven']:.3g}"
    assert rows["ε claimed (the count of the method's paper, which need not bound the privacy loss)"] == "–"
    assert (rows["neighbouring relation"], rows["unit of privacy"], rows["accountant"]) == (
        "add/remove", "one record", "pld"
    )  # fmt: skip
    assert rows["δ"] == "1e-05"
    assert rows["noise"].startswith("os: ")
    for entry in ledger["entries"]:
        assert f"| {entry['name']} | {entry['bound']['kind']}, C = {entry['bound']['C']} |" in body
    for text in ledger["out_of_scope"]:
        assert f"- out of scope: {text}" in body
    assert "They are left out: they are computed from test records" in body
    assert "NOT PRIVATE" not in body


def test_a_generator_that_is_not_private_is_refused_and_its_card_says_so(seeded, tmp_path):
    with pytest.raises(NotForRelease, match="can be subtracted"):
        export(seeded, tmp_path / "model")
    assert not list(tmp_path.iterdir())
    body = card(export(seeded, tmp_path / "model", benchmark=True)).split("---\n", 2)[2]
    assert body.index("**NOT PRIVATE: this generator protects nobody.**") < body.index("![")
    assert "| noise | **seeded: the noise is a function of the run's id, can be subtracted by anyone" in body
    assert "Protocol `toy`: 40 samples, 1 repeat; scale `paper`, seed 0." in body
    assert "| brightness | " in body


def test_the_card_names_the_module_of_a_plugin(seeded, private, tmp_path):
    assert "`tests.toys.Painter` must be importable" in card(export(seeded, tmp_path / "a", benchmark=True))
    assert "must be importable" not in card(export(private, tmp_path / "b"))


def test_a_folder_with_files_is_not_replaced(seeded, tmp_path):
    out = export(seeded, tmp_path / "model", benchmark=True)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(ValueError, match=r"expected a new or empty folder, .* add --overwrite"):
        export(seeded, out, benchmark=True)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    export(seeded, out, benchmark=True, overwrite=True)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} != before
    (out / "thesis.txt").write_text("years")
    with pytest.raises(ValueError, match=r"other files \(thesis.txt\)"):
        export(seeded, out, benchmark=True, overwrite=True)
    with pytest.raises(ValueError, match="which is a file"):
        export(seeded, out / "thesis.txt", benchmark=True, overwrite=True)
    assert (out / "thesis.txt").read_text() == "years"
    (tmp_path / "empty").mkdir()
    assert export(seeded, tmp_path / "empty", benchmark=True)


def test_an_export_that_fails_leaves_the_earlier_one(seeded, tmp_path, monkeypatch):
    out = export(seeded, tmp_path / "model", benchmark=True)
    before = card(out)
    monkeypatch.setattr(module, "_save_picture", lambda *_: (_ for _ in ()).throw(OSError("no space left on device")))
    with pytest.raises(OSError, match="no space"):
        export(seeded, out, benchmark=True, overwrite=True)
    with pytest.raises(OSError, match="no space"):
        export(seeded, tmp_path / "another", benchmark=True)
    assert card(out) == before
    assert os.listdir(tmp_path) == ["model"]


def test_training_records_are_never_exported(tmp_path):
    folder = execute(
        config(tmp_path, "method.name=real_data", "privacy.epsilon=inf", target="methods.real_data.RealData")
    )
    with pytest.raises(ValueError, match="may hold training records; they are never exported"):
        export(folder, tmp_path / "model", benchmark=True)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("key", ["kind", "net_config"])
def test_an_exported_folder_can_only_build_networks(seeded, tmp_path, key):
    out = export(seeded, tmp_path / "model", benchmark=True)
    content = json.loads((out / "config.json").read_text())
    wrong = "subprocess.Popen"
    content["generator"][key] = (
        wrong if key == "kind" else {"_target_": "torch.nn.Linear", "in_features": {"_target_": wrong}}
    )
    (out / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"expected subclasses of (Generator|Module), got subprocess\.Popen; do not load it"
    ):
        load_generator(out)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_export_is_refused_in_one_sentence(seeded, tmp_path, name):
    out = export(seeded, tmp_path / "model", benchmark=True)
    (out / name).write_bytes((out / name).read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"expected a generator in .*config\.json and model\.safetensors, got files"):
        load_generator(out)


def test_the_verb_exports_or_says_why_not(seeded, tmp_path, capsys, monkeypatch):
    results = ["--results", str(seeded.path.parent.parent)]
    assert main(["export", seeded.id, str(tmp_path / "model"), *results]) == 2
    assert "is not for release" in capsys.readouterr().err
    assert main(["export", seeded.id[:6], str(tmp_path / "model"), "--benchmark", *results]) == 0
    assert "read its README.md before you publish it" in capsys.readouterr().out
    assert math.isfinite(load_generator(tmp_path / "model").num_parameters)
    unfinished = tmp_path / "runs" / seeded.id
    shutil.copytree(seeded.path, unfinished)
    (unfinished / "DONE").unlink()
    with pytest.raises(ValueError, match="not finished; finish it"):
        export(unfinished, tmp_path / "other", benchmark=True)
