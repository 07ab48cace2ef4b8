"""The report's leaderboards: runs become lines, lines that are comparable are ranked, and others have the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dpgen_bench.report.boards import boards_content, boards_of
from dpgen_bench.report.lines import lines_of
from dpgen_bench.report.runs import read_runs
from dpgen_bench.store.folders import RunFolder, Store
from tests.report_toys import DEMO, make_run, write_report


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


def collect(results: Path) -> list[dict]:
    return boards_content(boards_of(read_runs(results)))


def board_of(boards: list[dict], epsilon: str, dataset: str = "digits") -> dict:
    (board,) = [board for board in boards if (board["dataset"], board["epsilon"]) == (dataset, epsilon)]
    return board


def reasons(board: dict, by: str = "fid") -> dict[str, str]:
    """Why lines have no place, by the id of their first run."""
    return {board["lines"][number]["runs"][0]["id"]: why for number, why in board["rankings"][by]["others"]}


def test_seeds_share_a_line_and_each_epsilon_has_a_board(bench):
    content = collect(bench)
    assert [(board["dataset"], board["name"], board["epsilon"]) for board in content] == [
        ("digits", "Digits", "1"),
        ("digits", "Digits", "10"),
        ("digits", "Digits", "inf"),
    ]
    (line,) = board_of(content, "1")["lines"]
    assert line["cells"]["fid"] == {"text": "12.0 ± 2.8", "by": ""}  # sqrt(((10-12)² + (14-12)²) / 1)
    assert (line["method"], line["epsilons"]) == ("DP-MERF", ["12.5 claimed", "not audited"])
    assert [run["seed"] for run in line["runs"]] == ["0", "1"]
    assert line["notes"] == ["demo scale", "2 seeds", "not recorded"]
    assert "inception_score" not in line["cells"]
    without = board_of(content, "inf")
    assert without["terms"] == "unit record, protocol quick"
    assert (without["lines"][0]["proven"], without["lines"][0]["epsilons"]) == ("inf", [])


def test_seeds_share_the_least_certified_epsilon(results):
    for path, bound in zip(sorted((results / "runs").glob("*/ledger.json")), (0.71, 0.7, 0.72, 0.73), strict=True):
        content = json.loads(path.read_text())
        how = {"figure": "gdp", "confidence": 0.95, "trials": 10, "level": "c", "relation": "add_remove"}
        content["epsilon"]["certified"] = {"epsilon": bound, **how}
        path.write_text(json.dumps(content))
    (line,) = board_of(collect(results), "1")["lines"]
    bounds = [
        epsilon["certified"]["epsilon"]
        for run in line["runs"]
        for epsilon in [json.loads((results / "runs" / run["id"] / "ledger.json").read_text())["epsilon"]]
    ]
    assert len(bounds) == 2
    assert line["epsilons"] == ["12.5 claimed", f"≥ {min(bounds):g} certified"]


def test_one_line_has_the_values_of_the_protocol_that_is_compared(results):
    folder = Store(results).runs()[0]
    protocol = {**folder.measurements.all()[0]["protocol"], "name": "mine", "num_samples": 5}
    write_report(folder, protocol, {"fid": 99.0, "kid": 1.0})
    (board,) = (board for board in collect(results) if folder.id in [run["id"] for run in board["lines"][0]["runs"]])
    assert len(board["lines"]) == 1
    assert board["lines"][0]["cells"]["fid"]["text"] != "99.0"
    assert board["terms"].endswith("protocol quick")


def test_each_metric_is_compared_by_the_protocol_that_most_lines_have(results):
    """Two settings have their accuracies by `quick`; their FIDs and a third setting are by `mine`."""
    one, two, three = (
        make_run(results, DEMO, "privacy.epsilon=20", f"method.features={n}", proven=19.99) for n in (50, 60, 70)
    )
    for folder, fid in ((one, 5.0), (two, 6.0), (three, 7.0)):
        (measured,) = folder.measurements.all()
        quick, mine = measured["protocol"], {**measured["protocol"], "name": "mine", "num_samples": 5}
        next((folder.path / "metrics").glob("*.json")).unlink()
        write_report(folder, mine, {"fid": fid} if folder is not three else {"fid": fid, "acc_mlp_pct": 99.0})
        if folder is not three:
            write_report(folder, quick, {"acc_mlp_pct": 70.0 + fid})
    board = board_of(collect(results), "20")
    assert board["terms"].endswith("FID by protocol mine, Acc. MLP (%) by protocol quick")
    assert len(board["rankings"]["fid"]["placed"]) == 3
    assert len(board["rankings"]["acc_mlp_pct"]["placed"]) == 2
    assert reasons(board, "acc_mlp_pct") == {three.id: "accuracy, MLP (%) by protocol mine, not quick"}
    (line,) = [line for line in board["lines"] if line["runs"][0]["id"] == three.id]
    assert line["cells"]["acc_mlp_pct"] == {"text": "99.0", "by": "by mine"}


def test_lines_that_cannot_be_compared_are_named_with_the_term(results):
    """Each run differs from those at an epsilon of 1 in one term; the scale is no such term."""
    for words, why in (
        ("privacy.delta=1e-6", "δ = 1e-06, not 1e-05"),
        ("privacy.accountant=rdp", "accountant rdp, not pld"),
        ("privacy.relation=replace_one", "replace-one, not add/remove"),
        ("scale=paper", None),
    ):
        run = make_run(results, DEMO, "privacy.epsilon=1", words)
        if why is None:  # else this line of one seed would make two with the fixture's
            assert reasons(board_of(collect(results), "1")).get(run.id) is None
        else:
            ledger = run.read_json("ledger.json")
            assert ledger["budget"]["epsilon"] == 1
            assert reasons(board_of(collect(results), "1"))[run.id] == why
    assert board_of(collect(results), "1")["terms"] == (
        "add/remove, δ = 1e-05, accountant pld, unit record, protocol quick"
    )


def test_of_equally_many_lines_those_of_more_runs_are_compared(results):
    for seed in (0, 1):
        make_run(results, DEMO, "privacy.epsilon=10", "privacy.relation=replace_one", f"seed={seed}")
    assert board_of(collect(results), "10")["terms"].startswith("replace-one, ")


def test_lines_are_ranked_by_each_metric_and_the_reasons_are_a_tables(results):
    """DP-MERF with other features is better in FID and worse in accuracy; ledgers must prove 98% of their budget."""
    other = make_run(results, DEMO, "privacy.epsilon=10", "method.features=50", fid=3.0)
    for folder in Store(results).runs():
        proven = {1.0: 0.99, 10.0: 9.9}.get(float(folder.config.privacy.epsilon), "inf")
        edit_ledger(folder, proven)
    board = board_of(collect(results), "10")
    assert [metric["key"] for metric in board["metrics"]] == ["fid", "acc_mlp_pct", "seconds_total"]
    first, second = board["rankings"]["fid"]["placed"]
    assert board["lines"][first[0]]["runs"][0]["id"] == other.id
    assert (first[1:], second[1:]) == (["1", "best"], ["2", "+6.0"])
    assert [place for _, place, _ in board["rankings"]["acc_mlp_pct"]["placed"]] == ["1=", "1="]  # 80 % both
    edit_ledger(other, 9.0)
    assert reasons(board_of(collect(results), "10"))[other.id] == "seed 0: proven 9 leaves a part of 10 unspent"
    make_run(results, DEMO, "privacy.epsilon=10", "seed=4", finish=False)
    board = board_of(collect(results), "10")
    assert sorted(reasons(board).values())[0] == "1 of 2 seeds measured"


def edit_ledger(folder: RunFolder, proven: float | str) -> None:
    ledger = folder.read_json("ledger.json")
    ledger["epsilon"]["proven"] = proven
    folder.write_json("ledger.json", ledger)


def test_the_page_opens_with_mnist_at_ten_or_else_the_most_lines(results):
    for folder in Store(results).runs():
        edit_ledger(folder, {1.0: 0.99, 10.0: 9.9}.get(float(folder.config.privacy.epsilon), "inf"))
    edit_ledger(make_run(results, DEMO, "privacy.epsilon=1", "method.features=50", fid=3.0), 0.99)
    assert [board["epsilon"] for board in collect(results) if board["start"]] == ["1"]
    mnist = make_run(results, DEMO, "privacy.epsilon=10", "dataset=mnist", proven=9.0)
    assert [board["epsilon"] for board in collect(results) if board["start"]] == ["1"]  # it has no place
    edit_ledger(mnist, 9.9)
    assert [(board["dataset"], board["epsilon"]) for board in collect(results) if board["start"]] == [("mnist", "10")]


def test_real_images_and_runs_without_records_stand_beside_the_board(results):
    real = make_run(results, "method=real_data", "dataset=digits", "privacy.epsilon=inf", "protocol=quick", fid=1.0)
    content = collect(results)
    (upper,) = board_of(content, "1")["upper"]
    assert upper["runs"] == [{"id": real.id, "seed": "0"}]
    assert reasons(board_of(content, "inf"))[real.id] == "real images, no generator"


def test_two_changed_texts_of_a_protocol_are_two_protocols(results):
    folder = Store(results).runs()[0]
    (measurement,) = folder.measurements.all()
    for number in (5, 6):
        write_report(folder, {**measurement["protocol"], "num_samples": number}, {"fid": 99.0})
    (run,) = [run for run in read_runs(results) if run.id == folder.id]
    (line,) = lines_of([run])
    assert len(line.values["fid"]) == 3
    assert sum(name.startswith("quick (changed: ") for name in line.values["fid"]) == 2


def test_settings_that_distinguish_lines_are_named(results):
    make_run(results, DEMO, "privacy.epsilon=1", "method.features=50")
    one, other = board_of(collect(results), "1")["lines"]
    assert {one["settings"], other["settings"]} == {"features = 1000", "features = 50"}
