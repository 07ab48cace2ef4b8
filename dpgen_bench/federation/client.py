"""The client's side of a release: a client runs a method's program on its own records and adds noise to the answer.

A client sees the messages that the server sends to it, and returns bytes. The server's side is
`dpgen_bench.federation.client_mechanism`. An engine (`dpgen_bench.federation.engines`) carries messages between the
two.
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
from dpgen_bench.privacy.isolation import expect_plain
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.state import expect_parts, private_rng, public_randomness_untouched
from dpgen_bench.privacy.state_file import Parts, StateFile, StatePlace
from dpgen_bench.utils.files import make_private

Records = tuple[Tensor, Tensor]
Answer = tuple[Tensor, Parts]
Observe = Callable[[int, int, dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]


class ClientProgram(Protocol):
    """The code that a method runs on each client: a picklable object with settings and without records.

    A new copy of the program answers each message, so only the state is kept from one message to the next. A program
    uses only the given `rng` for randomness, and never raises, for any records.
    """

    def identity(self) -> dict[str, Any]:
        """Everything that `start` depends on apart from the records and the run's seed, as JSON values."""
        ...

    def start(self, records: Records, rng: torch.Generator) -> Parts:
        """The client's first state.

        Args:
            records: all records of the client: images, float32 [n, c, h, w] in [0, 1], and labels, int64 [n]; n >= 0.
            rng: the generator for all randomness of this call.

        Returns:
            float32 tensors by name; {} for a client without state.
        """
        ...

    def answer(self, message: Parts, records: Records, state: Parts, rng: torch.Generator) -> Answer:
        """The answer to a message, before it is clipped, and the client's next state.

        Args:
            message: the tensors that the server sent, by name.
            records: as for `start`.
            state: the state after the previous answer; {} for a client without state.
            rng: the generator for all randomness of this call.

        Returns:
            a tensor of the shape of the mechanism's bound, and the next state (float32 tensors by name, or {}).
        """
        ...


class Program:
    """Base class for a `ClientProgram` that is a dataclass of settings; by default, its clients have no state."""

    def identity(self) -> dict[str, Any]:
        """The settings."""
        return _settings(self)

    def start(self, records: Records, rng: torch.Generator) -> Parts:
        """No state."""
        return {}


def _settings(program: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, also those of dataclasses that are its fields.

    `dataclasses.asdict` is not used because it copies the values of the fields, which would call the plugin's code.
    """
    values = {field.name: getattr(program, field.name) for field in fields(program)}
    return {name: _settings(value) if is_dataclass(value) else value for name, value in values.items()}


class BrokenProgram(TypeError):
    """Raised for a client program that breaks the rules for client programs, and must be corrected."""


@dataclass(frozen=True)
class ClientSetup:
    """Everything that a client consists of, and nothing of other clients. An engine sends it to the client's process.

    Attributes:
        mechanism: the name of the mechanism that the client takes part in.
        client: the client's number.
        images, labels: the client's records, in the form that `PrivateData` takes.
        program: a pickled `ClientProgram`.
        bound: the bound on an answer. PerRow and Whole bound the answer itself; PerRecord bounds the row that it adds
            to a sum.
        std: standard deviation of the noise that the client adds; 0.0 if the server adds the noise.
        key: the client's own key.
        max_answers: k_max, the largest number of different answers that the client gives.
        keeps_state: whether the client may have state. It must not if the draw of clients is secret.
        place: where the state is stored, and where runs share first states; without a folder the state is in memory.
        device: the device that the program runs on.
        diagnostics: a private file for norms before clipping, for debugging on public data.
        errors: a private file for the tracebacks of the program.
        strict: whether errors of the program are raised, as the conformance suite needs.
        observe: a callback of the conformance suite, in one process. It is called with (round, client, exact value,
            noisy value) and returns the value that is sent.
    """

    mechanism: str
    client: int
    images: Tensor
    labels: Tensor
    program: bytes
    bound: Bound
    std: float
    key: Key
    max_answers: int
    keeps_state: bool
    place: StatePlace
    device: torch.device
    diagnostics: Path | None = None
    errors: Path | None = None
    strict: bool = False
    observe: Observe | None = None

    def open(self) -> Client:
        """Open the client."""
        return Client(self)


class Client:
    """A client that is open; an engine carries messages to `handle`.

    Guarantees:

    - An answer is clipped, its non-finite values are replaced by zero, and noise is added before the answer is sent.
    - Noise is keyed by everything that the exact answer depends on apart from the records: the message, the round, and
      the history of the questions that led to the state. So the same noise is never added to two different answers,
      also if the server asks again after it was killed, or on purpose; and the same question to the same state has the
      same answer.
    - At most `max_answers` different questions are answered. Each is counted on disk before its answer is sent.
    - The answer of a program that fails is zero, and only the client knows that the program failed.
    - A client without records adds nothing to a sum.
    """

    def __init__(self, setup: ClientSetup) -> None:
        self._setup = setup
        folder = setup.place.folder and setup.place.folder / f"client-{setup.client}"
        self._memory = Memory(folder, setup.device, self._first_state)
        self._cache = setup.place.cache and setup.place.cache / self._cache_name()
        self._first = StateFile(self._cache, 1, slots=1)

    def handle(self, message: bytes) -> bytes:
        """Answer one message of a `ClientMechanism`.

        The header of a message is {"kind": "start"}, which makes the first state; {"kind": "flush"}, which writes all
        states to disk; or {"round", "committed"}, for a message of a round, where "committed" is the number of rounds
        that the server's last checkpoint contains.

        Raises:
            Malformed: for a message that cannot be decoded, and for another header.
        """
        tensors, header = decode(message)
        if header.get("kind") == "start":
            try:
                self._first_state()
            except BaseException:  # as in `_answer_or_zeros`
                self._note_failure(-1)
            return encode({})
        if header.get("kind") == "flush":
            self._memory.flush()
            return encode({})
        if not {"round", "committed"} <= header.keys():
            raise Malformed(f"expected a round and a committed round in the header, got {sorted(header)}.")
        round_, committed = int(header["round"]), int(header["committed"])
        point = self._memory.before(round_, committed) if self._setup.keeps_state else Point()
        # The question is everything that the exact answer depends on apart from the records, so two different answers
        # never have the same key. It is counted before any record is used.
        question = hashlib.sha256(encode(tensors, {"round": round_, "history": point.history})).hexdigest()
        try:
            self._memory.count(question, self._setup.max_answers)
        except Exhausted:
            return encode({}, {"refused": 1})
        exact, after = self._answer_or_zeros(tensors, round_, point)
        key = self._setup.key.derive(self._setup.mechanism, round_, question)
        noisy = {"value": add_noise(exact["value"], self._setup.std, key)}
        if self._setup.observe is not None:
            noisy = self._setup.observe(round_, self._setup.client, exact, noisy)
        if self._setup.keeps_state:
            self._memory.store(point, after, round_, committed, question)
        return encode({"value": noisy["value"].cpu()})

    def _answer_or_zeros(self, message: Parts, round_: int, point: Point) -> tuple[Parts, Parts]:
        """The bounded answer and the next state; zeros and an unchanged state if the program fails in any way.

        Whether a program fails may depend on the records, so an error that became known outside the client would be an
        answer without noise. This is also so if the program ends its process (`sys.exit`); the operator's stop signals
        wait for the end of the round. The client writes the error to its own private file.
        """
        try:
            exact, after = self._compute(message, round_, point)
            if after and not self._setup.keeps_state:
                raise BrokenProgram(
                    f"expected the clients of {self._setup.mechanism!r} to return no state, got {sorted(after)}: the "
                    "draw of clients is secret, and amplification by a secret draw does not hold for clients that "
                    "remember earlier draws. Return {} as the next state, or add the noise at the client."
                )
            if after:
                expect_parts(after)
            self._memory.check(after)
        except BaseException:
            self._note_failure(round_)
            assert isinstance(self._setup.bound, PerRow | Whole | PerRecord)
            return {"value": torch.zeros(self._setup.bound.shape, device=self._setup.device)}, {}
        return exact, after

    def _note_failure(self, round_: int) -> None:
        """Write the error that is being handled to the private file; for the conformance suite, raise it."""
        if self._setup.strict:
            raise
        note_error(self._setup.errors, round_, self._setup.client, traceback.format_exc())

    def _compute(self, message: Parts, round_: int, point: Point) -> tuple[Parts, Parts]:
        """The bounded answer without noise, {"value": tensor}, and the next state."""
        setup, after = self._setup, Parts()
        assert isinstance(setup.bound, PerRow | Whole | PerRecord)
        shape = tuple(setup.bound.shape)
        program: ClientProgram = pickle.loads(setup.program)
        tensors = {name: tensor.to(setup.device) for name, tensor in message.items()}
        rng = private_rng(setup.key.derive(setup.mechanism, "round", round_))

        def answer(images: Tensor, labels: Tensor) -> Tensor:
            state = self._memory.state(point) if setup.keeps_state else {}
            with public_randomness_untouched("a client program"):
                returned = program.answer(tensors, (images, labels), state, rng)
            if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
                raise BrokenProgram(f"expected answer() to return (a tensor, the next state), got {type(returned)}.")
            value, next_state = returned
            expect_plain(value, "the answer of a client program")
            if tuple(value.shape) != shape:
                raise BrokenProgram(f"expected an answer of the bound's shape {shape}, got {tuple(value.shape)}.")
            after.update(next_state)
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
        # Copies, because a program may write into them, and the next message must see the original records.
        images, labels = self._setup.images.clone(), self._setup.labels.clone()
        ids = torch.arange(len(labels), device=self._setup.device)  # unused: programs have rng instead
        return Batch(images.to(self._setup.device), labels.to(self._setup.device), ids, self._setup.key)

    def _identity(self) -> str:
        program: ClientProgram = pickle.loads(self._setup.program)
        own = {"client": self._setup.client, "program": type(program).__qualname__, **program.identity()}
        try:
            return json.dumps({"own": own, **self._setup.place.identity}, sort_keys=True)
        except TypeError as error:
            raise BrokenProgram(
                f"expected the identity of a client program as JSON values, which identify its first states, got "
                f"values that cannot be written as JSON ({error}); return numbers, strings, lists and dictionaries."
            ) from None

    def _cache_name(self) -> str:
        """A hash of everything that a first state depends on, also of the records; the name is therefore private.

        The device and the number of threads are part of it, because the last bits of sums depend on them.
        """
        digest = hashlib.sha256(f"{self._setup.device.type}:{torch.get_num_threads()}:{self._identity()}".encode())
        for part in (self._setup.images, self._setup.labels):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(np.ascontiguousarray(part.cpu().numpy()).tobytes())
        return digest.hexdigest()[:16]

    def _first_state(self) -> Parts:
        """The state before the first answer: read from the cache if an earlier run has made it, else computed."""
        if not self._setup.keeps_state:
            return {}
        with self._lock():
            if self._first.layout is None:  # another process may have made it meanwhile
                self._first = StateFile(self._cache, 1, slots=1)
            state = self._first.read(0, 1, self._setup.device)
            if state is None:
                program: ClientProgram = pickle.loads(self._setup.program)
                rng = private_rng(Key.seeded(f"client state:{self._identity()}"))
                with public_randomness_untouched("`start` of a client program"):
                    parts = program.start(self._records().inputs, rng)
                if parts == {}:
                    return {}
                expect_parts(parts)
                self._first.write(0, 0, 1, parts)
                self._first.flush()
                state = self._first.read(0, 1, self._setup.device)
                assert state is not None
            return state

    def _lock(self) -> AbstractContextManager[Any]:
        if self._cache is None:
            return nullcontext()
        make_private(self._cache)
        return FileLock(self._cache / "lock")

    def _diagnose(self, round_: int, unbounded: Tensor) -> None:
        """Append the norms of an answer before clipping to the private file of diagnostics, if there is one."""
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
