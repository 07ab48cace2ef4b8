"""Tests clients that refuse, fail or send malformed answers: the round goes on, and the ledger records real faults."""

from __future__ import annotations

import json

import pytest
import torch

from dpgen_bench.federation.client import BrokenProgram, Client
from dpgen_bench.federation.engines import Fault
from dpgen_bench.federation.faults import Faults
from dpgen_bench.federation.messages import encode
from dpgen_bench.federation.settings import Settings
from dpgen_bench.method import Context
from dpgen_bench.privacy.ledger import Invalidated
from dpgen_bench.privacy.sampling import Full
from tests.client_toys import REFUSAL, SCALE, SHAPE, Ends, Toy, ask_many, ask_one, data


def test_a_refused_answer_leaves_the_run_proven(monkeypatch, tmp_path):
    held = data(tmp_path=tmp_path)
    ask = ask_one(held)
    monkeypatch.setattr(Client, "handle", lambda self, message: REFUSAL)
    assert ask(SCALE) is None
    assert held._services.ledger.unproven == []
    assert "has given all" in (tmp_path / "faults.jsonl").read_text()


def test_a_round_goes_on_without_a_client_that_fails(tmp_path):
    faulty = Settings(faults=Faults(drop=0.5))
    held = data(federation=faulty, tmp_path=tmp_path)
    context = Context(0, services=held._services)
    ask = ask_one(held, times=20)
    answers = [ask(SCALE) for _ in context.steps(20)]
    lost = sum(answer is None for answer in answers)
    assert 3 <= lost <= 17
    assert ask.executed == 20  # every round counts as a release
    assert held._services.ledger.unproven == []  # simulated faults do not depend on records
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert len(rows) == lost == sum("fault" in row for row in context.history)
    assert all(row["injected"] for row in rows)


def test_the_sum_goes_on_without_clients_that_fail(tmp_path):
    held = data(federation=Settings(faults=Faults(drop=1.0)), tmp_path=tmp_path)
    ask = ask_many(held, Full(), std=1.0)
    assert ask(SCALE).shape == (3,)
    assert (tmp_path / "faults.jsonl").exists()


@pytest.mark.parametrize("wrong", ["raises", "exits", "own kind", "shape", "global", "subclass", "subclass in state"])
def test_a_program_that_fails_answers_zeros_and_the_failure_stays_private(wrong, tmp_path):
    held = data(tmp_path=tmp_path)
    context = Context(0, services=held._services)
    before = torch.get_rng_state()
    ask = ask_one(held, program=Toy(wrong=wrong))
    answers = [ask(SCALE) for _ in context.steps(8)]
    zeros = sum(torch.equal(answer, torch.zeros(SHAPE)) for answer in answers)
    assert zeros == (2 if wrong == "raises" else 8)  # the one client that has a record of class 3, twice
    assert torch.equal(torch.get_rng_state(), before)
    assert held._services.ledger.unproven == []
    assert (tmp_path / "errors.txt").stat().st_mode & 0o077 == 0
    assert "Traceback" in (tmp_path / "errors.txt").read_text()
    assert "secret" not in json.dumps(held._services.ledger.to_dict()) + json.dumps(context.history)


def test_a_start_that_ends_the_process_stays_private(tmp_path):
    """As any failure of `start`: the client makes its state again, and answers zeros while that fails."""
    held = data(tmp_path=tmp_path)
    context = Context(0, services=held._services)
    ask = ask_one(held, program=Toy(wrong="start exits"))
    for group in range(ask.groups):
        ask.start(group)
    assert all(torch.equal(ask(SCALE), torch.zeros(SHAPE)) for _ in context.steps(8))
    assert held._services.ledger.unproven == []
    assert "secret 3" in (tmp_path / "errors.txt").read_text()


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (BrokenProgram("found elsewhere"), "broke the rules"),
        (SystemExit("secret"), "raised SystemExit"),
        (Ends("secret"), "raised an exception type of the plugin"),
    ],
)
def test_an_error_that_an_engine_lets_through_invalidates_the_ledger(error, what, monkeypatch):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(Unreliable, "ask", broken)
    monkeypatch.setattr(Settings, "engine", lambda *_, **__: Unreliable())
    held = data()
    ask = ask_one(held)
    with pytest.raises(type(error)):
        ask(SCALE)
    (failure,) = held._services.ledger.failures
    assert failure.what.startswith(f"a client program of 'toy' {what}")
    assert "secret" not in failure.what
    with pytest.raises(Invalidated):  # a method that catches it cannot go on
        ask(SCALE)


class Unreliable:
    """An engine whose clients never answer, or answer with these bytes."""

    parallel = 1

    def __init__(self, answer=None):
        self.answer = answer

    def ask(self, messages, *, round):
        return dict.fromkeys(messages, Fault("lost", "gone") if self.answer is None else self.answer)

    def close(self):
        pass


@pytest.mark.parametrize(("dropout", "reasons"), [("unknown", 1), ("independent", 0)])
@pytest.mark.parametrize("answer", [None, b"rubbish", encode({"value": torch.full(SHAPE, torch.nan)})])
def test_a_real_fault_leaves_nothing_proven_unless_dropout_is_independent(
    answer, dropout, reasons, monkeypatch, tmp_path
):
    monkeypatch.setattr(Settings, "engine", lambda *_, **__: Unreliable(answer))
    held = data(federation=Settings(dropout=dropout), tmp_path=tmp_path)
    ask = ask_one(held)
    assert ask(SCALE) is None
    assert len(held._services.ledger.unproven) == reasons
    stated = [text for text in held._services.ledger.warnings if "as federation.dropout=independent states" in text]
    assert len(stated) == 1 - reasons  # the ledger keeps the statement on which its epsilon rests
    (row,) = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert (row["kind"], row["injected"]) == ("lost" if answer is None else "malformed", False)


def test_a_federation_without_any_answer_is_stopped(monkeypatch):
    monkeypatch.setattr(Settings, "engine", lambda *_, **__: Unreliable())
    ask = ask_one(data(), times=100)

    def go_on():
        for _ in range(100):
            ask(SCALE)

    with pytest.raises(RuntimeError, match="expected answers from clients, got none"):
        go_on()
