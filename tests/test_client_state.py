"""Tests what a client stores between questions (its state, its number of answers) and the noise of its answers."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from dpgen_bench.federation.client import Client, ClientSetup
from dpgen_bench.federation.messages import decode, encode
from dpgen_bench.federation.settings import Settings
from dpgen_bench.method import Context
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.training.signals import Preempted
from tests.client_toys import REFUSAL, ROWS, SCALE, N, Toy, ask_one, data
from tests.toys import records


def client(
    max_answers: int = 2, std: float = 1.0, place: StatePlace | None = None, program: Toy | None = None
) -> Client:
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
            max_answers,
            keeps_state=True,
            place=place or StatePlace(),
            device=torch.device("cpu"),
        )
    )


def question(round_: int, scale: float = 1.0, committed: int = 0) -> bytes:
    return encode({"scale": torch.full((1,), scale)}, {"round": round_, "committed": committed})


def test_equal_questions_have_equal_answers_and_others_have_other_noise():
    asked = client(max_answers=3)
    first = asked.handle(question(0))
    assert asked.handle(question(0)) == first
    other = asked.handle(question(0, scale=1e-9))
    # The exact answers differ by less than the clipping norm; equal noise would show it exactly.
    difference = decode(first)[0]["value"] - decode(other)[0]["value"]
    exact = torch.tensor([3.0, 0.0, 0.0]) / 3.0
    assert float((difference - exact).abs().min()) > 1e-3


def test_a_question_to_another_state_has_other_noise(tmp_path):
    place = StatePlace(folder=tmp_path)
    asked = client(max_answers=4, place=place)
    asked.handle(question(0))
    first = asked.handle(question(5))
    asked.handle(question(2, scale=2.0))  # as from an earlier checkpoint: the state before round 5 changes
    again = asked.handle(question(5))
    noise = decode(first)[0]["value"] - decode(again)[0]["value"]
    assert float(noise.abs().min()) > 1e-3  # no component shows the exact difference
    assert asked.handle(question(6)) == REFUSAL  # the repeated question counted as another answer


def test_whether_an_answer_counts_does_not_depend_on_records(tmp_path):
    """The exact answers of a client without records are zero, but its questions count, and each has its own noise."""
    empty = replace(client(place=StatePlace(folder=tmp_path))._setup, images=torch.zeros(0, 1, 28, 28), max_answers=4)
    empty = Client(replace(empty, labels=torch.zeros(0, dtype=torch.int64)))
    empty.handle(question(0))
    first = empty.handle(question(5))
    empty.handle(question(2, scale=2.0))
    assert empty.handle(question(5)) != first


def test_a_client_counts_its_answers_on_disk(tmp_path):
    place = StatePlace(folder=tmp_path)
    asked = client(place=place)
    asked.handle(question(0))
    asked.handle(question(1))
    again = client(place=place)  # as after a kill
    for t in (0, 1):  # repeated questions do not count again
        again.handle(question(t))
    assert again.handle(question(2)) == REFUSAL


def test_a_round_that_is_asked_again_meets_the_same_state(tmp_path):
    place = StatePlace(folder=tmp_path)
    asked = client(max_answers=9, std=0.0, place=place)
    rows = [decode(asked.handle(question(t, committed=2 if t >= 2 else 0)))[0]["value"] for t in range(4)]
    again = client(max_answers=9, std=0.0, place=place)
    # Killed after round 3, with a checkpoint at 2: rounds 2 and 3 are asked once more.
    for t in (2, 3):
        assert torch.equal(decode(again.handle(question(t, committed=2)))[0]["value"], rows[t])


def test_first_states_are_shared_through_a_cache(tmp_path):
    first = client(place=StatePlace(folder=tmp_path / "a", cache=tmp_path / "cache"))
    first.handle(encode({}, {"kind": "start"}))
    (state,) = (tmp_path / "cache").glob("*/state.npy")
    before = state.stat().st_mtime_ns
    second = client(place=StatePlace(folder=tmp_path / "b", cache=tmp_path / "cache"))
    assert second.handle(question(0)) == client().handle(question(0))
    assert state.stat().st_mtime_ns == before
    assert (state.parent / "PRIVATE").exists()


def test_ray_needs_a_place_for_state():
    ask = ask_one(data(federation=Settings(name="ray")))
    with pytest.raises(ValueError, match="federation=inproc"):
        ask(SCALE)


def run_rounds(folder, stop_after: int | None):
    """Make 20 rounds with state and noise, or stop early; return the sum of the answers and the context."""
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


def test_a_run_that_was_stopped_continues_with_the_state_of_every_client(tmp_path):
    whole, first = run_rounds(tmp_path / "whole", None)
    with pytest.raises(Preempted):
        run_rounds(tmp_path / "stopped", 13)
    resumed, second = run_rounds(tmp_path / "stopped", None)
    assert torch.equal(whole, resumed)
    assert (first.bytes_sent, first.counters) == (second.bytes_sent, second.counters)
