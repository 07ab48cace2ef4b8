"""Tests releases by clients: grouping of records, answers of one client, sums over clients, and counters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.messages import encode
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.calibration import BudgetExceeded
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.allowance import AllowanceExhausted
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, Poisson
from dpgen_bench.privacy.services import Services
from tests.client_toys import ROW, ROWS, SCALE, SHAPE, N, Toy, ask_many, ask_one, data
from tests.toys import records


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


def test_a_child_of_a_run_of_clients_is_one_of_clients_and_inherits_why_nothing_is_proven():
    parent = Ledger(Budget(math.inf), 12)
    ask_one(data(ledger=parent))
    parent.mark_unproven("why")
    child = Ledger(Budget(math.inf), 12)
    child.inherit(parent, "p")
    assert (child.unit, child.records) == ("client", N)
    assert child.unproven == ["p, from which it was restarted: why"]
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
def test_combinations_that_no_proof_covers_are_refused(noise_at, sample, bound):
    with pytest.raises(ValueError, match="expected"):
        data().grouped("client").mechanism(
            "x", program=Toy(), sample=sample, bound=bound, noise_at=noise_at, times=2, std=1.0
        )


def test_each_client_answers_from_its_own_records_and_state():
    ask = ask_one(data())
    answers = [ask(SCALE) for _ in range(8)]
    contents = sorted(tuple(int(x) for x in answer[0]) for answer in answers)
    # (records, first label, earlier answers): every client twice; client 3 has no records.
    assert contents == [(0, -1, 0), (0, -1, 1), (3, 4, 0), (3, 4, 1), (4, 0, 0), (4, 0, 1), (5, 7, 0), (5, 7, 1)]
    with pytest.raises(AllowanceExhausted):
        ask(SCALE)


def test_noise_is_added_at_the_client_to_the_clipped_answer():
    """Of 600 values the mean has standard error 0.02, the standard deviation 2.9%; false alarm below 1e-6."""
    ask = ask_one(data(), std=0.5, times=400, program=Toy(keeps=False))
    answers = torch.stack([ask(SCALE) for _ in range(400)])
    client_of = torch.tensor([int(clients[0]) for clients in ask._rounds])
    row = torch.tensor([4.0, 0.0, 0.0])
    noise = answers[client_of == 0] - (row / row.norm()).expand(SHAPE)
    assert noise.numel() == 600
    assert abs(float(noise.mean())) < 0.11
    assert float(noise.std()) == pytest.approx(0.5, rel=0.16)


def test_values_that_are_not_finite_count_as_zero():
    ask = ask_one(data(), program=Toy(wrong="nan"))
    assert torch.equal(ask(SCALE), torch.zeros(SHAPE))


def test_a_program_that_cannot_be_pickled_is_refused():
    with pytest.raises(ValueError, match="can be pickled"):
        ask_one(data(), program=lambda: None)


def test_the_server_sums_rows_that_it_has_clipped():
    ask = ask_many(data(), Full())
    rows = torch.tensor([[4.0, 0.0, 0.0], [3.0, 4.0, 0.0], [5.0, 7.0, 0.0]])  # client 3, without records, adds nothing
    expected = (rows / rows.norm(dim=1, keepdim=True)).sum(0)
    torch.testing.assert_close(ask(SCALE), expected)


def test_the_server_adds_noise_also_if_no_client_has_records():
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


def test_clients_keep_no_state_if_their_draw_is_secret(tmp_path):
    ask = ask_many(data(tmp_path=tmp_path), Full(), program=Toy(shape=(3,), keeps=True))
    assert torch.equal(ask(SCALE), torch.zeros(3))
    assert "to return no state" in (tmp_path / "errors.txt").read_text()


def test_the_next_message_sees_the_original_records():
    ask = ask_many(data(), Full(), program=Toy(shape=(3,), keeps=False, wrong="in place"), times=3)
    first = ask(SCALE)
    assert torch.equal(ask(SCALE), first)


def test_the_servers_noise_is_keyed_by_message_and_sum():
    def released(scale):
        return ask_many(data(), Full(), std=5.0, times=1)({"scale": torch.full((1,), scale)})

    assert torch.equal(released(0.1), released(0.1))
    difference = released(0.1) - released(0.1001)  # the sums differ by less than 1e-3
    assert float(difference.abs().min()) > 1e-2


def test_records_cannot_be_grouped_after_their_number_was_read():
    held = data()
    assert held.n == 12
    with pytest.raises(ValueError, match="group the data first"):
        held.grouped("client")


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


def test_the_expected_number_of_clients_is_counted_if_draws_are_secret():
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
    (event,) = held._services.ledger.events_seen_by_server()
    assert event == Event(Full(), ROWS.sensitivity, ask.std, 3)
    assert epsilon([event], 1e-5, "replace_one", "pld") == pytest.approx(5.0, rel=1e-3)
    assert epsilon(held._services.ledger.events, 1e-5, "replace_one", "pld") <= 5.0
    outsiders = ask_one(data(budget=budget), times=40, std=None, sample=sample, bound=ROWS)
    assert outsiders.std < ask.std
    with pytest.raises(BudgetExceeded):
        ask_one(data(budget=budget), times=40, std=0.9 * ask.std, sample=sample, bound=ROWS, against="server")


def test_there_are_no_events_against_a_server_that_adds_the_noise():
    held = data()
    ask_many(held, Poisson(0.5), std=1.0)
    assert held._services.ledger.events_seen_by_server() is None


def test_ledgers_of_clients_can_be_read_back_from_their_file(tmp_path):
    ledger = Ledger(Budget(math.inf), 12, path=tmp_path / "ledger.json")
    ask_one(data(ledger=ledger), std=1.0, sample=OneClient(N, "random", 2))
    ledger.mark_unproven("why")
    again = Ledger.load(tmp_path / "ledger.json")
    assert (again.unit, again.records, again.unproven, again.entries) == ("client", N, ["why"], ledger.entries)
