"""The names of tables and their files: those of the bench and those in `own_folders`. Nothing else is imported."""

from __future__ import annotations

import re
from pathlib import Path

from dpgen_bench.utils.own_folders import own_files
from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.validation import suggestion


def table_names() -> list[str]:
    """The tables in conf/table and in `own_folders`, in the order of their names with numbers as numbers."""
    names = {path.stem for path in (CONF / "table").glob("*.yaml")} | set(own_files("table"))
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def table_file(name: str) -> Path:
    """The yaml of a table; of two with the same name the bench's own.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in table_names():  # also refuses a path out of the folder
        raise ValueError(
            f"expected the name of a table in conf/table, or in table/ of --config-dir, got {name!r}"
            f"{suggestion(name, table_names())}. `dpgen list tables` lists them."
        )
    path = CONF / "table" / f"{name}.yaml"
    return path if path.exists() else own_files("table")[name]
