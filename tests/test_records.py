"""Records hold what tables and reports read of a run, and a record that was edited is refused, with the reason."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError
from PIL import Image

from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.outcomes import record_checks
from dpgen_bench.outcomes.record_checks import record_problems
from dpgen_bench.outcomes.recording import make_record, write_record
from dpgen_bench.report.runs import panel, read_runs
from dpgen_bench.runs.epsilon import epsilons
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.measurements import cost_of_fit
from dpgen_bench.store.pictures import MOST_BYTES
from dpgen_bench.store.records import Record, evidence, read_record, readable_run, record_file, record_paths
from dpgen_bench.store.values import notes
from dpgen_bench.tables.load import load_table
from dpgen_bench.utils.paths import RECORDS
from tests.record_edits import EDITS, entry_of
from tests.run_toys import RECORDABLE, recordable_run
from tests.table_toys import table_rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return recordable_run(tmp_path_factory.mktemp("results"))


@pytest.fixture
def protocol_is_known(finished: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy protocol counts as one of conf/protocol, and the toy run's command composes its config.

    As in the toy run, what takes longer than a process needs to start is left out of the table of epsilons.
    """
    monkeypatch.setattr(record_checks, "ACCOUNT_S", 0.01)
    protocol = finished.measurements.all()[0]["protocol"]
    monkeypatch.setattr(record_checks, "current_protocol", lambda name: protocol)
    known = lambda overrides: finished.config if overrides == RECORDABLE else compose_config(overrides)  # noqa: E731
    monkeypatch.setattr(record_checks, "compose_config", known)


@pytest.fixture
def record(finished: RunFolder, tmp_path: Path, protocol_is_known: None) -> Record:
    """A record of the run in a clone without runs."""
    made, picture = make_record(finished, "Ada")
    moved = Record(tmp_path / "records" / "dp_mean" / made.path.name, made.content)
    write_record(moved, picture)
    return read_record(moved.path)


def test_a_record_of_a_finished_run_is_accepted(record: Record) -> None:
    assert record_problems(record, data_root="unused") == []


def test_a_record_has_what_readers_read_of_the_run(finished: RunFolder, record: Record) -> None:
    protocol = finished.measurements.all()[0]["protocol"]
    for name in ("identity.json", "ledger.json", "training.json", "environment.json"):
        assert record.read_json(name) == finished.read_json(name), name
    (mine,), (theirs,) = record.measurements.all(), finished.measurements.all()
    assert {**theirs, "protocol_hash": mine["protocol_hash"]} == mine
    assert record.measurements.covered(protocol)
    assert record.config.method == finished.config.method
    assert (record.id, record.status(), record.steps()) == (finished.id, "finished", [])


def test_its_picture_shows_the_runs_samples(finished: RunFolder, record: Record) -> None:
    expected = finished.montage(3)
    shown = record.montage(3)
    assert expected is not None
    assert shown is not None
    assert np.array_equal(shown, expected)


def test_a_clone_reads_the_record_and_a_finished_run_comes_first(finished: RunFolder, record: Record) -> None:
    results = record.path.parents[2]
    protocol = finished.measurements.all()[0]["protocol"]
    assert readable_run(results, record.id, protocol) == record
    (shown,) = read_runs(results)
    assert (shown.state, shown.ledger) == ("finished", finished.read_json("ledger.json"))
    shutil.copytree(finished.path, results / "runs" / record.id)
    assert readable_run(results, record.id, protocol) == Store(results).folder(record.id)
    assert [run.folder for run in read_runs(results)] == [Store(results).folder(record.id)]


def test_the_report_has_measurements_that_only_the_record_of_a_finished_run_has(
    finished: RunFolder, record: Record
) -> None:
    results = record.path.parents[2]
    folder = Store(results).folder(record.id)
    shutil.copytree(finished.path, folder.path)
    shutil.rmtree(folder.path / "metrics")
    assert read_runs(results)[0].measurements == record.measurements.all()
    assert evidence(folder) == "reported by Ada"
    folder.write_json("training.json", {**folder.read_json("training.json"), "seconds_outside_loops": 1.25})
    (shown,) = read_runs(results)
    (measurement,) = shown.measurements
    assert cost_of_fit(measurement) == record.content["cost"]
    assert any("on a run made again" in note for note in notes(measurement))
    assert panel(shown)["evidence"][0] == "These values are of another fit than those of the run's record."
    assert evidence(folder) == "made again; its record: reported by Ada"
    record.path.write_text("{")
    assert read_runs(results)[0].measurements == []


def test_a_run_without_a_record_is_its_folder(finished: RunFolder, tmp_path: Path) -> None:
    protocol = finished.measurements.all()[0]["protocol"]
    assert readable_run(tmp_path, finished.id, protocol) == Store(tmp_path).folder(finished.id)


def test_a_record_measured_by_another_protocol_does_not_hide_the_folder(finished: RunFolder, record: Record) -> None:
    """Without a folder it is the record, which says that the run was made."""
    protocol = {**record.measurements.all()[0]["protocol"], "num_samples": 41}
    results = record.path.parents[2]
    assert readable_run(results, record.id, protocol) == record
    shutil.copytree(finished.path, results / "runs" / record.id)
    assert readable_run(results, record.id, protocol) == Store(results).folder(record.id)


def test_no_path_of_the_machine_enters_a_record(finished: RunFolder) -> None:
    text = json.dumps(make_record(finished, "Ada")[0].content)
    assert str(finished.path.parents[1]) not in text
    assert "/tmp" not in text


def test_a_records_config_is_read_only_and_a_copy_has_the_data_of_this_machine(finished: RunFolder) -> None:
    made, _ = make_record(finished, "Ada")
    config = {**made.content["config"], "dataset": {"name": "mnist", "root": "data"}, "method": {"fonts": "data/fonts"}}
    record = Record(made.path, {**made.content, "config": config})
    with pytest.raises(ReadonlyConfigError):
        record.config.seed = 1
    there = record.config_at("/mnt/images")
    there.seed = 1
    assert (there.dataset.root, there.method.fonts) == ("/mnt/images", "/mnt/images/fonts")
    assert (record.config.seed, record.config.dataset.root, record.config.method.fonts) == (0, "data", "data/fonts")


def test_public_files_below_data_root_are_named_relative_to_it(finished: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    settings = OmegaConf.load(folder.path / "config.yaml")
    data = "/home/ada/data"
    OmegaConf.update(settings, "data_root", data)
    OmegaConf.update(settings, "method.fonts", f"{data}/fonts/handwriting", force_add=True)
    OmegaConf.update(settings, "method.other", f"{data}-of-others/fonts", force_add=True)
    OmegaConf.save(settings, folder.path / "config.yaml")
    method = make_record(folder, "Ada")[0].content["config"]["method"]
    assert method["fonts"] == "data/fonts/handwriting"
    assert method["other"] == f"{data}-of-others/fonts"  # which the checks refuse as a path of a machine


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_record_is_refused(record: Record, name: str) -> None:
    edit, reason = EDITS[name]
    content = copy.deepcopy(record.content)
    edit(content)
    problems = record_problems(Record(record.path, content), data_root="unused")
    assert any(reason in problem for problem in problems), problems


def test_consistently_edited_noise_is_refused_by_the_plan_of_the_config(record: Record) -> None:
    """More noise and the smaller epsilon that it would prove agree with each other, but not with the method."""
    content = copy.deepcopy(record.content)
    entry_of(content)["std"] *= 2.0
    ledger = record_checks.Ledger.from_dict(content["ledger"])
    content["ledger"]["epsilon"] = epsilons(object(), ledger, record_checks.ACCOUNT_S, None)
    edited = Record(record.path, content)
    assert record_problems(edited) == []
    (problem,) = record_problems(edited, "unused")
    assert re.fullmatch(r"its release 'sum' has std [\d.]+, expected [\d.]+ by its config", problem)


def test_another_number_of_records_is_refused_by_the_plan(record: Record) -> None:
    content = copy.deepcopy(record.content)
    content["ledger"]["records"] += 1
    assert any("its ledger counts" in problem for problem in record_problems(Record(record.path, content), "unused"))


def test_a_record_in_the_wrong_place_is_refused(record: Record) -> None:
    folder = Record(record.path.parent.parent / "dpgan" / record.path.name, record.content)
    assert any("in the folder dpgan" in problem for problem in record_problems(folder))
    name = Record(record.path.with_name("0123456789ab.json"), record.content)
    assert any("is in 0123456789ab.json" in problem for problem in record_problems(name))


def test_a_record_may_have_a_part_of_the_metrics_of_a_protocol(
    finished: RunFolder, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = finished.measurements.all()[0]["protocol"]
    metrics = measured["metrics"]
    one = next(iter(metrics))
    whole = {**measured, "metrics": {**metrics, "another": {"_target_": "tests.toy_metrics.Mean", "name": "another"}}}
    monkeypatch.setattr(record_checks, "current_protocol", lambda name: whole)
    assert record_problems(record) == []
    changed = {**whole, "metrics": {**whole["metrics"], one: {**metrics[one], "other": 1}}}
    for other in (changed, {**whole, "num_samples": 1}, {**measured, "metrics": {}}):
        monkeypatch.setattr(record_checks, "current_protocol", lambda name, other=other: other)
        assert any("have changed since" in problem for problem in record_problems(record)), other


def test_a_protocol_that_the_bench_does_not_have_is_refused(finished: RunFolder) -> None:
    assert any("conf/protocol does not have" in problem for problem in record_problems(make_record(finished, "Ada")[0]))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "is missing"), (b"no picture", "cannot be read"), (bytes(MOST_BYTES + 1), "are accepted")],
    ids=["missing", "no picture", "too large"],
)
def test_a_record_without_a_good_picture_is_refused(record: Record, content: bytes | None, reason: str) -> None:
    record.picture.unlink()
    if content is not None:
        record.picture.write_bytes(content)
    assert any(reason in problem for problem in record_problems(record))


def test_a_picture_of_another_kind_is_refused(record: Record) -> None:
    Image.new("L", (8, 8)).save(record.picture, format="GIF")
    assert any("GIF, not PNG" in problem for problem in record_problems(record))


@pytest.mark.parametrize("text", ["", "[1]", '{"schema": 1'], ids=["empty", "a list", "truncated"])
def test_a_file_that_is_no_record_is_refused(record: Record, text: str) -> None:
    record.path.write_text(text)
    with pytest.raises(ValueError, match="expected a record"):
        read_record(record.path)
    (shown,) = read_runs(record.path.parents[2])
    assert shown.state == "damaged"


def test_a_run_for_release_is_not_recorded(finished: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    config_file = folder.path / "config.yaml"
    config_file.write_text(config_file.read_text().replace("noise: seeded", "noise: os"))
    with pytest.raises(ValueError, match=r"expected a run with privacy\.noise=seeded"):
        make_record(folder, "Ada")


def test_the_verb_writes_and_checks_records(
    finished: RunFolder, tmp_path: Path, protocol_is_known: None, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    results = ["--results", str(tmp_path)]
    assert main(["record", finished.id[:6], "--by", "Ada", *results]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == tmp_path / "records" / "dp_mean" / f"{finished.id}.json"
    assert main(["record", "--check", *results]) == 0
    assert capsys.readouterr().out == "1 record was checked\n"
    assert main(["record", finished.id, "--by", "Ada", *results]) == 2
    assert "by somebody else than 'Ada'" in capsys.readouterr().err
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    assert main(["record", "--check", *results]) == 1
    assert "its identity is that of run" in capsys.readouterr().err
    assert main(["record", *results]) == 2
    assert "expected ids of runs, or --check, got neither" in capsys.readouterr().err


def test_only_the_named_records_are_checked(
    record: Record, finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record.path.parents[2]
    results = ["--results", str(folder)]
    (record.path.parent / "0123456789ab.json").write_text("truncated")
    assert main(["record", finished.id[:6], "--check", *results]) == 0
    assert capsys.readouterr().out == "1 record was checked\n"
    assert main(["record", "0123", "--check", *results]) == 1
    assert "got a file that cannot be read" in capsys.readouterr().err
    assert main(["record", "beef", "--check", *results]) == 2
    assert f"expected the id of a record in {folder}, or the start of one, got 'beef'" in capsys.readouterr().err


def test_a_record_that_cannot_be_read_is_named_by_its_own_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--recorded` reads records through a temporary folder."""
    spec = table_rows(load_table("init"), tmp_path)[0].specs[0]
    path = record_file(tmp_path, str(spec.config.method.name), spec.id)
    path.parent.mkdir(parents=True)
    path.write_text("truncated")
    assert main(["tables", "init", "--recorded", "--no-plots", "--results", str(tmp_path)]) == 2
    assert f"expected a record in {path.resolve()}, got" in capsys.readouterr().err


def test_tables_of_records_are_written_into_a_folder_that_does_not_exist_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tables", "init", "--no-plots", "--results", str(tmp_path / "new")]
    assert main(arguments) == 2
    assert main([*arguments, "--recorded"]) == 0
    assert f"those of the bench, {RECORDS}, are shown" in capsys.readouterr().err
    assert (tmp_path / "new" / "tables" / "init.md").is_file()
    (tmp_path / "file").touch()
    assert main(["tables", "init", "--no-plots", "--recorded", "--results", str(tmp_path / "file")]) == 2


def test_a_record_that_would_not_be_accepted_is_not_written(
    finished: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The toy protocol is none of the bench's."""
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    assert main(["record", finished.id, "--by", "Ada", "--results", str(tmp_path)]) == 1
    assert "conf/protocol does not have" in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_an_unfinished_run_is_not_recorded(finished: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    folder = Store(tmp_path).folder(finished.id)
    (folder.path / "DONE").unlink()
    with pytest.raises(ValueError, match="expected a finished run"):
        make_record(folder, "Ada")


def test_a_run_without_a_measurement_is_not_recorded(finished: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(finished.path, tmp_path / "runs" / finished.id)
    shutil.rmtree(tmp_path / "runs" / finished.id / "metrics")
    with pytest.raises(ValueError, match="expected a measured run"):
        make_record(Store(tmp_path).folder(finished.id), "Ada")


# --- the records of this repository ---

COMMITTED = [*record_paths(RECORDS.parent).values()]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_record_has_the_form_of_a_record(path: Path) -> None:
    """The fast part of the next test: form, picture, and the place of the file."""
    record = read_record(path)
    assert [*record_checks._form(record), *record_checks._picture(record)] == []
    assert record.path == RECORDS / str(record.config.method.name) / f"{record.id}.json"


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_record_is_accepted_and_proves_its_epsilon(path: Path) -> None:
    """All that `dpgen record --check` checks, with epsilon computed again from the ledger's entries."""
    assert record_problems(read_record(path), os.environ.get("DPGEN_DATA", "data")) == []


def test_committed_records_are_as_many_as_their_pictures() -> None:
    assert {path.with_suffix("") for path in RECORDS.glob("*/*.png")} == {path.with_suffix("") for path in COMMITTED}


def test_a_report_of_records_alone_shows_who_measured_and_no_run_of_this_machine(
    finished: RunFolder, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = record.path.parents[2]
    shutil.copytree(finished.path, results / "runs" / "another")
    monkeypatch.setattr("dpgen_bench.report.page.table_names", lambda: [])

    def shown(*options: str) -> dict[str, Any]:
        assert main(["report", *options, "--results", str(results)]) == 0
        page = (results / "report.html").read_text()
        begin = page.index('id="data">') + len('id="data">')
        found = json.loads(page[begin : page.index("</script", begin)])
        assert isinstance(found, dict)
        return found

    data = shown("--recorded")
    assert [run["folder"] for run in data["runs"]] == [record.id]
    (board,) = data["boards"]
    assert "reported by Ada" in board["lines"][0]["notes"]
    assert data["runs"][0]["evidence"][0].startswith("Measured by Ada, ")
    assert data["runs"][0]["picture"].startswith("data:image/")
    assert "not recorded" in shown()["boards"][0]["lines"][0]["notes"]
    assert str(results) not in (results / "report.html").read_text()
