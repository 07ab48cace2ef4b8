"""Tables for readers: what a paper prints, in every format, without keys of files and within a page."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from dpgen_bench.config.display import metric_label
from dpgen_bench.report.written import to_html
from dpgen_bench.store.statistics import Summary
from dpgen_bench.tables.assembly import assemble, build
from dpgen_bench.tables.blocks import Text, value_text
from dpgen_bench.tables.formats import long_frame, show, to_markdown
from dpgen_bench.tables.latex import MOST_LINES, PREAMBLE, to_latex
from dpgen_bench.tables.layout import MOST_COLUMNS, WIDTH, Layout, lay_out
from dpgen_bench.tables.lines import TO_BEST, BuiltTable
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from tests.table_toys import ROW, RUN, a_table, measured, table_of

NOWHERE = Path("no such folder of results")
# Of each form: two data sets, many metrics, many rows, parameters, settings as columns.
PAPERS = ("dp_sinkhorn_table1", "gs_wgan_tablea1", "dpgan_table2", "dpgan_table4", "gs_wgan_table1")


@cache
def built_of(name: str) -> BuiltTable:
    return build(name, NOWHERE)


def texts_of(layout: Layout) -> list[str]:
    blocks = [column.head for part in layout.parts for column in part.columns]
    blocks += [block for part in layout.parts for row in part.rows for block in row]
    return [layout.title, *(text.text for block in blocks for text in block), *layout.paragraphs, *layout.notes]


def printed_in_terminal(built: BuiltTable, width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(built, console)
    return console.export_text().splitlines()


def column(layout: Layout, heading: str, part: int = 0) -> list[tuple[str, ...]]:
    """The texts of a column of one part, by the beginning of its heading."""
    columns = layout.parts[part].columns
    (number,) = [i for i, each in enumerate(columns) if each.head[0].text.startswith(heading)]
    return [tuple(text.text for text in row[number]) for row in layout.parts[part].rows]


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_table_fits_and_has_every_published_value(name):
    layout = lay_out(built_of(name))
    published = [cell for line in built_of(name).lines for cell in line.cells.values() if cell.published is not None]
    shown = [text for part in layout.parts for row in part.rows for block in row for text in block]
    assert len(published) == sum(text.text.startswith("[") and text.text != "[illegible]" for text in shown)
    assert all(len(part.columns) <= MOST_COLUMNS for part in layout.parts)
    for width in (WIDTH, 80):
        assert max(map(len, printed_in_terminal(built_of(name), width))) <= width


@pytest.mark.parametrize("name", PAPERS)
def test_no_key_of_a_file_reaches_a_reader(name):
    built = built_of(name)
    keys = {*built.metrics, "FashionMNIST", "add_remove", "replace_one"}
    for text in (to_markdown(built), to_latex(built), to_html(built), "\n".join(printed_in_terminal(built, WIDTH))):
        assert not [key for key in keys if key != "fid" and key in text]
        assert "fid" not in text.replace("fidelity", "")


def test_measured_published_and_difference_stand_in_one_cell_with_their_notes(tmp_path):
    for seed, fid in ((0, 260.0), (1, 262.0)):
        measured(tmp_path, RUN, "dpgan_revisited", {"fid": {"fid": fid}, "cnn": {"acc_cnn_pct": 40.0}}, seed)
    table = a_table({"of": ROW, "run": f"{RUN} seed=0,1", "caveat": {"fid": "T is our choice"}})
    layout = lay_out(assemble("t", table, tmp_path))
    place = column(layout, "Method").index(("Our DPGAN", ROW["variant"].replace("sigma", "σ")))
    assert column(layout, "FID")[place] == ("261.0 ± 1.4", "[251.8, +9.2]")
    assert column(layout, "Acc. CNN (%)")[place] == ("40.0", "[45.0, −5.0]")
    assert column(layout, "ε claimed → proven")[place] == ("10 → 9.5",)
    value, published = layout.parts[0].rows[place][2]
    assert [layout.notes[number - 1] for number in value.notes] == ["No reproduction: T is our choice."]
    assert published.notes == ()
    others = [row[0][0].notes for row in layout.parts[0].rows if row is not layout.parts[0].rows[place]]
    assert {layout.notes[number - 1] for notes in others for number in notes} == {"Not implemented here."}
    assert "Runs: scale paper; protocol dpgan_revisited; 2 seeds; ε for a record under" in " ".join(layout.paragraphs)


def test_the_best_of_each_epsilon_is_bold_and_real_data_does_not_compete(tmp_path):
    lines = {name: f"experiment=demo/{name} privacy.epsilon=10" for name in ("dp_merf", "dpgan")}
    real = "method=real_data privacy.epsilon=inf dataset=digits"
    for line, fid, accuracy in ((lines["dp_merf"], 50.0, 80.0), (lines["dpgan"], 40.0, 70.0), (real, 1.0, 99.0)):
        measured(tmp_path, line, "quick", {"fid": {"fid": fid}, "mlp": {"acc_mlp_pct": accuracy}})
    measured(tmp_path, lines["dpgan"].replace("10", "1"), "quick", {"fid": {"fid": 90.0}})
    table = table_of(
        sweeps=[*lines.values(), real, lines["dpgan"].replace("10", "1")], metrics=["fid", "acc_mlp_pct", "kid"]
    )
    layout = lay_out(assemble("t", table, tmp_path))
    assert [name for name, *_ in column(layout, "Method")] == ["Real data", "DPGAN", "DP-MERF", "DPGAN"]
    assert layout.parts[0].breaks == (1, 2), "the rows of one budget stand together"
    bold = {(row[0][0].text, text.text) for row in layout.parts[0].rows for block in row for text in block if text.bold}
    assert bold == {("DPGAN", "40.0"), ("DP-MERF", "80.0")}
    assert len(layout.parts[0].columns) == 4, "a metric that no run has needs no column"
    assert layout.heading_of(layout.parts[0]) == "Digits", "the title does not say which data these are"
    assert "2 seeds" not in " ".join(layout.paragraphs)


def test_nothing_is_bold_in_a_column_that_a_measured_line_lacks(tmp_path):
    """The missing value may be the best one."""
    lines = [f"experiment=demo/{name} privacy.epsilon=10" for name in ("dp_merf", "dpgan", "dp_gauss")]
    for line, values in zip(lines, ({"fid": 50.0, "kid": 0.1}, {"fid": 40.0, "kid": 0.2}, {"fid": 60.0}), strict=True):
        measured(tmp_path, line, "quick", {"fid": values})
    layout = lay_out(assemble("t", table_of(sweeps=lines, metrics=["fid", "kid"]), tmp_path))
    bold = {text.text for row in layout.parts[0].rows for block in row for text in block if text.bold}
    assert bold == {"40.0"}


def test_a_leaderboard_counts_its_lines_without_runs_and_does_not_show_them(tmp_path):
    terms = "privacy.epsilon=10 privacy.relation=replace_one privacy.accountant=pld"
    lines = [f"experiment=demo/{name} {terms}" for name in ("dp_merf", "dpgan", "gs_wgan")]
    table = table_of(sweeps=lines, metrics=["fid"], leaderboard={"by": "fid"})
    measured(tmp_path, lines[0], "quick", {"fid": {"fid": 50.0}})
    layout = lay_out(assemble("t", table, tmp_path))
    assert column(layout, "Method") == [("DP-MERF",)]
    expected = "2 lines have no run yet (DPGAN, GS-WGAN); `dpgen sweep t --dry-run` lists the runs."
    assert layout.paragraphs[-1] == expected
    plain = table_of(sweeps=lines, metrics=["fid"])
    assert len(lay_out(assemble("t", plain, tmp_path)).parts[0].rows) == 3


def test_a_wide_leaderboard_keeps_a_row_for_each_method_where_another_table_is_turned_around(tmp_path):
    terms = "privacy.epsilon=10 privacy.relation=replace_one privacy.accountant=pld"
    lines = [f"experiment=demo/{name} {terms}" for name in ("dp_merf", "dpgan")]
    metrics = ["fid", "acc_logreg_pct", "acc_mlp_pct", "acc_cnn_pct", "kid", "precision", "recall", "density"]
    for line in lines:
        measured(tmp_path, line, "quick", {"fid": dict.fromkeys(metrics, 50.0)})
    ranked = table_of(sweeps=lines, metrics=metrics, leaderboard={"by": "fid"})
    plain = table_of(sweeps=lines, metrics=metrics)
    heads = [
        [[column.head[0].text for column in part.columns][:2] for part in lay_out(assemble("t", table, tmp_path)).parts]
        for table in (ranked, plain)
    ]
    assert len(heads[0]) > 1
    assert all(head == ["#", "Method"] for head in heads[0])
    built = assemble("t", ranked, tmp_path)
    for line in built.lines:
        line.tail[TO_BEST] = "best"
    parts = lay_out(built).parts
    says = [[column.head[0].text for column in part.columns].count("Difference from the best") for part in parts]
    assert says == [1, *[0] * (len(parts) - 1)], "a ranking says once how far a line is from the best one"
    heads_of_values = [
        [column.head[0].text.split("\u00a0")[0] for column in part.columns if "\u00a0" in column.head[0].text]
        for part in parts
    ]
    assert [name for part in heads_of_values for name in part] == [metric_label(metric) for metric in metrics]
    assert [part.title for part in parts] == ["Digits", *["Digits, continued"] * (len(parts) - 1)]
    assert heads[1][0][0] == "Metric"


def test_rows_that_use_no_records_come_last(tmp_path):
    lines = [f"experiment=demo/{name} privacy.epsilon=10" for name in ("dp_merf", "dpgan")]
    for line in lines:
        measured(tmp_path, line, "quick", {"fid": {"fid": 50.0}})
    built = assemble("t", table_of(sweeps=lines, metrics=["fid"]), tmp_path)
    first = built.lines[0].row
    for folder in first.folders:
        ledger = folder.read_json("ledger.json")
        folder.write_json("ledger.json", {**ledger, "epsilon": {**ledger["epsilon"], "proven": 0.0, "claimed": None}})
    layout = lay_out(assemble("t", table_of(sweeps=lines, metrics=["fid"]), tmp_path))
    assert [name for name, *_ in column(layout, "Method")] == ["DPGAN", "DP-MERF"]
    assert column(layout, "ε claimed → proven") == [("10 → 9.5",), ("0",)]
    assert layout.notes == ()


def test_settings_are_columns_and_what_differs_is_a_note(tmp_path):
    line = "experiment=demo/dp_merf privacy.epsilon=10 method.steps=100,200"
    measured(tmp_path, line.replace("100,200", "100"), "quick", {"fid": {"fid": 50.0}})
    measured(tmp_path, line.replace("100,200", "200"), "quick", {"fid": {"fid": 50.0}})
    other = "experiment=demo/dpgan privacy.epsilon=10 seed=0,1 protocol=standard_2k"
    for seed in (0, 1):
        measured(tmp_path, other.partition(" seed")[0], "standard_2k", {"fid": {"fid": 60.0}}, seed)
    layout = lay_out(assemble("t", table_of(sweeps=[line, other], settings=["steps"], metrics=["fid"]), tmp_path))
    assert column(layout, "T") == [("100",), ("200",), ("900",)]
    assert layout.notes == ("Protocol standard_2k; 2 seeds.",)
    assert [row[0][0].notes for row in layout.parts[0].rows] == [(), (), (1,)]


def test_by_method_each_method_has_a_part_with_the_settings_that_its_lines_differ_in_and_its_own_best_value(tmp_path):
    merf, gan = ("experiment=demo/dp_merf method.latent_dim=5,20", "experiment=demo/dpgan method.batch_size=8,16")
    for line, values in ((merf, (50.0, 40.0)), (gan, (70.0, 80.0))):
        name, _, settings = line.rpartition("=")
        for setting, fid in zip(settings.split(","), values, strict=True):
            measured(tmp_path, f"{name}={setting} privacy.epsilon=10", "quick", {"fid": {"fid": fid}})
    measured(
        tmp_path, "experiment=demo/dpgan method.batch_size=32 privacy.epsilon=10", "standard_2k", {"fid": {"fid": 90.0}}
    )
    sweeps = [f"{line} privacy.epsilon=10" for line in (merf, gan)]
    sweeps.append("experiment=demo/dpgan method.batch_size=32 privacy.epsilon=10 protocol=standard_2k")
    table = table_of(sweeps=sweeps, settings=["batch_size", "latent_dim"], metrics=["fid"], by_method=True)
    layout = lay_out(assemble("t", table, tmp_path))
    assert [layout.heading_of(part) for part in layout.parts] == ["DP-MERF, Digits", "DPGAN, Digits"]
    heads = [[column.head[0].text for column in part.columns] for part in layout.parts]
    assert heads == [["latent dim", "ε claimed → proven", "FID\xa0↓"], ["B", "ε claimed → proven", "FID\xa0↓"]]
    bold = [[text.text for row in part.rows for block in row for text in block if text.bold] for part in layout.parts]
    assert bold == [["40.0"], ["70.0"]]
    assert layout.notes == ("Protocol standard_2k.",)
    marks = [[block[0].notes for block in row[:2]] for row in layout.parts[1].rows]
    assert marks == [[(), ()], [(), ()], [(), (1,)]], "a note on a line stands at its epsilon"
    assert "Bold marks the best mean of a method at one ε" in " ".join(layout.paragraphs)


@pytest.mark.parametrize("content", [{"leaderboard": {"by": "fid"}}, {"paper": "dpgan_revisited", "published": "8"}])
def test_by_method_is_refused_where_methods_are_compared(content):
    with pytest.raises(
        ValueError, match=r"table t: expected `by_method` in a table of sweeps, got one with `(lea|pub)"
    ):
        table_of(by_method=True, **content)


def test_a_fraction_of_many_digits_is_short_in_a_column(tmp_path):
    line = "experiment=demo/dp_gauss dataset=validation_digits dataset.fraction=0.9,0.16666666666666666"
    for fraction in ("0.9", "0.16666666666666666"):
        measured(tmp_path, line.rpartition("=")[0] + f"={fraction}", "quick", {"fid": {"fid": 50.0}})
    layout = lay_out(assemble("t", table_of(sweeps=[line], settings=["dataset.fraction"], metrics=["fid"]), tmp_path))
    assert column(layout, "fraction") == [("0.9",), ("0.1667",)]


def test_a_table_of_nothing_but_unmade_runs_says_so_once():
    layout = lay_out(built_of("dp_sinkhorn_table1"))
    assert "None of its runs has been made yet; `dpgen sweep dp_sinkhorn_table1` makes them." in layout.paragraphs
    assert not [note for note in layout.notes if "Not run yet" in note]
    assert lay_out(build("demo", NOWHERE)).parts == ()


def test_data_sets_stand_next_to_each_other_where_they_fit():
    built = built_of("dpgan_table2")
    both = lay_out(replace(built, metrics=["fid"]))
    assert [part.groups() for part in both.parts] == [[("", 2), ("MNIST", 1), ("Fashion-MNIST", 1)]]
    assert [part.title for part in lay_out(built, 100).parts] == ["MNIST", "Fashion-MNIST"]
    one, two = both.parts[0].rows[0][2:]
    assert (one, two) == ((Text("[1.0]"),), (Text("[1.5]"),))


@pytest.mark.parametrize(
    ("seeds", "repeats", "text"),
    [(None, None, "86.0"), (1.8, 0.3, "86.0 ± 1.8"), (None, 0.3, "86.0 (± 0.3)"), (0.0, None, "86.0")],
)
def test_spreads(seeds, repeats, text):
    assert value_text(Summary(86.0, seeds, repeats, None, None, 2, 2)) == text


def test_counts_have_no_decimals():
    assert value_text(Summary(166161.0, 0.0, None, None, None, 2, 1)) == "166,161"


def test_names_of_the_files_of_published_values_are_written_for_readers():
    tables = [to_markdown(built_of(name)) for name in ("dp_sinkhorn_table1", "gs_wgan_table1")]
    rows = "".join(line for table in tables for line in table.splitlines() if line.startswith("|"))
    assert "its authors' code, balanced labels" in rows
    assert "DP-MERF AE" in rows
    assert not [name for name in ("DP-Merf", "code_balanced", "FMNIST") if name in rows]


# --- LaTeX ---


OTHERS = [name for name in table_names() if load_table(name).paper and name not in PAPERS]


@pytest.mark.parametrize(
    "names", [PAPERS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some papers", "the other papers"]
)
def test_a_table_is_ascii_in_latex_and_balanced(names):
    """A structural check where there is no engine: names are escaped, and a tabular is as wide as its rows."""
    for name in names:
        latex = to_latex(built_of(name))
        assert latex.isascii(), (name, {letter for letter in latex if not letter.isascii()})
        assert latex.count("{") - latex.count(r"\{") == latex.count("}") - latex.count(r"\}")
        assert "`" not in latex.replace("``", ""), "code is set in a font of its own"
        outside = latex.split("\n", 1)[1].replace(r"\end{table}", r"\begin{table}").split(r"\begin{table}")[::2]
        assert not "".join(outside).strip(), "notes stand in a float"
        assert r"\caption{" in latex
        for body in latex.split(r"\begin{tabular}{")[1:]:
            columns, _, rows = body.partition("}\n")
            lines = [line for line in rows.partition(r"\end{tabular}")[0].splitlines() if line.endswith(r"\\")]
            plain = [line.replace(r"\&", "") for line in lines if "multicolumn" not in line]
            assert {line.count("&") for line in plain} == {len(columns) - 1}
            assert len(plain) <= MOST_LINES + 4, "longer than a page"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex: apt-get install texlive-latex-recommended")
@pytest.mark.parametrize("name", ["dp_sinkhorn_table1", "gs_wgan_tablea1", "dpgan_table2"])
def test_latex_compiles_and_fits_its_page(name, tmp_path):
    (tmp_path / "table.tex").write_text(to_latex(built_of(name)))
    widths = r"\let\scaled\resizebox\newsavebox\whole\renewcommand\resizebox[3]{\sbox\whole{#3}"
    widths += r"\typeout{WIDTH \the\wd\whole\space of \the\linewidth}\scaled{#1}{#2}{#3}}"
    document = rf"\documentclass{{article}}{PREAMBLE}{widths}\begin{{document}}\input{{table}}\end{{document}}"
    (tmp_path / "document.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-draftmode", "document.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    assert not [line for line in done.stdout.splitlines() if "Overfull" in line or "Float too large" in line]
    found = [float(width) / float(of) for width, of in re.findall(r"WIDTH ([\d.]+)pt of ([\d.]+)pt", done.stdout)]
    assert found
    assert max(found) <= 8 / 7, "the letters of 8 points would have less than 7"


AUDIT = {"figure": "gdp", "confidence": 0.95, "trials": 100_000, "level": "c", "relation": "replace_one"}


def test_what_was_certified_stands_next_to_claimed_and_proven_and_lines_without_it_say_so(tmp_path):
    """Seeds share the least value of their settings. A line without an audit is no line with a bound of 0."""
    lines = {name: f"experiment=demo/{name} privacy.epsilon=10" for name in ("dp_merf", "dpgan")}
    real = "method=real_data privacy.epsilon=inf dataset=digits"
    for seed in (0, 1, 2):
        measured(tmp_path, lines["dp_merf"], "quick", {"fid": {"fid": 50.0}}, seed)
    for line in (lines["dpgan"], real):
        measured(tmp_path, line, "quick", {"fid": {"fid": 60.0}})
    table = table_of(sweeps=[f"{lines['dp_merf']} seed=0,1,2", lines["dpgan"], real], metrics=["fid"])
    built = assemble("t", table, tmp_path)
    assert [each.head[0].text for each in lay_out(built).parts[0].columns][1] == "ε claimed → proven", (
        "none was audited"
    )
    assert not [name for name in long_frame(built) if "certified" in name]
    merf, _, end = (line.row for line in built.lines)
    values = ({**AUDIT, "epsilon": 6.789}, {**AUDIT, "epsilon": 6.5}, None, {"epsilon": None, "reason": "no noise"})
    for folder, value in zip([*merf.folders, *end.folders], values, strict=True):
        ledger = folder.read_json("ledger.json")
        folder.write_json("ledger.json", {**ledger, "epsilon": {**ledger["epsilon"], "certified": value}})
    built = assemble("t", table, tmp_path)
    layout = lay_out(built)
    assert column(layout, "ε certified") == [("not audited",), ("≥ 6.5",), ("not audited",)]
    notes = [layout.notes[number - 1] for row in layout.parts[0].rows for number in row[2][0].notes]
    expected = "Certified at 95 %, 100,000 trials, level c (Gaussian by construction, replace-one)."
    assert notes == ["Not audited: no noise.", expected]
    assert "ε certified is what attacks showed" in " ".join(layout.paragraphs)
    assert "ε certified" in to_markdown(built) + to_latex(built) + to_html(built)
    frame = long_frame(built)
    assert list(frame["epsilon_certified"]) == [6.5, "not audited", "not audited"]
    assert [*frame["certified_trials"]] == [100_000, "", ""]
    assert [*frame["certified_by"]] == ["gdp", "", ""]
