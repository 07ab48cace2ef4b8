"""Messages, clients in one process, injected faults, and the settings that choose among them."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from dpgen_bench.federation.engines import Fault, InProcess
from dpgen_bench.federation.faults import Faults, FaultyEngine
from dpgen_bench.federation.messages import DTYPES, Malformed, decode, encode
from dpgen_bench.federation.ray_engine import RayEngine
from dpgen_bench.federation.settings import Settings, settings
from dpgen_bench.privacy.key import Key
from dpgen_bench.runs.config import compose_config
from dpgen_bench.training.signals import Preempted
from tests import test_ray

SECRET = "record number 4711"
KEY = Key.seeded("faults")


# Messages


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_what_is_encoded_comes_back(dtype, shape):
    tensors = {"b": (torch.rand(shape) * 2).to(dtype), "a": torch.arange(4)}
    header = {"round": -(2**70), "kind": "grüße\n", "n": 0}
    back, fields = decode(encode(tensors, header), {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})
    assert fields == header
    assert [type(fields[name]) for name in ("round", "kind")] == [int, str]
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())
    back["a"] += 1  # the caller's own
    assert torch.equal(tensors["a"], torch.arange(4))


def test_equal_messages_are_equal_bytes_however_they_were_made():
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"x": whole.T, "y": whole[1], "z": whole}  # not contiguous, and in shared memory
    copies = {name: views[name].contiguous().clone().requires_grad_() for name in "zyx"}
    assert encode(views, {"b": 1, "a": "2", "c": 3}) == encode(copies, {"c": 3, "a": "2", "b": 1})
    assert encode({}) == encode({}, {})
    assert decode(encode({})) == ({}, {})
    assert encode(views) != encode({**views, "x": whole.T + 1})


@pytest.mark.parametrize(
    ("tensors", "header", "said"),
    [
        ({"x": [1.0]}, {}, "expected a tensor"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, {}, "complex64"),
        ({"x": torch.eye(2).to_sparse()}, {}, "sparse"),
        ({"x": torch.zeros(2, device="meta")}, {}, "meta"),
        ({"__metadata__": torch.zeros(2)}, {}, "__metadata__"),
        ({}, {"x": 1.5}, "integers or words"),
        ({}, {"x": True}, "integers or words"),
        ({}, {1: 1}, "integers or words"),
    ],
)
def test_what_no_message_can_hold(tensors, header, said):
    with pytest.raises(ValueError, match=said):
        encode(tensors, header)


EXPECT = {"images": (torch.float32, (2, 3)), "labels": (torch.int64, (2,)), "held": (torch.bool, (3,))}


def message() -> bytes:
    tensors = {
        "images": torch.arange(6.0).reshape(2, 3),
        "labels": torch.tensor([1, 9]),
        "held": torch.tensor([True, False, True]),
    }
    return encode(tensors, {"round": 3, "kind": "answer"})


def expect_malformed_or_as_expected(data: object) -> bool:
    """Whether it was refused; anything but `Malformed` raises here."""
    try:
        tensors, header = decode(data, EXPECT, finite=True)
    except Malformed:
        return True
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == EXPECT
    assert tensors["images"].isfinite().all()
    assert tensors["held"].view(torch.uint8).max() <= 1
    assert all(type(value) in (int, str) for value in header.values())
    return False


def test_every_truncation_is_refused():
    whole = message()
    assert not expect_malformed_or_as_expected(whole)
    assert all(expect_malformed_or_as_expected(whole[:n]) for n in range(len(whole)))
    assert expect_malformed_or_as_expected(whole + b"\0")


@given(place=st.integers(0, len(message()) - 1), mask=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_no_more_than_a_value(place, mask):
    whole = bytearray(message())
    whole[place] ^= mask
    expect_malformed_or_as_expected(bytes(whole))


def test_a_flipped_bit_passes_only_in_a_value_or_a_word_of_the_header():
    whole = message()
    passed = set()
    for place in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        if not expect_malformed_or_as_expected(bytes(changed)):
            passed.add(place // 8)
    words = range(whole.index(b"kind"), whole.index(b'}"}'))
    values = range(len(whole) - (2 * 8 + 6 * 4 + 3), len(whole))
    assert set(values) <= passed <= {*words, *values}


@given(st.binary(max_size=300))
def test_rubbish_is_refused(data):
    assert expect_malformed_or_as_expected(data)
    assert expect_malformed_or_as_expected(len(data).to_bytes(8, "little") + data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)))
def test_a_header_of_other_values_is_refused(value):
    for text in (json.dumps({"a": value}), json.dumps(value), f"[{value}" * 3):
        if isinstance(value, str) and text.startswith("{"):
            continue
        with pytest.raises(Malformed):
            decode(save({}, {"header": text}))


def test_a_header_too_deep_for_the_parser_is_refused():
    with pytest.raises(Malformed):
        decode(save({}, {"header": "[" * 100_000}))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes"),
        (pickle.dumps({"value": 1}), "expected a whole message"),
        ("text", "got str"),
        (save({}), "metadata"),
        (encode({}), r"named \['held', 'images', 'labels'\], got \[\]"),
        (encode({**decode(message())[0], "more": torch.zeros(1)}), "more"),
        (
            encode({**decode(message())[0], "labels": torch.zeros(3, dtype=torch.int64)}),
            r"int64 \[2\], got int64 \[3\]",
        ),
        (encode({**decode(message())[0], "labels": torch.zeros(2)}), r"int64 \[2\], got float32 \[2\]"),
        (encode({**decode(message())[0], "images": torch.tensor([[1, 2, 3], [4, 5, torch.nan]])}), "1 of 6"),
        (encode({**decode(message())[0], "images": torch.full((2, 3), -torch.inf)}), "6 of 6"),
        (save({"x": torch.zeros(2, dtype=torch.complex64)}, {"header": "{}"}), r"named|complex64"),
    ],
)
def test_what_was_expected_and_what_came_is_said(data, said):
    with pytest.raises(Malformed, match=said):
        decode(data, EXPECT, finite=True)


def test_values_that_are_not_finite_pass_unless_refused():
    tensors = {"x": torch.tensor([torch.nan, torch.inf])}
    assert decode(encode(tensors))[0]["x"].isnan().tolist() == [True, False]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with pytest.raises(Malformed, match="finite"):
            decode(encode({"x": tensors["x"].to(dtype)}), finite=True)
    with pytest.raises(Malformed, match="complex64"):
        decode(save({"x": torch.zeros(2, dtype=torch.complex64)}, {"header": "{}"}))


# Clients in one process


@dataclass
class Toy:
    """Answers with what it was sent and how often it was asked since it was opened; `books` outlives it."""

    client: int
    books: list[tuple[int, str]]
    asked: int = 0

    def open(self) -> Toy:
        self.books.append((self.client, "opened"))
        return Toy(self.client, self.books)

    def handle(self, message: bytes) -> bytes:
        self.asked += 1
        self.books.append((self.client, message.decode()))
        errors = {"raise": OSError(SECRET), "stop": KeyboardInterrupt(), "preempt": Preempted(143), "rule": Rule()}
        if message.decode() in errors:
            raise errors[message.decode()]
        if message == b"none":
            return None  # type: ignore[return-value]
        return encode({"value": torch.full((2, 3), float(self.client))}, {"asked": self.asked})


class Rule(AssertionError):
    """Such as the conformance suite raises."""


@dataclass
class Bench:
    books: list[tuple[int, str]] = field(default_factory=list)

    def setup(self, client: int) -> Toy:
        return Toy(client, self.books)

    def opened(self) -> list[int]:
        return [client for client, what in self.books if what == "opened"]

    def got(self) -> list[tuple[int, str]]:
        return [entry for entry in self.books if entry[1] != "opened"]


def asked(answer: bytes | Fault) -> int:
    assert isinstance(answer, bytes), answer
    return int(decode(answer)[1]["asked"])


def test_clients_are_opened_when_they_are_asked_and_stay_open():
    bench = Bench()
    engine = InProcess(bench.setup)
    assert bench.books == []
    assert list(engine.ask({5: b"a", 2: b"b"}, round=0)) == [2, 5]
    assert bench.books == [(2, "opened"), (2, "b"), (5, "opened"), (5, "a")]
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


def test_an_error_of_a_client_gives_its_type_alone_and_opens_it_afresh(tmp_path):
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
def test_what_the_operator_raises_is_not_caught(message, error):
    bench = Bench()
    engine = InProcess(bench.setup)
    with pytest.raises(error):
        engine.ask({0: message.encode(), 1: b"x"}, round=0)
    assert engine._open == {}, "nobody knows in which state its client is"


def test_errors_of_given_classes_are_let_through():
    bench = Bench()
    assert InProcess(bench.setup).ask({0: b"rule"}, round=0)[0] == Fault("raised", "Rule")
    with pytest.raises(Rule):
        InProcess(bench.setup, let_through=(AssertionError,)).ask({0: b"rule"}, round=0)


def test_an_error_of_the_harness_is_no_fault_of_a_client():
    def setup(client: int) -> Toy:
        raise LookupError("no such client")

    with pytest.raises(LookupError):
        InProcess(setup).ask({0: b"x"}, round=0)


def test_ray_is_asked_for_only_where_clients_are_to_run_on_it(monkeypatch):
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


def test_without_rates_an_engine_is_the_one_below():
    plain, bench = Bench(), Bench()
    engine = FaultyEngine(InProcess(bench.setup), Faults(), KEY)
    messages = {3: b"x", 1: b"raise", 2: b"y"}
    assert engine.ask(messages, round=4) == InProcess(plain.setup).ask(messages, round=4)
    assert engine.parallel == 1
    assert not any(engine.dropped(round_, client) for round_ in range(20) for client in range(20))


def test_faults_come_at_their_rate_independently_of_rounds_and_clients():
    engine = FaultyEngine(InProcess(Bench().setup), Faults(0.2), KEY)
    lost = [[engine.dropped(round_, client) for client in range(60)] for round_ in range(60)]
    assert abs(sum(map(sum, lost)) - 3600 * 0.2) < 5 * (3600 * 0.2 * 0.8) ** 0.5
    both = sum(row[i] and row[i + 1] for row in lost for i in range(0, 60, 2))
    assert abs(both - 1800 * 0.04) < 5 * (1800 * 0.04 * 0.96) ** 0.5
    again = sum(lost[i][c] and lost[i + 1][c] for i in range(0, 60, 2) for c in range(60))
    assert abs(again - 1800 * 0.04) < 5 * (1800 * 0.04 * 0.96) ** 0.5


def test_the_coins_are_the_same_for_good():
    """Golden: other coins would be other runs under the same id."""
    engine = FaultyEngine(InProcess(Bench().setup), Faults(0.25), KEY)
    assert [round_ for round_ in range(8) if engine.dropped(round_, 7)] == [2, 4]


def test_a_lost_message_reaches_nobody():
    bench = Bench()
    engine = FaultyEngine(InProcess(bench.setup), Faults(drop=0.5), KEY)
    answers = engine.ask(dict.fromkeys(range(40), b"x"), round=1)
    assert list(answers) == list(range(40))
    lost = [client for client in range(40) if engine.dropped(1, client)]
    assert [client for client in answers if answers[client] == Fault("lost", "injected", injected=True)] == lost
    assert 0 < len(lost) < 40
    assert bench.got() == [(client, "x") for client in range(40) if client not in lost]


def test_all_are_lost_at_rate_one_and_none_beside_the_rounds():
    bench = Bench()
    engine = FaultyEngine(InProcess(bench.setup), Faults(drop=1.0), KEY)
    assert set(engine.ask({0: b"x", 1: b"x"}, round=0).values()) == {Fault("lost", "injected", True)}
    assert bench.books == []
    assert asked(engine.ask({0: b"x"}, round=-1)[0]) == 1
    assert not engine.dropped(-1, 0)


def test_a_fault_depends_on_nobody_else_and_comes_again_on_resume():
    engines = [FaultyEngine(InProcess(Bench().setup), Faults(0.6), KEY) for _ in range(2)]
    whole = engines[0].ask(dict.fromkeys(range(30), b"x"), round=2)
    alone = {client: engines[1].ask({client: b"x"}, round=2)[client] for client in reversed(range(30))}
    assert alone == whole
    assert 5 < sum(isinstance(answer, bytes) for answer in whole.values()) < 25


def test_an_answer_that_was_damaged_is_always_refused():
    """Cut short, of another shape, with NaN, or rubbish of the same length."""
    rng = np.random.default_rng(0)
    for tensor in (torch.zeros(2, 3), torch.arange(3), torch.zeros(0)):
        answer = encode({"value": tensor}, {"asked": 1})
        damaged = [answer[:n] for n in range(len(answer))] + [rng.bytes(len(answer)) for _ in range(50)]
        damaged.append(encode({"value": torch.cat([tensor.flatten(), tensor.new_zeros(1)])}, {"asked": 1}))
        if tensor.is_floating_point() and tensor.numel():
            damaged.append(encode({"value": torch.full_like(tensor, torch.nan)}, {"asked": 1}))
        decode(answer, {"value": (tensor.dtype, tuple(tensor.shape))}, finite=True)
        for each in damaged:
            with pytest.raises(Malformed):
                decode(each, {"value": (tensor.dtype, tuple(tensor.shape))}, finite=True)


def test_a_real_fault_is_not_hidden():
    engine = FaultyEngine(InProcess(Bench().setup), Faults(drop=0.5), KEY)
    real = engine.ask(dict.fromkeys(range(20), b"raise"), round=0)
    assert set(real.values()) == {Fault("raised", "OSError"), Fault("lost", "injected", injected=True)}


# Settings


def test_the_configs_are_settings():
    assert settings(compose_config([]).federation) == settings({}) == Settings()
    ray = settings(compose_config(["federation=ray", "federation.actors=3", "federation.faults.drop=0.25"]).federation)
    assert ray == Settings("ray", Faults(drop=0.25), "unknown", None, 3, 300.0)
    assert settings(compose_config(["federation.dropout=independent"]).federation).dropout == "independent"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "threads"}, "federation.name: expected 'inproc' or 'ray'"),
        ({"dropout": "never"}, "federation.dropout"),
        ({"faults": {"drop": "often"}}, "federation.faults.drop: expected a number"),
        ({"faults": {"drop": 1.5}}, "federation.faults.drop"),
        ({"faults": {"lost": 0.5}}, "federation.faults.lost: expected a field among drop"),
        ({"faults": 0.5}, "federation.faults: expected a mapping such as"),
        ({"actor": 3, "name": "ray"}, "federation.actor: expected a field among"),
        ({"actors": 3}, "federation.actors: of no effect"),
        ({"name": "ray", "actors": 0}, "federation.actors"),
        ({"name": "ray", "actors": 2.5}, "federation.actors: expected an integer"),
        ({"name": "ray", "timeout_s": 0}, "federation.timeout_s"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with pytest.raises(ValueError, match=said):
        settings(given)


def test_the_engine_of_the_settings(tmp_path):
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
def test_a_client_in_a_process_of_ray_answers_as_in_this_one(tmp_path):
    """The cheapest of what test_ray has, for the fast suite."""
    folders = [tmp_path / name for name in ("ray", "here")]
    for folder in folders:
        folder.mkdir()
    there = RayEngine(test_ray.setups(folders[0]), actors=1, timeout_s=300.0, threads=torch.get_num_threads())
    here = InProcess(test_ray.setups(folders[1]))
    asked = {2: test_ray.tell("compute")}
    try:
        answers = there.ask(asked, round=0)
    finally:
        there.close()
    assert isinstance(answers[2], bytes), answers[2]
    assert answers == here.ask(asked, round=0)
    assert decode(answers[2])[0]["value"].abs().sum() > 0
