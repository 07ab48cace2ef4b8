"""The config group `federation`: which engine runs the clients, and which faults are simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.federation.engines import Engine, InProcess, Setup
from dpgen_bench.federation.faults import Faults, FaultyEngine
from dpgen_bench.federation.ray_engine import RayEngine
from dpgen_bench.privacy.key import Key
from dpgen_bench.utils.validation import Count, Positive, check_types

RAY_FIELDS = ("address", "actors", "timeout_s")


@dataclass(frozen=True)
class Settings:
    """The settings of a federation.

    Attributes:
        name: the engine: "inproc" runs clients one after the other in this process, "ray" each in its own process.
        faults: the faults to simulate.
        dropout: the user's assumption about faults that are not simulated. "independent": whether a client fails to
            answer does not depend on its records. "unknown": no assumption, so that nothing is proven after one real
            fault.
        address, actors, timeout_s: arguments of `RayEngine`.

    Raises:
        ValueError: for a value of the wrong type or out of its range.
    """

    name: Literal["inproc", "ray"] = "inproc"
    faults: Faults = field(default_factory=Faults)
    dropout: Literal["independent", "unknown"] = "unknown"
    address: str | None = None
    actors: Count = 8
    timeout_s: Positive = 300.0

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "federation")

    def engine(
        self,
        setup: Callable[[int], Setup],
        key: Key,
        *,
        private_log: Path | None = None,
        let_through: tuple[type[BaseException], ...] = (),
        keep: int | None = None,
    ) -> Engine:
        """The engine that runs the clients.

        Args:
            setup: returns the setup of a client, given its number.
            key: the key of the randomness of simulated faults.
            private_log: a private file to which the traceback of every error of a client is appended.
            let_through: classes of errors of client code that are raised instead of being turned into faults.
            keep: the number of clients that `InProcess` keeps open; Ray keeps `actors` of them, independently of it.
        """
        engine: Engine
        if self.name == "ray":
            engine = RayEngine(
                setup,
                address=self.address,
                actors=self.actors,
                timeout_s=self.timeout_s,
                private_log=private_log,
                let_through=let_through,
            )
        else:
            engine = InProcess(setup, keep=keep, private_log=private_log, let_through=let_through)
        return FaultyEngine(engine, self.faults, key) if self.faults.any else engine


def settings(config: Mapping[str, Any]) -> Settings:
    """The settings in a config group `federation`; fields that it leaves out have their defaults.

    Raises:
        ValueError: for a field that is unknown or has no effect with this engine, and for a value of the wrong type or
            out of its range.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    values = dict(plain)
    _expect_fields(values, [entry.name for entry in fields(Settings)], "federation")
    if values.get("name", "inproc") == "inproc" and (unused := [name for name in RAY_FIELDS if name in values]):
        raise ValueError(
            f"federation.{unused[0]}: expected only with federation=ray, got it with clients in one process, where it "
            "has no effect; set federation=ray, or leave it out."
        )
    faults = values.pop("faults", {})
    if not isinstance(faults, Mapping):
        raise ValueError(f"federation.faults: expected a mapping such as {{drop: 0.1}}, got {faults!r}.")
    _expect_fields(faults, [entry.name for entry in fields(Faults)], "federation.faults")
    check_types(Faults, faults, "federation.faults")
    return Settings(faults=Faults(**faults), **values)


def _expect_fields(values: Mapping[str, Any], known: list[str], group: str) -> None:
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"{group}.{unknown[0]}: expected a field among {', '.join(known)}.")
