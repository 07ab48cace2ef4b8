"""Clients as Ray actors: one story of processes that die, sleep, raise and make room; each test reads a part of it.

The fast suite has one answer of one client, in test_engines.
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

# Not imported here: the engine is to do that first.
pytestmark = [
    pytest.mark.slow,  # Ray takes half a minute to start
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'dpgen-bench[ray]'"
    ),
]

SECRET = "record number 4711"
TIMEOUT_S = 6.0  # for a client that never answers; the others answer in far less


class Stop(SystemExit):
    """As a cluster's stop signal makes it."""


class Rule(TypeError):
    """An error that an engine is told to let through."""


@dataclass(frozen=True)
class ToySetup:
    client: int
    records: Tensor
    folder: Path

    def open(self) -> Toy:
        return Toy(self)


class Toy:
    """Counts its answers on disk, and does as it is told by the field `do` of a message."""

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
    """A convolution, a product of matrices and noise, as critics and mechanisms make them."""
    images = setup.records.float().view(-1, 1, 16, 16) / 255.0
    features = F.conv2d(images, weight, stride=2).flatten(1)
    return features @ features.T + Key.seeded("noise").derive(setup.client).normal((len(images), len(images)), 1.0)


def tensors_here(like: Tensor) -> list[Tensor]:
    found = [each for each in gc.get_objects() if type(each) is Tensor]
    return [each.flatten() for each in found if each.dtype == like.dtype and each.shape == like.shape]


def setups(folder: Path):
    def setup(client: int) -> ToySetup:
        records = torch.randint(256, (6, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(client))
        records[0, 0] = client  # by which they are told apart
        return ToySetup(client, records, folder)

    return setup


def tell(do: str, number: int = 0) -> bytes:
    weight = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(7))
    large = torch.arange(100_000.0 if do == "compute" else 1.0)  # Ray keeps what is above 100 kB elsewhere
    return encode({"weight": weight, "large": large}, {"do": do, "number": number})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill_when_it_works(setup: ToySetup) -> threading.Thread:
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
    """The engine that starts Ray, and what was different in this process afterwards."""
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
    told: dict = {"engine": engine}
    told["first"] = engine.ask({client: tell("report", 1) for client in (2, 0, 1)}, round=0)
    killer = kill_when_it_works(setup(1))
    told["killed"] = engine.ask({0: tell("report", 2), 1: tell("hang"), 2: tell("report", 2)}, round=1)
    killer.join()
    told["late"] = engine.ask({0: tell("hang"), 1: tell("report", 3)}, round=2)
    told["live before"] = set(engine._live)
    told["crowd"] = engine.ask({client: tell("report", 4) for client in range(4)}, round=3)
    told["live after"] = set(engine._live)
    told["computed"] = engine.ask({0: tell("compute"), 3: tell("compute")}, round=4)
    told["raised"] = engine.ask({0: tell("leave"), 3: tell("raise")}, round=5)
    told["live at last"] = set(engine._live)
    (other,) = told["live at last"]
    with pytest.raises(Rule) as told["rule"]:
        engine.ask({other: tell("rule")}, round=6)
    told["stopped"] = stopped_while(lambda: engine.ask({9: tell("report")}, round=7))
    told["live when stopped"] = set(engine._live)
    engine.close()
    told["ray"] = ray.is_initialized()
    processes = {
        decode(answer)[1]["pid"]
        for part in ("first", "late", "crowd")
        for answer in told[part].values()
        if isinstance(answer, bytes)
    }
    told["processes"], told["alive"] = len(processes), [pid for pid in processes if alive(pid)]
    return told


def fields(story: dict, part: str, client: int) -> dict:
    answer = story[part][client]
    assert isinstance(answer, bytes), answer
    return decode(answer)[1]


def test_starting_ray_leaves_this_process_as_it_was(started):
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


def test_a_late_answer_is_not_taken_for_a_later_one(story):
    assert story["late"][0] == Fault("late", "no answer within 6 s")
    after = fields(story, "crowd", 0)
    assert (after["count"], after["asked"]) == (3, 4), "the message that it was late for counts nothing"


def test_an_error_gives_its_type_alone_and_its_text_to_the_private_log(story, started, folder):
    assert story["raised"][3] == Fault("raised", "OSError")
    log = folder / "private" / "raised.txt"
    assert log.read_text().count(f"OSError: {SECRET}") == 1
    assert "round 5, client 3" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0
    logs = [path for path in started["logs"].rglob("*") if path.is_file()]
    assert len(logs) > 10
    assert not [path for path in logs if SECRET.encode() in path.read_bytes()], "nor do Ray's logs have it"
    assert not [path for path in logs if path.stat().st_mode & 0o077], "which are private as well"


def test_leaving_is_no_error_of_the_client(story):
    assert story["raised"][0] == Fault("lost", "the client's process left (SystemExit)")


def test_errors_of_given_classes_are_raised(story):
    assert type(story["rule"].value) is Rule
    assert str(story["rule"].value) == "what the rule is"


def test_a_stop_signal_ends_what_is_under_way(story):
    assert story["stopped"]
    assert story["live when stopped"] == set()


def test_more_clients_than_actors_take_turns(story):
    assert list(story["crowd"]) == [0, 1, 2, 3]
    assert [fields(story, "crowd", client)["asked"] for client in range(4)] == [4, 4, 4, 4]
    assert story["live before"] == {1, 2}
    assert {0, 3} <= story["live after"]
    assert len(story["live after"]) == 3
    assert story["live at last"] == story["live after"] - {0, 3}, "a fault ends the process"
    for client, part in ((1, "late"), (2, "first")):  # they keep the process that they had until they have answered
        assert fields(story, "crowd", client)["pid"] == fields(story, part, client)["pid"]


def test_answers_are_those_of_one_process_bit_by_bit(story, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        there = InProcess(setups(tmp_path)).ask({0: tell("compute"), 3: tell("compute")}, round=4)
    finally:
        torch.set_num_threads(before)
    for client in (0, 3):
        here, there_too = decode(story["computed"][client])[0], decode(there[client])[0]
        assert torch.equal(here["value"], there_too["value"])
        assert here["value"].abs().sum() > 0
        assert torch.equal(here["back"], 2 * torch.arange(100_000.0))


def test_closing_ends_the_clients_but_not_a_ray_that_others_use(story):
    assert story["processes"] == 6, "three at first, one after the kill, one after the late answer, one for client 3"
    assert story["alive"] == []
    assert story["ray"]
    with pytest.raises(RuntimeError, match="closed"):
        story["engine"].ask({0: tell("report")}, round=9)
    story["engine"].close()


@pytest.mark.parametrize(
    ("given", "said"),
    [({"actors": 0}, "actors"), ({"threads": 0}, "threads"), ({"timeout_s": float("nan")}, "seconds")],
)
def test_bad_arguments(given, said):
    with pytest.raises(ValueError, match=said):
        RayEngine(setups(Path()), **given)
