"""The report's plots, drawn from the runs that it shows as it is made: never files of an earlier day."""

from __future__ import annotations

import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from dpgen_bench.plots.draw import WITHOUT_RUNS, drawings, stem_of
from dpgen_bench.report.text import data_uri
from dpgen_bench.tables.lines import Built
from dpgen_bench.tables.spec import TableSpec
from dpgen_bench.utils.errors import describe_error

# Said of a picture that no run can make stale, and that is not drawn again for the page.
COMPUTED = "computed from data, without a run; the file in results/plots, where dpgen tables put it"


def plots_of(built: Built, table: TableSpec, results: Path) -> list[dict[str, str]]:
    """The plots of a table as SVG in data URIs, by name, with title and with what they are drawn from, `source`.

    Those of kinds that need no run are taken from results/plots, where `dpgen tables` put them: they take minutes, and
    no run changes them. One that cannot be drawn or read says why.
    """
    if not table.plot:
        return []
    name = built.name + ("_quick" if built.scale == "quick" else "")
    try:
        with tempfile.TemporaryDirectory() as place:
            found = [
                _plot(path, built.title, f"drawn from {each.lines} of the {len(built.rows)} line(s) of table {name}")
                for each in drawings(name, table, built.rows, Path(place), skip=WITHOUT_RUNS)
                for path in each.paths
                if path.suffix == ".svg"
            ]
    except Exception as error:  # one table that cannot be drawn must not hide the others
        return [{"name": name, "title": f"cannot be drawn ({describe_error(error)})", "source": "", "picture": ""}]
    kinds = [entry.kind for entry in table.plot]
    # Such a picture has no scale, and stands with the table of the paper's.
    alone = [number for number, kind in enumerate(kinds) if kind in WITHOUT_RUNS and built.scale == "paper"]
    paths = [results / "plots" / f"{stem_of(name, number, len(kinds))}.svg" for number in alone]
    found += [_plot(path, built.title, COMPUTED) for path in paths if path.exists()]
    return sorted(found, key=lambda plot: plot["name"])


def _plot(path: Path, title: str, source: str) -> dict[str, str]:
    content = path.read_bytes()
    try:
        ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        return {"name": path.stem, "title": f"cannot be read ({error})", "source": "", "picture": ""}
    picture = data_uri(content, "image/svg+xml")
    return {"name": path.stem, "title": title, "source": source, "picture": picture}
