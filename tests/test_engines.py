"""Tests clients that run in one process, simulated faults, and the settings that choose an engine."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field

import pytest
import torch

from dpgen_bench.config.compose import compose_config
from dpgen_bench.federation.engines import Fault, InProcess
from dpgen_bench.federation.faults import Faults, FaultyEngine
from dpgen_bench.federation.messages import decode, encode
from dpgen_bench.federation.ray_engine import RayEngine
from dpgen_bench.federation.settings import Settings, settings
from dpgen_bench.privacy.key import Key
from dpgen_bench.training.signals import Preempted
from tests import test_ray
from tests.run_toys import in_child

SECRET = "record number 4711"
KEY = Key.seeded("faults")


# Clients in one process


@dataclass
class Toy:
    """Answers with its number and how often it was asked since it was opened; `events` outlives it."""

    client: int
    events: list[tuple[int, str]]
    asked: int = 0

    def open(self) -> Toy:
        self.events.append((self.client, "opened"))
        return Toy(self.client, self.events)

    def handle(self, message: bytes) -> bytes:
        self.asked += 1
        self.events.append((self.client, message.decode()))
        errors = {"raise": OSError(SECRET), "stop": KeyboardInterrupt(), "preempt": Preempted(143), "rule": Rule()}
        if message.decode() in errors:
            raise errors[message.decode()]
        if message == b"none":
            return None  # type: ignore[return-value]
        return encode({"value": torch.full((2, 3), float(self.client))}, {"asked": self.asked})


class Rule(AssertionError):
    """An error such as the conformance suite raises."""


@dataclass
class Bench:
    events: list[tuple[int, str]] = field(default_factory=list)

    def setup(self, client: int) -> Toy:
        return Toy(client, self.events)

    def opened(self) -> list[int]:
        return [client for client, what in self.events if what == "opened"]

    def received(self) -> list[tuple[int, str]]:
        return [entry for entry in self.events if entry[1] != "opened"]


def asked(answer: bytes | Fault) -> int:
    assert isinstance(answer, bytes), answer
    return int(decode(answer)[1]["asked"])


def test_clients_are_opened_when_they_are_asked_and_stay_open():
    bench = Bench()
    engine = InProcess(bench.setup)
    assert bench.events == []
    assert list(engine.ask({5: b"a", 2: b"b"}, round=0)) == [2, 5]
    assert bench.events == [(2, "opened"), (2, "b"), (5, "opened"), (5, "a")]
    assert {client: asked(answer) for client, answer in engine.ask({2: b"c", 3: b"c"}, round=1).items()} == {2: 2, 3: 1}
    assert engine.ask({}, round=2) == {}
    assert engine.parallel == 1
    engine.close()
    assert asked(engine.ask({2: b"d"}, round=3)[2]) == 1


def test_the_client_used_least_recently_is_dropped_to_make_room():
    bench = Bench()
    engine = InProcess(bench.setup, keep=2)
    for client in (0, 1, 0, 2, 0, 1):
        engine.ask({client: b"x"}, round=0)
        assert len(engine._open) <= 2
    assert bench.opened() == [0, 1, 2, 1]
    with pytest.raises(ValueError, match="keep open"):
        InProcess(bench.setup, keep=0)


def test_a_client_that_raised_gives_the_type_of_its_error_and_is_opened_again(tmp_path):
    bench, log = Bench(), tmp_path / "private" / "raised.txt"
    engine = InProcess(bench.setup, private_log=log)
    engine.ask({0: b"x", 1: b"x"}, round=6)
    answers = engine.ask({0: b"raise", 1: b"x"}, round=7)
    assert answers[0] == Fault("raised", "OSError", injected=False)
    assert asked(answers[1]) == 2
    assert asked(engine.ask({0: b"x"}, round=8)[0]) == 1
    text = log.read_text()
    assert "round 7, client 0" in text
    assert f"OSError: {SECRET}" in text
    assert "Traceback" in text
    assert log.stat().st_mode & 0o077 == log.parent.stat().st_mode & 0o077 == 0
    assert engine.ask({1: b"none"}, round=9) == {1: Fault("raised", "TypeError")}
    assert log.read_text().startswith(text), "appended"
    assert InProcess(bench.setup).ask({0: b"raise"}, round=0)[0] == Fault("raised", "OSError")


@pytest.mark.parametrize(("message", "error"), [("stop", KeyboardInterrupt), ("preempt", Preempted)])
def test_interrupts_of_the_operator_are_not_caught(message, error):
    bench = Bench()
    engine = InProcess(bench.setup)
    with pytest.raises(error):
        engine.ask({0: message.encode(), 1: b"x"}, round=0)
    assert engine._open == {}, "the state of the interrupted client is unknown"


def test_errors_of_listed_classes_are_let_through():
    bench = Bench()
    assert InProcess(bench.setup).ask({0: b"rule"}, round=0)[0] == Fault("raised", "Rule")
    with pytest.raises(Rule):
        InProcess(bench.setup, let_through=(AssertionError,)).ask({0: b"rule"}, round=0)


def test_an_error_of_the_harness_is_not_a_fault_of_a_client():
    def setup(client: int) -> Toy:
        raise LookupError("no such client")

    with pytest.raises(LookupError):
        InProcess(setup).ask({0: b"x"}, round=0)


def test_ray_is_needed_only_if_clients_run_on_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    chosen = Settings(name="ray")
    with pytest.raises(ModuleNotFoundError, match=r"dpgen-bench\[ray\]"):
        chosen.engine(Bench().setup, KEY)
    with pytest.raises(ModuleNotFoundError, match="federation=inproc"):
        RayEngine(Bench().setup)


# Faults


@pytest.mark.parametrize(
    "rates",
    [{"drop": -0.1}, {"drop": 1.5}, {"drop": float("nan")}],
)
def test_rates_are_probabilities(rates):
    with pytest.raises(ValueError, match=r"federation\.faults"):
        Faults(**rates)
    assert Faults(0.1).any
    assert not Faults().any


def test_an_engine_without_faults_behaves_as_the_wrapped_one():
    plain, bench = Bench(), Bench()
    engine = FaultyEngine(InProcess(bench.setup), Faults(), KEY)
    messages = {3: b"x", 1: b"raise", 2: b"y"}
    assert engine.ask(messages, round=4) == InProcess(plain.setup).ask(messages, round=4)
    assert engine.parallel == 1
    assert not any(engine.dropped(round_, client) for round_ in range(20) for client in range(20))


def test_faults_have_their_rate_and_are_independent_across_rounds_and_clients():
    engine = FaultyEngine(InProcess(Bench().setup), Faults(0.2), KEY)
    lost = [[engine.dropped(round_, client) for client in range(60)] for round_ in range(60)]
    assert abs(sum(map(sum, lost)) - 3600 * 0.2) < 5 * (3600 * 0.2 * 0.8) ** 0.5
    both = sum(row[i] and row[i + 1] for row in lost for i in range(0, 60, 2))
    assert abs(both - 1800 * 0.04) < 5 * (1800 * 0.04 * 0.96) ** 0.5
    again = sum(lost[i][c] and lost[i + 1][c] for i in range(0, 60, 2) for c in range(60))
    assert abs(again - 1800 * 0.04) < 5 * (1800 * 0.04 * 0.96) ** 0.5


def test_simulated_faults_never_change():
    """Golden values: other faults would be another run under the same id."""
    engine = FaultyEngine(InProcess(Bench().setup), Faults(0.25), KEY)
    assert [round_ for round_ in range(8) if engine.dropped(round_, 7)] == [2, 4]


def test_a_lost_message_does_not_reach_its_client():
    bench = Bench()
    engine = FaultyEngine(InProcess(bench.setup), Faults(drop=0.5), KEY)
    answers = engine.ask(dict.fromkeys(range(40), b"x"), round=1)
    assert list(answers) == list(range(40))
    lost = [client for client in range(40) if engine.dropped(1, client)]
    assert [client for client in answers if answers[client] == Fault("lost", "injected", injected=True)] == lost
    assert 0 < len(lost) < 40
    assert bench.received() == [(client, "x") for client in range(40) if client not in lost]


def test_at_rate_one_all_messages_of_rounds_are_lost_and_no_others():
    bench = Bench()
    engine = FaultyEngine(InProcess(bench.setup), Faults(drop=1.0), KEY)
    assert set(engine.ask({0: b"x", 1: b"x"}, round=0).values()) == {Fault("lost", "injected", True)}
    assert bench.events == []
    assert asked(engine.ask({0: b"x"}, round=-1)[0]) == 1
    assert not engine.dropped(-1, 0)


def test_a_fault_depends_on_no_other_client_and_is_repeated_on_resume():
    engines = [FaultyEngine(InProcess(Bench().setup), Faults(0.6), KEY) for _ in range(2)]
    whole = engines[0].ask(dict.fromkeys(range(30), b"x"), round=2)
    alone = {client: engines[1].ask({client: b"x"}, round=2)[client] for client in reversed(range(30))}
    assert alone == whole
    assert 5 < sum(isinstance(answer, bytes) for answer in whole.values()) < 25


def test_a_real_fault_is_not_hidden():
    engine = FaultyEngine(InProcess(Bench().setup), Faults(drop=0.5), KEY)
    real = engine.ask(dict.fromkeys(range(20), b"raise"), round=0)
    assert set(real.values()) == {Fault("raised", "OSError"), Fault("lost", "injected", injected=True)}


# Settings


def test_configs_become_settings():
    assert settings(compose_config([]).federation) == settings({}) == Settings()
    ray = settings(compose_config(["federation=ray", "federation.actors=3", "federation.faults.drop=0.25"]).federation)
    assert ray == Settings("ray", Faults(drop=0.25), "unknown", None, 3, 300.0)
    assert settings(compose_config(["federation.dropout=independent"]).federation).dropout == "independent"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "threads"}, "federation.name: expected 'inproc' or 'ray'"),
        ({"dropout": "never"}, "federation.dropout"),
        ({"faults": {"drop": "often"}}, "federation.faults.drop: expected a number"),
        ({"faults": {"drop": 1.5}}, "federation.faults.drop"),
        ({"faults": {"lost": 0.5}}, "federation.faults.lost: expected a field among drop"),
        ({"faults": 0.5}, "federation.faults: expected a mapping such as"),
        ({"actor": 3, "name": "ray"}, "federation.actor: expected a field among"),
        ({"actors": 3}, "federation.actors: expected only with federation=ray"),
        ({"name": "ray", "actors": 0}, "federation.actors"),
        ({"name": "ray", "actors": 2.5}, "federation.actors: expected an integer"),
        ({"name": "ray", "timeout_s": 0}, "federation.timeout_s"),
    ],
)
def test_invalid_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        settings(config)


def test_settings_make_the_engine(tmp_path):
    bench = Bench()
    plain = Settings().engine(bench.setup, KEY, private_log=tmp_path / "log" / "raised.txt", keep=1)
    assert type(plain) is InProcess
    plain.ask({0: b"raise", 1: b"x", 2: b"x"}, round=0)
    assert SECRET in (tmp_path / "log" / "raised.txt").read_text()
    assert len(plain._open) == 1
    with pytest.raises(Rule):
        Settings().engine(bench.setup, KEY, let_through=(Rule,)).ask({0: b"rule"}, round=0)
    faulty = Settings(faults=Faults(drop=1.0)).engine(bench.setup, KEY)
    assert type(faulty) is FaultyEngine
    assert faulty.ask({0: b"x"}, round=0)[0] == Fault("lost", "injected", True)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_client_in_a_process_of_ray_answers_as_in_this_one(tmp_path, one_thread_of_torch):
    """The cheapest of the tests in test_ray, for the fast suite. A child uses Ray, so that this process has no threads
    of Ray when later tests fork it.
    """
    folders = [tmp_path / name for name in ("ray", "here")]
    for folder in folders:
        folder.mkdir()
    asked = {2: test_ray.command("compute")}

    def ask() -> None:
        engine = RayEngine(test_ray.setups(folders[0]), actors=1, timeout_s=300.0, threads=torch.get_num_threads())
        try:
            answers = engine.ask(asked, round=0)
        finally:
            engine.close()
        assert answers.keys() == asked.keys()
        assert isinstance(answers[2], bytes), answers[2]
        (tmp_path / "answer").write_bytes(answers[2])

    assert in_child(ask) == 0
    answer = (tmp_path / "answer").read_bytes()
    assert {2: answer} == InProcess(test_ray.setups(folders[1])).ask(asked, round=0)
    assert decode(answer)[0]["value"].abs().sum() > 0


def test_a_process_that_has_loaded_ray_is_not_forked(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", object())
    with pytest.raises(AssertionError, match="a process without Ray"):
        in_child(lambda: None)
