"""Calls `dpgen` in this process with malformed commands and files, and checks how the command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dpgen_bench.cli import main
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFolder, Store
from tests import run_toys

KEPT_LOCKS = (".lock", "epsilon.json.lock")


@dataclass(frozen=True)
class Case:
    """A command that must be refused.

    Attributes:
        name: what is malformed.
        command: the arguments of `dpgen`; `{run}` stands for the id of the finished run, `{tmp}` for an empty folder.
        expected, got, do: fragments of the message, which says what was expected, what came and what to do.
        status: the exit status.
        prepare: called with the folder `{tmp}` and the finished run, before the command; makes files, or damages them.
    """

    name: str
    command: str
    expected: str
    got: str
    do: str
    status: int = 2
    prepare: Callable[[Path, RunFolder], object] = lambda tmp, run: None


def cases(*given: Case) -> list[object]:
    """The cases as parameters of a test, under their names."""
    names = [case.name for case in given]
    assert len(set(names)) == len(names), "each case needs a name of its own"
    return [pytest.param(case, id=case.name.replace(" ", "-")) for case in given]


def finished_run(results: Path) -> RunFolder:
    """A finished run of a toy method on small images."""
    return execute(run_toys.config(results))


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files of a folder by their path, without the empty files of locks."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in KEPT_LOCKS
    }


def keep_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo after the test what a command leaves in its process: arguments and the Python path.

    Hydra configures no logs, because Python then closes all handlers, and absl's closes the stream of pytest.
    """
    monkeypatch.setattr(sys, "argv", ["dpgen"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("hydra._internal.logging_config.configure_logging", lambda _: None)


def status_of(arguments: Sequence[str]) -> int:
    """The exit status of `dpgen ARGUMENTS` in this process. Any other exception than SystemExit is raised."""
    try:
        return main(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1


def only_run(results: Path) -> RunFolder:
    """The only run of a folder of results."""
    (run,) = Store(results).runs()
    return run
