"""Trackers: copies of a run's public scalars for TensorBoard or Weights & Biases.

The public log, log.jsonl, is always written and stays the record of the run. A tracker gets the rows of this log and
the metric values, and nothing else: private diagnostics are not rows of the public log. At each start of a process the
tracker's files are written again from log.jsonl, which a resumed run truncates to its checkpoint, so that no step is in
them twice.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dpgen_bench.utils.validation import suggestion

Row = Mapping[str, Any]


class Writer(Protocol):
    """Writes the files of one tracker; any method may raise any error."""

    def write(self, row: Row) -> None:
        """Add one row of the public log."""
        ...

    def summary(self, values: Mapping[str, float]) -> None:
        """Add metric values by name."""
        ...

    def close(self) -> None:
        """Write everything that is buffered."""
        ...


class TensorBoard:
    """Event files in the folder `tensorboard` of a run. The tags of scalars are PHASE/NAME; texts are left out."""

    def __init__(self, folder: Path, title: str, settings: Row) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imported here because it is slow

        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, row: Row) -> None:
        for name, value in _scalars(row).items():
            if not isinstance(value, str):
                self._writer.add_scalar(f"{row['phase']}/{name}", value, row["step"])

    def summary(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"metrics/{name}", value, 0)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases in the folder `wandb` of a run, offline unless the environment sets WANDB_MODE.

    Console output, the machine, the git repository and the source are not recorded.
    """

    def __init__(self, folder: Path, title: str, settings: Row) -> None:
        import wandb  # imported here because it is slow

        shutil.rmtree(folder / "wandb", ignore_errors=True)
        (folder / "wandb").mkdir()
        with _wandb_folders(folder / "wandb"):
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "dpgen_bench"),
                id=folder.name,
                name=title,
                config=dict(settings),
                settings=wandb.Settings(
                    mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
                    root_dir=str(folder),
                    reinit="create_new",
                    console="off",
                    silent=True,
                    disable_git=True,
                    disable_code=True,
                    disable_job_creation=True,
                    x_disable_meta=True,
                    x_disable_stats=True,
                    x_disable_machine_info=True,
                    x_save_requirements=False,
                ),
            )
        self._rows = 0
        self._phases: set[str] = set()

    def write(self, row: Row) -> None:
        phase = row["phase"]
        if phase not in self._phases:  # the horizontal axis of a phase's scalars is the phase's step
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        named = {f"{phase}/{name}": value for name, value in {"step": row["step"], **_scalars(row)}.items()}
        # The number of the row counts, because steps start again in each phase and W&B needs increasing ones.
        self._run.log(named, step=self._rows, commit=True)
        self._rows += 1

    def summary(self, values: Mapping[str, float]) -> None:
        self._run.summary.update({f"metrics/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


# By name: the package that has to be installed, and the class. The extras of this package have the same names.
TRACKERS: dict[str, type[TensorBoard] | type[WandB]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Tracker:
    """Passes public scalars to a `Writer`. If the writer fails, it says so once, and the run goes on without it.

    Args:
        name: A key of `TRACKERS`; None tracks nothing.
        folder: The run's folder, which has log.jsonl, and gets the tracker's files.
        title: The name under which the tracker shows the run.
        settings: Public settings of the run, which the tracker shows.

    Raises:
        ValueError: If the name is unknown, or the package is not installed.
    """

    def __init__(
        self, name: str | None = None, folder: Path | None = None, title: str = "", settings: Row | None = None
    ) -> None:
        expect_tracker(name)
        self._name, self._folder, self._title, self._settings = name, folder, title, dict(settings or {})
        self._writer: Writer | None = None
        self._active = name is not None and folder is not None

    def start(self) -> None:
        """Write the files of the tracker from log.jsonl, instead of those that an earlier process wrote."""
        self.close()
        if not self._active or self._name is None or self._folder is None:
            return
        with self._guard():
            self._writer = TRACKERS[self._name](self._folder, self._title, self._settings)
            for row in _rows(self._folder / "log.jsonl"):
                self._writer.write(row)

    def write(self, row: Row) -> None:
        """Add one row of the public log, after `start`."""
        if self._active and self._writer is not None:
            with self._guard():
                self._writer.write(row)

    def summary(self, values: Mapping[str, float]) -> None:
        """Add metric values by name; starts the tracker if the run was trained by an earlier process."""
        if self._active and self._writer is None:
            self.start()
        if self._active and self._writer is not None:
            with self._guard():
                self._writer.summary(values)

    def close(self) -> None:
        """End the tracking in this process."""
        writer, self._writer = self._writer, None
        if self._active and writer is not None:
            with self._guard():
                writer.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Catch any error of the tracker, which is code of third parties: the run must not end for it."""
        try:
            yield
        except Exception as error:
            self._active = False
            print(
                f"warning: the tracker {self._name} failed ({type(error).__name__}: {error}) and is switched off; the "
                "run goes on, and log.jsonl in its folder has all scalars.",
                file=sys.stderr,
            )


def expect_tracker(name: Any) -> None:
    """Check that a tracker exists and its package is installed; None, no tracker, is accepted.

    Raises:
        ValueError: If it does not, or is not.
    """
    if name is None:
        return
    if name not in TRACKERS:
        raise ValueError(
            f"expected tracker={' or tracker='.join(TRACKERS)}, or null for log.jsonl alone, got {name!r}"
            f"{suggestion(str(name), TRACKERS)}."
        )
    if find_spec(name) is None:
        raise ValueError(
            f"expected the package {name} for tracker={name}, which is not installed; install it with `pip install "
            f"'dpgen-bench[{name}]'`, or leave out tracker=..., because log.jsonl has the same scalars."
        )


def _scalars(row: Row) -> dict[str, float | str]:
    return {name: value for name, value in row.items() if name not in ("phase", "step")}


def _rows(path: Path) -> Iterator[Row]:
    """The rows of a log; none if there is no log."""
    if path.exists():
        with open(path) as lines:
            yield from map(json.loads, lines)


@contextmanager
def _wandb_folders(folder: Path) -> Iterator[None]:
    """A context in which W&B, when it starts, puts its caches and settings into `folder`, and reports no errors."""
    names = {f"WANDB_{kind}_DIR": str(folder / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    names["WANDB_ERROR_REPORTING"] = "false"
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
