"""Engines: where the code of clients runs. An engine carries a message to each client, and its answer back.

The code of the server (`client_mechanism`) and of the clients (`client`) is the same
with every engine. Client code gets the bytes that it is sent and what its `Setup` holds, and gives bytes.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dpgen_bench.utils.files import append_private

Kind = Literal["lost", "late", "raised", "malformed"]


class Handler(Protocol):
    """A client at work.

    It may be dropped between any two messages, in its process or with it, without a word, and opened afresh by its
    `Setup`. What must survive that is, when `handle` returns, in files (or, in one process, in an object that the
    `Setup` refers to).
    """

    def handle(self, message: bytes) -> bytes:
        """The answer to a message."""
        ...


class Setup(Protocol):
    """What one client is made of: its records, its key, its program, the place of its state.

    It can be pickled. Mind that a tensor that is a view of another one takes all of that one along: the records of a
    client are tensors of their own.
    """

    def open(self) -> Handler: ...


@dataclass(frozen=True)
class Fault:
    """Why a client gave no answer that can be used.

    Attributes:
        kind: "lost": the message or the answer never came, as when the client's process died. "late": it was not
            waited for any longer. "raised": the client's code raised an error. "malformed": the answer is not what was
            expected; found by whoever decodes it, never by an engine.
        detail: in words; of "raised" the name of the error's type alone, since its text may hold private data.
        injected: whether a simulation made it, with randomness that is independent of the records.
    """

    kind: Kind
    detail: str = ""
    injected: bool = False


class Engine(Protocol):
    """Where clients run.

    Attributes:
        parallel: how many clients work at the same time.
    """

    @property
    def parallel(self) -> int: ...

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        """Each client its message, all at once; an answer or a fault of each, in ascending order of clients.

        Args:
            messages: by client number.
            round: its number, 0 or more. Below 0: none, but messages beside the rounds (to prepare, to save), in which
                no fault is injected.

        Guarantees: an answer is one to this message, never to an earlier one.
        """
        ...

    def close(self) -> None:
        """Let go of all clients. A second time changes nothing."""
        ...


class InProcess:
    """All clients in this process, one after the other.

    A client is opened at its first message. Its errors become faults; those of the operator (KeyboardInterrupt,
    SystemExit, and with it `Preempted`) do not. A client whose code raised is dropped and opened afresh at its next
    message.

    Args:
        setup: what client number i is made of.
        keep: how many clients are kept open, those used last; None keeps all, as clients need that have their state in
            memory alone. Open files count: a client that maps some keeps them open.
        private_log: a private file that gets the traceback of every error of a client.
        let_through: errors that are raised here instead, such as those of the conformance suite.

    Raises:
        ValueError: for `keep` below 1.
    """

    parallel = 1

    def __init__(
        self,
        setup: Callable[[int], Setup],
        *,
        keep: int | None = None,
        private_log: Path | None = None,
        let_through: tuple[type[BaseException], ...] = (),
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"expected a number of clients to keep open >= 1, or None for all, got {keep!r}.")
        self._setup, self._keep = setup, keep
        self._private_log, self._let_through = private_log, let_through
        self._open: OrderedDict[int, Handler] = OrderedDict()  # the one used last at the end

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        return {client: self._ask_one(client, messages[client], round) for client in sorted(messages)}

    def _ask_one(self, client: int, message: bytes, round: int) -> bytes | Fault:
        setup = None if client in self._open else self._setup(client)
        if setup is not None:
            while self._keep is not None and len(self._open) >= self._keep:
                self._open.popitem(last=False)
        try:
            handler = self._open.pop(client) if setup is None else setup.open()
            answer = answered(handler, message)
        except self._let_through:
            raise
        except Exception as error:
            note_error(self._private_log, round, client, traceback.format_exc())
            return Fault("raised", type(error).__name__)
        self._open[client] = handler  # back again only now that it has answered
        return answer

    def injected(self, round: int, client: int) -> Kind | None:
        return None

    def close(self) -> None:
        self._open.clear()


def answered(handler: Handler, message: bytes) -> bytes:
    """The handler's answer.

    Raises:
        TypeError: if it is not bytes.
    """
    answer = handler.handle(message)
    if not isinstance(answer, bytes):
        raise TypeError(f"expected a client to answer in bytes, got {type(answer).__name__}.")
    return answer


def note_error(private_log: Path | None, round: int, client: int, trace: str) -> None:
    """Append the traceback of a client's error to a file that its owner alone can read; None writes nothing."""
    if private_log is None:
        return
    append_private(private_log, f"round {round}, client {client}\n{trace}\n")
