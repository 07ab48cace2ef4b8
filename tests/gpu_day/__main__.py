"""Fills days on a machine with a GPU: its tests, the bench, and the papers' headline runs, recorded as they finish.

    python -m tests.gpu_day [--plan FILE] [--results DIR] [--by NAME] [--dry-run]

The plan is in tests/gpu_day/plan.yaml. What is done is skipped, so the same command goes on after it was stopped or
killed; a run continues from its last checkpoint. Without a GPU the command only prints what it would do.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dpgen_bench.tables.sweeps import run_stoppable
from tests.gpu_day.plan import PLAN, Check, Run, describe, read

# Executes a command; returns its exit status, and the number of a signal to stop that this process received, or None.
Execute = Callable[[Sequence[str]], tuple[int, int | None]]
DPGEN = (sys.executable, "-m", "dpgen_bench.cli")


def main(arguments: Sequence[str] | None = None, execute: Execute = run_stoppable) -> int:
    """Execute what is left of the plan; returns 1 if a part failed, and 128 plus the signal after a signal to stop."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_day", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, default=PLAN, help="file of the plan")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of results")
    parser.add_argument("--by", help="who measures, for the records; default: git's user.name")
    parser.add_argument("--dry-run", action="store_true", help="only print what is done and what is left")
    parser.add_argument("--on-cpu", action="store_true", help="execute the plan on a machine without a GPU, too")
    options = parser.parse_args(arguments)
    checks, runs = read(options.plan, options.results)
    print(describe(checks, runs), flush=True)
    if options.dry_run:
        return 0
    if not (torch.cuda.is_available() or options.on_cpu):
        print("This machine has no GPU, so nothing was executed; the hours are those expected on an H100.")
        return 0
    failed: list[str] = []
    for part in (*checks, *runs):
        if part.done and (isinstance(part, Check) or part.recorded):
            continue
        print(f"\n{part.name}", flush=True)
        if isinstance(part, Check):
            code, stopped = _check(part, options.results, execute)
        else:
            code, stopped = _run(part, options.results, options.by, execute)
        if stopped:
            print("stopped by a signal; the same command goes on")
            return 128 + stopped
        if code:
            failed.append(part.name)
        checks, runs = read(options.plan, options.results)  # with the hours that were measured meanwhile
        print(describe(checks, runs).splitlines()[-1], flush=True)
    if failed:
        print(f"failed: {'; '.join(failed)}; the same command tries them again")
    return int(bool(failed))


def _check(check: Check, results: Path, execute: Execute) -> tuple[int, int | None]:
    """Execute the command of a check, and make its mark if it succeeds."""
    command = check.command.format(python=shlex.quote(sys.executable), results=shlex.quote(str(results)))
    code, stopped = execute(shlex.split(command))
    if code == 0 and not stopped:
        check.mark.parent.mkdir(parents=True, exist_ok=True)
        check.mark.touch()
    return code, stopped


def _run(run: Run, results: Path, by: str | None, execute: Execute) -> tuple[int, int | None]:
    """Make a run, or continue it, and write its record."""
    code, stopped = (0, None) if run.done else execute([*DPGEN, "run", *run.overrides])
    if code or stopped:
        return code, stopped
    named = [] if by is None else ["--by", by]
    return execute([*DPGEN, "record", run.spec.id, *named, "--results", str(results)])


if __name__ == "__main__":
    sys.exit(main())
