"""What `dpgen record` does: write the records of runs, with an audit if that is asked for, and check records."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dpgen_bench.audit.certified import certified_problems, certify_run, keep_certified, with_certified
from dpgen_bench.outcomes.record_checks import record_problems
from dpgen_bench.outcomes.recording import add_record, default_name, left_out, write_record
from dpgen_bench.store.folders import Store
from dpgen_bench.store.records import Record, read_record, record_paths
from dpgen_bench.training.progress import ProgressBar


def write_records(
    names: Sequence[str], results: Path, by: str | None, log: Sequence[str], audit: bool, overwrite: bool
) -> int:
    """Write the records of runs, and print their paths; returns 1 if one of them would not be accepted.

    Args:
        names: ids of runs, or the start of them; with `audit` also of records whose runs are elsewhere.
        by: who measured; None takes git's user.name.
        audit: certify an epsilon for each that has none.
    """
    failed = 0
    for name in names:
        existing = _record_without_run(name, results) if audit else None
        if existing is None:
            folder = Store(results).find(name)
            by = by or default_name(Path.cwd())
            written, picture = add_record(folder, by, log, overwrite)  # raises before an audit, which may take long
            for each in left_out(folder.measurements.all()):
                _say(f"{name}: left out what protocol {each['protocol']['name']} measured before it was edited")
            if audit:
                certified = certify_run(folder, results, _data_root(), _say)
                keep_certified(folder, certified)
                if "certified" not in written.content["ledger"]["epsilon"]:  # else it is that of an earlier audit
                    written = with_certified(written, certified)
        else:
            written = with_certified(existing, certify_run(existing, results, _data_root(), _say))
            picture = existing.picture.read_bytes()
        if problems := problems_of(written, results, picture=False):
            reasons = "\n  ".join(problems)
            print(f"dpgen: expected a run whose record is accepted, got {name}:\n  {reasons}", file=sys.stderr)
            failed = 1
        else:
            print(write_record(written, picture))
    return failed


def _record_without_run(name: str, results: Path) -> Record | None:
    """The record whose id starts with `name`, if no run's does."""
    if any(run.id.startswith(name) for run in Store(results).runs()):
        return None
    found = [path for run, path in record_paths(results).items() if run.startswith(name)]
    return read_record(found[0]) if len(found) == 1 else None


def check_records(results: Path, names: Sequence[str] = ()) -> int:
    """Print why records are not accepted; returns 1 if there is such a record.

    Args:
        names: ids of the records to check, or the start of them; all records if there are none.

    Raises:
        ValueError: for a name that no record has.
    """
    failed, paths = 0, _named(results, names)
    bar = ProgressBar("checking")
    bar.start("records", len(paths))
    for number, path in enumerate(paths, start=1):
        try:
            problems = problems_of(read_record(path), results, _data_root())
        except ValueError as error:
            problems = [str(error)]
        for problem in problems:
            print(f"{path}: {problem}", file=sys.stderr)
            failed = 1
        bar.step(number)
    bar.finish()
    print(f"{len(paths)} {'record was' if len(paths) == 1 else 'records were'} checked")
    return failed


def _named(results: Path, names: Sequence[str]) -> list[Path]:
    """The paths of the records whose ids start with one of the names; of all records if there are no names."""
    paths = record_paths(results)
    for name in names:
        if not any(run.startswith(name) for run in paths):
            raise ValueError(
                f"expected the id of a record in {results}, or the start of one, got {name!r}; its folder records has "
                "them."
            )
    return [path for run, path in paths.items() if not names or run.startswith(tuple(names))]


def problems_of(record: Record, results: Path, data_root: str | None = None, picture: bool = True) -> list[str]:
    """Why a record is not accepted, its certified epsilon included; [] if it is."""
    problems = record_problems(record, data_root, picture, cache=results / "cache" / "epsilon.json")
    return problems or certified_problems(record)


def _data_root() -> str:
    return os.environ.get("DPGEN_DATA", "data")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
