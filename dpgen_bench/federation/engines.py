"""Engines, which run the clients of a federation: an engine takes a message to each client and returns its answer.

The code of the server (`client_mechanism`) and of the clients (`client`) is the same with every engine. A client sees
its `Setup` and the bytes of the messages that are sent to it, and it returns bytes.
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
    """A client that is open.

    An engine may drop it between any two messages, alone or with its process and without notice, and open the client
    again from its `Setup`. Everything that must survive this is in files when `handle` returns (or, if all clients run
    in one process, in an object that the `Setup` refers to).
    """

    def handle(self, message: bytes) -> bytes:
        """Answer a message."""
        ...


class Setup(Protocol):
    """Everything that one client consists of: its records, its key, its program, and the place of its state.

    A setup can be pickled. Pickling a view of a tensor pickles the whole tensor, so the records of a client must be
    copies and not views of all records.
    """

    def open(self) -> Handler:
        """Open the client."""
        ...


@dataclass(frozen=True)
class Fault:
    """The reason why a client gave no answer that can be used.

    Attributes:
        kind: "lost": the message or the answer did not arrive, for example because the client's process died. "late":
            the answer did not arrive within the time limit. "raised": the client's code raised an error. "malformed":
            the answer could not be decoded or is not what was expected; the server finds this, never an engine.
        detail: a description. For "raised" it is the name of the error's type alone, because the error's text may
            contain private data.
        injected: whether the fault was simulated, with randomness that is independent of the records.
    """

    kind: Kind
    detail: str = ""
    injected: bool = False


class Engine(Protocol):
    """Runs the clients of a federation.

    Attributes:
        parallel: the number of clients that run at the same time.
    """

    @property
    def parallel(self) -> int: ...

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        """Send each client its message, all in one batch, and wait for the answers.

        Args:
            messages: the messages by client number.
            round: the number of the round, >= 0. A negative number marks messages outside the rounds (to prepare
                clients, or to save their state), into which no fault is injected.

        Returns:
            an answer or a fault for each client, in ascending order of clients.

        Guarantees: an answer belongs to this message, never to an earlier one.
        """
        ...

    def close(self) -> None:
        """Close all clients. Closing an engine twice has no effect."""
        ...


class InProcess:
    """Runs all clients in this process, one after the other.

    A client is opened at its first message. Errors of its code become faults; KeyboardInterrupt and SystemExit
    (including `Preempted`), which come from the operator, are raised. A client whose code raised an error is dropped,
    and is opened again at its next message.

    Args:
        setup: returns the setup of a client, given its number.
        keep: the number of clients that are kept open, which are those used last. None keeps all clients open, which is
            needed where their state is in memory alone. A limit bounds the number of open files, because a client may
            keep memory-mapped files open.
        private_log: a private file to which the traceback of every error of a client is appended.
        let_through: classes of errors that are raised instead of being turned into faults, such as those of the
            conformance suite.

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
        self._open: OrderedDict[int, Handler] = OrderedDict()  # ordered from the least to the most recently used

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        return {client: self._ask_one(client, messages[client], round) for client in sorted(messages)}

    def _ask_one(self, client: int, message: bytes, round: int) -> bytes | Fault:
        setup = None if client in self._open else self._setup(client)
        if setup is not None:
            while self._keep is not None and len(self._open) >= self._keep:
                self._open.popitem(last=False)
        try:
            handler = self._open.pop(client) if setup is None else setup.open()
            answer = checked_answer(handler, message)
        except self._let_through:
            raise
        except Exception as error:
            note_error(self._private_log, round, client, traceback.format_exc())
            return Fault("raised", type(error).__name__)
        self._open[client] = handler  # a client whose code raised is not kept
        return answer

    def close(self) -> None:
        self._open.clear()


def checked_answer(handler: Handler, message: bytes) -> bytes:
    """The answer of a client to a message.

    Raises:
        TypeError: if the answer is not bytes.
    """
    answer = handler.handle(message)
    if not isinstance(answer, bytes):
        raise TypeError(f"expected a client to answer in bytes, got {type(answer).__name__}.")
    return answer


def note_error(private_log: Path | None, round: int, client: int, trace: str) -> None:
    """Append the traceback of a client's error to a file that only its owner can read; None writes nothing."""
    if private_log is None:
        return
    append_private(private_log, f"round {round}, client {client}\n{trace}\n")
