"""The multirun lines of a table, at the papers' scale or in minutes, and the runs that they stand for."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import SEEDS, RunSpec, build_spec
from dpgen_bench.tables.spec import RowSpec, TableSpec
from dpgen_bench.utils.own_folders import own_folders
from dpgen_bench.utils.validation import suggestion

SCALES = ("paper", "quick")  # at which tables are built
REDUCED = "reduced"  # at which the stand-ins are run that a table of scale paper shows
MOST_ORDERS = 120  # in which overrides are joined to lines; all orders of five
QUICK_PROTOCOL = "standard_1k_cpu"  # the protocol of a table's quick runs if its yaml does not name one


def expand(sweep: str) -> list[list[str]]:
    """The overrides of each job of a multirun line: every combination of its choices, as in Hydra's basic sweeper."""
    choices = []
    for override in OverridesParser.create().parse_overrides(sweep.split()):
        key = override.get_key_element()
        if override.is_sweep_override():
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([key if override.is_delete() else f"{key}={override.get_value_element_as_str()}"])
    return [list(job) for job in itertools.product(*choices)]


def lines_that_make(jobs: Sequence[Sequence[str]]) -> list[list[str]]:
    """Multirun lines that make exactly these jobs of one line, as few as joining their overrides one by one gives.

    It is the reverse of `expand`. The lines are in the order of the first job of each.
    """
    differing = [place for place, overrides in enumerate(zip(*jobs, strict=True)) if len(set(overrides)) > 1]
    # Which override is joined first decides how many lines there are. If not, it is the last, mostly the seed.
    orders = itertools.islice(itertools.permutations(reversed(differing)), MOST_ORDERS)
    return min((_joined(jobs, places) for places in orders), key=len)


def _joined(jobs: Sequence[Sequence[str]], places: Sequence[int]) -> list[list[str]]:
    """Lines that make these jobs: at one place after the other, those that differ there alone become one."""
    lines = [[*job] for job in jobs]
    for place in places:
        groups: dict[tuple[str, ...], list[str]] = {}  # overrides at this place by those at all other places
        for line in lines:
            groups.setdefault((*line[:place], *line[place + 1 :]), []).append(line[place])
        lines = [[*rest[:place], _with_all_values(group), *rest[place:]] for rest, group in groups.items()]
    return lines


def _with_all_values(overrides: Sequence[str]) -> str:
    """The override of a multirun with the values of these overrides of one key."""
    key = overrides[0].partition("=")[0]
    return f"{key}={','.join(override.partition('=')[2] for override in overrides)}"


def parent_overrides(table: TableSpec, scale: str = "paper") -> dict[str, list[str]]:
    """The overrides of the table's `parents`, from which other runs restart, by name.

    Raises:
        ValueError: if the line of a parent stands for more than one run.
    """
    overrides = {}
    for name, line in table.parents.items():
        jobs = expand(line)
        if len(jobs) != 1:
            raise ValueError(
                f"expected the line of one run for the parent {name!r}, got {len(jobs)} runs: {line}. Give each "
                "setting one value."
            )
        overrides[name] = [*with_table_protocol(table, jobs[0]), *(["scale=quick"] if scale == "quick" else [])]
    return overrides


def parent_ids(table: TableSpec, results: Path, scale: str = "paper") -> dict[str, str]:
    """Ids of the table's `parents` by name; raises what `parent_overrides` does."""
    overrides = parent_overrides(table, scale)
    return {name: spec_of_job(each, results).id for name, each in overrides.items()}


def lines_of(table: TableSpec, scale: str = "paper") -> list[str]:
    """The multirun lines of the table at that scale, of its printed rows and of its own, with their protocol.

    At scale quick the line of a printed row is its `quick`, or else its `run` with scale=quick; so are all others. At
    scale reduced there are only the lines under `reduced`.

    Raises:
        ValueError: for another scale, and at scale reduced for a table without such lines.
    """
    if scale == REDUCED:
        stand_ins = [line for entry in table.rows if (line := reduced_line_of(table, entry))]
        if not stand_ins:
            raise ValueError(
                "expected a table with a line under `reduced` for scale=reduced, got none in its `rows`; use "
                f"scale={' or scale='.join(SCALES)}, or write such a line."
            )
        return stand_ins
    check_scale(scale)
    entries = [line for entry in table.rows if (line := line_of(table, entry, scale))]
    return [*entries, *sweep_lines(table, scale)]


def sweep_lines(table: TableSpec, scale: str = "paper") -> list[str]:
    """The multirun lines of runs that answer no printed row, with their protocol."""
    return [_at_scale(table, sweep, scale) for sweep in table.sweeps]


def scales_to_build(table: TableSpec, quick_runs: bool) -> tuple[str, ...]:
    """The scales at which a table can have values; only these are built, because building composes each run.

    Args:
        quick_runs: whether there are runs of scale quick.
    """
    has_stand_ins = any(entry.quick for entry in table.rows)
    return SCALES if has_stand_ins or quick_runs else SCALES[:1]


def line_of(table: TableSpec, entry: RowSpec, scale: str) -> str | None:
    """The multirun line of one entry of `rows`; None if the entry has no run."""
    check_scale(scale)
    if scale == "quick" and entry.quick:
        return " ".join(_with_protocol(entry.quick.split(), _quick_protocol(table)))
    return _at_scale(table, entry.run, scale) if entry.run else None


def reduced_line_of(table: TableSpec, entry: RowSpec) -> str | None:
    """The multirun line that stands in for the run of an entry of `rows`; None if the entry has none."""
    return " ".join(with_table_protocol(table, entry.reduced.split())) if entry.reduced else None


def check_scale(scale: str) -> None:
    """Check that tables are built at this scale.

    Raises:
        ValueError: for anything but `paper` or `quick`.
    """
    if scale == REDUCED:
        raise ValueError(
            "expected scale=paper or scale=quick, got 'reduced': the table of scale paper shows reduced runs, where a "
            "row has no others. `dpgen sweep NAME scale=reduced` makes them."
        )
    if scale not in SCALES:
        raise ValueError(
            f"expected scale={' or scale='.join(SCALES)}, or scale={REDUCED} for a sweep, got {scale!r}"
            f"{suggestion(scale, (*SCALES, REDUCED))}."
        )


def _at_scale(table: TableSpec, line: str, scale: str) -> str:
    if scale == "paper":
        return " ".join(with_table_protocol(table, line.split()))
    overrides = line.split()
    # In a paper's table a protocol that a line names is the paper's, which takes too long at scale quick.
    if table.published or not _names_protocol(overrides):
        overrides = [each for each in overrides if not each.startswith("protocol")]
    return " ".join([*_with_protocol(overrides, _quick_protocol(table)), "scale=quick"])


def _quick_protocol(table: TableSpec) -> str:
    return table.quick.protocol or QUICK_PROTOCOL


def with_table_protocol(table: TableSpec, overrides: Sequence[str]) -> list[str]:
    """The overrides with the table's protocol, unless they name one."""
    return _with_protocol(overrides, table.protocol)


def _with_protocol(overrides: Sequence[str], protocol: str) -> list[str]:
    return [*overrides] if _names_protocol(overrides) else [*overrides, f"protocol={protocol}"]


def _names_protocol(overrides: Sequence[str]) -> bool:
    return any(each.startswith("protocol=") for each in overrides)


def jobs_of(line: str, parents: dict[str, str]) -> list[list[str]]:
    """The overrides of each job of a line, with the ids of parents in place of their names.

    Raises:
        ValueError: for a name that `parents` lacks.
    """
    return expand(with_parents(line, parents))


def with_parents(line: str, parents: dict[str, str]) -> str:
    """The line with the ids of parents in place of their names.

    Raises:
        ValueError: for a name that `parents` lacks.
    """
    for name in re.findall(r"@([A-Za-z]\w*)", line):
        if name not in parents:
            names = ", ".join(sorted(parents)) or "there are none"
            raise ValueError(
                f"expected after @ the name of a parent of the table ({names}), got @{name}"
                f"{suggestion(name, parents)}; correct the name, or add the parent under `parents`."
            )
        line = re.sub(rf"@{name}\b", f'"{parents[name]}"', line)  # quoted: some ids look like numbers
    return line


def spec_of_job(overrides: Sequence[str], results: Path) -> RunSpec:
    """The run that the overrides of a job describe, with a read-only config.

    A run from which it restarts need not exist yet.
    """
    seeds = [each.split("=", 1)[1] for each in overrides if re.fullmatch(r"seed=\d+", each)]
    others = tuple(each for each in overrides if not re.fullmatch(r"seed=\d+", each))
    seed = int(seeds[-1]) if seeds else None
    if seed is not None and seed >= SEEDS:  # refused there
        return build_spec(compose_config(overrides), planned=True)
    return _with_seed(others, seed, str(results), own_folders())


@cache
def _with_seed(overrides: tuple[str, ...], seed: int | None, results: str, folders: tuple[Path, ...]) -> RunSpec:
    """The run of these overrides with a seed, None for the default one. Its config, which callers share, is read-only.

    Runs that differ in their seed share what is built from the other settings.
    """
    spec = _without_seed(overrides, results, folders)
    config = copy.deepcopy(spec.config)
    config.seed = spec.seed if seed is None else seed
    OmegaConf.set_readonly(config, True)
    return replace(spec, config=config, training={**spec.training, "seed": int(config.seed)})


@cache
def _without_seed(overrides: tuple[str, ...], results: str, _: tuple[Path, ...]) -> RunSpec:
    """The run of these overrides with the default seed, which no other setting depends on; cached for `own_folders`."""
    config = compose_config(overrides)
    config.results = results
    return build_spec(config, planned=True)
