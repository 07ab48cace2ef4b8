"""The server's side of a release by clients: draws the clients of a round, asks them, and combines their answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.federation.client import BrokenProgram, ClientSetup
from dpgen_bench.federation.engines import Engine, Fault
from dpgen_bench.federation.messages import Malformed, decode, encode
from dpgen_bench.privacy.allowance import Allowance, AllowanceExhausted
from dpgen_bench.privacy.bounds import Bound, PerRecord, PerRow, Whole, clip_rows
from dpgen_bench.privacy.isolation import public_type
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import GlobalRandomness
from dpgen_bench.privacy.uninterrupted import Uninterrupted
from dpgen_bench.training.precision import private_computation

NoiseAt = Literal["client", "server"]
REFUSED = "it has given all the answers that it may give"
MAX_UNANSWERED = 20  # rounds at the start of a run without any answer, after which the run stops


class ClientMechanism(Allowance):
    """An allowance of `times` rounds. In each round, the clients that `sample` draws answer one message.

    `ClientData.mechanism` makes it after the budget was checked. A call with a message (tensors by name) makes a round
    and returns

    - with noise at the client (`OneClient`): the answer of the one client that was asked, of the shape of the bound, or
      None if that client gave no answer;
    - with noise at the server: the sum of the clipped answers of all clients that were asked, plus noise
      N(0, std² I). The sum is released even if no client answers.

    Guarantees:

    - Round number `times` + 1 raises an error.
    - A client that does not answer, answers late, or sends an answer that cannot be decoded is left out. The round
      counts as a release nevertheless. The fault is written to the run's private folder, and to the public log, too, if
      the draw of clients is public.
    - A fault that was not simulated marks the ledger as unproven, because whether a client drops out may depend on its
      records. Only the setting `federation.dropout=independent` states that it does not.
    - The clients of all rounds are drawn before any answer, with a key that is used for nothing else.
    """

    def __init__(
        self,
        entry: Entry,
        bound: Bound,
        services: Services,
        *,
        clients: int,
        open_engine: Callable[[Callable[[int], ClientSetup]], Engine],
        setup: Callable[[int], ClientSetup],
        assume_independent_dropout: bool,
    ) -> None:
        super().__init__(entry, bound)
        self._clients, self._services = clients, services
        self._open_engine, self._setup = open_engine, setup
        self._assume_independent_dropout = assume_independent_dropout
        self._key = services.key.derive(entry.name)
        self._rounds = list(entry.event.sampling.rounds(np.arange(clients), self._key.derive("rounds"), self.times))
        self._committed = 0
        self._engine: Engine | None = None
        self._to_flush: set[int] = set()
        self._answers = 0
        with_state = self._rounds if entry.noise_at == "client" else []
        self._needed = sorted({int(client) for clients in with_state for client in clients})
        services.register(self, _Control(self))

    @property
    def groups(self) -> int:
        """The number of groups of clients; `start` makes the first states of one group."""
        return -(-len(self._needed) // self._parallel)

    @property
    def _parallel(self) -> int:
        return 1 if self._services.observer is not None else max(self._opened().parallel, 1)

    def start(self, number: int) -> None:
        """Make the first states of group `number` (0 to groups - 1) of the clients.

        A client without a first state makes it at its first message, so these calls are optional.
        """
        self._services.before_records()
        size = self._parallel
        group = self._needed[number * size : (number + 1) * size]
        sent = encode({}, {"kind": "start"})
        self._services.public.count(bytes_beside_rounds=len(group) * (len(sent) + len(encode({}))))
        with Uninterrupted(), private_computation():
            self._ask(dict.fromkeys(group, sent), round_=-1, public=True)

    def close(self) -> None:
        """Close all clients."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __call__(self, message: Mapping[str, Tensor]) -> Tensor | None:
        """Make one round, as described for the class.

        Args:
            message: the tensors to send, by name.

        Raises:
            AllowanceExhausted: after `times` rounds.
            RuntimeError: outside `ctx.steps`, and if no client gives an answer at the start of a run.
            Invalidated: if a private function of the run has raised before.
            ValueError: if the run has a parent, from which the method has not started (`Context.warm_start`).
        """
        self._services.loop.expect_started()
        index = self._executed
        if index >= self.times:
            raise AllowanceExhausted(
                f"mechanism {self.name!r} was approved for {self.times} rounds and has made them all; round "
                f"{index + 1} is refused. Ask for a larger `times` when the mechanism is created."
            )
        if not self._services.loop.inside:
            raise RuntimeError(
                f"mechanism {self.name!r} asks clients that may keep state, so its rounds must be made inside "
                "ctx.steps(...): only there can a run that was killed restore the state of each client."
            )
        self._services.ledger.refuse_if_invalidated()
        self._services.before_records()
        with Uninterrupted(), private_computation():
            return self._round(index, message)

    def _round(self, index: int, message: Mapping[str, Tensor]) -> Tensor | None:
        """Round number `index`. It counts as executed before a client is asked, so a failed round counts, too."""
        self._executed = index + 1
        self._services.ledger.record_executed(self.name, self._executed)
        asked = [int(client) for client in self._rounds[index]]
        tensors = {name: tensor.detach().cpu() for name, tensor in message.items()}
        sent = encode(tensors, {"round": index, "committed": self._committed})
        at_client = self._entry.noise_at == "client"
        self._count(len(asked), len(sent))
        answers = self._ask(dict.fromkeys(asked, sent), index, public=at_client)
        self._expect_some_answer(index, len(answers))
        if at_client:
            return next(iter(answers.values())) if answers else None
        return self._noisy_sum(index, tensors, asked, answers)

    def _noisy_sum(
        self, index: int, message: Mapping[str, Tensor], asked: list[int], answers: dict[int, Tensor]
    ) -> Tensor:
        """The sum of the clipped answers of a round, with noise."""
        assert isinstance(self._bound, PerRecord)
        total = torch.zeros(self._bound.shape, dtype=torch.float64, device=self._services.device)
        # Clipped again by the server, so that the proof does not rely on clients that clip.
        rows = {
            client: clip_rows(row.to(self._services.device)[None], self._bound.C)[0] for client, row in answers.items()
        }
        for row in rows.values():
            total += row.double()
        if self._services.observer is not None:
            self._services.observer.answers(rows)
        # The noise is keyed by the message and the sum, so that a round that is repeated with another result has other
        # noise. The time of the last checkpoint must not matter, so "committed" is 0 in this key.
        question = encode(message, {"round": index, "committed": 0})
        digest = hashlib.sha256(question + total.cpu().numpy().tobytes()).hexdigest()
        exact = {"value": total}
        noisy = {"value": add_noise(total, self.std, self._key.derive("noise", index, digest))}
        if self._services.observer is not None:
            noisy = self._services.observer.release(self, index, np.array(asked, np.int64), exact, noisy)
        return noisy["value"]

    def _ask(self, messages: dict[int, bytes], round_: int, public: bool) -> dict[int, Tensor]:
        """Send messages; return the answers that can be used, by client, and record the faults of the other clients."""
        if not messages:
            return {}
        engine = self._opened()
        answers: dict[int, Tensor] = {}
        try:
            replies = engine.ask(messages, round=round_)
        except (BrokenProgram, GlobalRandomness) as error:  # whether this is raised may depend on records
            self._services.ledger.invalidate(
                f"a client program of {self.name!r} broke the rules ({public_type(error)})", error
            )
            raise
        except BaseException as error:
            # An Exception is of the engine. Others are of a client's code, because signals wait for the end of the
            # round, or of an observer.
            if not isinstance(error, Exception) and self._services.observer is None:
                self._services.ledger.invalidate(
                    f"a client program of {self.name!r} raised {public_type(error)}", error
                )
            raise
        for client, reply in replies.items():
            if isinstance(reply, Fault):
                self._record_fault(round_, client, reply, public)
                continue
            if round_ < 0:  # the reply to a message outside the rounds is empty
                continue
            if public:
                self._services.public.count_bytes(client_to_server=len(reply))
            try:
                tensors, _ = decode(reply, {"value": (torch.float32, self._shape)}, finite=True)
            except Malformed as error:
                fault = Fault("lost", REFUSED) if _is_refusal(reply) else Fault("malformed", str(error))
                self._record_fault(round_, client, fault, public)
                continue
            answers[client] = tensors["value"].to(self._services.device)
            self._to_flush.add(client)
        return answers

    @property
    def _shape(self) -> tuple[int, ...]:
        assert isinstance(self._bound, PerRow | Whole | PerRecord)
        return self._bound.shape

    def _record_fault(self, round_: int, client: int, fault: Fault, public: bool) -> None:
        """Write a fault to the logs, and mark the ledger if nothing is proven after this fault."""
        if self._services.client_folder is not None:
            self._services.client_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            row = {"mechanism": self.name, "round": round_, "client": client, **vars(fault)}
            with open(self._services.client_folder / "faults.jsonl", "a") as out:
                out.write(json.dumps(row) + "\n")
        if public:
            self._services.public.write(fault=fault.kind, client=client, round=round_)
        # Simulated faults and refusals do not depend on records: a refusal depends on the earlier questions alone.
        if fault.injected or fault.detail == REFUSED:
            return
        lost = "a client did not answer, or not in time, or not in a form that could be read"
        if fault.kind == "raised":
            self._services.ledger.record_failure(f"a client of {self.name!r} raised an error")
        elif self._assume_independent_dropout:  # the setting is no part of the run's id, so the ledger keeps it
            self._services.ledger.warn(
                f"{lost}: epsilon holds if this did not depend on its records, as federation.dropout=independent states"
            )
        else:
            self._services.ledger.mark_unproven(
                f"{lost}, and whether that depends on its records is not known (federation.dropout=independent states "
                "that it does not)"
            )

    def _expect_some_answer(self, index: int, answers: int) -> None:
        """Raise RuntimeError if no client has given any answer in the first rounds."""
        self._answers += answers
        if self._answers:
            return
        asked = sum(len(clients) for clients in self._rounds[: index + 1])
        if index + 1 >= self._committed + MAX_UNANSWERED and asked >= MAX_UNANSWERED:
            raise RuntimeError(
                f"mechanism {self.name!r}: expected answers from clients, got none that could be used in {index + 1} "
                f"rounds; read the faults in {self._services.client_folder}/faults.jsonl and the errors of clients "
                "next to it, and correct the cause."
            )

    def _count(self, asked: int, size: int) -> None:
        """Add the bytes and clients of a round to the public counters.

        If the draw of clients is secret, the expected number of clients is counted instead of the number asked.
        """
        public = self._services.public
        if isinstance(self._entry.event.sampling, OneClient):
            public.count(rounds=1, clients_asked=asked)
            public.count_bytes(server_to_client=asked * size)  # `_ask` counts the bytes of answers
            return
        expected = round(self._entry.event.sampling.rate * self._clients)
        public.count(rounds=1, clients_asked=expected)
        public.count_bytes(server_to_client=expected * size, client_to_server=expected * self._answer_size)

    @cached_property
    def _answer_size(self) -> int:
        return len(encode({"value": torch.zeros(self._shape)}))

    def _opened(self) -> Engine:
        if self._engine is None:
            self._engine = self._open_engine(self._setup)
        return self._engine


class _Control:
    """The `Control` of a ClientMechanism: before a checkpoint, clients write their state to disk."""

    def __init__(self, mechanism: ClientMechanism) -> None:
        self._mechanism = mechanism

    def resume_at(self, executed: int) -> None:
        self._mechanism._executed = self._mechanism._committed = executed

    def before_checkpoint(self) -> None:
        engine, clients = self._mechanism._engine, self._mechanism._to_flush
        if engine is not None and clients:
            engine.ask(dict.fromkeys(sorted(clients), encode({}, {"kind": "flush"})), round=-1)
        clients.clear()

    def after_checkpoint(self) -> None:
        self._mechanism._committed = self._mechanism._executed


def _is_refusal(answer: bytes) -> bool:
    """Whether a client refuses to answer because it has given all its answers."""
    try:
        return bool(decode(answer)[1].get("refused"))
    except Malformed:
        return False
