"""One client: its records, its state, its noise. What it sees is the messages that it is sent; what it gives is bytes.

The server's side is `dpgen_bench.federation.client_mechanism`; what carries messages between the two is an engine.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from dpgen_bench.federation.engines import note_error
from dpgen_bench.federation.memory import Exhausted, Memory, Point
from dpgen_bench.federation.messages import Malformed, decode, encode
from dpgen_bench.privacy.bounds import Batch, Bound, PerRecord, PerRow, Whole, clip_rows
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.state import expect_parts, private_rng, public_randomness_untouched
from dpgen_bench.privacy.state_file import Parts, StateFile, StatePlace
from dpgen_bench.privacy.unseen import expect_plain
from dpgen_bench.utils.files import make_private

Records = tuple[Tensor, Tensor]
Answer = tuple[Tensor, Parts]
Seen = Callable[[int, int, dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]


class ClientProgram(Protocol):
    """What a method runs on each client: a picklable object that holds settings, and no record.

    Each message is answered by a fresh copy, so that nothing is kept from one to the next but the state. A program
    draws its randomness from the generator `rng` that it is given, and must not raise, whatever the records are.
    """

    def identity(self) -> dict[str, Any]:
        """What `start` depends on besides the records and the run's seed; JSON-able."""
        ...

    def start(self, records: Records, rng: torch.Generator) -> Parts:
        """The client's first state, float32 tensors by name; {} for a client that keeps nothing.

        Args:
            records: all of the client's, (images float32 [n, c, h, w] in [0, 1], labels int64 [n]), n >= 0.
        """
        ...

    def answer(self, message: Parts, records: Records, state: Parts, rng: torch.Generator) -> Answer:
        """(what the mechanism's bound expects, before it is clipped; the client's next state)."""
        ...


class Program:
    """Base class of a `ClientProgram` that is a dataclass of settings, and by default keeps nothing on a client."""

    def identity(self) -> dict[str, Any]:
        return _settings(self)

    def start(self, records: Records, rng: torch.Generator) -> Parts:
        return {}


def _settings(program: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, also of dataclasses in it.

    Not `asdict`, which copies what a field holds, and so would call code of the plugin from the harness.
    """
    values = {field.name: getattr(program, field.name) for field in fields(program)}
    return {name: _settings(value) if is_dataclass(value) else value for name, value in values.items()}


class BrokenProgram(TypeError):
    """A client program gives what no client program may give; it must be mended."""


@dataclass(frozen=True)
class ClientSetup:
    """All that a client is made of; it travels to where the client lives, and holds no other client's records.

    Args:
        mechanism: the name of the releases that it takes part in.
        client: its number.
        images, labels: its records, as `PrivateData` takes them.
        program: a pickled `ClientProgram`.
        bound: of an answer. PerRow or Whole: of the answer itself. PerRecord: of the row that it adds to a sum.
        std: of the noise that the client adds; 0.0 where the server adds it.
        key: the client's own.
        most_answers: k_max, different answers that it gives at most.
        keeps_state: whether it may; a client that is drawn in secret must not.
        place: where its state lies, and first states are shared by runs; in memory without a folder.
        diagnostics: a private file that gets norms before clipping, for debugging on public data.
        errors: a private file that gets the tracebacks of the program.
        strict: raise the program's errors, for the conformance suite.
        seen: is shown what an answer is made of, and says what is sent; for the conformance suite, in one process.
    """

    mechanism: str
    client: int
    images: Tensor
    labels: Tensor
    program: bytes
    bound: Bound
    std: float
    key: Key
    most_answers: int
    keeps_state: bool
    place: StatePlace
    device: torch.device
    diagnostics: Path | None = None
    errors: Path | None = None
    strict: bool = False
    seen: Seen | None = None

    def open(self) -> Client:
        return Client(self)


class Client:
    """A client at work; `dpgen_bench.federation.engines` carries messages to `handle`.

    Guarantees: an answer is clipped, what is not finite in it is zero, and noise is added before it is sent. Noise is
    keyed by all that the exact answer depends on but the records: the message, the round, and the history of questions
    that made the state. So the same noise is never added to two different answers, however a server asks again after a
    kill, or on purpose; and the same question, meeting the same state, gets the same answer. No more than
    `most_answers` questions are answered; they are counted on disk before the answers leave. A program that fails
    answers zeros, and nobody hears of it but the client. A client without records adds nothing to a sum.
    """

    def __init__(self, setup: ClientSetup) -> None:
        self._setup = setup
        own = f"client-{setup.client}"
        self._memory = Memory(setup.place.folder and setup.place.folder / own, setup.device, self._first_state)
        self._cache = setup.place.cache and setup.place.cache / self._cache_name()
        self._first = StateFile(self._cache, 1, slots=1)

    def handle(self, message: bytes) -> bytes:
        """The answer to one message of a `ClientMechanism`.

        Raises:
            Malformed: for a message that cannot be read.
        """
        tensors, header = decode(message)
        if header.get("kind") == "start":
            try:
                self._first_state()
            except Exception:
                self._failed(-1)
            return encode({})
        if header.get("kind") == "flush":
            self._memory.flush()
            return encode({})
        if not {"round", "committed"} <= header.keys():
            raise Malformed(f"expected a round and a committed round in the header, got {sorted(header)}.")
        round_, committed = int(header["round"]), int(header["committed"])
        point = self._memory.before(round_, committed) if self._setup.keeps_state else Point()
        # All that the exact answer depends on, but for the records: so no two different ones share a key.
        question = hashlib.sha256(encode(tensors, {"round": round_, "history": point.history})).hexdigest()
        try:
            self._memory.count(question, self._setup.most_answers)
        except Exhausted:
            return encode({}, {"refused": 1})
        exact, after = self._guarded(tensors, round_, point)
        key = self._setup.key.derive(self._setup.mechanism, round_, question)
        noisy = {"value": add_noise(exact["value"], self._setup.std, key)}
        if self._setup.seen is not None:
            noisy = self._setup.seen(round_, self._setup.client, exact, noisy)
        if self._setup.keeps_state:
            self._memory.leave(point, after, round_, committed, question)
        return encode({"value": noisy["value"].cpu()})

    def _guarded(self, message: Parts, round_: int, point: Point) -> tuple[Parts, Parts]:
        """The bounded answer and the next state; zeros, and the state as it was, if the program fails in any way.

        Whether a program fails may depend on the records, and an error that left the client would be an answer without
        noise. The client writes it into a private file of its own.
        """
        try:
            exact, after = self._compute(message, round_, point)
            if after and not self._setup.keeps_state:
                raise BrokenProgram(
                    f"expected the clients of {self._setup.mechanism!r} to leave no state, got {sorted(after)}: they "
                    "are drawn in secret, and what remembers past draws takes away what the secret gives."
                )
            if after:
                expect_parts(after)
            self._memory.check(after)
        except Exception:
            self._failed(round_)
            assert isinstance(self._setup.bound, PerRow | Whole | PerRecord)
            return {"value": torch.zeros(self._setup.bound.shape, device=self._setup.device)}, {}
        return exact, after

    def _failed(self, round_: int) -> None:
        """Note the error that is being handled; where the conformance suite looks on, raise it."""
        if self._setup.strict:
            raise
        note_error(self._setup.errors, round_, self._setup.client, traceback.format_exc())

    def _compute(self, message: Parts, round_: int, point: Point) -> tuple[Parts, Parts]:
        """The bounded answer without noise, {"value": ...}, and the state that it leaves."""
        setup, after = self._setup, Parts()
        assert isinstance(setup.bound, PerRow | Whole | PerRecord)
        shape = tuple(setup.bound.shape)
        program: ClientProgram = pickle.loads(setup.program)
        there = {name: tensor.to(setup.device) for name, tensor in message.items()}
        rng = private_rng(setup.key.derive(setup.mechanism, "round", round_))

        def answer(images: Tensor, labels: Tensor) -> Tensor:
            state = self._memory.state(point) if setup.keeps_state else {}
            with public_randomness_untouched("a client program"):
                given = program.answer(there, (images, labels), state, rng)
            if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], dict):
                raise BrokenProgram(f"expected answer() to return (a tensor, the next state), got {type(given)}.")
            value, left = given
            expect_plain(value, "the answer of a client program")
            if tuple(value.shape) != shape:
                raise BrokenProgram(f"expected an answer of the bound's shape {shape}, got {tuple(value.shape)}.")
            after.update(left)
            self._diagnose(round_, value)
            return value

        records = self._records()
        if isinstance(setup.bound, PerRow | Whole):
            exact = setup.bound.value(answer, records, None)
        else:
            row = clip_rows(answer(*records.inputs)[None], setup.bound.C)[0]
            exact = {"value": row if len(records) else torch.zeros_like(row)}
        return exact, after

    def _records(self) -> Batch:
        # Copies: what a program writes into them must not be there for the next message.
        images, labels = self._setup.images.clone(), self._setup.labels.clone()
        ids = torch.arange(len(labels), device=self._setup.device)  # of no use here: programs have rng instead
        return Batch(images.to(self._setup.device), labels.to(self._setup.device), ids, self._setup.key)

    def _identity(self) -> str:
        program: ClientProgram = pickle.loads(self._setup.program)
        own = {"client": self._setup.client, "program": type(program).__qualname__, **program.identity()}
        try:
            return json.dumps({"own": own, **self._setup.place.identity}, sort_keys=True)
        except TypeError as error:
            raise BrokenProgram(
                f"expected the identity of a client program to be JSON-able, so that others are told apart ({error})."
            ) from None

    def _cache_name(self) -> str:
        """What a first state depends on. Bits depend on the processor's threads, too; the records' hash is private."""
        digest = hashlib.sha256(f"{self._setup.device.type}:{torch.get_num_threads()}:{self._identity()}".encode())
        for part in (self._setup.images, self._setup.labels):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(np.ascontiguousarray(part.cpu().numpy()).tobytes())
        return digest.hexdigest()[:16]

    def _first_state(self) -> Parts:
        """The state before any answer: made once, or found where an earlier run has left it."""
        if not self._setup.keeps_state:
            return {}
        with self._lock():
            if self._first.layout is None:  # another process may have made it since
                self._first = StateFile(self._cache, 1, slots=1)
            if self._first.find(0, 1) is None:
                program: ClientProgram = pickle.loads(self._setup.program)
                rng = private_rng(Key.seeded(f"client state:{self._identity()}"))
                with public_randomness_untouched("`start` of a client program"):
                    parts = program.start(self._records().inputs, rng)
                if parts == {}:
                    return {}
                expect_parts(parts)
                self._first.write(0, 0, 1, parts)
                self._first.flush()
            return self._first.read(0, 0, self._setup.device)

    def _lock(self) -> AbstractContextManager[Any]:
        if self._cache is None:
            return nullcontext()
        make_private(self._cache)
        return FileLock(self._cache / "lock")

    def _diagnose(self, round_: int, unbounded: Tensor) -> None:
        if self._setup.diagnostics is None:
            return
        rows = unbounded.detach() if isinstance(self._setup.bound, PerRow) else unbounded.detach()[None]
        row = {
            "mechanism": self._setup.mechanism,
            "release": round_,
            "client": self._setup.client,
            "norms_before_clipping": [round(float(norm), 5) for norm in rows.flatten(1).norm(dim=1)],
        }
        self._setup.diagnostics.parent.mkdir(parents=True, exist_ok=True)
        with open(self._setup.diagnostics, "a") as out:
            out.write(json.dumps(row) + "\n")
