"""Make the missing runs of a table: plan them, and launch the multiruns that make them."""

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

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.display import counted
from dpgen_bench.config.overrides import parse_override, quote_value
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.outcomes.listing import make_console, setting_of
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.store.records import record_file
from dpgen_bench.tables.expand import lines_that_make
from dpgen_bench.tables.jobs import Job, plan_sweep
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.sweep_progress import SweepProgress
from dpgen_bench.training.signals import STOP_SIGNALS
from dpgen_bench.utils.own_folders import own_folders
from dpgen_bench.utils.paths import RECORDS, environment_of_children

# Config groups that overrides for a whole sweep may change: how runs are made. All others determine which runs.
HOW = ("runtime", "hydra", "federation", "data_root", "tracker")
OF_THE_SWEEP = ("hydra/sweeper", "hydra.sweeper", "hydra.mode")  # with these, Hydra would choose the runs


def multiruns(jobs: Iterable[Job], results: Path, overrides: Sequence[str]) -> list[list[str]]:
    """Arguments of `dpgen run` for the multiruns that make exactly those jobs that are neither finished nor damaged.

    The missing jobs of a line are one multirun, or several if one would also make other jobs. Jobs from which others
    restart come first, as in `plan_sweep`.
    """
    missing: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for job in jobs:
        if not (job.finished or job.damaged):  # `dpgen run` would make a run again that has only a record
            missing.setdefault(job.line, []).append(job.overrides)
    lines = [line for of_one_line in missing.values() for line in lines_that_make(of_one_line)]
    folders = [f"--config-dir={folder}" for folder in own_folders()]
    return [["-m", *folders, *line, *_place(results), *overrides] for line in lines]


def _place(results: Path) -> list[str]:
    """The override that sets the folder of results; empty if it is the default."""
    default = "DPGEN_RESULTS" not in os.environ and results == Path("results")
    return [] if default else [f"results={quote_value(str(results))}"]


def check_overrides(overrides: Sequence[str], jobs: Sequence[Job], results: Path) -> None:
    """Check that overrides for a whole sweep change how runs are made and not which runs are made.

    Keys are checked first, because that needs no config and gives the same message in every state of the results. A
    preset may derive other settings from an allowed key, so each missing run is also composed with the overrides, and
    its identity must not change.

    Raises:
        ValueError: for an override that would make other runs than the table needs, or each of them several times.
    """
    for override in overrides:
        parsed = parse_override(override)
        key = parsed.key_or_group
        how = key.replace("/", ".").split(".")[0] in HOW or key == "privacy.population"
        if not how or key.startswith(OF_THE_SWEEP):
            raise ValueError(
                f"expected overrides that say how runs are made ({', '.join(HOW)}), got {override}: the table says "
                "which runs. Use scale=quick or scale=reduced for its other runs, --results for the folder of "
                "results, and `dpgen run` for any other run."
            )
        if parsed.is_sweep_override():
            raise ValueError(f"expected one value, since each run is made once, got {override}.")
    if not overrides:
        return
    missing = [job for job in jobs if not job.finished] or jobs[:1]
    seedless = {tuple(each for each in job.overrides if not each.startswith("seed=")): job for job in missing}
    for job in seedless.values():  # overrides have the same effect for each seed
        composed = build_spec(compose_config([*job.overrides, *_place(results), *overrides]), planned=True)
        before, after = _fixed(job.spec, job.overrides), _fixed(composed, job.overrides)
        if changed := [name for name in before if before[name] != after[name]]:
            raise ValueError(
                f"expected overrides that leave the table's runs as they are, got {' '.join(overrides)}: this changes "
                f"{', '.join(changed)} of {_title(job.spec)} ({job.spec.id})."
            )


def _fixed(spec: RunSpec, overrides: Sequence[str]) -> dict[str, Any]:
    """The properties of a run that overrides for a whole sweep must not change, by their names in messages."""
    runtime, named = spec.config.runtime, [each.split("=", 1)[0] for each in overrides]
    kept = {key: runtime.get(key) for key in ("keep_steps", "measure_kept") if f"runtime.{key}" in named}
    return {
        "the identity": spec.id,
        "the protocol": spec.protocol_record(),
        # Not part of the id, but an assumption of the proof, which is made for each run and not for a whole sweep.
        "federation.dropout": spec.federation().dropout,
        "the steps to keep": str(kept),
    }


def launch_sweeps(
    name: str, results: Path, overrides: Sequence[str] = (), scale: str = "paper", without: Sequence[str] = ()
) -> int:
    """Launch multiruns that make exactly the missing runs of the table, parents first.

    A damaged run is not made and counts as failed. If this process receives a signal to stop, it passes it on to the
    multirun and launches no other one.

    Args:
        overrides: for every multirun, such as a launcher or a device; see `check_overrides`.
        without: metrics that are not measured now; see `plan_sweep`.

    Returns:
        the exit status: 0 if all runs succeed, 1 if one fails, 128 plus the signal's number after a signal to stop.

    Raises:
        ValueError: for an unknown table or scale, and as `check_overrides` and `plan_sweep` do.
    """
    jobs = plan_sweep(load_table(name), results, scale, without)
    check_overrides(overrides, jobs, results)
    print(f"{name}: {sum(job.finished for job in jobs)} of {len(jobs)} runs finished", flush=True)
    if published := _published([job for job in jobs if not job.finished], results):
        print(published, flush=True)
    failed = False
    for job in jobs:
        if job.damaged:
            print(f"{name}: {_describe_damaged(job)}", file=sys.stderr, flush=True)
            failed = True
    with SweepProgress(name, jobs) as progress:
        output = progress.output if progress.shows_bar else None
        for arguments in multiruns(jobs, results, overrides):
            print(f"{name}: {_line(arguments)}", flush=True)
            code, stopped = run_stoppable([sys.executable, "-m", "dpgen_bench.cli", "run", *arguments], output)
            if stopped:
                print(f"{name}: stopped by a signal; the same command continues", file=sys.stderr, flush=True)
                return 128 + stopped
            failed |= code != 0
            progress.report()
    return int(failed)


def _line(arguments: Sequence[str]) -> str:
    return shlex.join(["dpgen", "run", *arguments])


def _describe_damaged(job: Job) -> str:
    return f"run {job.spec.id} is {job.state}; it is not made until its folder is restored or deleted"


def run_stoppable(command: Sequence[str], output: Callable[[str], None] | None = None) -> tuple[int, int | None]:
    """Run a command; returns its exit status, and the signal to stop that this process received or None.

    The command receives such a signal as SIGTERM, on which a run writes a checkpoint and exits; this function waits
    for its end. On Linux the command also receives SIGTERM if this process is killed.

    Args:
        output: gets each line that the command prints; None: the command prints to where this process does.
    """
    caught: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if child is not None:
            child.terminate()

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        streams: dict[str, Any] = {} if output is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, env=environment_of_children(), preexec_fn=_end_with_parent(), **streams)
        if caught:  # the signal came before the child existed
            child.terminate()
        if output is not None and child.stdout is not None:
            for line in child.stdout:
                output(line.decode(errors="replace").rstrip("\n"))
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, caught[0] if caught else None


def _end_with_parent() -> Callable[[], None] | None:
    """A function for a new process, by which Linux sends it SIGTERM when its parent ends; None on other systems."""
    if sys.platform != "linux":
        return None
    prctl, parent, set_death_signal = ctypes.CDLL(None).prctl, os.getpid(), 1

    def request_signal() -> None:
        prctl(set_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the request
            os._exit(128 + signal.SIGTERM)

    return request_signal


def _published(missing: Iterable[Job], results: Path) -> str:
    """A line on runs that are missing in `results` and that the bench is published with a record of; "" for none."""
    bench = RECORDS.parent
    number = sum(record_file(bench, str(job.spec.config.method.name), job.spec.id).exists() for job in missing)
    if not number or results.resolve() == bench.resolve():
        return ""
    return f"{counted(number, 'run')} of these have a record in {bench}, which --results {bench} would use"


def print_plan(
    name: str, results: Path, overrides: Sequence[str] = (), scale: str = "paper", without: Sequence[str] = ()
) -> None:
    """Print the missing runs of the table with their state and steps, and the multiruns that make them.

    Raises:
        ValueError: as `launch_sweeps` does.
    """
    table = load_table(name)
    jobs = plan_sweep(table, results, scale, without)
    check_overrides(overrides, jobs, results)
    missing = [job for job in jobs if not job.finished]
    console = make_console()
    console.print(f"{name}: {len(jobs) - len(missing)} of {len(jobs)} runs finished; {len(missing)} to make")
    if published := _published(missing, results):
        console.print(published, highlight=False, soft_wrap=True, markup=False)
    if not missing:
        return
    shown = Table("run", "what", "state", "steps")
    for job in missing:
        steps = "?" if job.steps is None else f"{job.steps:,}"
        shown.add_row(job.spec.id, _title(job.spec, table.settings), job.state, steps)
    console.print(shown)
    for job in missing:
        if job.damaged:
            console.print(f"  {_describe_damaged(job)}", highlight=False, soft_wrap=True, markup=False)
    for arguments in multiruns(missing, results, overrides):
        console.print(f"  {_line(arguments)}", highlight=False, soft_wrap=True, markup=False)


def _title(spec: RunSpec, settings: Iterable[str] = ()) -> str:
    config = spec.config
    shown = "".join(f" {name}={value}" for name in settings if (value := setting_of(config, name, "")))
    return (
        f"{config.method.name} {config.dataset.name} ε={budget_text(config.privacy.epsilon)}{shown} seed {config.seed}"
    )
