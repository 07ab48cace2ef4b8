"""Write the files of a table and its plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dpgen_bench.outcomes.listing import make_console
from dpgen_bench.plots.draw import draw
from dpgen_bench.report.text import templates
from dpgen_bench.tables.assembly import build
from dpgen_bench.tables.formats import expect_formats, show, to_csv, to_markdown
from dpgen_bench.tables.latex import to_latex
from dpgen_bench.tables.layout import lay_out
from dpgen_bench.tables.lines import BuiltTable
from dpgen_bench.tables.load import load_table
from dpgen_bench.utils.files import write_atomic


def to_html(built: BuiltTable) -> str:
    """The table as an HTML page without script, in the report's look."""
    return templates().get_template("table.html.j2").render(layout=lay_out(built)) + "\n"


WRITERS: dict[str, Callable[[BuiltTable], str]] = {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}


def write_table(
    name: str,
    results: Path,
    scale: str,
    formats: Sequence[str],
    quiet: bool = False,
    plots: bool = True,
    source: Path | None = None,
) -> list[Path]:
    """Print a table and write it as results/tables/NAME.FORMAT (NAME_quick.FORMAT at that scale), with its plots.

    A table without any measured value is not written, except a paper's table at scale paper, which shows the published
    values. For a table without lines only its plots are drawn; they need no run.

    Args:
        quiet: print the names of the files and not the table.
        plots: also draw the table's plots.
        source: the folder of the runs and records that the table shows; None is `results`.

    Returns:
        the files that were written.

    Raises:
        ValueError: for an unknown format, and as `build` does.
    """
    expect_formats(formats)
    built, console = build(name, source or results, scale), make_console()
    if built.lines and not quiet:
        show(built, console)
    if built.lines and not built.measured and (scale == "quick" or not built.published):
        of_quick = " scale=quick" if scale == "quick" else ""
        console.print(
            f"{name}: nothing is measured yet, so no file is written; `dpgen sweep {name}{of_quick}` makes runs"
        )
        return []
    stem, written = name + ("_quick" if scale == "quick" else ""), []
    for kind in formats if built.lines else ():  # a table whose plot is computed without runs has no lines
        path = results / "tables" / f"{stem}.{kind}"
        write_atomic(path, WRITERS[kind](built))
        written.append(path)
    table = load_table(name)
    if plots and table.plot and (built.lines or scale == "paper"):
        written += draw(stem, table, built.rows, results)
    for path in written:
        console.print(f"{name}: {path}", highlight=False, soft_wrap=True)
    return written
