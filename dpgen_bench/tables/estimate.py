"""How long runs will take, going by the finished ones; what is taken from runs of other work per step says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.runs.config import build_dataset
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.runs.validation import damage
from dpgen_bench.tables.jobs import Job

# Settings that leave the work of a step as it is. Whether there is noise is asked of sigma and the budget together.
NO_MATTER = {"steps", "sigma", "clip_norm", "name", "check", "lr", "lr_d", "lr_g", "lr_server", "lr_decay"} | {
    "decay_steps",
    "betas",
    "beta",
    "ema",
    "length_scale2",
}
UNKNOWN = "nothing comparable was run"


@dataclass(frozen=True)
class Estimate:
    """Seconds for training and measuring, None where nothing comparable was run.

    Args:
        basis: what the time of training is taken from.
        about: the steps there are other work, or their number is not known, so that it is an order of magnitude.
    """

    train: float | None
    measure: float | None
    basis: str
    about: bool = False


@dataclass(frozen=True)
class _Timed:
    """A finished run with its times: `others` are the seconds outside its training loop, which has `steps` steps."""

    folder: RunFolder
    config: DictConfig
    per_step: float
    others: float
    steps: int | None
    loops: int
    device: str


class Estimator:
    """How long a run will take, going by the finished ones under `results`, whatever machine they ran on.

    Training: seconds per step times the run's steps; other loops, such as a warm start, as long as they took there. The
    time is taken from runs of the same method on images of the same shape, both with or both without noise, nearest in
    their other settings (the median where several are equally near). Measuring: the median of reports of the same
    protocol on the same data set, once more for each kept step that is to be measured.

    Attributes:
        unused: finished runs that are damaged, or do not tell their times, each with why.
    """

    def __init__(self, results: Path) -> None:
        self.unused: dict[str, str] = {}
        self._runs: list[_Timed] = []
        for folder in Store(results).runs():
            if not folder.done:
                continue
            problem = damage(folder)
            timed = None if problem else _timed(folder)
            if timed is None:
                self.unused[folder.id] = problem or "it does not tell its times"
            else:
                self._runs.append(timed)

    def __call__(self, job: Job) -> Estimate:
        once = self._measuring(job)
        config = job.spec.config
        kept = len(config.runtime.keep_steps) if config.runtime.get("measure_kept", False) else 0
        if job.state == "kept steps not measured":
            return Estimate(0.0, None if once is None else kept * once, "reports of this protocol" if once else UNKNOWN)
        measure = None if once is None else (1 + kept) * once
        if job.state == "trained, not measured":
            return Estimate(0.0, measure, UNKNOWN if measure is None else "reports of this protocol")
        near: dict[tuple[int, tuple[str, ...], str], list[_Timed]] = {}
        for timed in self._runs:
            apart = _apart(timed, config)
            if apart is not None:
                near.setdefault((len(apart), tuple(apart), timed.device), []).append(timed)
        if not near:
            return Estimate(None, measure, UNKNOWN)
        _, differs, device = min(near)
        found = near[min(near)]
        seconds = median(timed.per_step * (job.steps or timed.steps or 0) + timed.others for timed in found)
        guessed = job.steps is None and found[0].steps is not None
        basis = f"{device}, " + (f"other {', '.join(differs)}" if differs else "the same settings")
        return Estimate(seconds, measure, basis + ("; steps as there" if guessed else ""), bool(differs) or guessed)

    def _measuring(self, job: Job) -> float | None:
        wanted, dataset = job.spec.protocol_record(), _data(job.spec.config)
        times = []
        for timed in self._runs:
            report = timed.folder.reports.of(wanted) if _data(timed.config) == dataset else {}
            results = [result for repeat in report.get("repeats", []) for result in repeat["metrics"].values()]
            seconds = [result.get("seconds", 0.0) for result in results]
            if results and all(map(_is_time, seconds)):
                times.append(sum(seconds))
        return median(times) if times else None


def _timed(folder: RunFolder) -> _Timed | None:
    """A sound run with its times; None where it does not tell them."""
    training = folder.read_json("training.json")
    seconds, steps = training.get("seconds"), training.get("steps", {}).get("train")
    outside = training.get("seconds_outside_loops", 0.0)
    if seconds is None or not all(map(_is_time, [*seconds.values(), outside])):
        return None
    if (steps is None) != ("train" not in seconds) or (steps is not None and steps < 1):
        return None
    others = sum(value for loop, value in seconds.items() if loop != "train") + outside
    per_step = seconds["train"] / steps if steps else 0.0
    return _Timed(folder, folder.config, per_step, others, steps, len(seconds), str(training.get("device", "?")))


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _apart(timed: _Timed, ours: DictConfig) -> list[str] | None:
    """What differs between two runs and changes the work of a step; None where one says nothing of the other."""
    theirs = timed.config
    if theirs.method.get("_target_") != ours.method.get("_target_") or has_noise(theirs) != has_noise(ours):
        return None
    if (timed.steps is None) != ("steps" not in ours.method):
        return None
    keys = sorted((set(theirs.method) | set(ours.method)) - NO_MATTER)
    found = [str(key) for key in keys if theirs.method.get(key) != ours.method.get(key)]
    if _data(theirs) != _data(ours):
        if _shape(theirs) is None or _shape(theirs) != _shape(ours):
            return None
        found.append("data set")
    if timed.loops > 1 and theirs.scale.get("max_steps") != ours.scale.get("max_steps"):
        found.append("scale")  # caps the other loops, too
    engines = [(config.get("federation") or {}).get("name", "inproc") for config in (theirs, ours)]
    return [*found, "federation"] if engines[0] != engines[1] else found


def has_noise(config: DictConfig) -> bool:
    """Whether records are clipped and noise is added, which takes most of the time of a private step.

    Methods do neither where the budget is infinite and sigma, from which they would calibrate, is null.
    """
    return math.isfinite(float(config.privacy.epsilon)) or config.method.get("sigma") is not None


def _data(config: DictConfig) -> dict[str, Any]:
    """Which records a run is of, wherever they lie."""
    tree = OmegaConf.to_container(config.dataset)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items() if key != "root"}


def _shape(config: DictConfig) -> tuple[int, ...] | None:
    """The shape of its images; None where this bench cannot tell any more."""
    try:
        return tuple(build_dataset(config).image_shape)
    except Exception:  # an old run may be of a data set, or a folder, that is gone
        return None


def format_seconds(seconds: float | None, about: bool = False) -> str:
    """`42 s`, `7 min`, `3.1 h`, `2.4 days`, with ≈ before it where it is `about`; `?` where it is not known."""
    if seconds is None:
        return "?"
    sign = "≈ " if about else ""
    for limit, size, unit, digits in ((90, 1, "s", 0), (5400, 60, "min", 0), (172800, 3600, "h", 1)):
        if seconds < limit:
            return f"{sign}{seconds / size:.{digits}f} {unit}"
    return f"{sign}{seconds / 86400:.1f} days"
