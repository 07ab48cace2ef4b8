"""The papers' figures in conf/table: each composes, and its plots use keys and metrics that its runs have."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.plots.draw import WITHOUT_RUNS, config_keys, draw
from dpgen_bench.plots.parts import check_keys
from dpgen_bench.privacy.accountants.claims import classical_rdp
from dpgen_bench.tables.expand import jobs_of, lines_of, parent_ids
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.plot_spec import CurveSpec, PrivacyUtilitySpec, StepsSpec
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec
from dpgen_bench.utils.paths import CONF

DPGAN = [1, 2, 4, 5, 6, *range(14, 25)]
FIGURES = [
    *(f"dpgan_figure{number}" for number in DPGAN),
    *(f"dp_sinkhorn_figure{number}" for number in ("4a", "4b", "4c", "5")),
    "dp_sinkhorn_early_figure5",
    *(f"gs_wgan_figure{number}" for number in ("2", "4", "a2")),
]
NOWHERE = Path("nowhere")


@lru_cache
def planned(job: tuple[str, ...]) -> RunSpec:
    return build_spec(compose_config([f"results={NOWHERE}", *job]), planned=True)


@lru_cache
def parents_of(name: str) -> dict[str, str]:
    return parent_ids(load_table(name), NOWHERE)


@lru_cache
def first_rows(name: str) -> tuple[TableRow, ...]:
    """The first run of each of a table's lines."""
    table = load_table(name)
    specs = [planned(tuple(jobs_of(line, parents_of(name))[0])) for line in lines_of(table)]
    return tuple(TableRow((spec,), ()) for spec in specs)


def test_every_figure_has_a_yaml() -> None:
    prefixes = ("dpgan_figure", "dp_sinkhorn_figure", "dp_sinkhorn_early_figure", "gs_wgan_figure")
    assert sorted(name for name in table_names() if name.startswith(prefixes)) == sorted(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_run_and_drawn(name: str, tmp_path: Path) -> None:
    table, rows = load_table(name), first_rows(name)
    assert table.plot
    assert (CONF / "protocol" / f"{table.protocol}.yaml").exists()
    assert table.title
    assert table.note
    if all(entry.kind in WITHOUT_RUNS for entry in table.plot):
        assert not rows
        return
    assert {row.protocol for row in rows} == {table.protocol}
    assert {row.scale for row in rows} == {"paper"}
    for entry in table.plot:
        check_keys(rows, config_keys(entry))
        if isinstance(entry, CurveSpec | StepsSpec | PrivacyUtilitySpec):
            assert set(entry.y) <= set(table.metrics)
    for setting in table.settings:
        assert any(setting in row.specs[0].config.method for row in rows)
    assert draw(name, table, rows, tmp_path) == []


@pytest.mark.parametrize("name", [name for name in FIGURES if "figure4c" not in name])
def test_kept_steps_are_within_the_training_and_end_with_it(name: str) -> None:
    table = load_table(name)
    needed = any(entry.kind == "steps" for entry in table.plot)
    assert needed == bool(table.kept_steps)
    if table.kept_steps:
        longest = max(row.specs[0].config.method.steps for row in first_rows(name))
        assert list(table.kept_steps) == sorted(set(table.kept_steps))
        assert max(table.kept_steps) == longest


def test_lines_of_a_figure_and_rows_of_a_table_are_the_same_runs() -> None:
    """DP-Sinkhorn's early Figure 5 has that version's Tables 4 and 5; DPGAN's Figures 15 and 16 share their runs."""
    table = load_table("dp_sinkhorn_early_figure5")
    jobs = [tuple(job) for line in lines_of(table) for job in jobs_of(line, {})]
    assert len(jobs) == len(set(jobs)) == 19 + 12
    some = [job for job in jobs if "method.p=0.1" in job and {"method.cost=l2", "method.m=0.3"} & set(job)]
    ids = {planned(job).id for job in some}
    of = {"4": ["m=0", "m=0.3"], "5": ["m=0.3"]}
    runs = [
        entry.run
        for number, weights in of.items()
        for entry in load_table(f"dp_sinkhorn_early_table{number}").rows
        if entry.of["variant"] in [f"p=0.1; {m}; whole-matrix clip" for m in weights]
    ]
    assert len(runs) == 3
    assert ids == {planned(tuple(run.split())).id for run in runs}
    assert list(load_table("dpgan_figure15").sweeps) == list(load_table("dpgan_figure16").sweeps)


def test_restarts_are_from_every_checkpoint_that_the_parent_keeps() -> None:
    table, (own, *restarts) = load_table("dpgan_figure5"), first_rows("dpgan_figure5")
    (parent,) = parents_of("dpgan_figure5").values()
    assert own.specs[0].id == parent  # its own values are drawn, too
    (job,) = jobs_of(table.parents["pretrain"], {})
    assert "runtime.keep_steps=[1000,2000,3000]" in job
    for row, line in zip(restarts, lines_of(table)[1:], strict=True):
        config = row.specs[0].config
        assert (config.restart.run, config.restart.checkpoint) == (parent, "step-1000")
        checkpoints = [job[-2] for job in jobs_of(line, {"pretrain": parent})]
        assert checkpoints == [f"restart.checkpoint=step-{step}" for step in (1000, 2000, 3000)]
        assert config.method.steps == 1000 * config.method.n_d  # 1,000 generator steps each
        assert row.specs[0].budget().epsilon == float("inf")


def sweep_values(table: TableSpec, key: str) -> list[float]:
    words = [word for line in lines_of(table) for word in line.split() if word.startswith(f"{key}=")]
    return sorted({float(value) for word in words for value in word.split("=")[1].split(",")})


def test_the_claims_in_a_note_are_the_papers_count() -> None:
    """Figure 4(b) of DP-Sinkhorn: T of its points, and epsilon as its appendix D.4 counts them."""
    table = load_table("dp_sinkhorn_figure4b")
    printed = {11_000: "2.33", 20_000: "3.19", 40_000: "4.64", 80_000: "6.77", 160_000: "10.05"}
    assert set(printed) <= set(sweep_values(table, "method.steps"))
    for steps, words in printed.items():
        assert f"{classical_rdp(1 / 1200, 1.5, steps * 50, 1e-5):.2f}" == words
        assert f"{steps:,} (" in table.note or f"{steps:,} (claimed" in table.note
        assert words in table.note


def test_grids_are_the_printed_ones() -> None:
    for number, sigmas in ((22, [0.6, 1.4]), (23, [1.2, 2.0, 2.8]), (24, [2.4, 4.0])):
        table = load_table(f"dpgan_figure{number}")
        assert sweep_values(table, "method.n_d") == [1, 2, 5, 10, 20, 50, 100, 200, 500]
        known = {planned(tuple(jobs_of(line, {})[0])).config.method.sigma for line in lines_of(table)}
        assert set(sigmas) <= set(sweep_values(table, "method.sigma")) | known
        assert len(set(sweep_values(table, "method.sigma")) | known) == 3
    assert min(sweep_values(load_table("dpgan_figure6"), "method.sigma")) == 0.4
