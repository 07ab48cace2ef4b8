"""Releases by clients: grouped data, what a client guards by itself, what a server makes of answers, faults, kills."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.client import BrokenProgram, Client, ClientSetup
from dpgen_bench.federation.engines import Fault
from dpgen_bench.federation.faults import Faults
from dpgen_bench.federation.messages import decode, encode
from dpgen_bench.federation.settings import Settings
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.allowance import AllowanceExhausted
from dpgen_bench.privacy.bounds import PerRecord, PerRow
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger, Spoiled
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.training.signals import Preempted
from tests.toys import records

SHAPE = (2, 3)
N = 4
ROWS = PerRow(C=1.0, shape=SHAPE)
ROW = PerRecord(C=1.0, shape=(3,))


class Odd(torch.Tensor):
    pass


@dataclass(frozen=True)
class Toy:
    """Answers (number of records, first label, how often it answered) in each row, and counts its answers."""

    shape: tuple[int, ...] = SHAPE
    keeps: bool = True
    wrong: str = ""

    def identity(self) -> dict[str, Any]:
        return {}

    def start(self, records, coins):
        return {"answers": torch.zeros(1)}

    def answer(self, message, records, state, coins):
        _, labels = records
        if self.wrong == "raises" and 3 in labels:
            raise RuntimeError("secret 3")
        if self.wrong == "in place":
            labels += 1
        if self.wrong == "global":
            torch.rand(1)
        answers = state.get("answers", torch.zeros(1))
        first = float(labels[0]) if len(labels) else -1.0
        row = torch.tensor([float(len(labels)), first, float(answers)]) * message["scale"]
        if self.wrong == "nan":
            row[0] = math.nan
        if self.wrong == "subclass":
            row = row.as_subclass(Odd)
        if self.wrong == "subclass in state":
            answers = answers.as_subclass(Odd)
        shape = (5, 3) if self.wrong == "shape" else self.shape
        return row.expand(shape).clone(), {"answers": answers + 1} if self.keeps else {}


def data(
    place=None, budget=None, clients=None, federation=None, tmp_path=None, ledger=None, number=N, key="k"
) -> PrivateData:
    images, labels = records(12)
    own = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2]) if clients is None else clients
    return PrivateData(
        images,
        labels,
        10,
        Services(
            ledger or Ledger(budget or Budget(math.inf, relation="replace_one"), 12),
            Key.seeded(key),
            place=place or StatePlace(),
            client_folder=tmp_path,
        ),
        clients=own,
        num_clients=number,
        federation=federation,
    )


def ask_one(held: PrivateData, times=8, std=0.0, program=None, bound=None, **other):
    sample = other.pop("sample", OneClient(N, "public_balanced"))
    bound = bound or replace(ROWS, C=math.inf if std == 0.0 else 1.0)
    return held.grouped("client").mechanism(
        "toy", program=program or Toy(), sample=sample, bound=bound, noise_at="client", times=times, std=std, **other
    )


def ask_many(held: PrivateData, sample, times=3, std=0.0, program=None, bound=ROW):
    return held.grouped("client").mechanism(
        "toy",
        program=program or Toy(shape=(3,), keeps=False),
        sample=sample,
        bound=bound,
        noise_at="server",
        times=times,
        std=std,
    )


SCALE = {"scale": torch.ones(1)}
REFUSAL = encode({}, {"refused": 1})


def test_grouped_data_make_the_client_the_unit():
    held = data()
    clients = held.grouped("client")
    assert clients.n == N
    assert (held._services.ledger.unit, held._services.ledger.records) == ("client", N)
    with pytest.raises(ValueError, match="number of records is private"):
        _ = held.n
    with pytest.raises(ValueError, match="unit is the client"):
        held.mechanism("x", sample=Full(), bound=ROW, times=1, std=1.0)


def test_one_ledger_has_one_unit():
    held = data()
    held.mechanism("x", sample=Full(), bound=ROW, times=1, std=1.0)
    with pytest.raises(ValueError, match="one ledger has one unit"):
        held.grouped("client")
    parent = Ledger(Budget(math.inf), 12)
    data(ledger=parent).mechanism("x", sample=Full(), bound=ROW, times=1, std=1.0)
    child = Ledger(Budget(math.inf), 12)
    child.inherit(parent, "p")
    with pytest.raises(ValueError, match="one ledger has one unit"):
        data(ledger=child).grouped("client")


def test_a_child_of_a_run_of_clients_is_one_of_clients_and_inherits_doubts():
    parent = Ledger(Budget(math.inf), 12)
    ask_one(data(ledger=parent))
    parent.doubt("why")
    child = Ledger(Budget(math.inf), 12)
    child.inherit(parent, "p")
    assert (child.unit, child.records) == ("client", N)
    assert child.doubts == ["p, from which it was restarted: why"]
    with pytest.raises(ValueError, match="unit is the client"):
        data(ledger=child).mechanism("x", sample=Full(), bound=ROW, times=1, std=1.0)


def test_data_without_clients_cannot_be_grouped():
    images, labels = records()
    held = PrivateData(images, labels, 10, Services(Ledger(Budget(math.inf), 12), Key.seeded("k")))
    with pytest.raises(ValueError, match="dataset=clients_mnist"):
        held.grouped("client")
    with pytest.raises(ValueError, match="expected the unit 'client'"):
        data().grouped("user")


@pytest.mark.parametrize(
    ("noise_at", "sample", "bound"),
    [
        ("client", Poisson(0.5), ROWS),
        ("client", OneClient(N), ROW),
        ("server", OneClient(N), ROW),
        ("server", Poisson(0.5), ROWS),
        ("client", OneClient(N + 1), ROWS),
        ("server", FixedSize(2, N + 1), ROW),
        ("both", OneClient(N), ROWS),
    ],
)
def test_combinations_that_nothing_is_proven_of_are_refused(noise_at, sample, bound):
    with pytest.raises(ValueError, match="expected"):
        data().grouped("client").mechanism(
            "x", program=Toy(), sample=sample, bound=bound, noise_at=noise_at, times=2, std=1.0
        )


def test_each_client_answers_from_its_own_records_and_state():
    ask = ask_one(data())
    answers = [ask(SCALE) for _ in range(8)]
    seen = sorted(tuple(int(x) for x in answer[0]) for answer in answers)
    # (records, first label, earlier answers): every client twice, client 3 has no record.
    assert seen == [(0, -1, 0), (0, -1, 1), (3, 4, 0), (3, 4, 1), (4, 0, 0), (4, 0, 1), (5, 7, 0), (5, 7, 1)]
    with pytest.raises(AllowanceExhausted):
        ask(SCALE)


def test_noise_is_added_at_the_client_to_the_clipped_answer():
    """Of 600 values the mean has standard error 0.02, the standard deviation 2.9%; false alarm below 1e-6."""
    ask = ask_one(data(), std=0.5, times=400, program=Toy(keeps=False))
    answers = torch.stack([ask(SCALE) for _ in range(400)])
    whose = torch.tensor([int(clients[0]) for clients in ask._rounds])
    row = torch.tensor([4.0, 0.0, 0.0])
    noise = answers[whose == 0] - (row / row.norm()).expand(SHAPE)
    assert noise.numel() == 600
    assert abs(float(noise.mean())) < 0.11
    assert float(noise.std()) == pytest.approx(0.5, rel=0.16)


def test_values_that_are_not_finite_count_as_zero():
    ask = ask_one(data(), program=Toy(wrong="nan"))
    assert torch.equal(ask(SCALE), torch.zeros(SHAPE))


def client(most: int = 2, std: float = 1.0, place: StatePlace | None = None, program: Toy | None = None) -> Client:
    images, labels = records(3)
    return Client(
        ClientSetup(
            "toy",
            7,
            images,
            labels,
            pickle.dumps(program or Toy()),
            ROWS,
            std,
            Key.seeded("client"),
            most,
            keeps_state=True,
            place=place or StatePlace(),
            device=torch.device("cpu"),
        )
    )


def question(round_: int, scale: float = 1.0, committed: int = 0) -> bytes:
    return encode({"scale": torch.full((1,), scale)}, {"round": round_, "committed": committed})


def test_the_same_question_has_the_same_answer_and_another_one_other_noise():
    asked = client(most=3)
    first = asked.handle(question(0))
    assert asked.handle(question(0)) == first
    other = asked.handle(question(0, scale=1e-9))
    # The exact answers differ by less than the clipping norm; equal noise would show it exactly.
    difference = decode(first)[0]["value"] - decode(other)[0]["value"]
    exact = torch.tensor([3.0, 0.0, 0.0]) / 3.0
    assert float((difference - exact).abs().min()) > 1e-3


def test_a_server_that_changes_the_state_behind_a_question_learns_nothing_from_asking_it_again(tmp_path):
    place = StatePlace(folder=tmp_path)
    asked = client(most=4, place=place)
    asked.handle(question(0))
    first = asked.handle(question(5))
    asked.handle(question(2, scale=2.0))  # as if it went on from an earlier checkpoint: the state before 5 is another
    again = asked.handle(question(5))
    noise = decode(first)[0]["value"] - decode(again)[0]["value"]
    assert float(noise.abs().min()) > 1e-3  # no component shows the exact difference
    assert asked.handle(question(6)) == REFUSAL  # it was an answer of its own


def test_whether_an_answer_counts_does_not_depend_on_records(tmp_path):
    """A client without records always answers zeros, and yet the same questions count, with noise of their own."""
    empty = replace(client(place=StatePlace(folder=tmp_path))._setup, images=torch.zeros(0, 1, 28, 28), most_answers=4)
    empty = Client(replace(empty, labels=torch.zeros(0, dtype=torch.int64)))
    empty.handle(question(0))
    first = empty.handle(question(5))
    empty.handle(question(2, scale=2.0))
    assert empty.handle(question(5)) != first


def test_a_client_counts_its_answers_itself_and_remembers_the_count_on_disk(tmp_path):
    place = StatePlace(folder=tmp_path)
    asked = client(place=place)
    asked.handle(question(0))
    asked.handle(question(1))
    again = client(place=place)  # as after a kill
    for t in (0, 1):  # the same questions again, from the checkpoint on, are no further answers
        again.handle(question(t))
    assert again.handle(question(2)) == REFUSAL


def test_a_client_finds_the_state_of_the_round_that_is_asked_again(tmp_path):
    place = StatePlace(folder=tmp_path)
    asked = client(most=9, std=0.0, place=place)
    rows = [decode(asked.handle(question(t, committed=2 if t >= 2 else 0)))[0]["value"] for t in range(4)]
    again = client(most=9, std=0.0, place=place)
    # Killed after round 3, with a checkpoint at 2: rounds 2 and 3 are asked once more.
    for t in (2, 3):
        assert torch.equal(decode(again.handle(question(t, committed=2)))[0]["value"], rows[t])


def test_first_states_are_shared_through_a_cache(tmp_path):
    made = client(place=StatePlace(folder=tmp_path / "a", cache=tmp_path / "cache"))
    made.handle(encode({}, {"kind": "start"}))
    (state,) = (tmp_path / "cache").glob("*/state.npy")
    before = state.stat().st_mtime_ns
    found = client(place=StatePlace(folder=tmp_path / "b", cache=tmp_path / "cache"))
    assert found.handle(question(0)) == client().handle(question(0))
    assert state.stat().st_mtime_ns == before
    assert (state.parent / "PRIVATE").exists()


def test_the_server_sums_what_it_has_clipped_itself():
    ask = ask_many(data(), Full())
    rows = torch.tensor([[4.0, 0.0, 0.0], [3.0, 4.0, 0.0], [5.0, 7.0, 0.0]])  # client 3, without records, adds nothing
    expected = (rows / rows.norm(dim=1, keepdim=True)).sum(0)
    torch.testing.assert_close(ask(SCALE), expected)


def test_the_server_adds_its_noise_whoever_answers():
    """The standard deviation of 1,800 values has standard error 1.7%; false alarm below 1e-8."""
    held = PrivateData(
        torch.zeros(0, 1, 28, 28),
        torch.zeros(0, dtype=torch.int64),
        10,
        Services(Ledger(Budget(math.inf), 0), Key.seeded("k")),
        clients=np.zeros(0, np.int64),
        num_clients=N,
    )
    ask = ask_many(held, Poisson(0.5), times=300, std=2.0)
    noise = torch.stack([ask(SCALE) for _ in range(300)])
    assert float(noise.std()) == pytest.approx(2.0, rel=0.1)


def test_clients_that_are_drawn_in_secret_may_keep_no_state(tmp_path):
    ask = ask_many(data(tmp_path=tmp_path), Full(), program=Toy(shape=(3,), keeps=True))
    assert torch.equal(ask(SCALE), torch.zeros(3))
    assert "leave no state" in (tmp_path / "errors.txt").read_text()


def test_what_a_program_writes_into_its_records_is_gone_at_the_next_message():
    ask = ask_many(data(), Full(), program=Toy(shape=(3,), keeps=False, wrong="in place"), times=3)
    first = ask(SCALE)
    assert torch.equal(ask(SCALE), first)


def test_the_servers_noise_is_of_one_message_and_one_sum():
    def released(scale):
        return ask_many(data(), Full(), std=5.0, times=1)({"scale": torch.full((1,), scale)})

    assert torch.equal(released(0.1), released(0.1))
    difference = released(0.1) - released(0.1001)  # the sums differ by less than 1e-3
    assert float(difference.abs().min()) > 1e-2


def test_a_number_of_records_that_was_read_cannot_become_private():
    held = data()
    assert held.n == 12
    with pytest.raises(ValueError, match="group the data first"):
        held.grouped("client")


def test_a_refused_answer_is_no_doubt(monkeypatch, tmp_path):
    held = data(tmp_path=tmp_path)
    ask = ask_one(held)
    monkeypatch.setattr(Client, "handle", lambda self, message: REFUSAL)
    assert ask(SCALE) is None
    assert held._services.ledger.doubts == []
    assert "has given all" in (tmp_path / "faults.jsonl").read_text()


def test_bytes_and_clients_are_counted():
    held = data()
    context = Context(0, services=held._services)
    ask = ask_one(held)
    for _ in context.steps(3):
        ask(SCALE)
    sent = len(encode(SCALE, {"round": 0, "committed": 0}))
    answer = len(encode({"value": torch.zeros(SHAPE)}))
    assert context.bytes_sent == {"server_to_client": 3 * sent, "client_to_server": 3 * answer}
    assert context.counters == {"rounds": 3, "clients_asked": 3}


def test_where_draws_are_secret_the_expected_number_of_clients_is_counted():
    held = data()
    context = Context(0, services=held._services)
    ask = ask_many(held, Poisson(0.5))
    for _ in context.steps(3):
        ask(SCALE)
    assert context.counters == {"rounds": 3, "clients_asked": 6}


def test_no_client_is_asked_more_often_than_its_cap():
    ask = ask_one(data(), times=40, sample=OneClient(N, "random", max_answers=2))
    answered = [ask(SCALE) is not None for _ in range(40)]
    assert sum(answered) == 2 * N
    assert ask.executed == 40


def test_a_budget_against_the_server_holds_against_it():
    budget = Budget(5.0, relation="replace_one")
    sample = OneClient(N, "random", max_answers=3)
    held = data(budget=budget)
    ask = ask_one(held, times=40, std=None, sample=sample, bound=ROWS, against="server")
    (seen,) = held._services.ledger.events_seen_by_server()
    assert seen == Event(Full(), ROWS.sensitivity, ask.std, 3)
    assert epsilon([seen], 1e-5, "replace_one", "pld") == pytest.approx(5.0, rel=1e-3)
    assert epsilon(held._services.ledger.events, 1e-5, "replace_one", "pld") <= 5.0
    outsiders = ask_one(data(budget=budget), times=40, std=None, sample=sample, bound=ROWS)
    assert outsiders.std < ask.std
    with pytest.raises(BudgetExceeded):
        ask_one(data(budget=budget), times=40, std=0.9 * ask.std, sample=sample, bound=ROWS, against="server")


def test_a_server_that_adds_the_noise_itself_has_no_figure():
    held = data()
    ask_many(held, Poisson(0.5), std=1.0)
    assert held._services.ledger.events_seen_by_server() is None


def test_ledgers_of_clients_survive_their_file(tmp_path):
    ledger = Ledger(Budget(math.inf), 12, path=tmp_path / "ledger.json")
    ask_one(data(ledger=ledger), std=1.0, sample=OneClient(N, "random", 2))
    ledger.doubt("why")
    again = Ledger.load(tmp_path / "ledger.json")
    assert (again.unit, again.records, again.doubts, again.entries) == ("client", N, ["why"], ledger.entries)


def test_a_round_goes_on_without_a_client_that_fails(tmp_path):
    faulty = Settings(faults=Faults(drop=0.5))
    held = data(federation=faulty, tmp_path=tmp_path)
    context = Context(0, services=held._services)
    ask = ask_one(held, times=20)
    answers = [ask(SCALE) for _ in context.steps(20)]
    lost = sum(answer is None for answer in answers)
    assert 3 <= lost <= 17
    assert ask.executed == 20  # each counts as a release all the same
    assert held._services.ledger.doubts == []  # the coins of injected faults know no records
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert len(rows) == lost == sum("fault" in row for row in context.history)
    assert all(row["injected"] for row in rows)


def test_the_sum_goes_on_without_clients_that_fail(tmp_path):
    held = data(federation=Settings(faults=Faults(drop=1.0)), tmp_path=tmp_path)
    ask = ask_many(held, Full(), std=1.0)
    assert ask(SCALE).shape == (3,)
    assert (tmp_path / "faults.jsonl").exists()


@pytest.mark.parametrize("wrong", ["raises", "shape", "global", "subclass", "subclass in state"])
def test_a_program_that_fails_answers_zeros_and_nobody_hears_of_it(wrong, tmp_path):
    held = data(tmp_path=tmp_path)
    context = Context(0, services=held._services)
    before = torch.get_rng_state()
    ask = ask_one(held, program=Toy(wrong=wrong))
    answers = [ask(SCALE) for _ in context.steps(8)]
    zeros = sum(torch.equal(answer, torch.zeros(SHAPE)) for answer in answers)
    assert zeros == (2 if wrong == "raises" else 8)  # the one client that has a record of class 3, twice
    assert torch.equal(torch.get_rng_state(), before)
    assert held._services.ledger.doubts == []
    assert (tmp_path / "errors.txt").stat().st_mode & 0o077 == 0
    assert "Traceback" in (tmp_path / "errors.txt").read_text()
    assert "secret" not in json.dumps(held._services.ledger.to_dict()) + json.dumps(context.history)


def test_an_engine_that_lets_an_error_through_spoils_the_ledger(monkeypatch):
    def broken(*_, **__):
        raise BrokenProgram("found elsewhere")

    monkeypatch.setattr(Unreliable, "ask", broken)
    monkeypatch.setattr(Settings, "engine", lambda *_, **__: Unreliable())
    held = data()
    ask = ask_one(held)
    with pytest.raises(BrokenProgram):
        ask(SCALE)
    (failure,) = held._services.ledger.failures
    assert failure.what.startswith("a client program of 'toy' broke the rules")
    with pytest.raises(Spoiled):  # a method that catches it cannot go on
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


@pytest.mark.parametrize(("dropout", "doubts"), [("unknown", 1), ("independent", 0)])
@pytest.mark.parametrize("answer", [None, b"rubbish", encode({"value": torch.full(SHAPE, torch.nan)})])
def test_a_real_fault_is_doubted_unless_the_user_vouches(answer, dropout, doubts, monkeypatch, tmp_path):
    monkeypatch.setattr(Settings, "engine", lambda *_, **__: Unreliable(answer))
    held = data(federation=Settings(dropout=dropout), tmp_path=tmp_path)
    ask = ask_one(held)
    assert ask(SCALE) is None
    assert len(held._services.ledger.doubts) == doubts
    (row,) = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert (row["kind"], row["injected"]) == ("lost" if answer is None else "malformed", False)


def test_a_federation_in_which_nobody_answers_is_stopped(monkeypatch):
    monkeypatch.setattr(Settings, "engine", lambda *_, **__: Unreliable())
    ask = ask_one(data(), times=100)

    def go_on():
        for _ in range(100):
            ask(SCALE)

    with pytest.raises(RuntimeError, match="no client gave an answer"):
        go_on()


def test_a_program_that_cannot_travel_is_refused():
    with pytest.raises(ValueError, match="can be pickled"):
        ask_one(data(), program=lambda: None)


def test_ray_needs_a_place_for_state():
    ask = ask_one(data(federation=Settings(name="ray")))
    with pytest.raises(ValueError, match="federation=inproc"):
        ask(SCALE)


def run_rounds(folder, stop_after: int | None):
    """20 rounds with state and noise, perhaps stopped; the sum of what came."""
    place = StatePlace(folder=folder / "state", cache=folder.parent / "cache")
    held = data(place=place, tmp_path=folder / "federation")
    calls = []

    def should_stop():
        calls.append(1)
        return 15 if stop_after is not None and len(calls) >= stop_after else None

    context = Context(
        0, services=held._services, folder=folder, should_stop=should_stop, keep_steps=(10,), due=lambda seconds: False
    )
    ask = ask_one(held, times=20, std=0.3, sample=OneClient(N, "random", 9))
    net = torch.nn.Linear(1, 1)
    for _ in context.steps(20, net=net):
        answer = ask({"scale": 1.0 + net.weight.detach()[0]})
        with torch.no_grad():
            net.weight += answer.sum()
    return net.weight.detach().clone(), context


def test_a_run_that_was_stopped_goes_on_with_every_clients_state(tmp_path):
    whole, first = run_rounds(tmp_path / "whole", None)
    with pytest.raises(Preempted):
        run_rounds(tmp_path / "stopped", 13)
    resumed, second = run_rounds(tmp_path / "stopped", None)
    assert torch.equal(whole, resumed)
    assert (first.bytes_sent, first.counters) == (second.bytes_sent, second.counters)
