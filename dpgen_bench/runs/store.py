"""The store: one directory per run, named by its id. What a file there means never depends on when it was written.

config.yaml ledger.json environment.json log.jsonl generator.safetensors generator.json checkpoints/ samples.npz
samples.png metrics/ (see `measurements`) status.json, private/ (never to be shared) and, last, DONE.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.runs.measurements import Measurements
from dpgen_bench.utils.errors import describe_error
from dpgen_bench.utils.files import write_atomic

PHASES = {"prepare": "preparation", "train": "training", "account": "accounting", "measure": "measurement"}


class RunBusy(RuntimeError):
    """Another process is working on this run."""


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def done(self) -> bool:
        return (self.path / "DONE").exists()

    @property
    def trained(self) -> bool:
        return (self.path / "generator.safetensors").exists()

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON file of the run, or {} when it is not there yet."""
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}); restore it, or delete the run's folder.") from None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_atomic(self.path / name, json.dumps(content, indent=2))

    @property
    def config(self) -> DictConfig:
        loaded = OmegaConf.load(self.path / "config.yaml")
        assert isinstance(loaded, DictConfig)
        return loaded

    @property
    def measurements(self) -> Measurements:
        """By which protocols the run was measured, and what came of it."""
        return Measurements(self.path)

    def mark(self, status: str, phase: str, error: BaseException | None = None) -> None:
        """Write status.json: what the run is doing, or how and when it ended."""
        content = {"status": status, "phase": phase, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        if error is not None:
            content["error"] = describe_error(error)
        self.write_json("status.json", content)

    def failed_during(self) -> str:
        """The phase in which the run failed, for a sentence: "during training"."""
        phase = str(self.read_json("status.json").get("phase"))
        return f"during {PHASES.get(phase, 'an unknown phase')}"

    def finish(self) -> None:
        """Delete the secret noise key, the journal and private state, then write DONE: nothing is left to resume."""
        for name in ("journal", "state"):
            shutil.rmtree(self.path / "private" / name, ignore_errors=True)
        (self.path / "private" / "noise.key").unlink(missing_ok=True)
        self.mark("finished", "done")
        write_atomic(self.path / "DONE", "")

    @contextmanager
    def locked(self, timeout_s: float = 1.0) -> Iterator[None]:
        """Hold the run for this process; the lock falls with the process, however that ends.

        Raises:
            RunBusy: if another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=timeout_s)
        except filelock.Timeout:
            raise RunBusy(
                f"run {self.id} is being worked on by another process (lock {self.path / '.lock'}); wait for it, or "
                "start a run with another seed or config."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def status(self) -> str:
        """finished, running, failed, preempted, interrupted (killed without a word) or empty."""
        if self.done:
            return "finished"
        if not self.path.exists():
            return "empty"
        try:
            with self.locked(timeout_s=0.0):
                told = self.read_json("status.json").get("status", "empty")
        except RunBusy:
            return "running"
        return "interrupted" if told == "running" else told


@dataclass(frozen=True)
class Store:
    """All runs under one results folder."""

    root: Path

    def folder(self, run_id: str) -> RunFolder:
        return RunFolder(self.root / "runs" / run_id)

    def runs(self) -> list[RunFolder]:
        """Every run that has at least a config, by id."""
        return [RunFolder(path.parent) for path in sorted((self.root / "runs").glob("*/config.yaml"))]

    def find(self, prefix: str) -> RunFolder:
        """The run whose id starts with `prefix` (a path to its folder works too).

        Raises:
            LookupError: if none or several do.
        """
        if (Path(prefix) / "config.yaml").exists():
            return RunFolder(Path(prefix))
        found = [run for run in self.runs() if run.id.startswith(prefix)]
        if len(found) != 1:
            what = "none" if not found else ", ".join(run.id for run in found)
            raise LookupError(
                f"expected one run whose id starts with {prefix!r} in {self.root / 'runs'}, found {what}; `dpgen runs` "
                "lists them."
            )
        return found[0]
