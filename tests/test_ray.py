"""Tests clients that are Ray actors. One fixture records a sequence of events; each test checks a part of it.

The events are processes that die, sleep, raise errors and are replaced. The fast suite has one test, in test_engines.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpgen_bench.federation.engines import Fault, InProcess
from dpgen_bench.federation.messages import decode, encode
from dpgen_bench.federation.ray_engine import RayEngine
from dpgen_bench.privacy.key import Key

# Ray is not imported here, because the engine has to import it first.
pytestmark = [
    pytest.mark.slow,  # Ray takes half a minute to start
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'dpgen-bench[ray]'"
    ),
]

SECRET = "record number 4711"
TIMEOUT_S = 6.0  # for a client that never answers; the others answer in far less


class Stop(SystemExit):
    """An error such as the handler of a cluster's stop signal raises."""


class Rule(TypeError):
    """An error of a class that the engine lets through."""


@dataclass(frozen=True)
class ToySetup:
    client: int
    records: Tensor
    folder: Path

    def open(self) -> Toy:
        return Toy(self)


class Toy:
    """Counts its answers on disk. The field `do` of a message says what it does."""

    def __init__(self, setup: ToySetup) -> None:
        self.setup = setup
        self.count = setup.folder / f"count-{setup.client}"

    def handle(self, message: bytes) -> bytes:
        tensors, header = decode(message)
        do = header["do"]
        if do == "raise":
            raise OSError(SECRET)
        if do == "rule":
            raise Rule("what the rule is")
        if do == "leave":
            raise SystemExit(SECRET)
        if do == "hang":
            (self.setup.folder / f"hangs-{self.setup.client}.tmp").write_text(str(os.getpid()))
            (self.setup.folder / f"hangs-{self.setup.client}.tmp").rename(self.hangs(self.setup))
            time.sleep(600.0)
        count = 1 + (int(self.count.read_text()) if self.count.exists() else 0)
        self.count.write_text(str(count))
        if do == "compute":
            value = compute(tensors["weight"], self.setup)
            return encode({"value": value, "back": 2 * tensors["large"]}, {"count": count})
        held = sorted({int(each[0]) for each in tensors_here(self.setup.records)})
        return encode(
            {"held": torch.tensor(held)},
            {"count": count, "pid": os.getpid(), "threads": torch.get_num_threads(), "asked": header["number"]},
        )

    @staticmethod
    def hangs(setup: ToySetup) -> Path:
        return setup.folder / f"hangs-{setup.client}"


def compute(weight: Tensor, setup: ToySetup) -> Tensor:
    """A convolution, a product of matrices and noise, as in critics and mechanisms."""
    images = setup.records.float().view(-1, 1, 16, 16) / 255.0
    features = F.conv2d(images, weight, stride=2).flatten(1)
    return features @ features.T + Key.seeded("noise").derive(setup.client).normal((len(images), len(images)), 1.0)


def tensors_here(like: Tensor) -> list[Tensor]:
    found = [each for each in gc.get_objects() if type(each) is Tensor]
    return [each.flatten() for each in found if each.dtype == like.dtype and each.shape == like.shape]


def setups(folder: Path):
    def setup(client: int) -> ToySetup:
        records = torch.randint(256, (6, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(client))
        records[0, 0] = client  # identifies the records of a client
        return ToySetup(client, records, folder)

    return setup


def command(do: str, number: int = 0) -> bytes:
    weight = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(7))
    large = torch.arange(100_000.0 if do == "compute" else 1.0)  # Ray keeps what is above 100 kB elsewhere
    return encode({"weight": weight, "large": large}, {"do": do, "number": number})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill_while_it_hangs(setup: ToySetup) -> threading.Thread:
    def kill() -> None:
        deadline = time.monotonic() + 120.0
        while not Toy.hangs(setup).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(int(Toy.hangs(setup).read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def stopped_while(work: Callable[[], object]) -> bool:
    """Whether a signal whose handler raises gets through while `work` waits."""

    def stop(number: int, frame: object) -> None:
        raise Stop(number)

    before = signal.signal(signal.SIGUSR2, stop)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        work()
    except Stop:
        return True
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="module")
def started() -> dict:
    """Starts Ray with an engine; records what has changed in this process."""
    environment, handler, state, mask = dict(os.environ), signal.getsignal(signal.SIGTERM), random.getstate(), _mask()
    owner = RayEngine(setups(Path()))
    changed = [
        name
        for name, same in {
            "environment": environment.items() - dict(os.environ).items() == set(),
            "SIGTERM": signal.getsignal(signal.SIGTERM) is handler,
            "random": random.getstate() == state,
            "umask": _mask() == mask,
        }.items()
        if not same
    ]
    import ray

    address = ray.util.get_node_ip_address()
    logs = Path(ray._private.worker._global_node.get_session_dir_path())
    yield {"changed": changed, "address": address, "logs": logs}
    owner.close()
    assert not ray.is_initialized(), "the engine that started Ray stops it"


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.fixture(scope="module")
def story(started, folder) -> dict:
    import ray

    setup = setups(folder)
    engine = RayEngine(
        setup,
        actors=3,
        timeout_s=TIMEOUT_S,
        threads=2,
        private_log=folder / "private" / "raised.txt",
        let_through=(Rule,),
    )
    events: dict = {"engine": engine}
    events["first"] = engine.ask({client: command("report", 1) for client in (2, 0, 1)}, round=0)
    killer = kill_while_it_hangs(setup(1))
    events["killed"] = engine.ask({0: command("report", 2), 1: command("hang"), 2: command("report", 2)}, round=1)
    killer.join()
    events["late"] = engine.ask({0: command("hang"), 1: command("report", 3)}, round=2)
    events["live before"] = set(engine._live)
    events["crowd"] = engine.ask({client: command("report", 4) for client in range(4)}, round=3)
    events["live after"] = set(engine._live)
    events["computed"] = engine.ask({0: command("compute"), 3: command("compute")}, round=4)
    events["raised"] = engine.ask({0: command("leave"), 3: command("raise")}, round=5)
    events["live at last"] = set(engine._live)
    (other,) = events["live at last"]
    with pytest.raises(Rule) as events["rule"]:
        engine.ask({other: command("rule")}, round=6)
    events["stopped"] = stopped_while(lambda: engine.ask({9: command("report")}, round=7))
    events["live when stopped"] = set(engine._live)
    engine.close()
    events["ray"] = ray.is_initialized()
    processes = {
        decode(answer)[1]["pid"]
        for part in ("first", "late", "crowd")
        for answer in events[part].values()
        if isinstance(answer, bytes)
    }
    events["processes"], events["alive"] = len(processes), [pid for pid in processes if alive(pid)]
    return events


def fields(story: dict, part: str, client: int) -> dict:
    answer = story[part][client]
    assert isinstance(answer, bytes), answer
    return decode(answer)[1]


def test_starting_ray_does_not_change_this_process(started):
    assert started["changed"] == []
    assert started["address"] == "127.0.0.1"


def test_each_client_is_a_process_with_its_own_records_and_the_threads_asked_for(story):
    assert list(story["first"]) == [0, 1, 2], "ascending"
    processes = [fields(story, "first", client)["pid"] for client in range(3)]
    assert len({os.getpid(), *processes}) == 4
    for client in range(3):
        assert decode(story["first"][client])[0]["held"].tolist() == [client]
        assert fields(story, "first", client)["threads"] == 2


def test_a_process_killed_in_the_middle_of_a_message_is_lost_and_the_others_answer(story):
    lost = story["killed"][1]
    assert lost == Fault("lost", lost.detail)
    assert "died" in lost.detail
    assert [fields(story, "killed", client)["asked"] for client in (0, 2)] == [2, 2]


def test_the_next_message_starts_a_new_process_that_finds_its_state(story):
    before, after = fields(story, "first", 1), fields(story, "late", 1)
    assert after["pid"] != before["pid"]
    assert (before["count"], after["count"], after["asked"]) == (1, 2, 3)


def test_a_late_answer_is_not_taken_for_an_answer_to_a_later_message(story):
    assert story["late"][0] == Fault("late", "no answer within 6 s")
    after = fields(story, "crowd", 0)
    assert (after["count"], after["asked"]) == (3, 4), "the message without an answer was not counted"


def test_an_error_gives_its_type_and_writes_its_text_to_the_private_log(story, started, folder):
    assert story["raised"][3] == Fault("raised", "OSError")
    log = folder / "private" / "raised.txt"
    assert log.read_text().count(f"OSError: {SECRET}") == 1
    assert "round 5, client 3" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    logs = [path for path in started["logs"].rglob("*") if path.is_file()]
    assert len(logs) > 10
    assert not [path for path in logs if SECRET.encode() in path.read_bytes()], "nor do Ray's logs have it"
    assert not [path for path in logs if path.stat().st_mode & 0o077], "which are private as well"


def test_an_exit_is_not_an_error_of_the_client(story):
    assert story["raised"][0] == Fault("lost", "the client's process left (SystemExit)")


def test_errors_of_listed_classes_are_raised(story):
    assert type(story["rule"].value) is Rule
    assert str(story["rule"].value) == "what the rule is"


def test_a_stop_signal_ends_messages_under_way(story):
    assert story["stopped"]
    assert story["live when stopped"] == set()


def test_more_clients_than_actors_are_asked_in_parts(story):
    assert list(story["crowd"]) == [0, 1, 2, 3]
    assert [fields(story, "crowd", client)["asked"] for client in range(4)] == [4, 4, 4, 4]
    assert story["live before"] == {1, 2}
    assert {0, 3} <= story["live after"]
    assert len(story["live after"]) == 3
    assert story["live at last"] == story["live after"] - {0, 3}, "a fault ends the process"
    for client, part in ((1, "late"), (2, "first")):  # a process is kept until its client has answered
        assert fields(story, "crowd", client)["pid"] == fields(story, part, client)["pid"]


def test_answers_are_bit_identical_to_those_in_one_process(story, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        in_process = InProcess(setups(tmp_path)).ask({0: command("compute"), 3: command("compute")}, round=4)
    finally:
        torch.set_num_threads(before)
    for client in (0, 3):
        by_ray, expected = decode(story["computed"][client])[0], decode(in_process[client])[0]
        assert torch.equal(by_ray["value"], expected["value"])
        assert by_ray["value"].abs().sum() > 0
        assert torch.equal(by_ray["back"], 2 * torch.arange(100_000.0))


def test_closing_ends_the_clients_but_not_a_ray_of_another_engine(story):
    assert story["processes"] == 6, "three at first, one after the kill, one after the late answer, one for client 3"
    assert story["alive"] == []
    assert story["ray"]
    with pytest.raises(RuntimeError, match="closed"):
        story["engine"].ask({0: command("report")}, round=9)
    story["engine"].close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"actors": 0}, "actors"), ({"threads": 0}, "threads"), ({"timeout_s": float("nan")}, "seconds")],
)
def test_bad_arguments_are_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        RayEngine(setups(Path()), **arguments)
