"""The committed records, which each program that makes a page reads once."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dpgen_bench.store.records import Record, read_record, record_paths

RESULTS = Path(__file__).resolve().parent.parent / "results"


@cache
def records() -> tuple[Record, ...]:
    """All records, in the order of their paths."""
    return tuple(map(read_record, sorted(record_paths(RESULTS).values())))


def records_of(method: str) -> list[Record]:
    """The records of a method, in the order of their paths."""
    return [record for record in records() if record.path.parent.name == method]
