"""Faults that are injected into a simulation of a federation: clients that drop out, answer late, or answer rubbish."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dpgen_bench.federation.engines import Engine, Fault, Kind
from dpgen_bench.federation.messages import Malformed, decode, encode
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.validation import Fraction, check_types

INJECTED = "injected"


@dataclass(frozen=True)
class Faults:
    """Probabilities of what happens to one client in one round; at most one of the three does.

    Attributes:
        drop: the message does not reach the client.
        late: the client does the work, and its answer comes too late.
        malformed: the answer comes damaged.

    Raises:
        ValueError: for a rate outside [0, 1], or rates above 1 together.
    """

    drop: Fraction = 0.0
    late: Fraction = 0.0
    malformed: Fraction = 0.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "federation.faults")
        if (total := self.drop + self.late + self.malformed) > 1.0 + 1e-9:  # 0.1 + 0.2 + 0.7 is 1
            raise ValueError(f"federation.faults: expected rates of 1 together at most, got {total:g}.")

    @property
    def any(self) -> bool:
        """Whether anything is injected at all."""
        return self.drop + self.late + self.malformed > 0.0


class FaultyEngine:
    """An engine between the server and another one, which injects faults.

    Guarantees: whether and how a client fails in a round is a function of (key, round, client), so it depends on no
    record, and is the same with every engine and when a run is resumed. A damaged answer is handed on as bytes: the
    server must find out by itself. A real fault is never hidden behind an injected one of an answer.
    """

    def __init__(self, engine: Engine, faults: Faults, key: Key) -> None:
        self._engine, self._faults, self._key = engine, faults, key

    @property
    def parallel(self) -> int:
        return self._engine.parallel

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        kinds = {client: self.injected(round, client) for client in sorted(messages)}
        reached = {client: message for client, message in messages.items() if kinds[client] != "lost"}
        answers = self._engine.ask(reached, round=round) if reached else {}
        return {client: self._change(answers.get(client), kind, round, client) for client, kind in kinds.items()}

    def _change(self, answer: bytes | Fault | None, kind: Kind | None, round: int, client: int) -> bytes | Fault:
        if answer is None:
            return Fault("lost", INJECTED, injected=True)
        if isinstance(answer, Fault) or kind is None:
            return answer
        if kind == "late":
            return Fault("late", INJECTED, injected=True)
        return damage(answer, self._key.derive("damage", round, client))

    def injected(self, round: int, client: int) -> Kind | None:
        if round < 0:
            return None
        coin = float(self._key.derive("fault", round, client).generator("coin").random())
        edge = 0.0
        kinds: tuple[tuple[Kind, float], ...] = (
            ("lost", self._faults.drop),
            ("late", self._faults.late),
            ("malformed", self._faults.malformed),
        )
        for kind, rate in kinds:
            edge += rate
            if coin < edge:
                return kind
        return None

    def close(self) -> None:
        self._engine.close()


def damage(answer: bytes, key: Key) -> bytes:
    """The answer, damaged in one of four ways by the key's coin: cut short, of another shape, with NaN, or rubbish.

    Where there is no tensor that could have another shape, or no floating-point number that could be NaN, it is cut
    short instead. `decode(..., expect, finite=True)` refuses all of them.
    """
    coins = key.generator("damage")
    way = int(coins.integers(4))
    try:
        tensors, header = decode(answer)
    except Malformed:
        tensors, header = {}, {}
    if way == 1 and tensors:
        name = min(tensors)
        flat = tensors[name].flatten()
        return encode({**tensors, name: torch.cat([flat, flat.new_zeros(1)])}, header)
    floats = sorted(name for name in tensors if tensors[name].is_floating_point() and tensors[name].numel())
    if way == 2 and floats:
        name = floats[int(coins.integers(len(floats)))]
        return encode({**tensors, name: torch.full_like(tensors[name], torch.nan)}, header)
    if way == 3 or not answer:
        return coins.bytes(max(len(answer), 16))
    return answer[: int(coins.integers(len(answer)))]
