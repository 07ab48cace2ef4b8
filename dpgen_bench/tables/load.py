"""Reads the yaml of a table, and checks the protocols and parents that it names."""

from __future__ import annotations

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpgen_bench.config.catalogue import catalogue
from dpgen_bench.tables.expand import parent_overrides, with_parents
from dpgen_bench.tables.names import table_file
from dpgen_bench.tables.spec import TableSpec, parse_table
from dpgen_bench.utils.validation import suggestion


def load_table(name: str) -> TableSpec:
    """The table NAME.yaml of conf/table or of `own_folders`, with each grid entry of its `rows` replaced by its rows.

    Raises:
        ValueError: if there is none of that name, for a file that is not yaml, for keys or types that no table has (see
            `parse_table`), for a protocol or a parent that does not exist, and for a table without runs.
    """
    path = table_file(name)
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"table {name}: expected {path} to be yaml with each key once, got an error: {reason}. Correct the file."
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f"table {name}: expected a mapping of keys to values, got {loaded!r}; write `key: value`.")
    table = parse_table(name, {str(key): value for key, value in loaded.items()})
    try:
        _check_references(table)
        _check_runs(table)
    except (ValueError, HydraException) as error:
        raise ValueError(f"table {name}: {error}") from None
    return table


def _check_runs(table: TableSpec) -> None:
    """Check that a table has runs, printed values, or a plot that needs none."""
    if table.rows and not table.published:
        raise ValueError(
            "expected `paper` and `published` with `rows`, which answer printed rows; add them, or write the runs as "
            "multirun lines under `sweeps`."
        )
    if not (table.sweeps or table.published or table.plot):
        raise ValueError("expected runs, got none; write multirun lines under `sweeps`.")


def _check_references(table: TableSpec) -> None:
    """Check that the protocols and the parents that a table names exist."""
    known = catalogue("protocols")
    for key, protocol in (("protocol", table.protocol), ("quick.protocol", table.quick.protocol)):
        if protocol is not None and protocol not in known:
            raise ValueError(
                f"expected `{key}` to name a protocol, got {protocol!r}{suggestion(protocol, known)}. `dpgen list "
                "protocols` lists them."
            )
    parents = dict.fromkeys(parent_overrides(table), "")
    for line in [*table.sweeps, *(line for entry in table.rows for line in (entry.run, entry.quick) if line)]:
        with_parents(line, parents)
    for line in (entry.reduced for entry in table.rows if entry.reduced):
        with_parents(line, {})  # scale reduced makes no parents
