"""What a table lacks: its missing runs, and the multiruns that make them."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.table import Table

from dpgen_bench.privacy.events import budget_text
from dpgen_bench.runs.config import RunSpec, build_spec, compose_config
from dpgen_bench.runs.listing import make_console
from dpgen_bench.runs.overrides import parse_override, quote_value
from dpgen_bench.tables.jobs import Job, plan_sweep
from dpgen_bench.tables.rows import load_table
from dpgen_bench.training.signals import STOP_SIGNALS

# Of overrides for a whole sweep: what may say how runs are made. Everything else says which.
HOW = ("runtime", "hydra", "federation", "data_root")
OF_THE_SWEEP = ("hydra/sweeper", "hydra.sweeper", "hydra.mode")  # with these, Hydra would choose the runs


def multiruns(jobs: Iterable[Job], results: Path, overrides: Sequence[str]) -> list[list[str]]:
    """Arguments of `dpgen run` for the multiruns that make these jobs: one for each line of the table that lacks some.

    `dpgen run` skips the finished runs of a line. Jobs that other jobs restart from come first, as in `plan_sweep`.
    """
    lines = dict.fromkeys(job.line for job in jobs if not (job.finished or job.damaged))
    return [["-m", *line, *_place(results), *overrides] for line in lines]


def _place(results: Path) -> list[str]:
    """The override that says where runs go, unless that is where they go in any case."""
    default = "DPGEN_RESULTS" not in os.environ and results == Path("results")
    return [] if default else [f"results={quote_value(str(results))}"]


def check_overrides(overrides: Sequence[str], jobs: Sequence[Job], results: Path) -> None:
    """Check that overrides for a whole sweep say how its runs are made, and leave each the run that the table wants.

    Their keys are looked at first, since that needs nothing composed and says the same whatever is missing. But no list
    of keys knows what a preset makes of a setting: each missing run is composed with the overrides, too, and must come
    out the same.

    Raises:
        ValueError: for an override that would make other runs than the table lacks, or each of them several times.
    """
    for word in overrides:
        parsed = parse_override(word)
        key = parsed.key_or_group
        how = key.replace("/", ".").split(".")[0] in HOW or key == "privacy.population"
        if not how or key.startswith(OF_THE_SWEEP):
            raise ValueError(
                f"expected overrides that say how runs are made ({', '.join(HOW)}), got {word}: the table says which "
                "runs. A table's quick runs are made by scale=quick, a place for results is given by --results, and "
                "`dpgen run` makes any other run."
            )
        if parsed.is_sweep_override():
            raise ValueError(f"expected one value, since each run is made once, got {word}.")
    if not overrides:
        return
    missing = [job for job in jobs if not job.finished] or jobs[:1]
    seedless = {tuple(word for word in job.words if not word.startswith("seed=")): job for job in missing}
    for job in seedless.values():  # a seed changes nothing of what overrides do
        composed = build_spec(compose_config([*job.words, *_place(results), *overrides]), planned=True)
        wanted, given = _made(job.spec, job.words), _made(composed, job.words)
        if changed := [what for what in wanted if wanted[what] != given[what]]:
            raise ValueError(
                f"expected overrides that leave the table's runs as they are, got {' '.join(overrides)}: this changes "
                f"{', '.join(changed)} of {_title(job.spec)} ({job.spec.id})."
            )


def _made(spec: RunSpec, words: Sequence[str]) -> dict[str, Any]:
    """What of a run no override may change, by what it is called in words."""
    runtime, named = spec.config.runtime, [word.split("=", 1)[0] for word in words]
    kept = {key: runtime.get(key) for key in ("keep_steps", "measure_kept") if f"runtime.{key}" in named}
    return {
        "the identity": spec.id,
        "the protocol": spec.protocol_record(),
        # No part of the id, but of what is proven: what one vouches for is said run by run.
        "federation.dropout": spec.federation().dropout,
        "the steps to keep": str(kept),
    }


def launch_sweeps(name: str, results: Path, overrides: Sequence[str] = (), scale: str = "paper") -> int:
    """Launch multiruns that make exactly the runs that the table lacks, parents first; 0 if all end well, else 1.

    A damaged run is not made, and counts as not ended well. If this process is told to stop, so is the multirun, and
    no other one is launched; the status is then 128 and the signal's number.

    Args:
        overrides: for every multirun: a launcher, a device; see `check_overrides`.
    """
    jobs = plan_sweep(load_table(name), results, scale)
    check_overrides(overrides, jobs, results)
    print(f"{name}: {sum(job.finished for job in jobs)} of {len(jobs)} runs finished", flush=True)
    failed = False
    for job in jobs:
        if job.damaged:
            print(f"{name}: {_refused(job)}", file=sys.stderr, flush=True)
            failed = True
    for words in multiruns(jobs, results, overrides):
        print(f"{name}: {_line(words)}", flush=True)
        code, stopped = run_stoppable([sys.executable, "-m", "dpgen_bench.cli", "run", *words])
        if stopped:
            print(f"{name}: told to stop; the same command goes on", file=sys.stderr, flush=True)
            return 128 + stopped
        failed |= code != 0
    return int(failed)


def _line(words: Sequence[str]) -> str:
    return shlex.join(["dpgen", "run", *words])


def _refused(job: Job) -> str:
    return f"run {job.spec.id} is {job.state}; it is not made until its folder is restored or deleted"


def run_stoppable(command: Sequence[str]) -> tuple[int, int | None]:
    """Run a command to its end: its status, and the signal by which this process was told to stop, if it was.

    Such a signal is handed on as SIGTERM, at which a run writes a checkpoint and leaves; then the command's end is
    waited for. On Linux the command gets it also when this process is killed outright.
    """
    caught: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if child is not None:
            child.terminate()

    before = {number: signal.signal(number, stop) for number in (*STOP_SIGNALS, signal.SIGINT)}
    try:
        child = subprocess.Popen(command, preexec_fn=_end_with_parent())
        if caught:  # a signal before there was a child
            child.terminate()
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, caught[0] if caught else None


def _end_with_parent() -> Callable[[], None] | None:
    """What a new process calls so that Linux sends it SIGTERM when its parent is gone; None elsewhere."""
    if sys.platform != "linux":
        return None
    prctl, parent, set_death_signal = ctypes.CDLL(None).prctl, os.getpid(), 1

    def ask() -> None:
        prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it went before it could be watched
            os._exit(128 + signal.SIGTERM)

    return ask


def print_plan(name: str, results: Path, overrides: Sequence[str] = (), scale: str = "paper") -> None:
    """Print the runs that the table lacks, each with its steps and why it is missing, and the multiruns.

    Raises:
        ValueError: as `launch_sweeps` would.
    """
    table = load_table(name)
    jobs = plan_sweep(table, results, scale)
    check_overrides(overrides, jobs, results)
    missing = [job for job in jobs if not job.finished]
    console = make_console()
    console.print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs finished; {len(missing)} to make")
    if not missing:
        return
    shown = Table("run", "what", "state", "steps")
    for job in missing:
        steps = "?" if job.steps is None else f"{job.steps:,}"
        shown.add_row(job.spec.id, _title(job.spec, table.settings), job.state, steps)
    console.print(shown)
    for job in missing:
        if job.damaged:
            console.print(f"  {_refused(job)}", highlight=False, soft_wrap=True, markup=False)
    for words in multiruns(missing, results, overrides):
        console.print(f"  {_line(words)}", highlight=False, soft_wrap=True, markup=False)


def _title(spec: RunSpec, settings: Iterable[str] = ()) -> str:
    config = spec.config
    told = "".join(f" {name}={config.method[name]}" for name in settings if name in config.method)
    return (
        f"{config.method.name} {config.dataset.name} ε={budget_text(config.privacy.epsilon)}{told} seed {config.seed}"
    )
