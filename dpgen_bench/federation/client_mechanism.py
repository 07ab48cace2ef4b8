"""The server's side of a release by clients: whom to ask in a round, what to send, and what to make of the answers."""

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
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.sampling import OneClient
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import GlobalRandomness
from dpgen_bench.privacy.uninterrupted import Uninterrupted
from dpgen_bench.privacy.unseen import public_type

NoiseAt = Literal["client", "server"]
REFUSED = "it has given all the answers that it may give"
SILENT_ROUNDS = 20  # at the start of a run, after which somebody must have answered


class ClientMechanism(Allowance):
    """`times` rounds, in each of which the clients that `sample` draws answer one message.

    Made by `ClientData.mechanism` after the budget was checked. Calling it with a message, tensors by name, makes a
    round:

    - noise at the client (`OneClient`): the answer of the one client that was asked, [R, ...] as the bound has it, or
      None if it gave none;
    - noise at the server: the sum of the clipped answers of all that were asked, plus noise N(0, std² I). It is
      released whether or not anybody answered.

    Guarantees: round number `times` + 1 raises. A client that does not answer, answers late or answers what cannot be
    read is left out, its round counts as a release all the same, and the fault is written to the run's private folder
    (in public too, where it is known who was asked). A fault that was not injected marks the ledger as unproven, unless
    the user vouches for it: whether a client drops out may depend on its records. Who is asked when is drawn before any
    answer, from randomness of its own.

    Attributes:
        groups: how many calls of `start` make the first states of all clients that will be asked.
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
        services.hand_out(self, _Control(self))

    @property
    def groups(self) -> int:
        return -(-len(self._needed) // self._parallel)

    @property
    def _parallel(self) -> int:
        return 1 if self._services.observer is not None else max(self._opened().parallel, 1)

    def start(self, number: int) -> None:
        """Make the first states of group `number` in 0..groups-1 of the clients; a client makes it later otherwise."""
        self._services.before_records()
        size = self._parallel
        group = self._needed[number * size : (number + 1) * size]
        sent = encode({}, {"kind": "start"})
        self._services.public.count(bytes_beside_rounds=len(group) * (len(sent) + len(encode({}))))
        with Uninterrupted():
            self._ask(dict.fromkeys(group, sent), round_=-1, public=True)

    def close(self) -> None:
        """Let go of the clients."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __call__(self, message: Mapping[str, Tensor]) -> Tensor | None:
        """One round; see the class.

        Raises:
            AllowanceExhausted: after `times` rounds.
            RuntimeError: outside `ctx.steps`; or if nobody at all answers.
        """
        index = self._executed
        if index >= self.times:
            raise AllowanceExhausted(
                f"mechanism {self.name!r} was approved for {self.times} rounds and has made them all; round "
                f"{index + 1} is refused. Ask for a larger `times` when the mechanism is created."
            )
        if not self._services.loop.inside:
            raise RuntimeError(
                f"mechanism {self.name!r} asks clients that may keep state, so its rounds must be made inside "
                "ctx.steps(...): only there can a killed run find the state that each of them had."
            )
        self._services.ledger.refuse_if_invalidated()
        self._services.before_records()
        with Uninterrupted():
            return self._round(index, message)

    def _round(self, index: int, message: Mapping[str, Tensor]) -> Tensor | None:
        self._executed = index + 1
        self._services.ledger.record(self.name, self._executed)
        asked = [int(client) for client in self._rounds[index]]
        header = {"round": index, "committed": self._committed}
        tensors = {name: tensor.detach().cpu() for name, tensor in message.items()}
        sent = encode(tensors, header)
        at_client = self._entry.noise_at == "client"
        self._count(len(asked), len(sent))
        answers = self._ask(dict.fromkeys(asked, sent), index, public=at_client)
        self._expect_life(index, len(answers))
        if at_client:
            return next(iter(answers.values())) if answers else None
        return self._noisy_sum(index, tensors, asked, answers)

    def _noisy_sum(
        self, index: int, message: Mapping[str, Tensor], asked: list[int], answers: dict[int, Tensor]
    ) -> Tensor:
        assert isinstance(self._bound, PerRecord)
        total = torch.zeros(self._bound.shape, dtype=torch.float64, device=self._services.device)
        # Clipped here again: what is proven rests on no client's word.
        rows = {
            client: clip_rows(row.to(self._services.device)[None], self._bound.C)[0] for client, row in answers.items()
        }
        for row in rows.values():
            total += row.double()
        if self._services.observer is not None:
            self._services.observer.answers(rows)
        # By all that the sum depends on: a round that is made again in another way has noise of its own. When the last
        # checkpoint was made is no part of that, or noise would depend on the clock: as if there were none.
        question = encode(message, {"round": index, "committed": 0})
        made_of = hashlib.sha256(question + total.cpu().numpy().tobytes()).hexdigest()
        exact = {"value": total}
        noisy = {"value": add_noise(total, self.std, self._key.derive("noise", index, made_of))}
        if self._services.observer is not None:
            noisy = self._services.observer.release(self, index, np.array(asked, np.int64), exact, noisy)
        return noisy["value"]

    def _ask(self, messages: dict[int, bytes], round_: int, public: bool) -> dict[int, Tensor]:
        """The answers that can be used, by client."""
        if not messages:
            return {}
        engine = self._opened()
        answers: dict[int, Tensor] = {}
        try:
            came = engine.ask(messages, round=round_)
        except (BrokenProgram, GlobalRandomness) as error:  # whether a program breaks may depend on records
            self._services.ledger.invalidate(
                f"a client program of {self.name!r} broke the rules ({public_type(error)})", error
            )
            raise
        for client, answer in came.items():
            if isinstance(answer, bytes) and round_ < 0:
                continue
            if isinstance(answer, bytes):
                if public:
                    self._services.public.count_bytes(client_to_server=len(answer))
                try:
                    tensors, _ = decode(answer, {"value": (torch.float32, self._shape)}, finite=True)
                    answers[client] = tensors["value"].to(self._services.device)
                    self._to_flush.add(client)
                    continue
                except Malformed as error:
                    answer = Fault("lost", REFUSED) if _is_refusal(answer) else Fault("malformed", str(error))
            self._note(round_, client, answer, public)
        return answers

    @property
    def _shape(self) -> tuple[int, ...]:
        assert isinstance(self._bound, PerRow | Whole | PerRecord)
        return self._bound.shape

    def _note(self, round_: int, client: int, fault: Fault, public: bool) -> None:
        """Write a fault down, and what it means for what is proven."""
        if self._services.client_folder is not None:
            self._services.client_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            row = {"mechanism": self.name, "round": round_, "client": client, **vars(fault)}
            with open(self._services.client_folder / "faults.jsonl", "a") as out:
                out.write(json.dumps(row) + "\n")
        if public:
            self._services.public.write(fault=fault.kind, client=client, round=round_)
        if fault.injected or fault.detail == REFUSED or (self._assume_independent_dropout and fault.kind != "raised"):
            return  # what a client has answered before is no matter of its records
        if fault.kind == "raised":
            self._services.ledger.fail(f"a client of {self.name!r} raised an error")
        else:
            self._services.ledger.mark_unproven(
                "a client did not answer, or not in time, or not in a form that could be read, and whether that "
                "depends on its records is not known (federation.dropout=independent vouches that it does not)"
            )

    def _expect_life(self, index: int, answers: int) -> None:
        self._answers += answers
        if self._answers:
            return
        asked = sum(len(clients) for clients in self._rounds[: index + 1])
        if index + 1 >= self._committed + SILENT_ROUNDS and asked >= SILENT_ROUNDS:
            raise RuntimeError(
                f"mechanism {self.name!r}: no client gave an answer that could be used in {index + 1} rounds; the "
                f"faults are in {self._services.client_folder}/faults.jsonl, and what clients raised beside it."
            )

    def _count(self, asked: int, size: int) -> None:
        """Bytes and clients of a round. Where draws are secret, the expected number of clients stands for theirs."""
        public = self._services.public
        if isinstance(self.event.sampling, OneClient):
            public.count(rounds=1, clients_asked=asked)
            public.count_bytes(server_to_client=asked * size)  # answers are counted as they come
            return
        expected = round(self.event.sampling.rate * self._clients)
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
    """The `Control` of a ClientMechanism: before a checkpoint, clients push their state to disk."""

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
    """Whether a client says that it has given all its answers."""
    try:
        return bool(decode(answer)[1].get("refused"))
    except Malformed:
        return False
