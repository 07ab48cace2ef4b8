"""Records: what a finished run leaves in version control, results/records/METHOD/ID.json and its picture ID.png.

Tables, plots and the report read a record as they read a run's folder. `outcomes.recording` makes records, and
`outcomes.record_checks` decides whether one is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from dpgen_bench.store.folders import ReadableRun, RunFolder, Store
from dpgen_bench.store.measurements import Measured, Measurement, check_measurement, protocol_hash
from dpgen_bench.utils.paths import RECORDS

SCHEMA = 1  # increased when a record gets another form
FOLDER = "records"
ENTRIES = ("config", "identity", "ledger", "cost", "environment")  # mappings that every record has
DATA_ROOT = "data"  # what stands in a record for the folder of data sets

# The file of a run's folder -> the entry of a record with its content.
_FILES = {
    "identity.json": "identity",
    "ledger.json": "ledger",
    "training.json": "cost",
    "environment.json": "environment",
    "step.json": "step",
}


@dataclass(frozen=True)
class RecordedMeasurements(Measured):
    """The measurements in a record."""

    measurements: tuple[Measurement, ...]

    def all(self) -> list[Measurement]:
        return sorted(self.measurements, key=lambda each: (each["protocol"]["name"], protocol_hash(each["protocol"])))


@dataclass(frozen=True)
class Record(ReadableRun):
    """One record; `content` is that of its JSON file `path`."""

    path: Path
    content: dict[str, Any]

    @property
    def id(self) -> str:
        return self.path.stem

    @property
    def done(self) -> bool:
        return True

    @property
    def trained(self) -> bool:
        return True

    @cached_property
    def config(self) -> DictConfig:
        """The resolved config of the run, read-only: every reader gets the same object."""
        config = OmegaConf.create(self.content["config"])
        OmegaConf.set_readonly(config, True)
        return config

    def config_at(self, data_root: str) -> DictConfig:
        """A copy of the config that may be changed, with data sets and fonts in the folder `data_root`."""
        config: DictConfig = OmegaConf.create(moved(self.content["config"], DATA_ROOT, data_root))
        if "root" in config.dataset:
            OmegaConf.update(config, "dataset.root", data_root)
        return config

    @property
    def measurements(self) -> RecordedMeasurements:
        return RecordedMeasurements(tuple(self.content["measurements"]))

    def read_json(self, name: str) -> dict[str, Any]:
        content = dict(self.content.get(_FILES.get(name, ""), {}))
        if name == "environment.json" and self.content.get("command") is not None:
            content["overrides"] = self.content["command"]
        return content

    @property
    def cost(self) -> dict[str, Any]:
        """The cost of its own fit, with a processor time if it or another fit on this kind of device counted one.

        Records of before 24 November 2026 counted none. That of another fit, whose processor may be slower, is cut at
        the most that the fit's own threads can have used in its time on the clock.
        """
        own = self.content["cost"]
        on_this_device = [fit for fit in self.fits if fit.get("device") == own.get("device")]
        times = [fit["cpu_seconds"] for fit in on_this_device if fit.get("cpu_seconds") is not None]
        if own.get("cpu_seconds") is not None or not times:
            return own
        threads = self.content["environment"]["machine"]["torch_threads"]
        seconds = sum(own["seconds"].values()) + own.get("seconds_outside_loops", 0.0)
        return {**own, "cpu_seconds": min(times[0], threads * seconds)}

    @property
    def fits(self) -> list[dict[str, Any]]:
        """The cost of each fit that it has measurements of, its own first: seconds tell any two fits apart."""
        further = [each["fit"]["cost"] for each in self.content["measurements"] if "fit" in each]
        return [self.content["cost"], *further]

    def is_of(self, run: ReadableRun) -> bool:
        """Whether it was made of the fit of `run`, and not of another one with the same id."""
        return run is self or run.read_json("training.json") in self.fits

    def status(self) -> str:
        return "finished"

    def log_values(self, name: str) -> np.ndarray:
        return np.array(self.content.get("log", {}).get(name, []), dtype=float)

    def steps(self) -> list[int]:
        return sorted(int(step) for step in self.content.get("steps", {}))

    def at_step(self, step: int) -> Record:
        return Record(self.path, self.content["steps"][str(step)])

    @property
    def picture(self) -> Path:
        return self.path.with_suffix(".png")

    def montage(self, per_class: int) -> np.ndarray | None:
        if not self.picture.exists():
            return None
        try:
            with Image.open(self.picture) as opened:
                pixels = np.asarray(opened.convert("L" if opened.mode in ("L", "1", "P") else "RGB"))
        except OSError as error:
            raise ValueError(f"expected a picture in {self.picture.name}, got a file that is none.") from error
        rows = int(self.content["picture_rows"])
        height = (pixels.shape[0] + 1) // rows  # of one image and the line below it
        pixels = pixels[: min(per_class, rows) * height - 1]
        return pixels[:, :, None] if pixels.ndim == 2 else pixels


def moved(value: Any, old: str, new: str) -> Any:
    """A part of a config in which paths below the folder `old`, such as those of fonts, are below `new`."""
    if isinstance(value, dict):
        return {key: moved(part, old, new) for key, part in value.items()}
    if isinstance(value, list):
        return [moved(part, old, new) for part in value]
    if isinstance(value, str) and value.startswith(f"{old}/"):
        return f"{new}/{value.removeprefix(f'{old}/')}"
    return value


def _expect_entries(content: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or AttributeError if a record lacks what readers use, or has another type there."""
    for measurement in content["measurements"]:
        check_measurement(measurement)
        _ = measurement["protocol"]["name"]
        results = [result for repeat in measurement["repeats"] for result in repeat["metrics"].values()]
        for name, value in (item for result in results for item in result["values"].items()):
            if not isinstance(value, int | float):
                raise TypeError(f"expected a number as {name}, got {value!r}")
    _ = content["measured_by"]["name"], *(content[key].keys() for key in ENTRIES)


def record_file(results: Path, method: str, run_id: str) -> Path:
    """Where the record of a run of that method is."""
    return results / FOLDER / method / f"{run_id}.json"


def read_record(path: Path) -> Record:
    """The record in a file.

    Raises:
        ValueError: if the file is not JSON of a record of this form.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a record in {path.resolve()}, got a file that cannot be read ({error}); restore it, or record "
            "the run again."
        ) from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(
            f"expected a record of schema {SCHEMA} in {path.resolve()}, got {schema!r}; record the run again."
        )
    try:
        _expect_entries(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected a complete record in {path.resolve()}, got one that is damaged ({type(error).__name__}: "
            f"{error}); restore it, or record the run again."
        ) from None
    return Record(path, content)


def record_paths(results: Path) -> dict[str, Path]:
    """The files of all records by the run's id, sorted by id."""
    return {path.stem: path for path in sorted((results / FOLDER).glob("*/*.json"), key=lambda path: path.stem)}


def find_record(results: Path, run_id: str) -> Record | None:
    """The record of the run of that id; None if it has none.

    Raises:
        ValueError: as `read_record`.
    """
    path = next((results / FOLDER).glob(f"*/{run_id}.json"), None)
    return read_record(path) if path else None


def readable_run(results: Path, run_id: str, protocol: dict[str, Any]) -> ReadableRun:
    """The run of that id: its folder if that is finished and measured by the protocol, or else its record.

    It is its folder, which may not exist, if it has no record, or a folder and a record without a measurement by the
    protocol. A record without that measurement still says that the run was made.

    Raises:
        ValueError: if the record cannot be read.
    """
    folder: RunFolder = Store(results).folder(run_id)
    if folder.done and folder.measurements.covered(protocol):
        return folder
    record = find_record(results, run_id)
    if record is None:
        return folder
    return record if record.measurements.assembled(protocol) or folder.status() == "empty" else folder


def has_records(results: Path) -> bool:
    """Whether a folder of results has a folder of records, without which `--recorded` reads those of the bench."""
    return (results / FOLDER).is_dir()


@contextmanager
def records_alone(results: Path) -> Iterator[Path]:
    """A temporary folder of results that has the records and plots of `results` and no runs.

    Results without records stand for those that the bench is published with.
    """
    with TemporaryDirectory() as folder:
        source = results / FOLDER if has_records(results) else RECORDS
        (Path(folder) / FOLDER).symlink_to(source.resolve())
        if (results / "plots").is_dir():  # the report shows plots of it that need no run
            (Path(folder) / "plots").symlink_to((results / "plots").resolve())
        yield Path(folder)


def same_name(name: str) -> str:
    """The form in which names of people are compared: without case and repeated blanks."""
    return " ".join(name.split()).casefold()


def record_of(run: ReadableRun) -> Record | None:
    """The run itself if it is a record, or else the record of a run's folder; None if it has none.

    Raises:
        ValueError: as `read_record`.
    """
    if isinstance(run, RunFolder):
        return find_record(run.path.parent.parent, run.id)
    return run if isinstance(run, Record) else None


def evidence(run: ReadableRun) -> str:
    """Who measured a run that has a record: `reported by Ada`, or `measured by Ada, verified by Grace`; "" without one.

    Of a folder with another fit than the record's, the text says so. A record that cannot be read does not hide the
    values of the run's folder.
    """
    try:
        record = record_of(run)
    except ValueError:
        return "its record cannot be read"
    if record is None:
        return ""
    by, others = record.content["measured_by"]["name"], [each["name"] for each in record.content["verified"]]
    recorded = f"measured by {by}, verified by {' and '.join(others)}" if others else f"reported by {by}"
    return recorded if record.is_of(run) else f"made again; its record: {recorded}"
