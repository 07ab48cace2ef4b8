"""A table's yaml: which rows its grids (`for:`) stand for, and which keys and types are refused."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from dpgen_bench.tables import load
from dpgen_bench.tables.expand import lines_of
from dpgen_bench.tables.grid import expand_rows
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.spec import parse_table

PRINTED = {"paper": "dpgan_revisited", "published": "8"}


def test_a_grid_stands_for_every_combination_with_the_last_axis_fastest() -> None:
    entry = {
        "for": {"p": [0.5, 1.0], "m": [1, 3]},
        "of": {"variant": "p={p}; m={m}"},
        "run": "experiment=e method.p={p} method.m={m}.0 seed=0",
        "caveat": {"fid": "p is {p}"},
    }
    expanded = expand_rows([{"of": {"method": "A"}, "why": "No."}, entry])
    assert expanded[0] == {"of": {"method": "A"}, "why": "No."}
    assert [row["of"]["variant"] for row in expanded[1:]] == ["p=0.5; m=1", "p=0.5; m=3", "p=1.0; m=1", "p=1.0; m=3"]
    assert expanded[2]["run"] == "experiment=e method.p=0.5 method.m=3.0 seed=0"
    assert expanded[3]["caveat"] == {"fid": "p is 1.0"}
    assert all("for" not in row for row in expanded)


def test_an_axis_may_map_what_is_printed_to_what_is_run() -> None:
    axes = {"d": {"196": 192, "none": None}}
    entry = {"for": axes, "of": {"variant": "d={d}"}, "run": "method.d={d}", "why": "It is {d}."}
    assert expand_rows([entry]) == [
        {"of": {"variant": "d=196"}, "run": "method.d=192", "why": "It is 192."},
        {"of": {"variant": "d=none"}, "run": "method.d=null", "why": "It is null."},
    ]


def test_braces_that_hydra_reads_stay() -> None:
    line = "method.p={p} restart={run:@pretrain,checkpoint:last}"
    (row,) = expand_rows([{"for": {"p": [True]}, "of": {"variant": "{p}"}, "run": line}])
    assert row["run"] == "method.p=true restart={run:@pretrain,checkpoint:last}"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"for": {"p": []}, "of": {"variant": "{p}"}},
            "axis 'p' a list of values.*got \\[\\].*write at least one value",
        ),
        ({"for": {"p": "ab"}, "of": {"variant": "{p}"}}, "axis 'p' a list of values.*got 'ab'"),
        ({"for": {"p": [[1]]}, "of": {"variant": "{p}"}}, "axis 'p' a list of values.*got \\[\\[1\\]\\]"),
        ({"for": {"p": 3}, "of": {"variant": "{p}"}}, "axis 'p' a list of values.*got 3.*as in {p: \\[0.1, 0.2\\]}"),
        ({"for": {1: [2]}, "of": {"variant": "a"}}, "each axis.*under `of`, got none of \\['1'\\]"),
        ({"for": {}, "of": {"variant": "a"}}, "expected under `for` axes and their values, got {}.*leave `for` out"),
        ({"for": ["p"], "of": {"variant": "{p}"}}, "expected under `for` axes and their values, got \\['p'\\]"),
        ({"for": {"p": [1]}, "of": {"variant": "{p}"}, "run": "{q}"}, "axes of `for` \\(p\\), got \\['q'\\].*correct"),
        ({"of": {"variant": "p={p}"}}, "axes of `for` \\(there are none\\), got \\['p'\\]"),
        ({"for": {"p": [1]}, "of": {"variant": "a"}, "run": "{p}"}, "each axis.*under `of`, got none of \\['p'\\]"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(entry: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expand_rows([entry])


def test_a_tables_grid_is_expanded_when_it_is_loaded(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "table").mkdir()
    entry = {"for": {"p": [1, 2]}, "of": {"variant": "p={p}"}, "run": "method.p={p}"}
    OmegaConf.save(
        OmegaConf.create({"title": "T", "protocol": "quick", **PRINTED, "rows": [entry]}), tmp_path / "table/t.yaml"
    )
    monkeypatch.setattr("dpgen_bench.tables.names.CONF", tmp_path)
    assert lines_of(load_table("t")) == ["method.p=1 protocol=quick", "method.p=2 protocol=quick"]


@pytest.mark.parametrize("name", table_names())
def test_every_table_has_known_keys_and_types(name: str) -> None:
    load_table(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": ["fid"]}, "table t: expected keys among title, protocol.*got \\['metric'\\]; correct the name"),
        ({"title": None}, "table t.title: expected a string, got None"),
        ({"metrics": "fid"}, "table t.metrics: expected .*got 'fid'"),
        ({"published": [1]}, "table t.published: expected .*got \\[1\\]"),
        ({"rows": "hello"}, "table t, rows: expected a list of entries, got 'hello'; begin each entry with `- of:`"),
        ({"rows": None}, "table t, rows: expected a list of entries, got None"),
        ({"rows": {"of": {"method": "A"}, "why": "No."}}, "table t, rows: expected a list of entries, got {'of'"),
        ({"rows": [{"of": "A", "why": "No."}]}, "table t, rows.of: expected the fields of a printed row.*got 'A'"),
        ({"rows": [{"of": {"epsilon": True}, "why": "No."}]}, "table t, rows.of: expected a mapping from a string"),
        ({"rows": [{"of": {}, "run": "seed=0", "why": "No."}]}, "table t, rows: expected one of `run` and `why`.*both"),
        ({"rows": [{"of": {}}]}, "table t, rows: expected one of `run` and `why`.*got neither; write `run` if"),
        (
            {"rows": [{"of": {}, "run": "seed=0", "reduced": " "}]},
            "expected a multirun line under `reduced` in the entry",
        ),
        (
            {"rows": [{"of": {}, "why": "No.", "reduced": "seed=0"}]},
            "table t, rows: expected `run` next to `reduced` in the entry of {}, got no `run`; write",
        ),
        ({"rows": [{"for": {"g": 3}, "of": {"method": "{g}"}}]}, "table t, rows: expected for the axis 'g' a list"),
        ({"kept_steps": ["first"]}, "table t.kept_steps: expected .*got \\['first'\\]"),
        ({"rows": [{"of": {}, "unlkie": "why"}]}, "table t, rows: expected keys among of, run.*got \\['unlkie'\\]"),
        ({"rows": [{"run": "seed=0"}]}, "table t, rows: expected the keys of, got none of \\['of'\\]; add them"),
        ({"rows": ["seed=0"]}, "table t, rows: expected a mapping of keys to values, got 'seed=0'"),
        ({"quick": {"protocols": "quick"}}, "table t, quick: expected keys among protocol, kept_steps"),
        ({"leaderboard": {"unit": "record"}}, "table t, leaderboard: expected the keys by, got none of"),
    ],
)
def test_a_table_that_no_reader_understands_is_refused(changes: dict, message: str) -> None:
    content = {"title": "T", "protocol": "quick"}
    parse_table("t", content)
    with pytest.raises(ValueError, match=message):
        parse_table("t", {**content, **changes})


def test_numbers_of_the_paper_may_be_written_as_numbers() -> None:
    table = parse_table(
        "t", {"title": "T", "protocol": "quick", "published": 8, "rows": [{"of": {"epsilon": 10}, "why": "No."}]}
    )
    assert table.published == "8"
    assert table.rows[0].of == {"epsilon": "10"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: [T", r"table t: expected .*t.yaml to be yaml.*line 1, column 8.*Correct the file"),
        ("title: T\ntitle: U", "table t: expected .*t.yaml to be yaml with each key once.*duplicate key title"),
        ('title: "${"', "table t: expected .*t.yaml to be yaml.*key: title"),
        ("3", "table t: expected .*t.yaml to be yaml"),
        ("- title", r"table t: expected a mapping of keys to values, got \['title'\]; write `key: value`"),
        (
            "title: T\nprotocol: quik",
            r"table t: expected `protocol` to name a protocol, got 'quik' \(did you mean 'quick'",
        ),
        ("title: T\nprotocol: quick\nquick: {protocol: zzz}", "table t: expected `quick.protocol` to name.*got 'zzz'"),
        (
            "title: T\nprotocol: quick\nparents: {first: seed=0}\nsweeps: ['restart={run:@frist}']",
            r"table t: expected after @ the name of a parent of the table \(first\), got @frist \(did you mean 'first'",
        ),
        (
            "title: T\nprotocol: quick\nparents: {first: 'seed=0,1'}",
            "table t: expected the line of one run for the parent 'first', got 2 runs: seed=0,1. Give each setting",
        ),
        (
            "title: T\nprotocol: quick\nparents: {first: seed=0}\n"
            "rows: [{of: {}, run: seed=0, reduced: 'restart=@first'}]",
            "expected after @ the name of a parent of the table .there are none., got @first",
        ),
        ("title: T\nprotocol: quick\nparents: {first: 'seed=['}", "table t: "),
    ],
)
def test_a_file_that_is_no_table_is_refused_when_it_is_loaded(text: str, message: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "t.yaml").write_text(text)
    monkeypatch.setattr("dpgen_bench.tables.names.CONF", tmp_path)
    with pytest.raises(ValueError, match=message):
        load_table("t")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "expected runs, got none; write multirun lines under `sweeps`"),
        ("sweeps: []", "expected runs, got none"),
        ("rows: [{of: {method: A}, why: No.}]", "expected `paper` and `published` with `rows`"),
    ],
)
def test_a_table_without_runs_is_refused(content, problem, tmp_path, monkeypatch) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(f"title: T\nprotocol: quick\n{content}\n")
    monkeypatch.setattr(load, "table_file", lambda name: path)
    with pytest.raises(ValueError, match=f"table t: {problem}"):
        load_table("t")
