"""The report: which folders count, how runs become lines, what it never contains, and that it is deterministic."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections import Counter
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from dpgen_bench.report import page as report
from dpgen_bench.report.page import _describe_reproductions, build_report, collect, render
from dpgen_bench.store.folders import RunFolder, Store
from tests.report_toys import DEMO, PLACE, SECRET, make_run


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Path:
    """Two seeds at epsilon 1, one at 10, one without privacy."""
    results = tmp_path_factory.mktemp("bench") / "results"
    for words, fid in ((("1", "0"), 10.0), (("1", "1"), 14.0), (("10", "0"), 9.0), (("inf", "0"), 8.0)):
        make_run(results, DEMO, f"privacy.epsilon={words[0]}", f"seed={words[1]}", fid=fid)
    return results


@pytest.fixture
def results(bench, tmp_path) -> Path:
    """A copy of `bench` that a test may change."""
    return Path(shutil.copytree(bench, tmp_path / "results"))


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """No tables, because each composes many configs; tests of tables are below."""
    monkeypatch.setattr(report, "table_names", lambda: [])


def states(content: dict) -> dict[str, str]:
    return {run["folder"]: run["state"] for run in content["runs"]}


def data_of(html: str) -> dict:
    """What a browser would find: the JSON up to the first end of a script."""
    begin = html.index('<script type="application/json" id="data">') + len('<script type="application/json" id="data">')
    return json.loads(html[begin : html.index("</script", begin)])


def board_of(content: dict, epsilon: str) -> dict:
    (board,) = [board for board in content["boards"] if board["epsilon"] == epsilon]
    return board


def lines_in(content: dict) -> list[dict]:
    return [line for board in content["boards"] for line in board["lines"]]


def test_a_value_that_is_not_finite_does_not_break_the_page(results):
    make_run(results, DEMO, "privacy.epsilon=3", fid=math.nan)
    make_run(results, DEMO, "privacy.epsilon=4", fid=math.inf)
    data = data_of(page(results))
    for epsilon, text in (("3", "nan"), ("4", "inf")):
        board = board_of(data, epsilon)
        assert board["lines"][0]["cells"]["fid"]["text"] == text
        assert board["rankings"]["fid"]["placed"] == []


def page(results: Path) -> str:
    return build_report(results).read_text()


def test_copies_count_once(results):
    first = Store(results).runs()[0]
    shutil.copytree(first.path, first.path.with_name("a copy"))
    content = collect(results)
    assert states(content)["a copy"] == "duplicate"
    copy = next(run for run in content["runs"] if run["folder"] == "a copy")
    assert copy["remark"] == f"duplicate of {first.id}"
    assert content["head"]["runs"] == "4 runs (4 finished), and 1 copy not counted."
    assert sum(len(line["runs"]) for line in lines_in(content)) == 4


def test_a_renamed_folder_is_the_run_it_holds(results):
    first = Store(results).runs()[0]
    shutil.copytree(first.path, first.path.with_name("zz"))
    first.path.rename(first.path.with_name("aa"))
    content = collect(results)
    assert [states(content)[name] for name in ("aa", "zz")] == ["finished", "duplicate"]
    run = next(run for run in content["runs"] if run["folder"] == "aa")
    assert run["id"] == first.id
    assert "its folder is called aa" in run["remark"]
    assert sum(len(line["runs"]) for line in lines_in(content)) == 4


def test_a_failed_run_shows_its_error_without_path_and_traceback(results):
    folder = make_run(results, DEMO, "privacy.epsilon=5", finish=False)
    try:
        raise FileNotFoundError(f"expected '{PLACE}/MNIST/raw' and {PLACE.split()[0]}/x.npz\nsecond line")
    except FileNotFoundError as error:
        folder.mark("failed", "train", error)
    content = collect(results)
    run = next(run for run in content["runs"] if run["id"] == folder.id)
    assert run["state"] == "failed"
    assert run["remark"] == "during training: FileNotFoundError: expected [path] and [path]"
    assert "5" not in [board["epsilon"] for board in content["boards"]]
    html = render(content)
    assert not [word for word in ("Traceback", "second line", "somebody", "test_report") if word in html]


def test_a_killed_run_is_interrupted(results):
    folder = make_run(results, DEMO, "privacy.epsilon=5", finish=False)
    assert states(collect(results))[folder.id] == "interrupted"


def corrupt_ledger(folder: RunFolder) -> None:
    (folder.path / "ledger.json").write_text('{"unit": ')


def lose_identity(folder: RunFolder) -> None:
    (folder.path / "identity.json").unlink()


def lose_config(folder: RunFolder) -> None:
    (folder.path / "config.yaml").unlink()


def odd_training(folder: RunFolder) -> None:
    (folder.path / "training.json").write_text("[1, 2]")


def odd_entry(folder: RunFolder) -> None:
    ledger = folder.read_json("ledger.json")
    del ledger["entries"][0]["sampling"]
    folder.write_json("ledger.json", ledger)


def text_for_a_value(folder: RunFolder) -> None:
    (measurement,) = folder.measurements.all()
    measurement["repeats"][0]["metrics"]["all"]["values"]["fid"] = "50.0"
    folder.measurements.write(measurement)


def text_for_epsilon(folder: RunFolder) -> None:
    ledger = folder.read_json("ledger.json")
    ledger["epsilon"]["proven"] = "abc"
    folder.write_json("ledger.json", ledger)


def no_folder(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)
    folder.path.write_text("x")


CORRUPTIONS = [corrupt_ledger, lose_identity, lose_config, odd_training, odd_entry, no_folder]


@pytest.mark.parametrize("corrupt", [*CORRUPTIONS, text_for_a_value, text_for_epsilon])
def test_a_damaged_run_is_named_and_hides_no_other(results, corrupt):
    (folder,) = [run for run in Store(results).runs() if (run.config.privacy.epsilon, run.config.seed) == (1, 1)]
    corrupt(folder)
    content = collect(results)
    assert sorted(states(content).values()) == ["damaged", "finished", "finished", "finished"]
    run = next(run for run in content["runs"] if run["state"] == "damaged")
    assert run["folder"] == folder.id
    assert run["remark"]
    assert str(results) not in render(content)
    assert len(board_of(content, "1")["lines"][0]["runs"]) == 1


def test_a_damaged_report_is_no_damaged_run(results):
    folder = Store(results).runs()[0]
    next((folder.path / "metrics").glob("*.json")).write_text("{")
    content = collect(results)
    run = next(run for run in content["runs"] if run["id"] == folder.id)
    assert run["state"] == "finished"
    assert run["remarks"] == ["1 measurement cannot be read and is ignored"]
    whys = [
        why for board in content["boards"] for ranking in board["rankings"].values() for _, why in ranking["others"]
    ]
    assert "not measured" in whys


def test_no_runs_at_all(tmp_path):
    content = collect(tmp_path)
    assert (content["head"]["runs"], content["boards"], content["runs"], content["plots"]) == ("0 runs.", [], [], [])
    none = (
        "0 values of the tables below count as reproductions of printed values. No finished run is of a paper's scale."
    )
    assert content["head"]["reproduction"] == none
    assert data_of(page(tmp_path))["runs"] == []
    with pytest.raises(ValueError, match="expected a folder of results"):
        build_report(tmp_path / "nowhere")


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028'\""


def test_hostile_words_stay_words(results):
    make_run(results, DEMO, "privacy.epsilon=2", change={"method.name": HOSTILE})
    (results / "runs" / "<b>odd").mkdir()
    content = collect(results)
    html = render(content)
    scripts = len(re.findall("<script", render(collect(results.parent))))
    assert len(re.findall("<script", html)) == scripts == 2
    assert "<img src=x" not in html
    assert "<b>odd" not in html
    data = data_of(html)
    assert HOSTILE in [run.get("method") for run in data["runs"]]
    assert "<b>odd" in [run["folder"] for run in data["runs"]]


def test_nothing_private_and_nothing_of_the_machine(bench):
    html = page(bench)
    assert not [word for word in (SECRET, "somebody", "/somewhere", "somehost", str(bench)) if word in html]
    assert "mean_embedding" in html  # so the ledger was there to be read


def test_the_same_runs_give_the_same_bytes(bench, tmp_path):
    first = page(bench)
    assert page(bench) == first
    other = tmp_path / "elsewhere"
    for path in sorted((bench / "runs").iterdir(), reverse=True):
        shutil.copytree(path, other / "runs" / path.name)
    for number, path in enumerate(sorted(other.rglob("*"))):
        os.utime(path, (1e9 + 7 * number, 1e9 - 3 * number))
    assert page(other) == first
    assert time.strftime("%Y-%m-%d") not in first


def test_the_page_counts_reproductions_even_if_there_are_none(results):
    """A run at a paper's scale is not a reproduction if its protocol differs or if no printed row names it."""
    sentence = "0 values of the tables below count as reproductions of printed values."
    assert collect(results)["head"]["reproduction"] == f"{sentence} No finished run is of a paper's scale."
    make_run(results, "method=dp_merf")
    assert collect(results)["head"]["reproduction"] == sentence
    assert sentence in unescape(page(results))


def test_the_page_says_of_what_the_reproductions_are(tmp_path):
    finished = [SimpleNamespace(config=OmegaConf.create({"scale": {"name": "paper"}}), state="finished")]
    real = _describe_reproductions(finished, Counter(real_data=4))
    assert real.endswith("They are of real data, of which no generator is trained.")
    assert _describe_reproductions(finished, Counter(real_data=4, dpgan=2)) == (
        "6 values of the tables below count as reproductions of printed values. By method: DPGAN 2, Real data 4."
    )
    assert _describe_reproductions(finished, Counter(dpgan=1)).startswith(
        "1 value of the tables below counts as a reproduction of"
    )


def test_the_ledger_is_shown_in_full(bench):
    run = next(run for run in collect(bench)["runs"] if run["epsilon"] == "10")
    ledger = run["ledger"]
    assert dict(zip(ledger["events"]["head"], ledger["events"]["rows"][0], strict=True)) == {
        "release": "mean_embedding",
        "bound": "PerRecord",
        "C": "1",
        "noise std": "7.5 (std calibrated)",
        "sampling": "Poisson rate 0.25",
        "rate": "0.25",
        "times": "40",
        "executed": "40",
        "noise by": "server",
        "from": "this run",
    }
    assert ledger["table"] == {
        "head": ["ε by", "rdp", "pld"],
        "rows": [["add/remove", "9.5", "8.25"], ["replace-one", "inf", "16.5"]],
    }
    assert "not for release" in ledger["warnings"][0]
