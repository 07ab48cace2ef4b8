"""Parts of the report: the stored command of a run, texts without paths, small pictures, tables, plots."""

from __future__ import annotations

import base64
import math

import numpy as np
import pytest
from PIL import Image

from dpgen_bench.config import overrides
from dpgen_bench.config.spec import identify
from dpgen_bench.plots.draw import KINDS
from dpgen_bench.report import page as report
from dpgen_bench.report.boards import boards_content, boards_of
from dpgen_bench.report.drawings import COMPUTED
from dpgen_bench.report.page import build_report, collect, render
from dpgen_bench.report.runs import panel, read_runs
from dpgen_bench.report.text import plain, small_picture, with_code
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.tables.assembly import assemble
from dpgen_bench.utils.errors import describe_error, without_paths
from tests.report_toys import DEMO, PLACE, built, make_run
from tests.table_toys import table_of


@pytest.fixture(autouse=True)
def no_tables(monkeypatch):
    """The tables of conf/table compose hundreds of configs; a test that needs tables defines them."""
    monkeypatch.setattr(report, "table_names", lambda: [])


def test_the_command_of_a_run_is_the_one_that_it_stored(tmp_path):
    new, old, stale, moved = (make_run(tmp_path, DEMO, f"seed={seed}") for seed in range(4))
    edit(old, "environment.json", lambda content: content.pop("overrides"))
    edit(moved, "environment.json", lambda content: content["overrides"].append("dataset.path=PATH"))
    identity = stale.read_json("identity.json") | {"version": "0" * 16}
    stale.write_json("identity.json", identity)
    other = RunFolder(stale.path.rename(stale.path.with_name(identify(identity))))
    panels = {run.folder.id: panel(run)["command"] for run in read_runs(tmp_path)}
    assert panels[new.id] == {"line": f"dpgen run {DEMO} seed=0", "note": ""}
    assert panels[old.id]["line"] == ""
    assert "made before commands were stored" in panels[old.id]["note"]
    assert panels[other.id]["line"] == f"dpgen run {DEMO} seed=2"
    assert "The code has changed" in panels[other.id]["note"]
    assert panels[moved.id] == {
        "line": f"dpgen run {DEMO} seed=3 dataset.path=PATH",
        "note": "Replace PATH by your own folder.",
    }


def edit(folder: RunFolder, name: str, change) -> None:
    content = folder.read_json(name)
    change(content)
    folder.write_json(name, content)


@pytest.mark.parametrize(
    ("word", "stored"),
    [
        ("data_root=/data", []),
        ("results='/home/a b'", []),
        ("dataset.path=/home/a/images", ["dataset.path=PATH"]),
        ("++dataset.path='/home/a b'", ["++dataset.path=PATH"]),
        ("dataset.path='~/images'", ["dataset.path=PATH"]),
        ("dataset.path='C:\\a'", ["dataset.path=PATH"]),
        ("dataset.path=images", ["dataset.path=images"]),
        ("experiment=demo/dp_merf", ["experiment=demo/dp_merf"]),
        ("method.betas=[0.25,0.75]", ["method.betas=[0.25,0.75]"]),
        ("restart={run:'0123456789ab',checkpoint:last}", ["restart={run:'0123456789ab',checkpoint:last}"]),
        ("~protocol.metrics.mlp", ["~protocol.metrics.mlp"]),
    ],
)
def test_stored_overrides_hold_no_folder_of_this_machine(word, stored):
    assert overrides.without_local_paths([word]) == stored


@pytest.mark.parametrize("option", [["--config-dir", "/home/a"], ["--config-dir=/home/a"], ["-cd", "/home/a"]])
def test_stored_overrides_hold_no_folder_of_configs(option):
    assert overrides.without_local_paths(["seed=3", *option, "method=mm"]) == ["seed=3", "method=mm"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("no file /home/a/b.npz here", "no file [path] here"),
        ("no file '/home/a b/c.npz' here", "no file [path] here"),
        (r"C:\Users\a\b.txt is gone", "[path] is gone"),
        ("see ~/x/y and ../up/one", "see [path] and ../up/one"),
        ("(/tmp/a.json): line 3", "([path]): line 3"),
        ("relation add/remove, 5/7, t-shirt/top, https is one word", None),
        ("1e-05 by rdp or pld, ε = 10 / 3", None),
    ],
)
def test_paths_are_taken_out_and_nothing_else(text, kept):
    assert without_paths(text) == (text if kept is None else kept)


def test_an_error_is_one_short_line():
    assert describe_error(ValueError("\n  one\ntwo")) == "ValueError: one"
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(ValueError("one /home/a/b\ntwo")) == "ValueError: one [path]"
    assert len(describe_error(ValueError("x" * 1000))) == 300


def test_json_has_no_infinity():
    assert plain({"b": math.inf, "a": (-math.inf, math.nan, 1.5, None, True)}) == {
        "a": ["-inf", "nan", 1.5, None, True],
        "b": "inf",
    }
    with pytest.raises(ValueError, match="expected a value that JSON has"):
        plain({"a": object()})


def test_pictures_are_small_and_keep_their_appearance(tmp_path):
    """Noise is the worst case; of 16 equal shades the nearest is 8 levels away at most."""
    rng = np.random.default_rng(0)
    grey = np.repeat(rng.integers(0, 256, (242, 302, 1), dtype=np.uint8), 3, axis=2)
    colours = rng.integers(0, 256, (410, 512, 3), dtype=np.uint8)
    for name, pixels, kind in (("grey", grey, "png"), ("colours", colours, "webp")):
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        uri = small_picture(tmp_path / f"{name}.png")
        assert uri.startswith(f"data:image/{kind};base64,")
        assert len(uri) < 60_000  # 80 of them are 4.8 MB
        (tmp_path / "back").write_bytes(base64.b64decode(uri.split(",")[1]))
        with Image.open(tmp_path / "back") as back:
            assert max(back.size) <= 320
            if name == "grey":
                decoded = np.asarray(back.convert("L")).astype(int)
                assert np.abs(decoded - grey[..., 0].astype(int)).mean() < 8


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"relation": "replace_one"}, "add/remove / replace-one, not add/remove"),
        ({"delta": 1e-3}, "δ = 1e-05 / 0.001, not 1e-05"),
        ({"accountant": "rdp"}, "accountant pld / rdp, not pld"),
        ({"proven": 2.5}, "seed 1: proven 2.5 is above 1"),
        ({"unproven": ["noise was drawn twice"]}, "seed 1: nothing is proven: noise was drawn twice"),
        ({"budget": 3.0}, "seed 1: its ledger has a budget of 3, not 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) and value else "",
)
def test_a_line_whose_ledger_differs_from_its_config_has_no_place(tmp_path, changed, why):
    """The second of two seeds has another ledger; the ledger counts, and no other line is comparable."""
    folders = [make_run(tmp_path, DEMO, "privacy.epsilon=1", f"seed={seed}", proven=0.99) for seed in (0, 1)]
    others = [make_run(tmp_path, DEMO, "privacy.epsilon=1", f"method.features={n}", proven=0.99) for n in (50, 60)]
    folder = folders[1]
    ledger = folder.read_json("ledger.json")
    for key, value in changed.items():
        if key in ("relation", "delta", "accountant"):
            ledger["budget"][key] = ledger["epsilon"][key] = value
        elif key == "budget":
            ledger["budget"]["epsilon"] = value
        else:
            (ledger if key == "unproven" else ledger["epsilon"])[key] = value
    (before,) = boards_content(boards_of(read_runs(tmp_path)))
    assert len(before["rankings"]["fid"]["placed"]) == 3
    folder.write_json("ledger.json", ledger)
    (board,) = boards_content(boards_of(read_runs(tmp_path)))
    ((number, reason),) = board["rankings"]["fid"]["others"]
    assert board["lines"][number]["runs"][0]["id"] == folders[0].id
    assert reason == why
    assert len(board["rankings"]["fid"]["placed"]) == len(others)


def test_tables_show_differences_and_numbered_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "table_names", lambda: ["t"])
    monkeypatch.setattr(report, "load_table", lambda _: table_of())
    monkeypatch.setattr(report, "build", lambda name, results, scale: built(name, scale))
    content = collect(tmp_path)
    sentence = content["head"]["reproduction"]  # of the values only a is without a caveat
    assert sentence.startswith("1 value of the tables below counts as a reproduction of printed values.")
    html = render(content)
    assert "<b>title" not in html
    assert "<i>DPGAN" not in html
    assert "&lt;i&gt;DPGAN" in html
    assert "[100, −10.0]" in html
    assert "No reproduction: scale reduced." in html
    assert 'data-label="' in html  # the heading of a cell on a phone


def test_which_tables_are_shown(tmp_path, monkeypatch, capsys):
    asked = []

    def build(name, _, scale):
        asked.append((name, scale))
        if name == "broken":
            raise ValueError(f"expected something in {PLACE}")
        return built(name, scale, measured=name != "idle", published=name != "own")

    tables = {name: table_of() for name in ("broken", "idle", "own")}
    tables["stand_in"] = table_of(rows=[{"of": {}, "run": "x", "quick": "x"}])
    monkeypatch.setattr(report, "table_names", lambda: list(tables))
    monkeypatch.setattr(report, "load_table", tables.__getitem__)
    monkeypatch.setattr(report, "build", build)
    shown = [(table["name"], table["scale"]) for table in collect(tmp_path)["tables"]]
    assert shown == [("broken", ""), ("own", "paper"), ("idle", "paper"), ("stand_in", "paper"), ("stand_in", "quick")]
    assert ("idle", "quick") not in asked  # nothing could be measured, and a build takes seconds
    assert capsys.readouterr().err == ""
    html = build_report(tmp_path).read_text()
    messages = capsys.readouterr().err.splitlines()
    assert messages == [f"[{number}/4] table {name}" for number, name in enumerate(tables, start=1)]
    assert "cannot be built" in html
    assert "somebody" not in html


def test_plots_are_drawn_from_the_runs_that_are_there_and_never_from_old_files(tmp_path, monkeypatch):
    """An old plot is in results/plots; one more run changes the report's plot and no file."""
    plot = {"kind": "privacy_utility", "y": "fid"}
    sweeps = [f"{DEMO} privacy.epsilon=1,10"]
    table = table_of(title="FID & <over> ε", metrics=["fid"], plot=plot, sweeps=sweeps)
    monkeypatch.setattr(report, "table_names", lambda: ["t"])
    monkeypatch.setattr(report, "load_table", lambda _: table)
    monkeypatch.setattr(report, "build", lambda name, results, scale: assemble(name, table, results, scale))
    (tmp_path / "plots").mkdir()
    old = '<svg xmlns="http://www.w3.org/2000/svg"><title>of an earlier day</title></svg>'
    (tmp_path / "plots" / "t.svg").write_text(old)
    assert collect(tmp_path)["plots"] == []
    make_run(tmp_path, DEMO, "privacy.epsilon=1", fid=77.0)
    (one,) = collect(tmp_path)["plots"]
    assert (one["name"], one["title"]) == ("t", "FID & <over> ε")
    assert "1 seed each; ε proven 1" in " ".join(one["caption"])
    assert "earlier day" not in svg_of(one)
    make_run(tmp_path, DEMO, "privacy.epsilon=10", fid=55.0)
    html = build_report(tmp_path).read_text()
    (two,) = collect(tmp_path)["plots"]
    assert two["picture"] != one["picture"]
    assert "ε proven 1, 10" in " ".join(two["caption"])
    assert 'alt="t: FID &amp; &lt;over&gt; ε"' in html
    assert two["picture"] in html
    assert [path.read_text() for path in (tmp_path / "plots").iterdir()] == [old]


def svg_of(plot: dict[str, str]) -> str:
    return base64.b64decode(plot["picture"].split(",", 1)[1]).decode()


def test_plots_without_runs_are_those_of_the_tables(tmp_path, monkeypatch):
    def cannot_draw(*_):
        raise ValueError("expected samples, got none")

    tables = {
        "alone": {"kind": "bias_variance"},
        "several": [{"kind": "norms"}, {"kind": "bias_variance"}],
        "torn": {"kind": "bias_variance"},
        "missing": {"kind": "bias_variance"},
        "wrong": {"kind": "samples"},
    }
    tables = {name: table_of(title=name.upper(), plot=plot) for name, plot in tables.items()}
    monkeypatch.setattr(report, "table_names", lambda: list(tables))
    monkeypatch.setattr(report, "load_table", tables.__getitem__)
    monkeypatch.setattr(report, "build", lambda name, results, scale: built(name, scale))
    monkeypatch.setitem(KINDS, "samples", cannot_draw)
    (tmp_path / "plots").mkdir()
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><title>4c</title></svg>'
    for name, content in (("alone", svg), ("several-1", svg), ("several-2", svg), ("torn", "<svg")):
        (tmp_path / "plots" / f"{name}.svg").write_text(content)
    content = collect(tmp_path)
    plots = {plot["name"]: plot for plot in content["plots"]}
    assert {name: bool(plot["picture"]) for name, plot in plots.items()} == {
        **{"alone": True, "several-2": True},  # several-1 is of a kind that is drawn from runs, of which there are none
        **{"torn": False, "wrong": False},
    }
    assert plots["alone"]["caption"] == plots["several-2"]["caption"] == [COMPUTED]
    assert plots["torn"]["title"].startswith("cannot be read")
    assert plots["wrong"]["title"].startswith("cannot be drawn (ValueError: expected samples, got none)")


def test_text_between_backticks_is_code_and_stays_escaped():
    written = with_code("`dpgen sweep <b>` makes them, a single ` does not")
    assert written == "<code>dpgen sweep &lt;b&gt;</code> makes them, a single ` does not"
