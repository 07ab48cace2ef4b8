"""What a table lacks: its missing runs, how long they will take by measured speed, and the multiruns that make them."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from dpgen_bench.results.listing import make_console
from dpgen_bench.results.store import RunFolder, Store
from dpgen_bench.results.trajectory import settled_steps
from dpgen_bench.specify import RunSpec
from dpgen_bench.tables.rows import jobs_of, lines_of, load_table, parent_ids, specify_job

# Settings that change how long a run takes by its number of steps alone, or not at all.
NO_MATTER = {"steps", "sigma", "name", "check", "lr", "lr_d", "lr_g", "betas", "clip_norm", "threshold", "beta", "ema"}


@dataclass(frozen=True)
class Job:
    """One run of a table. `words`: its overrides. `state`: finished, or what is missing of it."""

    words: tuple[str, ...]
    spec: RunSpec
    folder: RunFolder
    state: str

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def steps(self) -> int | None:
        """Steps of its training loop; None where the budget or the method sets them as it starts."""
        wanted = self.spec.config.method.get("steps")
        if not isinstance(wanted, int):
            return None
        cap = self.spec.config.scale.max_steps
        return wanted if cap is None else min(wanted, int(cap))


@dataclass(frozen=True)
class Estimate:
    """Seconds for training and measuring, None where nothing comparable was run; `basis`: what they are taken from."""

    train: float | None
    measure: float | None
    basis: str


def plan_sweep(table: DictConfig, results: Path, scale: str = "paper") -> list[Job]:
    """Every run of the table once, parents first, then in the order of its lines, each with its state."""
    parents = parent_ids(table, results, scale)
    extra = _kept_words(table, scale)
    store = Store(results)
    jobs: dict[tuple[str, str], Job] = {}
    of_parents = [f"{line} protocol={table.protocol}" for line in table.get("parents", {}).values()]
    if scale == "quick":
        of_parents = [f"{line} scale=quick" for line in of_parents]
    for number, line in enumerate([*of_parents, *lines_of(table, scale)]):
        for job in jobs_of(line, parents):
            words = [*job, *(extra if number >= len(of_parents) else [])]
            spec = specify_job(words, results)
            key = (spec.id, str(spec.protocol_record()))  # one run may be measured by two protocols
            jobs.setdefault(key, Job(tuple(words), spec, store.folder(spec.id), _state(spec, store.folder(spec.id))))
    return list(jobs.values())


def _kept_words(table: DictConfig, scale: str) -> list[str]:
    """The overrides that keep and measure generators along the way, for a table with `kept_steps`."""
    steps = (table.get("quick") or {}).get("kept_steps") if scale == "quick" else table.get("kept_steps")
    if not steps:
        return []
    return [f"runtime.keep_steps=[{','.join(str(step) for step in steps)}]", "runtime.measure_kept=true"]


def _state(spec: RunSpec, folder: RunFolder) -> str:
    if not folder.done:
        return "not run" if not folder.path.exists() else folder.status()
    if not folder.reports.covered(spec.protocol_record()):
        return "trained, not measured"
    return "finished" if settled_steps(spec, folder) else "kept steps not measured"


def boxes(jobs: Iterable[Sequence[str]]) -> list[list[str]]:
    """The jobs as few multirun lines, each of which makes every combination of its choices: exactly these, each once.

    Jobs of the same keys that differ in the values of one key become one line; so again with lines.
    """
    merged: list[dict[str, list[str]]] = [
        {key: [value] for key, value in (word.split("=", 1) for word in job)} for job in jobs
    ]
    again = True
    while again:
        again = False
        for i, one in enumerate(merged):
            for j in range(i + 1, len(merged)):
                other = merged[j]
                apart = [key for key in one if other.get(key) != one[key]]
                if list(one) == list(other) and len(apart) == 1 and not set(one[apart[0]]) & set(other[apart[0]]):
                    one[apart[0]] = one[apart[0]] + other[apart[0]]
                    del merged[j]
                    again = True
                    break
            if again:
                break
    return [[f"{key}={','.join(values)}" for key, values in box.items()] for box in merged]


def launch_sweeps(name: str, results: Path, overrides: list[str], scale: str = "paper") -> int:
    """Launch multiruns of exactly the runs that the table lacks, parents first; 0 if all end well, else 1.

    `overrides` go to every multirun (a launcher, a device).
    """
    table = load_table(name)
    jobs = plan_sweep(table, results, scale)
    missing = [job for job in jobs if not job.finished]
    print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs finished", flush=True)
    parents = set(parent_ids(table, results, scale).values())
    first = [job for job in missing if job.spec.id in parents]
    failed = False
    for group in (first, [job for job in missing if job.spec.id not in parents]):
        for words in boxes(job.words for job in group):
            command = [sys.executable, "-m", "dpgen_bench.cli", "run", "-m", *words, f"results={results}", *overrides]
            print(f"{name}: dpgen run -m {shlex.join(words)}", flush=True)
            failed |= subprocess.run(command).returncode != 0
    return int(failed)


def print_plan(name: str, results: Path, scale: str = "paper") -> None:
    """Print the runs that the table lacks, each with its steps and time by measured speed, and the multiruns."""
    table = load_table(name)
    jobs = plan_sweep(table, results, scale)
    missing = [job for job in jobs if not job.finished]
    console = make_console()
    console.print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs finished; {len(missing)} to make")
    shown = Table("run", "what", "state", "steps", "train", "measure", "time taken from")
    estimate = estimator(results)
    total, unknown = 0.0, 0
    for job in missing:
        found = estimate(job)
        total += (found.train or 0.0) + (found.measure or 0.0)
        unknown += (found.train is None) + (found.measure is None)
        steps = "?" if job.steps is None else f"{job.steps:,}"
        figures = [format_seconds(found.train), format_seconds(found.measure)]
        shown.add_row(job.spec.id, _title(job.spec), job.state, steps, *figures, found.basis)
    if missing:
        console.print(shown)
        rest = f", and {unknown} times (?) for which nothing comparable was run" if unknown else ""
        console.print(f"together {format_seconds(total)}, one run after the other{rest}")
        for words in boxes(job.words for job in missing):
            console.print(f"  dpgen run -m {shlex.join(words)}", highlight=False, soft_wrap=True, markup=False)


def estimator(results: Path) -> Callable[[Job], Estimate]:
    """How long a run will take, going by the finished ones under `results`, whatever machine they ran on.

    Training: seconds per step of the run of the same method whose settings are nearest (fewest differences; the median
    where several are equally near) times its steps; other loops, such as a warm start, as long as they took there.
    Measuring: the median of reports of the same protocol on the same data set.
    """
    runs = [
        (folder.config, folder.read_json("training.json"), folder) for folder in Store(results).runs() if folder.done
    ]
    return lambda job: _estimate(job, runs)


def _estimate(job: Job, runs: Sequence[tuple[DictConfig, dict[str, Any], RunFolder]]) -> Estimate:
    measure = _measuring(job, [folder for _, _, folder in runs])
    if job.state in ("trained, not measured", "kept steps not measured"):
        return Estimate(0.0, measure, "reports of this protocol")
    ours = job.spec.config
    near: dict[int, list[tuple[float, str]]] = {}
    for config, training, _ in runs:
        if config.method.get("_target_") != ours.method.get("_target_"):
            continue
        done = training.get("steps", {}).get("train")
        if not done or "seconds" not in training:
            continue
        differs = _differences(config, ours)
        per_step = training["seconds"]["train"] / done
        others = sum(training["seconds"].values()) - training["seconds"]["train"]
        seconds = per_step * (job.steps or done) + others + training.get("seconds_outside_loops", 0.0)
        basis = f"{training.get('device', '?')}, " + (f"other {', '.join(differs)}" if differs else "the same settings")
        near.setdefault(len(differs), []).append((seconds, basis))
    if not near:
        return Estimate(None, measure, "nothing comparable was run")
    nearest = near[min(near)]
    guess = "" if job.steps is not None else "; steps as there"
    return Estimate(median(seconds for seconds, _ in nearest), measure, nearest[0][1] + guess)


def _differences(one: DictConfig, other: DictConfig) -> list[str]:
    """Names of what two configs differ in and what matters to the time of a step."""
    keys = sorted((set(one.method) | set(other.method)) - NO_MATTER)
    found = [str(key) for key in keys if one.method.get(key) != other.method.get(key)]
    if one.dataset.get("name") != other.dataset.get("name"):
        found.append("dataset")
    if math.isinf(float(one.privacy.epsilon)) != math.isinf(float(other.privacy.epsilon)):
        found.append("privacy")
    return found


def _measuring(job: Job, folders: Sequence[RunFolder]) -> float | None:
    wanted, dataset = job.spec.protocol_record(), job.spec.config.dataset.name
    times = []
    for folder in folders:
        report = folder.reports.of(wanted)
        if report and folder.config.dataset.name == dataset:
            results = [result for repeat in report["repeats"] for result in repeat["metrics"].values()]
            times.append(sum(float(result.get("seconds", 0.0)) for result in results))
    return median(times) if times else None


def _title(spec: RunSpec) -> str:
    config = spec.config
    return f"{config.method.name} {config.dataset.name} ε={float(config.privacy.epsilon):g} seed {config.seed}"


def format_seconds(seconds: float | None) -> str:
    """`42 s`, `7 min`, `3.1 h`, `2.4 days`; `?` where it is not known."""
    if seconds is None:
        return "?"
    for limit, size, unit, digits in ((90, 1, "s", 0), (5400, 60, "min", 0), (172800, 3600, "h", 1)):
        if seconds < limit:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86400:.1f} days"
