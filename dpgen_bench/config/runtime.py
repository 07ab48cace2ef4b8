"""The settings `runtime.*` of a config: how a run is executed. All but `precision` are no part of its identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, cast

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.utils.execution import Backend, Precision
from dpgen_bench.utils.validation import Count, CountOrZero, Interval, check_types, suggestion


@dataclass(frozen=True)
class Runtime:
    """Types of the settings, whose meaning is in conf/config.yaml. Configs of older runs lack those with a default."""

    device: str
    threads: Count | None
    checkpoint_s: Annotated[float, Interval("[0, inf]")]
    keep_steps: Sequence[CountOrZero]
    progress: bool
    account_s: Annotated[float, Interval("(0, inf]")]
    measure_kept: bool = False
    failures_independent_of_records: bool = False
    workers: Count | None = None
    padded: bool | None = None
    stack: Count | None = None
    state_gib: Annotated[float, Interval("[0, inf)")] = 0.0
    processes: Count = 1
    precision: Precision = "fp32"
    compile: Backend = "none"


def precision_of(config: DictConfig) -> Precision:
    """`runtime.precision`, which configs of older runs lack."""
    return cast(Precision, config.runtime.get("precision", "fp32"))


def backend_of(config: DictConfig) -> Backend:
    """`runtime.compile`, which configs of older runs lack."""
    return cast(Backend, config.runtime.get("compile", "none"))


def state_gib_of(config: DictConfig) -> float:
    """`runtime.state_gib`, which configs of older runs lack."""
    return cast(float, config.runtime.get("state_gib", 0.0))


def number_of_processes(config: DictConfig) -> int:
    """`runtime.processes`, which configs of older runs lack; 1 also for a value that `check_runtime` refuses."""
    number = OmegaConf.select(config, "runtime.processes", default=1)
    return number if isinstance(number, int) and number >= 1 else 1


def check_runtime(config: DictConfig) -> None:
    """Check the settings `runtime.*` of a config.

    Raises:
        ValueError: for a setting that is unknown, missing or of another type than expected.
    """
    runtime = config.get("runtime")
    if not isinstance(runtime, DictConfig):
        raise ValueError(f"expected settings runtime.*, got runtime={runtime!r}; leave it out.")
    settings = OmegaConf.to_container(runtime)
    assert isinstance(settings, dict)
    known = {field.name: field for field in fields(Runtime)}
    for key in map(str, settings):
        if key not in known:
            raise ValueError(
                f"runtime.{key}: expected one of the settings {', '.join(known)}, got {key!r}{suggestion(key, known)}; "
                "correct the name."
            )
    for key, field in known.items():
        if field.default is MISSING and key not in settings:
            raise ValueError(f"expected a value of runtime.{key}, got none; leave ~runtime.{key} out.")
    check_types(Runtime, {str(key): value for key, value in settings.items()}, "runtime")
