"""The store of runs: one folder for each run, named by the run's id.

A folder holds config.yaml, identity.json, ledger.json, environment.json, dataset.json (class names and image shape),
log.jsonl, generator.safetensors, generator.json, checkpoints/, samples.npz, samples.png, metrics/ (see `measurements`),
status.json, private/ (never to be shared) and DONE, which is written last. No code uses the times of files to decide
what they mean.
"""

from __future__ import annotations

import errno
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpgen_bench.store.measurements import Measured, Measurements
from dpgen_bench.store.pictures import montage
from dpgen_bench.training.log import read_scalar
from dpgen_bench.utils.errors import describe_error
from dpgen_bench.utils.files import write_atomic
from dpgen_bench.utils.validation import suggestion

REMOVED = "REMOVED"  # marks a folder of which only the ledger is kept, see `outcomes.removal`
ARITHMETIC = "arithmetic.json"  # a private file of a run that is not finished, see `runs.arithmetic`
READING_S = 0.1  # another reader of the status holds the lock for less
PHASES = {"prepare": "preparation", "train": "training", "account": "accounting", "measure": "measurement"}


class RunBusy(RuntimeError):
    """Raised if another process holds the lock of a run."""


class RunFailed(RuntimeError):
    """Raised if a run failed; its status.json has the phase, the time and the error."""


def make_folder(path: Path) -> None:
    """Make a folder of results if it does not exist.

    Raises:
        ValueError: if there is no place for it: a parent is a file, or cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"expected a folder of results in which {path} can be made, got an error ({error.strerror}); set another "
            "folder with results=FOLDER or the environment variable DPGEN_RESULTS."
        ) from None


class ReadableRun(ABC):
    """What tables, plots and the report read of a run: its folder, or its record (`runs.records.Record`)."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The run's id; for a copy of a run's folder, the name of the folder."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the run is finished."""

    @property
    @abstractmethod
    def trained(self) -> bool:
        """Whether its training has ended."""

    @property
    @abstractmethod
    def config(self) -> DictConfig:
        """The resolved config of the run."""

    @property
    @abstractmethod
    def measurements(self) -> Measured:
        """The run's measurements, one for each protocol."""

    @property
    @abstractmethod
    def picture(self) -> Path:
        """The file with a picture of its samples, which may not exist."""

    @abstractmethod
    def read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the run, such as ledger.json; {} if there is none."""

    @property
    def cost(self) -> dict[str, Any]:
        """What the run's fit took, as `cost_values` reads it; {} before it ended."""
        return self.read_json("training.json")

    @abstractmethod
    def status(self) -> str:
        """finished, running, failed, preempted, interrupted (the process was killed) or empty (never started)."""

    @abstractmethod
    def log_values(self, name: str) -> np.ndarray:
        """The values of one scalar of the public log in order, float64 [n], without the rows that lack it."""

    @abstractmethod
    def steps(self) -> list[int]:
        """The kept training steps whose generator was extracted, sorted."""

    @abstractmethod
    def at_step(self, step: int) -> ReadableRun:
        """What was measured of the generator of one kept step."""

    @abstractmethod
    def montage(self, per_class: int) -> np.ndarray | None:
        """An image uint8 [H, W, c] of the first `per_class` samples of each class, see `runs.pictures.montage`.

        None if there are no samples. A record may have fewer samples of each class.

        Raises:
            ValueError: if the file of samples cannot be read.
        """


@dataclass(frozen=True)
class RunFolder(ReadableRun):
    """The folder of one run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def done(self) -> bool:
        return (self.path / "DONE").exists()

    @property
    def removed(self) -> bool:
        """Whether the run was removed, and only its ledger is left."""
        return (self.path / REMOVED).exists()

    @property
    def trained(self) -> bool:
        return (self.path / "generator.safetensors").exists()

    @property
    def picture(self) -> Path:
        return self.path / "samples.png"

    def read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the run; {} if the file does not exist.

        Raises:
            ValueError: if the file is not JSON.
        """
        path = self.path / name
        try:
            return json.loads(path.read_text()) if path.exists() else {}
        except (ValueError, OSError) as error:  # no JSON, bytes that are no text, or a folder in place of the file
            raise ValueError(
                f"expected JSON in {path}, got a corrupt file ({error}); restore it, or delete the run's folder."
            ) from None

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of the folder as a whole."""
        write_atomic(self.path / name, json.dumps(content, indent=2))

    @property
    def config(self) -> DictConfig:
        """The resolved config of the run.

        Raises:
            ValueError: if its file is missing, or no yaml of settings.
        """
        path = self.path / "config.yaml"
        try:
            loaded = OmegaConf.load(path)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"expected the settings of a run in {path}, got a corrupt file ({reason}); restore it, or delete the "
                "run's folder."
            ) from None
        if not isinstance(loaded, DictConfig):
            raise ValueError(f"expected the settings of a run in {path}, got a list; restore it.")
        return loaded

    @property
    def measurements(self) -> Measurements:
        return Measurements(self.path)

    def mark(self, status: str, phase: str, error: BaseException | None = None) -> None:
        """Write status.json: the run's status and phase now, the time, and the error if there is one."""
        content = {"status": status, "phase": phase, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        if error is not None:
            content["error"] = describe_error(error)
        self.write_json("status.json", content)

    def failed_during(self) -> str:
        """The phase in which the run failed, as part of a sentence: "during training"."""
        phase = str(self.read_json("status.json").get("phase"))
        return f"during {PHASES.get(phase, 'an unknown phase')}"

    def finish(self) -> None:
        """Mark the run as finished; delete what only a resumed run needs: its noise key, journal and private state."""
        for name in ("journal", "state"):
            shutil.rmtree(self.path / "private" / name, ignore_errors=True)
        for name in ("noise.key", "host_noise", ARITHMETIC):
            (self.path / "private" / name).unlink(missing_ok=True)
        self.mark("finished", "done")
        write_atomic(self.path / "DONE", "")

    @contextmanager
    def locked(self, timeout_s: float = 1.0) -> Iterator[None]:
        """Lock the run for this process. The operating system releases the lock if the process is killed.

        Raises:
            RunBusy: if another process holds the lock for longer than `timeout_s`.
            ValueError: if the folder can neither be used nor made.
        """
        make_folder(self.path)
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=timeout_s)
        except filelock.Timeout:
            raise RunBusy(
                f"run {self.id} is in use by another process (lock {self.path / '.lock'}); wait for that process, or "
                "start a run with another seed or config."
            ) from None
        try:
            yield
        finally:
            lock.release()

    def log_values(self, name: str) -> np.ndarray:
        return read_scalar(self.path / "log.jsonl", name)

    def steps(self) -> list[int]:
        paths = (self.path / "steps").glob("*/step.json")
        return sorted(int(path.parent.name) for path in paths if path.parent.name.isdigit())

    def at_step(self, step: int) -> RunFolder:
        return RunFolder(self.path / "steps" / str(step))

    def montage(self, per_class: int) -> np.ndarray | None:
        path = self.path / "samples.npz"
        return montage(path, per_class) if path.exists() else None

    def status(self) -> str:
        if self.done:
            return "finished"
        if not self.path.exists():
            return "empty"
        try:
            with self.locked(timeout_s=READING_S):
                stored = self.read_json("status.json").get("status", "empty")
        except RunBusy:
            return "running"
        except OSError:  # the lock is not ours to use, so a run of another user may go on
            return self.read_json("status.json").get("status", "empty")
        return "interrupted" if stored == "running" else stored


@dataclass(frozen=True)
class Store:
    """All runs of one results folder, `root`."""

    root: Path

    def folder(self, run_id: str) -> RunFolder:
        return RunFolder(self.root / "runs" / run_id)

    def runs(self) -> list[RunFolder]:
        """All runs that have at least a config and were not removed, sorted by id."""
        folders = [RunFolder(path.parent) for path in sorted((self.root / "runs").glob("*/config.yaml"))]
        return [folder for folder in folders if not folder.removed]

    def find(self, prefix: str) -> RunFolder:
        """The run whose id starts with `prefix`; `prefix` may also be the path of a run's folder.

        Raises:
            LookupError: if no run matches, or several do.
        """
        if (Path(prefix) / "config.yaml").exists():
            return RunFolder(Path(prefix))
        matches = [run for run in self.runs() if run.id.startswith(prefix)]
        if len(matches) != 1:
            ids = ", ".join(run.id for run in matches) or "none" + suggestion(prefix, (run.id for run in self.runs()))
            raise LookupError(
                f"expected one run whose id starts with {prefix!r} in {self.root / 'runs'}, found {ids}; `dpgen runs` "
                "lists all runs."
            )
        return matches[0]
