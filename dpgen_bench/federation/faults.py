"""Simulates faults of a federation: an engine that drops messages, so that they do not reach their clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpgen_bench.federation.engines import Engine, Fault
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.validation import Fraction, check_types

INJECTED = "injected"


@dataclass(frozen=True)
class Faults:
    """The faults to simulate.

    Attributes:
        drop: the probability that the message to one client in one round is lost.

    Raises:
        ValueError: for a probability outside [0, 1].
    """

    drop: Fraction = 0.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "federation.faults")

    @property
    def any(self) -> bool:
        """Whether any faults are simulated."""
        return self.drop > 0.0


class FaultyEngine:
    """Wraps another engine and drops messages on their way to the clients.

    Guarantees: whether a client's message is dropped in a round is a function of (key, round, client). It depends on
    no record, and it is the same with every engine and when a run is resumed.
    """

    def __init__(self, engine: Engine, faults: Faults, key: Key) -> None:
        self._engine, self._faults, self._key = engine, faults, key

    @property
    def parallel(self) -> int:
        return self._engine.parallel

    def ask(self, messages: Mapping[int, bytes], *, round: int) -> dict[int, bytes | Fault]:
        delivered = {client: message for client, message in messages.items() if not self.dropped(round, client)}
        answers = self._engine.ask(delivered, round=round) if delivered else {}
        lost = Fault("lost", INJECTED, injected=True)
        return {client: answers.get(client, lost) for client in sorted(messages)}

    def dropped(self, round: int, client: int) -> bool:
        """Whether the message to a client is dropped in a round. The answer is the same before and after the round."""
        if round < 0:
            return False
        return float(self._key.derive("fault", round, client).generator("coin").random()) < self._faults.drop

    def close(self) -> None:
        self._engine.close()
