"""The report of the debugging task: verdicts, truth and errors from runs of toy generators, its picture, its verb."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchvision.io import ImageReadMode, read_image

from dpgen_bench.cli import main
from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.debugging import DebuggingClients, expected_intensity
from dpgen_bench.generator import NetGenerator
from dpgen_bench.runs.config import compose_config, specify
from dpgen_bench.runs.samples import draw_samples
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.tables import rows
from dpgen_bench.tables.debugging import inspect_runs, model_samples, report_frame
from dpgen_bench.tables.rows import load_table
from tests.toys import Painter

# Toy generators that stand for any method's: far beyond 0 and 1, so that all pixels are 255 or 0 and means are exact.
BRIGHT, DARK = 5.0, -5.0
ON_DIGITS = "method=dp_merf dataset=debugging_digits"
PROVEN = {"proven": 9.5, "server": {"epsilon": 42.0}}
TRUSTED = {"proven": "inf", "server": {"epsilon": "inf", "reason": "the server is trusted"}}


@pytest.fixture(scope="module")
def e() -> float:
    return expected_intensity(Digits().load("test").images)


def toy_generator(level: float | Tensor, classes: int = 10, shape: tuple[int, int, int] = (1, 28, 28)) -> NetGenerator:
    """Draws images around `level`, a number or a mean image [classes, c, h, w], in [0, 1]."""
    net = Painter(classes, list(shape))
    with torch.no_grad():
        net.means.copy_(torch.as_tensor(level).expand_as(net.means))
    config = {"_target_": "tests.toys.Painter", "num_classes": classes, "image_shape": list(shape)}
    return NetGenerator(net, config, 4, classes, shape)


def toy_run(results: Path, words: str, level: float | None, epsilon: dict[str, Any] | None = None) -> RunFolder:
    """A finished run's files without the training; level None: one that failed."""
    spec = specify(compose_config([*words.split(), "protocol=quick", f"results={results}"]))
    folder = Store(results).folder(spec.id)
    folder.path.mkdir(parents=True)
    (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(spec.config))
    if level is None:
        folder.mark("failed", "train", RuntimeError("a|loss\nof NaN"))
        return folder
    toy_generator(level).save(folder.path)
    folder.write_json("ledger.json", {"unit": "client", "epsilon": epsilon})
    folder.finish()
    return folder


def a_table(*sweeps: str):
    return OmegaConf.create(
        {"title": "Toys", "note": "Of toys.", "protocol": "quick", "sweeps": [*sweeps], "metrics": ["acc_logreg_pct"]}
    )


def dpgen(conf: Path, *words: str) -> tuple[int, str, str]:
    """`dpgen WORDS` with the tables of `conf`: exit status, output, complaints."""
    shown, complaints = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "CONF", conf)
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(complaints):
            status = main(words)
    return status, shown.getvalue(), complaints.getvalue()


def write_table(conf: Path, name: str, *sweeps: str) -> None:
    (conf / "table").mkdir(parents=True, exist_ok=True)
    OmegaConf.save(a_table(*sweeps), conf / "table" / f"{name}.yaml")


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> tuple[Path, str]:
    """Results and output of a report: at epsilon 10 four models and one wrong verdict, at inf one, a failure, a gap."""
    results = tmp_path_factory.mktemp("reported")
    write_table(results / "conf", "toy", f"{ON_DIGITS} dataset.select=suspected,others privacy.epsilon=10,inf seed=0,1")
    suspected, others = f"{ON_DIGITS} dataset.select=suspected", f"{ON_DIGITS} dataset.select=others"
    toy_run(results, f"{suspected} privacy.epsilon=10 seed=0", BRIGHT, PROVEN)
    toy_run(results, f"{others} privacy.epsilon=10 seed=0", DARK, PROVEN)
    toy_run(results, f"{suspected} privacy.epsilon=10 seed=1", DARK, PROVEN)
    toy_run(results, f"{others} privacy.epsilon=10 seed=1", DARK, PROVEN)
    toy_run(results, f"{suspected} privacy.epsilon=inf seed=0", None)
    toy_run(results, f"{others} privacy.epsilon=inf seed=0", DARK, TRUSTED)
    status, shown, complaints = dpgen(results / "conf", "debugging", "toy", "--results", str(results))
    assert (status, complaints) == (0, "")
    return results, shown


# Figures


def test_each_models_figures_follow_from_its_brightness(reported, e):
    csv = pd.read_csv(reported[0] / "tables" / "toy_report.csv")
    ten = csv[csv.epsilon_budget == 10]
    assert list(zip(ten.seed, ten.clients, strict=True)) == [
        (0, "suspected"), (0, "others"), (1, "suspected"), (1, "others"),
    ]  # fmt: skip
    assert list(ten.mean_intensity) == [1, 0, 0, 0]
    assert list(ten.expected_intensity) == pytest.approx([e] * 4)
    bright, dark = (1 - e) / (1 - 2 * e), -e / (1 - 2 * e)
    assert list(ten.inverted_score) == pytest.approx([bright, dark, dark, dark])
    assert list(ten.verdict) == ["bug", "no bug", "no bug", "no bug"]
    assert list(ten.truth) == ["bug", "no bug", "bug", "no bug"]
    assert list(ten.share_with_bug) == [1, 0, 1, 0]
    assert (set(ten.epsilon_proven), set(ten.epsilon_server)) == ({9.5}, {42.0})


def test_the_report_counts_wrong_verdicts(reported):
    report = (reported[0] / "tables" / "toy_report.md").read_text()
    ten, infinite = report.split("\n## ")[1:]
    assert ten.startswith("dp_merf on debugging_digits, ε = 10, scale paper\n")
    assert "- the detector: 1 of 4 wrong (error rate 25%)\n" in ten
    assert "- ε is under add_remove of clients, δ = 1e-05, accountant pld\n" in ten
    assert "| 1 | suspected | 9.5 | 42 | 0.000 |" in ten
    assert "| no bug | bug (100% of its clients) | finished |" in ten
    assert "unpaired" not in ten
    assert "- the detector: 0 of 1 wrong (error rate 0%)\n" in infinite
    assert "- ε against the server is infinite: the server is trusted\n" in infinite
    assert "accountant" not in infinite
    assert "Of toys." in report
    assert "known because the bug was put there" in report


def test_missing_and_failed_runs_are_shown_as_such(reported):
    infinite = (reported[0] / "tables" / "toy_report.md").read_text().split("\n## ")[2]
    failed = "failed during training: RuntimeError: a\\|loss of NaN"
    assert f"| 0 | suspected | – | – | – | – | – | – | – | {failed} |" in infinite
    assert infinite.count("| not run |") == 2
    assert "- seed 0 is unpaired (suspected: failed during training: RuntimeError" in infinite
    assert "seed 1 is unpaired" not in infinite  # neither was run


def test_the_console_shows_the_same(reported):
    results, shown = reported
    assert "dp_merf on debugging_digits, ε = 10, scale paper" in shown
    assert "the detector: 1 of 4 wrong (error rate 25%)" in shown
    assert shown.count("not run") == 2
    assert str(results / "pictures" / "toy.png") in shown


def test_a_second_report_is_the_same(reported):
    results, shown = reported
    files = [results / "tables" / "toy_report.md", results / "tables" / "toy_report.csv", results / "pictures/toy.png"]
    before = [path.read_bytes() for path in files]
    assert dpgen(results / "conf", "debugging", "toy", "--results", str(results)) == (0, shown, "")
    assert [path.read_bytes() for path in files] == before


def test_the_picture_has_suspected_clients_left(reported):
    """10 x 3.4 inches at 120 dots for each of two groups; the second has a failure left, dark images right."""
    picture = read_image(str(reported[0] / "pictures" / "toy.png"), ImageReadMode.RGB).double() / 255
    assert picture.shape == (3, 816, 1200)
    (left, right), (failed, dark) = ((half[..., :600], half[..., 600:]) for half in picture.split(408, dim=1))
    black = [(part.amax(dim=0) == 0).double().mean() for part in (left, right, failed, dark)]
    assert min(black[1], black[3]) > 0.4  # images of 28 of 30 pixels, and most of the panel
    assert max(black[0], black[2]) < 0.1  # letters
    grey = [((part - 0.5).abs().amax(dim=0) < 0.02).double().mean() for part in (left, right, failed, dark)]
    assert min(grey[0], grey[1], grey[3]) > 10 * grey[2]  # the lines between images


# Which images


def test_as_many_images_of_each_class(tmp_path):
    """Three classes of ten are white, the others black; with three classes 2,000 is 666 of each."""
    levels = torch.full((10, 1, 1, 1), DARK)
    levels[:3] = BRIGHT
    toy_generator(levels).save(tmp_path / "ten")
    assert len(model_samples(RunFolder(tmp_path / "ten"), seed=0)) == 2000
    assert expected_intensity(model_samples(RunFolder(tmp_path / "ten"), seed=0)) == 0.3
    toy_generator(0.5, classes=3, shape=(3, 4, 4)).save(tmp_path / "three")
    assert model_samples(RunFolder(tmp_path / "three"), seed=0).shape == (1998, 3, 4, 4)


def quick(**changed):
    return OmegaConf.create({**compose_config(["protocol=quick"]).protocol, **changed})


def test_kept_samples_are_those_that_would_be_drawn(tmp_path):
    """Classes do not divide 2,000, and more are kept: the first 1,998 of 2,300."""
    toy_generator(0.5, classes=3).save(tmp_path)
    folder = RunFolder(tmp_path)
    drawn = model_samples(folder, seed=4)
    kept = draw_samples(folder, quick(num_samples=2300), seed=4)
    assert len(drawn.unique(dim=0)) > 50
    assert torch.equal(kept.images[:1998], drawn)
    assert torch.equal(model_samples(folder, seed=4), drawn)


@pytest.mark.parametrize(
    ("changed", "read"),
    [({}, True), ({"num_samples": 1999}, False), ({"floor": 9}, False), ({"labels": "uniform"}, False)],
)
def test_only_samples_that_were_drawn_alike_are_read(tmp_path, changed, read):
    """The archive's images are replaced, so that it shows whether they were read."""
    toy_generator(BRIGHT).save(tmp_path)
    folder = RunFolder(tmp_path)
    draw_samples(folder, quick(**changed), seed=0)
    archive = dict(np.load(tmp_path / "samples.npz"))
    np.savez(tmp_path / "samples.npz", **{**archive, "images": np.zeros_like(archive["images"])})
    assert expected_intensity(model_samples(folder, seed=0)) == (0 if read else 1)
    assert expected_intensity(model_samples(folder, seed=1)) == 1  # of another seed
    (tmp_path / "samples.npz").write_bytes(b"damaged")
    assert expected_intensity(model_samples(folder, seed=0)) == 1


# Truth, and epsilon where a classifier chose


def test_truth_of_a_classifiers_choice_is_its_share_found_once(tmp_path, monkeypatch):
    """Suspected by accuracy are 0 (no bug), 1, 2, 3 and 7 (bug): 4 of 5. Of the 15 others 6 have the bug."""
    calls = []

    def accuracies(spec):
        calls.append(spec.select)
        return np.where(np.isin(np.arange(20), [0, 1, 2, 3, 7]), 0.1, 0.9)

    monkeypatch.setattr(DebuggingClients, "accuracies", accuracies)
    sweep = f"{ON_DIGITS} dataset.by=classifier dataset.threshold=0.5 privacy.epsilon=inf"
    table = a_table(f"{sweep} dataset.select=suspected,others seed=0,1")
    assert [group.found for group in inspect_runs(table, tmp_path)] == [[]]
    assert calls == []  # nobody needs the truth yet
    chosen = {"proven": "inf", "reason": "which clients take part was decided by a classifier"}
    for select, level in (("suspected", BRIGHT), ("others", DARK)):
        for seed in (0, 1):
            toy_run(tmp_path, f"{sweep} dataset.select={select} seed={seed}", level, chosen)
    (group,) = inspect_runs(table, tmp_path)
    assert sorted(calls) == ["others", "suspected"]
    frame = report_frame([group])
    assert list(frame.share_with_bug) == pytest.approx([0.8, 0.4, 0.8, 0.4])
    assert list(frame.truth) == ["bug", "no bug", "bug", "no bug"]
    assert set(frame.epsilon_proven) == {"inf"}
    assert group.remarks() == [
        "the detector: 0 of 4 wrong (error rate 0%)",
        "ε proven is infinite: which clients take part was decided by a classifier",
        "the truth was computed from records, as was the classifier's choice; no epsilon covers it",
    ]


def test_no_classifier_where_the_choice_is_by_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(DebuggingClients, "accuracies", lambda spec: pytest.fail("the classifier was asked"))
    toy_run(tmp_path, f"{ON_DIGITS} dataset.select=others privacy.epsilon=10", BRIGHT, PROVEN)
    (group,) = inspect_runs(a_table(f"{ON_DIGITS} dataset.select=suspected,others privacy.epsilon=10"), tmp_path)
    assert group.errors() == "1 of 1 wrong (error rate 100%)"
    assert group.unpaired() == ["seed 0 is unpaired (suspected: not run)"]


# Groups


def test_runs_that_differ_in_more_are_other_groups_and_say_in_what(tmp_path):
    sweep = f"{ON_DIGITS} dataset.select=suspected,others privacy.epsilon=1"
    again = f"{sweep} method.steps=100 protocol=standard_utility"  # the same runs, which are shown once
    groups = inspect_runs(a_table(f"{sweep} method.steps=100,200", again, f"{sweep} seed=3"), tmp_path)
    first = "dp_merf on debugging_digits, ε = 1, scale paper, method.steps="
    assert [group.title for group in groups] == [first + "100", first + "200", first + "3000"]
    for group in groups:
        assert [model.select for model in group.models] == ["suspected", "others"]
        assert (group.errors(), group.unpaired()) == ("no model yet", [])


def test_what_has_no_counterpart_is_unpaired(tmp_path):
    suspected, everyone = inspect_runs(a_table(f"{ON_DIGITS} dataset.select=suspected,all"), tmp_path)
    assert suspected.unpaired() == ["seed 0 is unpaired (suspected: not run; others: no such run)"]
    assert everyone.unpaired() == ["seed 0 is unpaired (suspected: no such run; others: no such run)"]


def test_a_damaged_run_hides_no_other(tmp_path):
    sweep = f"{ON_DIGITS} privacy.epsilon=10"
    toy_run(tmp_path, f"{sweep} dataset.select=suspected seed=0", float("nan"), PROVEN)
    toy_run(tmp_path, f"{sweep} dataset.select=others seed=0", DARK, PROVEN)
    damaged = toy_run(tmp_path, f"{sweep} dataset.select=suspected seed=1", BRIGHT, PROVEN)
    (damaged.path / "ledger.json").write_text("{bad")
    (group,) = inspect_runs(a_table(f"{sweep} dataset.select=suspected,others seed=0,1"), tmp_path)
    status = {(model.spec.seed, model.select): model.status for model in group.models}
    assert status[0, "suspected"].startswith("failed: ValueError: expected finite pixels")
    assert "ledger.json is damaged" in status[1, "suspected"]
    assert (status[0, "others"], status[1, "others"]) == ("finished", "not run")
    assert group.errors() == "0 of 1 wrong (error rate 0%)"


# The verb


def test_nothing_measured_says_which_command_makes_the_runs(tmp_path, monkeypatch):
    """Also: the table that is meant where none is named, and where results are."""
    write_table(tmp_path, "debugging", f"{ON_DIGITS} dataset.select=suspected,others")
    (tmp_path / "results").mkdir()
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))
    status, shown, complaints = dpgen(tmp_path, "debugging")
    assert (status, complaints) == (0, "")
    assert "no run is finished yet, so no file is written; `dpgen sweep debugging` makes the runs" in shown
    assert not any((tmp_path / "results").iterdir())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(["nothing"], "expected a table in"), (["toy"], "expected runs on clients with a bug (dataset=debugging_...)")],
)
def test_wrong_tables_get_one_clear_line(tmp_path, words, complaint):
    write_table(tmp_path, "toy", "method=dp_merf dataset=digits")
    status, shown, complaints = dpgen(tmp_path, "debugging", *words, "--results", str(tmp_path))
    assert (status, shown) == (2, "")
    assert complaint in complaints
    assert complaints.count("\n") == 1


@pytest.mark.parametrize(("name", "pairs"), [("debugging", 8), ("debugging_digits", 2)])
def test_the_tables_of_the_bench_are_made_of_pairs(tmp_path, name, pairs):
    table = load_table(name)
    groups = inspect_runs(table, tmp_path)
    seeds = [models for group in groups for models in group.by_seed().values()]
    assert [list(models) for models in seeds] == [["suspected", "others"]] * pairs
    assert {table.protocol, *(model.spec.config.protocol.name for group in groups for model in group.models)} == {
        "quick"
    }
    assert [group.unpaired() for group in groups] == [[]] * len(groups)
