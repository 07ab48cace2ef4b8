"""The leaderboard: places among comparable lines alone, and a reason wherever there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpgen_bench.results.store import Store
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.tables.formats import side_by_side
from dpgen_bench.tables.rows import load_table, table_rows
from tests.test_tables import measured

ALIKE = "privacy.relation=replace_one privacy.accountant=pld privacy.delta=1e-5"
LINES = {name: f"experiment=demo/{name} {ALIKE} privacy.epsilon=10" for name in ("dp_merf", "dpgan", "dp_sinkhorn")}


def board(*sweeps: str, by: str = "fid"):
    content = {"title": "t", "protocol": "quick", "sweeps": [*sweeps], "metrics": [by], "leaderboard": {"by": by}}
    return OmegaConf.create(content)


def ran(results: Path, name: str, fid: float, proven: float | str = 9.99, unit: str = "record", **more: float) -> None:
    run_id = measured(results, LINES[name], "quick", {"fid": {"fid": fid, **more}})
    Store(results).folder(run_id).write_json("ledger.json", {"unit": unit, "epsilon": {"proven": proven}})


def places(results: Path, table) -> dict[str, tuple[str, str]]:
    frame = side_by_side(assemble("t", table, results))
    return {line["method"]: (line["place"], line["status"]) for line in frame.to_dict("records")}


def test_places_go_by_the_figure_lower_or_higher(tmp_path):
    for name, fid, accuracy in (("dp_merf", 100.0, 70.0), ("dpgan", 50.0, 60.0), ("dp_sinkhorn", 75.0, 80.0)):
        ran(tmp_path, name, fid, acc_mlp_pct=accuracy)
    by_fid = places(tmp_path, board(*LINES.values()))
    assert list(by_fid) == ["dpgan", "dp_sinkhorn", "dp_merf"]
    assert [place for place, _ in by_fid.values()] == ["1", "2", "3"]
    by_accuracy = places(tmp_path, board(*LINES.values(), by="acc_mlp_pct"))
    assert list(by_accuracy) == ["dp_sinkhorn", "dp_merf", "dpgan"]


def test_equal_figures_share_a_place(tmp_path):
    for name, fid in (("dp_merf", 50.0), ("dpgan", 50.0), ("dp_sinkhorn", 75.0)):
        ran(tmp_path, name, fid)
    assert [place for place, _ in places(tmp_path, board(*LINES.values())).values()] == ["1", "1", "3"]


def test_each_epsilon_has_its_own_places(tmp_path):
    ran(tmp_path, "dp_merf", 50.0)
    table = board(*LINES.values(), LINES["dp_merf"].replace("epsilon=10", "epsilon=1"))
    frame = side_by_side(assemble("t", table, tmp_path))
    assert list(frame["ε budget"]) == ["1", "10", "10", "10"]
    assert list(frame["place"]) == ["–", "1", "–", "–"]
    assert set(frame["status"]) == {"measured", "not run"}


@pytest.mark.parametrize(
    ("proven", "unit", "why"),
    [
        (9.0, "record", "proven 9 leaves a part of 10 unspent"),
        (10.4, "record", "proven 10.4 is above 10"),
        ("inf", "record", "nothing is proven"),
        (9.99, "client", "its epsilon protects a client, not a record"),
    ],
)
def test_what_is_not_comparable_gets_no_place_and_says_why(tmp_path, proven, unit, why):
    """The best figure of all does not help a run that proved less or more than the others."""
    ran(tmp_path, "dp_merf", 1.0, proven, unit)
    ran(tmp_path, "dpgan", 50.0)
    found = places(tmp_path, board(LINES["dp_merf"], LINES["dpgan"]))
    assert found == {"dpgan": ("1", "measured"), "dp_merf": ("–", f"measured; no place: {why}")}


def test_a_run_without_the_figure_gets_no_place(tmp_path):
    run_id = measured(tmp_path, LINES["dpgan"], "quick", {"mlp": {"acc_mlp_pct": 90.0}})
    Store(tmp_path).folder(run_id).write_json("ledger.json", {"unit": "record", "epsilon": {"proven": 9.99}})
    assert places(tmp_path, board(LINES["dpgan"])) == {
        "dpgan": ("–", "none of these figures measured; no place: fid was not measured")
    }


def test_a_figure_that_is_no_number_gets_no_place(tmp_path):
    ran(tmp_path, "dp_merf", float("nan"))
    ran(tmp_path, "dpgan", 50.0)
    found = places(tmp_path, board(LINES["dp_merf"], LINES["dpgan"]))
    assert found == {"dpgan": ("1", "measured"), "dp_merf": ("–", "measured; no place: fid is no finite number")}


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ("privacy.relation=add_remove", "relation"),
        ("privacy.delta=1e-6", "delta"),
        ("privacy.accountant=rdp", "accountant"),
        ("protocol=standard_2k", "protocol"),
    ],
)
def test_unlike_lines_are_no_leaderboard(tmp_path, other, key):
    words = [word for word in LINES["dpgan"].split() if word.split("=")[0] != other.split("=")[0]]
    unlike = " ".join([*words, other])
    with pytest.raises(ValueError, match=f"expected one {key} in a leaderboard"):
        assemble("t", board(LINES["dp_merf"], unlike), tmp_path)


def test_the_boards_own_lines_are_comparable(tmp_path):
    table = load_table("leaderboard")
    assemble("leaderboard", table, tmp_path)  # raises if they are not
    methods = {row.specs[0].config.method.name for row in table_rows(table, tmp_path)}
    assert methods == {"dpgan", "dp_sinkhorn", "gs_wgan", "dp_merf"}
