"""Write a table: published and measured values side by side (md, tex, html, console), or a line per value (csv)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Column, Table

from dpgen_bench.privacy.events import budget_text
from dpgen_bench.tables.lines import CONDITIONAL, PUBLIC_DATA, SERVER, BuiltTable, Line
from dpgen_bench.tables.ranking import Standing
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import FORMATS

WIDE = 4  # tables with published values and more metrics than this have a line for each metric
HEADS = (
    *("place", "method", "variant", "reported in", "dataset", "ε printed", "δ printed", "ε budget", "ε proven", SERVER),
    *("ε claimed", CONDITIONAL, "relation, δ, by", PUBLIC_DATA),
)
# Columns shown if a line has a value.
OPTIONAL = ("variant", "reported in", "δ printed", SERVER, CONDITIONAL, PUBLIC_DATA)

SPREADS = (
    "`±`: standard deviation over training seeds; `repeats ±`: over drawings of samples from one generator, with "
    "newly trained classifiers. The CSV next to this file has every value with ten digits, and 95% intervals."
)
COLUMNS = (
    "`printed` is the paper's figure (`*`: see the notes; its `±` is the paper's own), the column after it what was "
    "measured here, `Δ` ours minus printed. ε proven is what the ledger of our runs proves, never above the ε budget, "
    "and ε claimed what the paper's count makes of the same runs."
)


def side_by_side(built: BuiltTable) -> pd.DataFrame:
    """The table for readers, with text in all cells: each metric as published, as measured, and their difference.

    A table with published values and more than four metrics has a line for each metric of each line.
    """
    long = built.published and len(built.metrics) > WIDE
    lines = [_line_per_metric(line) if long else [_one_line(line, built)] for line in built.lines]
    frame = pd.DataFrame([line for several in lines for line in several]).fillna("–")
    # Lines without a printed row have other columns in their head; all columns of heads come first.
    heads = list(dict.fromkeys(name for line in built.lines for name in line.head))
    heads.sort(key=lambda name: HEADS.index(name) if name in HEADS else HEADS.index("dataset") - 0.5)
    frame = frame[[*heads, *(name for name in frame if name not in heads)]]
    return frame.drop(columns=[name for name in OPTIONAL if name in frame and (frame[name] == "–").all()])


def _one_line(line: Line, built: BuiltTable) -> dict[str, str]:
    values: dict[str, str] = {}
    for metric, cell in line.cells.items():
        if built.published:
            values |= {f"{metric} printed": cell.printed, metric: cell.text, f"Δ {metric}": cell.distance}
        else:
            values[metric] = cell.text
    return {**line.head, **values, **line.tail}


def _line_per_metric(line: Line) -> list[dict[str, str]]:
    return [
        {**line.head, "figure": metric, "printed": cell.printed, "here": cell.text, "Δ": cell.distance, **line.tail}
        for metric, cell in line.cells.items()
        if cell.printed != "–" or cell.measured
    ]


def long_frame(built: BuiltTable) -> pd.DataFrame:
    """One line for each metric of each line, with its numbers; blank where there is none.

    `difference` is mean minus published. `reproduction` is `yes` if the measured value counts as a reproduction of the
    published one; otherwise it is `no`, and `unlike` has the reason.
    """
    lines: list[dict[str, Any]] = []
    for line in built.lines:
        lines += [_long(built, line, metric) for metric in line.cells]
    frame = pd.DataFrame(lines)
    blank = ("epsilon_server", "epsilon_conditional", "public_data")
    unused = [name for name in blank if name in frame and frame[name].isin(["–", ""]).all()]
    return frame.drop(columns=unused)


def _long(built: BuiltTable, line: Line, metric: str) -> dict[str, Any]:
    cell, row = line.cells[metric], line.row
    config = row.specs[0].config if row else None
    summary = cell.measured
    low, high = (summary.ci95 if summary else None) or (None, None)
    comparison = {
        "published": cell.published,
        "published_std": cell.published_std,
        "published_note": cell.note,
        "difference": cell.difference,
        "reproduction": "" if cell.difference is None else "yes" if cell.is_reproduction else "no",
        "unlike": cell.caveat,
    }
    return {
        **{name: value for name, value in line.head.items() if name not in _EPSILONS},
        **({"run_method": config.method.name} if config and built.published else {}),
        "epsilon_budget": _budget(config),
        "epsilon_proven": _unrounded(row, "proven"),
        "epsilon_claimed": _unrounded(row, "claimed"),
        "epsilon_server": _unrounded(row, "server"),
        "epsilon_conditional": _unrounded(row, "conditional"),
        "unit": row.unit if row else "",
        "delta": float(config.privacy.delta) if config else None,
        "relation": config.privacy.relation if config else "",
        "accountant": config.privacy.accountant if config else "",
        "public_data": row.public_data if row else "",
        "metric": metric,
        **(comparison if built.published else {}),
        **(_to_best(line.standing) if line.standing else {}),
        "mean": summary and summary.mean,
        "std_seeds": summary and summary.std_seeds,
        "std_repeats": summary and summary.std_repeats,
        "ci95_low": low,
        "ci95_high": high,
        "ci95_over": summary and summary.ci_over,
        "seeds": summary.seeds if summary else 0,
        "repeats": summary.repeats if summary else 0,
        "scale": line.tail["scale"],
        "protocol": row.protocol if row else "–",
        "status": line.tail["status"],
        "runs": " ".join(folder.id for folder in row.measured) if row else "",
    }


def _to_best(standing: Standing) -> dict[str, Any]:
    """A leaderboard's difference from the best line, in the metric by which it ranks."""
    found = standing.to_best
    low, high = (found.ci95 if found else None) or (None, None)
    tie = "" if found is None or found.is_tie is None else "yes" if found.is_tie else "no"
    return {"to_best": found and found.mean, "to_best_ci95_low": low, "to_best_ci95_high": high, "tie": tie}


def _budget(config: DictConfig | None) -> float | str | None:
    """The epsilon of the budget, "none" without a budget; None without a run."""
    if config is None:
        return None
    return budget_text(None) if config.privacy.epsilon is None else float(config.privacy.epsilon)


def _unrounded(row: TableRow | None, name: str) -> float | str:
    if row is None:
        return "–"
    value = row.epsilon_value(name)
    return row.epsilon(name) if value is None else value


_EPSILONS = ("ε budget", "ε proven", SERVER, "ε claimed", CONDITIONAL, "relation, δ, by", PUBLIC_DATA)


def paragraphs(built: BuiltTable) -> list[str]:
    """The paragraphs below a table, in their order."""
    footnotes = "\n".join(f"- {note}" for note in built.footnotes())
    remarks = "\n".join(f"- {remark}" for remark in built.remarks)
    counts = built.count_reproductions()
    parts = [counts, built.note, COLUMNS if built.published else "", SPREADS, footnotes, remarks]
    return [part for part in parts if part]


def to_markdown(built: BuiltTable) -> str:
    """The table as a Markdown page, with the texts below it."""
    frame = side_by_side(built)
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return "\n\n".join([f"# {_title(built)}", table, *paragraphs(built)]) + "\n"


def to_latex(built: BuiltTable) -> str:
    """A `longtable`, which breaks over pages, with its notes below. It needs longtable, booktabs and amssymb.

    A wide table also needs pdflscape.
    """
    frame, counts = side_by_side(built), built.count_reproductions()
    names = {name: _for_latex(name) for name in frame.columns}
    shown = frame.rename(columns=names).map(_for_latex)
    caption = _for_latex(" ".join([_title(built), counts]).strip())
    table = shown.to_latex(index=False, escape=False, longtable=True, caption=caption, label=f"tab:{built.name}")
    below = [_for_latex(line) for part in paragraphs(built) if part != counts for line in part.splitlines()]
    return "\n\n".join([str(table).rstrip(), r"{\footnotesize", *below, "}"]) + "\n"


_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{"ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$", "Δ": r"$\Delta$", "±": r"$\pm$", "−": "$-$"},
    **{"†": r"$\dagger$", "–": "--", "×": r"$\times$", "𝒟": r"$\mathcal{D}$", "𝒢": r"$\mathcal{G}$"},
}


def _for_latex(text: Any) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in str(text))


def to_html(built: BuiltTable) -> str:
    """A complete HTML page without style or script."""
    title = html.escape(_title(built))
    notes = "".join(f"<p>{html.escape(part)}</p>\n" for part in paragraphs(built))
    table = side_by_side(built).to_html(index=False, escape=True, border=0)
    head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n<h1>{title}</h1>\n'
    return f"{head}{table}\n{notes}</html>\n"


def _title(built: BuiltTable) -> str:
    return built.title + (" · stand-ins (scale=quick)" if built.scale == "quick" and built.published else "")


def to_csv(built: BuiltTable) -> str:
    """One line for each value, with ten significant digits: the last ones of intervals differ between processors."""
    return str(long_frame(built).map(_ten_digits).to_csv(index=False))


def _ten_digits(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


WRITERS = {"md": to_markdown, "tex": to_latex, "csv": to_csv, "html": to_html}


def expect_formats(formats: Sequence[str]) -> None:
    """
    Raises:
        ValueError: for an unknown format.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"expected formats {','.join(FORMATS)}, got {','.join(unknown)}.")


def show(built: BuiltTable, console: Console) -> None:
    """Print the table, the places of its runs' samples, and its remarks."""
    console.print(_for_console(side_by_side(built), built, console.width))
    for row in built.rows:
        for folder in row.measured:
            config = folder.config
            name = f"{config.method.name} ε={budget_text(config.privacy.epsilon)} seed {config.seed}"
            console.print(f"  samples of {name}: {folder.picture}", highlight=False, soft_wrap=True)
    for remark in [built.count_reproductions(), *built.remarks]:
        console.print(f"  {remark}", highlight=False, soft_wrap=True)


def _folding(head: str) -> Column:
    # By default Rich cuts text that does not fit, digits included; "fold" breaks it over lines instead.
    return Column(head, overflow="fold")


def _for_console(frame: pd.DataFrame, built: BuiltTable, width: int) -> Table:
    """The table, transposed if its columns would have only a few letters each in this width."""
    caption = built.note or None
    if 10 * len(frame.columns) <= width:
        shown = Table(*map(_folding, frame.columns), title=_title(built), caption=caption)
        lines = frame.astype(str).values.tolist()
    else:
        heads = ["", *(str(i + 1) for i in range(len(frame)))]
        shown = Table(*map(_folding, heads), title=_title(built), caption=caption)
        lines = [[name, *frame[name].astype(str)] for name in frame.columns]
    for line in lines:
        shown.add_row(*line)
    return shown
