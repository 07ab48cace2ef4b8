"""`Settings`: the config group `federation`, where clients run and which faults happen to them."""

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

OF_RAY = ("address", "actors", "timeout_s")


@dataclass(frozen=True)
class Settings:
    """Where clients run, and what may happen to them.

    Attributes:
        name: "inproc", one after the other in this process, or "ray", each a process of its own.
        faults: injected ones, of a simulation.
        dropout: what the user vouches for about faults that are not injected. "independent": whether a client fails to
            answer does not depend on its records. "unknown": nothing, so that one real fault leaves nothing proven.
        address, actors, timeout_s: of `RayEngine`.

    Raises:
        ValueError: for a value that no federation can have.
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
        """What runs the clients.

        Args:
            setup: what client number i is made of.
            key: of the randomness of injected faults.
            private_log: a private file that gets the traceback of every error of a client.
            let_through: errors of client code that are raised here and not made into faults.
            keep: of `InProcess`; the actors of Ray are `actors`, whatever it says.
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
    """The settings of a config group `federation`; what it leaves out has its default.

    Raises:
        ValueError: for a field that is unknown, or of no effect with this engine, or a value that is out of its range.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
    given = dict(plain)
    _expect_fields(given, [entry.name for entry in fields(Settings)], "federation")
    if given.get("name", "inproc") == "inproc" and (idle := [name for name in OF_RAY if name in given]):
        raise ValueError(f"federation.{idle[0]}: of no effect in one process; take federation=ray, or leave it out.")
    faults = given.pop("faults", {})
    if not isinstance(faults, Mapping):
        raise ValueError(f"federation.faults: expected a mapping such as {{drop: 0.1}}, got {faults!r}.")
    _expect_fields(faults, [entry.name for entry in fields(Faults)], "federation.faults")
    check_types(Faults, faults, "federation.faults")
    return Settings(faults=Faults(**faults), **given)


def _expect_fields(given: Mapping[str, Any], known: list[str], where: str) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{where}.{unknown[0]}: expected a field among {', '.join(known)}.")
