"""Tests what `dpgen account` prints for clients, against golden numbers of the paper's federated setting."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
from dp_accounting import get_epsilon_gaussian

from dpgen_bench.cli import main as dpgen
from dpgen_bench.privacy.accountants.claims import wor_rdp
from dpgen_bench.privacy.events import RELATIONS

DELTA = 1e-5
CLIENTS = ["--clients", "3400", "--sigma", "1.07", "--steps", "30000", "--releases-per-draw", "32"]


def main(argv: list[str]) -> int:
    return dpgen(["account", *argv])


def as_json(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# The paper's federated setting: N, k_max, epsilon against outsiders (PLD), answers of one client, epsilon against the
# server. Computed independently of this code, by sums over all numbers of participations with 60 digits.
FEDERATED = [
    (3400, None, 357.5, 30_000, 423_154.9),
    (3400, 21, 341.3, 21, 395.9),
    (866, None, 905.6, 30_000, 423_154.9),
    (866, 59, 888.5, 59, 996.8),
    (2136, None, 480.6, 30_000, 423_154.9),
    (2136, 30, 467.5, 30, 541.8),
]


@pytest.mark.parametrize(("clients", "cap", "outsiders", "answers", "server"), FEDERATED)
def test_the_federated_setting_of_gs_wgan(clients, cap, outsiders, answers, server, capsys, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)  # no cell needs a process
    limit = [] if cap is None else ["--max-answers", str(cap)]
    report = as_json(capsys, "--clients", str(clients), *CLIENTS[2:], *limit)
    table = report["epsilon"]
    assert table["add_remove"] == table["replace_one"]  # an answer is any function of the client's records
    assert table["replace_one"]["pld"] == pytest.approx(outsiders, abs=0.05)
    assert table["replace_one"]["pld"] < table["replace_one"]["rdp"] < 1.12 * outsiders
    assert report["server"]["answers"] == answers
    exact = get_epsilon_gaussian(1.07 / math.sqrt(32 * answers), DELTA)
    assert report["server"]["epsilon"] == dict.fromkeys(RELATIONS, pytest.approx(exact, rel=1e-9))
    assert exact == pytest.approx(server, abs=0.05)
    (mechanism,) = report["mechanisms"]
    assert (mechanism["sampling"], mechanism["clients"], mechanism["max_answers"]) == ("oneclient", clients, cap)


def test_a_public_schedule_of_clients_needs_no_limit(capsys) -> None:
    report = as_json(capsys, *CLIENTS, "--schedule", "public_balanced")
    assert report["server"]["answers"] == 9  # ceil(30,000 / 3400)
    assert (
        report["epsilon"]["add_remove"]["pld"]
        == report["server"]["epsilon"]["add_remove"]
        == pytest.approx(192.5, abs=0.05)
    )
    sums = as_json(capsys, "--clients", "5", "--sigma", "3", "--steps", "9", "--bound", "record")["server"]["epsilon"]
    assert sums["replace_one"] == pytest.approx(get_epsilon_gaussian(0.5, DELTA), rel=1e-9)
    assert sums["add_remove"] == pytest.approx(get_epsilon_gaussian(1.0, DELTA), rel=1e-9)


def test_both_adversaries_are_printed(capsys) -> None:
    assert main([*CLIENTS, "--max-answers", "20"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "30,000 releases, one of 3400 clients, random, at most 20 answers each, joint multiplier 0.18915" in printed
    assert "at most 20 of one client" in printed
    assert printed.index("333.7") < printed.index("379.4 (add/remove), 379.4 (replace-one)")
    assert main(["--q", "1", "--sigma", "1", "--steps", "1"]) == 0
    assert "server" not in capsys.readouterr().out


def test_the_claimed_epsilon_counts_as_the_paper_does(capsys) -> None:
    table = as_json(capsys, *CLIENTS, "--published", "--timeout", "0.05")["epsilon"]
    assert table["claimed"] == {
        "claimed (960,000 compositions, without-replacement RDP)": pytest.approx(
            wor_rdp(1 / 3400, 1.07, 960_000, DELTA), rel=1e-9
        )
    }
    assert list(table["conditional"]) == ["conditional (if steps were memoryless)"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*CLIENTS, "--shards", "9"], "one of --shards and --clients, got both"),
        ([*CLIENTS, "--shards", "9", "--q", "1"], "one of --q and --shards and --clients, got all"),
        (["--clients", "0", *CLIENTS[2:]], "--clients >= 1, got 0"),
        ([*CLIENTS, "--max-answers", "0"], "--max-answers >= 1, got 0"),
        (["--shards", "9", *CLIENTS[2:], "--max-answers", "2"], "expected --max-answers together with --clients"),
        (["--q", "1", *CLIENTS[2:], "--schedule", "random"], "expected --schedule together with --shards or --clients"),
        (["--clients", "9", "--steps", "1"], "missing --sigma"),
        (["--clients", "9", "method=dpgan"], "got both"),
        (["--max-answers", "3", "method=dpgan"], "expected --max-answers together with --clients"),
        ([*CLIENTS, "--max-answers", "3", "--published"], "without a limit"),
    ],
)
def test_bad_arguments_are_refused_with_a_message(argv, message, capsys) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err
