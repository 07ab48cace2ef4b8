"""Write a table: its layout for readers to the terminal or as Markdown, and its long form as CSV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as RichText

from dpgen_bench.outcomes.listing import NOT_AUDITED
from dpgen_bench.privacy.events import RELATIONS, budget_text
from dpgen_bench.tables.blocks import Block, Text
from dpgen_bench.tables.layout import WIDTH, Column, Layout, Part, lay_out
from dpgen_bench.tables.lines import NONE, BuiltTable, Line
from dpgen_bench.tables.naming import certified, proven_under
from dpgen_bench.tables.ranking import Standing
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import FORMATS

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
CSV = "The CSV of this table has every value with ten digits, its spread and 95% interval, and the state of each run."


def expect_formats(formats: Sequence[str]) -> None:
    """
    Raises:
        ValueError: for an unknown format.
    """
    if unknown := [kind for kind in formats if kind not in FORMATS]:
        raise ValueError(f"expected formats {','.join(FORMATS)}, got {','.join(unknown)}.")


def marks(text: Text) -> str:
    """The numbers of a text's notes as superscripts: ` ¹ ²`."""
    return "".join(f" {number}".translate(SUPERSCRIPTS) for number in text.notes)


# --- Markdown ---


def to_markdown(built: BuiltTable) -> str:
    """The table as a Markdown page, with the texts and notes below it."""
    layout = lay_out(built)
    parts = [f"# {layout.title}"]
    for part in layout.parts:
        heading = layout.heading_of(part)
        parts += [*([f"## {heading}"] if heading else []), _markdown_table(part)]
    parts += [*layout.paragraphs, CSV]
    if layout.notes:
        parts.append("\n".join(f"{number}. {note}" for number, note in enumerate(layout.notes, start=1)))
    if layout.remarks:
        parts.append("\n".join(f"- {remark}" for remark in layout.remarks))
    return "\n\n".join(parts) + "\n"


def _markdown_table(part: Part) -> str:
    heads = ["<br>".join(filter(None, [column.group, _markdown_cell(column.head)])) for column in part.columns]
    lines = [heads, ["---"] * len(heads), *([_markdown_cell(block) for block in row] for row in part.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(block: Block) -> str:
    texts = []
    for text in block:
        # `[18.5, +2.3]` is no link, and a bar ends no cell.
        escaped = text.text.replace("|", r"\|").replace("[", r"\[").replace("]", r"\]")
        texts.append((f"**{escaped}**" if text.bold else escaped) + marks(text))
    return "<br>".join(texts)


# --- the terminal ---


def show(built: BuiltTable, console: Console) -> None:
    """Print the table in the terminal's width, at most 120 characters; texts that are wider are folded."""
    width = min(WIDTH, console.width)
    layout = lay_out(built, width)
    console.print(RichText(layout.title, style="bold"), width=width)
    for part in layout.parts:
        console.print(_rich_table(part, layout.heading_of(part)), width=width)
    for paragraph in layout.paragraphs:
        console.print(Padding(RichText(paragraph), (0, 0, 0, 2)), width=width)
    for mark, note in _numbered(layout):
        console.print(Padding(RichText(f"{mark} {note}", style="dim"), (0, 0, 0, 2)), width=width)


def _numbered(layout: Layout) -> list[tuple[str, str]]:
    notes = [(str(number).translate(SUPERSCRIPTS), note) for number, note in enumerate(layout.notes, start=1)]
    return [*notes, *(("·", remark) for remark in layout.remarks)]


def _rich_table(part: Part, heading: str) -> Table:
    table = Table(title=heading or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in part.columns:
        # By default rich cuts text that does not fit, digits included; "fold" breaks it over lines instead.
        table.add_column(_rich_head(column), overflow="fold", vertical="top")
    for number, row in enumerate(part.rows, start=1):
        table.add_row(*map(_rich_cell, row), end_section=number in part.breaks)
    return table


def _rich_head(column: Column) -> RichText:
    group = [RichText(column.group, style="dim")] if column.group else []
    return RichText("\n").join([*group, _rich_cell(column.head)])


def _rich_cell(block: Block) -> RichText:
    return RichText("\n").join(
        RichText.assemble((text.text, "bold" if text.bold else ""), (marks(text), "dim")) for text in block
    )


# --- CSV ---


def to_csv(built: BuiltTable) -> str:
    """One line for each value, with ten significant digits: the last ones of intervals differ between processors."""
    return str(long_frame(built).map(_ten_digits).to_csv(index=False))


def _ten_digits(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


def long_frame(built: BuiltTable) -> pd.DataFrame:
    """One line for each metric of each line, with its numbers; blank where there is none.

    `difference` is mean minus published. `reproduction` is `yes` if the measured value reproduces the published one;
    otherwise it is `no`, and `caveat` has the reason. `stands_in` marks values of runs that stand in for a row's own. A
    leaderboard also has the epsilon under the other relation.
    """
    frame = pd.DataFrame([_long(built, line, metric) for line in built.lines for metric in line.cells])
    blank = ["epsilon_server", "epsilon_conditional", "public_data", "evidence", "stands_in"]
    blank += ("epsilon_certified", "certified_confidence", "certified_trials", "certified_level", "certified_by")
    unused = [name for name in blank if name in frame and frame[name].isin([NONE, "", NOT_AUDITED]).all()]
    return frame.drop(columns=unused)


def _long(built: BuiltTable, line: Line, metric: str) -> dict[str, Any]:
    # The columns of the head except epsilons, then exact numbers, then how they were measured.
    cell, row, printed = line.cells[metric], line.row, line.printed
    config = row.specs[0].config if row else None
    summary = cell.measured
    low, high = (summary.ci95 if summary else None) or (None, None)
    comparison = {
        "published": cell.published,
        "published_std": cell.published_std,
        "published_note": cell.note,
        "difference": cell.difference,
        "reproduction": "" if cell.difference is None else "yes" if cell.is_reproduction else "no",
        "caveat": cell.why_no_reproduction,
    }
    names = {"place": line.head["place"]} if "place" in line.head else {}
    names |= {"method": line.head["method"]}
    if printed:
        names |= {"variant": printed.variant, "reported_in": printed.reported_in}
    names |= {"dataset": line.head["dataset"], **{name: line.head[name] for name in built.settings}}
    if printed:
        names |= {"epsilon_published": printed.epsilon, "delta_published": printed.delta}
    return {
        **names,
        **({"run_method": config.method.name if config else ""} if built.published else {}),
        "epsilon_budget": _budget(config),
        "epsilon_proven": _unrounded(row, "proven"),
        "epsilon_claimed": _unrounded(row, "claimed"),
        "epsilon_server": _unrounded(row, "server"),
        "epsilon_conditional": _unrounded(row, "conditional"),
        **(_other_relation(row) if line.standing else {}),
        **_certified(row),
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
        "stands_in": line.stands_in,
        "protocol": row.protocol if row else NONE,
        "status": line.tail["status"],
        "evidence": row.evidence if row else "",
        "runs": " ".join(folder.id for folder in row.measured) if row else "",
    }


def _to_best(standing: Standing) -> dict[str, Any]:
    """A leaderboard's difference from the best line, in the metric by which it ranks."""
    found = standing.to_best
    low, high = (found.ci95 if found else None) or (None, None)
    tie = "" if found is None or found.is_tie is None else "yes" if found.is_tie else "no"
    return {"to_best": found and found.mean, "to_best_ci95_low": low, "to_best_ci95_high": high, "tie": tie}


def _other_relation(row: TableRow | None) -> dict[str, float | None]:
    """What a leaderboard's lines, which prove one epsilon under one relation, prove under the other relation."""
    if row is None:
        return {}
    (other,) = set(RELATIONS) - {row.specs[0].config.privacy.relation}
    return {f"epsilon_{other}": proven_under(row, other)}


def _budget(config: DictConfig | None) -> float | str | None:
    """The epsilon of the budget, "none" without a budget; None without a run."""
    if config is None:
        return None
    return budget_text(None) if config.privacy.epsilon is None else float(config.privacy.epsilon)


def _certified(row: TableRow | None) -> dict[str, Any]:
    """The certified epsilon and how it was certified, or that a line was not audited."""
    audit = certified(row)
    bound = audit.get("epsilon")
    return {
        "epsilon_certified": (NOT_AUDITED if row and row.measured else NONE) if bound is None else float(bound),
        **{f"certified_{key}": audit.get(key, "") for key in ("confidence", "trials", "level")},
        "certified_by": audit.get("figure", ""),
    }


def _unrounded(row: TableRow | None, name: str) -> float | str:
    if row is None:
        return NONE
    value = row.epsilon_value(name)
    return row.epsilon(name) if value is None else value
