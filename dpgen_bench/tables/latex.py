"""Write a table as LaTeX, which a paper includes with \\input: booktabs, at most as wide as the text, and a caption."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from dpgen_bench.tables.blocks import Block, Text
from dpgen_bench.tables.layout import Column, Layout, Part, column_width, lay_out
from dpgen_bench.tables.lines import BuiltTable

WIDTH = 94  # characters of \footnotesize, with the space between columns, that an article's text is wide
MOST_LINES = 40  # lines of text in one table
PAGE_LINES = 50  # lines in one float, with the notes below the table
LEAST_HEADING = 9  # characters to which headings are folded at least
NOTE_WIDTH = 90  # characters in a line of the notes
PREAMBLE = r"\usepackage{booktabs,graphicx,amssymb}"  # what a document needs to include a table

_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"''",
        "'": "'",
        "`": r"\textasciigrave{}",
    },
    **{"[": "{[}", "]": "{]}"},  # a bracket after \\ would be its argument
    **{"ε": r"$\varepsilon$", "δ": r"$\delta$", "σ": r"$\sigma$", "Δ": r"$\Delta$", "λ": r"$\lambda$", "±": r"$\pm$"},
    **{"→": r"$\to$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "∞": r"$\infty$", "−": "$-$", "×": r"$\times$"},
    **{"≤": r"$\le$", "≥": r"$\ge$", "†": r"$\dagger$", "…": r"\ldots{}", "·": r"$\cdot$", "–": "--", "—": "---"},
    **{"“": "``", "”": "''", "‘": "`", "’": "'", "√": r"$\surd$", "²": r"\textsuperscript{2}", "\u00a0": "~"},
    **{"𝒟": r"$\mathcal{D}$", "𝒢": r"$\mathcal{G}$", "é": r"\'e", "è": r"\`e", "ö": r"\"o", "ü": r"\"u", "ä": r"\"a"},
}


def for_latex(text: str) -> str:
    """The text with what LaTeX reads as commands escaped, and with commands for letters outside ASCII.

    Text between backticks is set in the font of code. Letters that are not in `_LATEX`, such as those of a name, stay
    as they are; an engine for UTF-8 may know them.
    """
    plain_and_code = re.split(r"`([^`]+)`", text)
    escaped = ["".join(_LATEX.get(letter, letter) for letter in part) for part in plain_and_code]
    return "".join(rf"\texttt{{{part}}}" if number % 2 else part for number, part in enumerate(escaped))


def to_latex(built: BuiltTable) -> str:
    """One `table` for each part, or several where a part has more lines than a page.

    Its notes stand in it, below its rows. What is said of the whole table stands in the last one, or where that has no
    room, in one of its own. A document needs `PREAMBLE`. The letters are those of \footnotesize (8 points in an
    article), and a table is scaled down only if it is wider than the text nevertheless.
    """
    layout = lay_out(built, WIDTH)
    parts = [_folded(part) for part in layout.parts]
    tables = [(part, rows, _notes(layout, part, rows)) for part in parts for rows in _pages(layout, part)]
    general = [*map(for_latex, layout.paragraphs), *map(for_latex, layout.remarks)]
    texts = [f"% In the preamble: {PREAMBLE}"]
    for number, (part, rows, notes) in enumerate(tables):
        title = ": ".join(filter(None, [layout.title, layout.heading_of(part)]))
        caption = for_latex(title + ("" if number == 0 else " (continued)") + ".")
        label = rf"\label{{tab:{built.name}}}" if number == 0 else ""
        is_last = number == len(tables) - 1
        lines = _height(part, rows) + _lines_of(notes)
        below = [*notes, *(general if is_last and lines + _lines_of(general) <= PAGE_LINES else ())]
        body = [
            rf"\caption{{{caption}{label}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            f"{_tabular(part, rows)}}}",
        ]
        texts.append(_float([*body, *_minipage(below)]))
        if is_last and len(below) == len(notes) and general:
            texts.append(_float(_minipage(general)))
    if not tables:
        texts.append(_float(_minipage(general)))
    return "\n\n".join(texts) + "\n"


def _float(body: Sequence[str]) -> str:
    return "\n".join(
        [r"\begin{table}[htbp]", r"\centering\footnotesize\setlength{\tabcolsep}{3pt}", *body, r"\end{table}"]
    )


def _minipage(texts: Sequence[str]) -> list[str]:
    """Paragraphs below a table, as wide as the text."""
    if not texts:
        return []
    begin = r"\begin{minipage}{\linewidth}\vspace{1ex}\footnotesize\raggedright"
    return [r"\par", begin, "\n\n".join(texts), r"\end{minipage}"]


def _lines_of(texts: Sequence[str]) -> int:
    """About how many lines texts have in a minipage."""
    return sum(-(-len(text) // NOTE_WIDTH) for text in texts)


def _height(part: Part, rows: range) -> int:
    return sum(max(len(block) for block in part.rows[number]) for number in rows)


def _notes(layout: Layout, part: Part, rows: range) -> list[str]:
    """The notes that the headings and these rows of a part have marks of, each with its number."""
    blocks = [*(column.head for column in part.columns), *(block for number in rows for block in part.rows[number])]
    numbers = sorted({number for block in blocks for text in block for number in text.notes})
    return [f"{_superscript(number)} {for_latex(layout.notes[number - 1])}" for number in numbers]


def _pages(layout: Layout, part: Part) -> list[range]:
    """The rows of each table of a part, of which none has more than `MOST_LINES` lines or, with its notes, a page."""
    pages, start = [], 0
    for number in range(1, len(part.rows)):
        rows = range(start, number + 1)
        lines = _height(part, rows)
        if lines > MOST_LINES or lines + _lines_of(_notes(layout, part, rows)) > PAGE_LINES:
            pages.append(range(start, number))
            start = number
    return [*pages, range(start, len(part.rows))]


def _folded(part: Part) -> Part:
    """The part with headings, and names of methods, of several lines, so that no column is wider than its values."""
    widths = [column_width(part, number) for number in range(len(part.columns))]
    columns = [
        Column(column.group, _fold(column.head, max(width, LEAST_HEADING)))
        for column, width in zip(part.columns, widths, strict=True)
    ]
    rows = [
        (_fold(row[0], widths[0]), *row[1:]) if part.columns[0].head[0].text == "Method" else row for row in part.rows
    ]
    return replace(part, columns=tuple(columns), rows=tuple(rows))


def _fold(block: Block, width: int) -> Block:
    """The texts of a block in lines of that width, broken at spaces; the last line has the marks of its notes."""
    folded = []
    for text in block:
        lines = textwrap.wrap(text.text, width, break_long_words=False, break_on_hyphens=False) or [text.text]
        folded += [replace(text, text=line, notes=()) for line in lines[:-1]] + [replace(text, text=lines[-1])]
    return tuple(folded)


def _tabular(part: Part, rows: range) -> str:
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(part.columns) - 1)}}}", r"\toprule", *_heads(part), r"\midrule"]
    for number in rows:
        if number in part.breaks and number != rows.start:
            lines.append(r"\midrule")
        lines += _row(part.rows[number])
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _heads(part: Part) -> list[str]:
    """The groups above their columns, each with a rule below it, and the headings."""
    lines = []
    groups = part.groups()
    if len(groups) > 1:
        lines.append(
            " & ".join(rf"\multicolumn{{{count}}}{{c}}{{{for_latex(name)}}}" for name, count in groups) + r" \\"
        )
        start, rules = 1, []
        for name, count in groups:
            rules += [rf"\cmidrule(lr){{{start}-{start + count - 1}}}"] if name else []
            start += count
        lines.append(" ".join(rules))
    return [*lines, *_row([column.head for column in part.columns])]


def _row(blocks: Sequence[Block]) -> list[str]:
    """The lines of a row: the first lines of all blocks, then the second ones."""
    height = max(len(block) for block in blocks)
    lines = [" & ".join(_cell(block[i]) if i < len(block) else "" for block in blocks) for i in range(height)]
    return [line + r" \\" for line in lines]


def _cell(text: Text) -> str:
    shown = rf"\textbf{{{for_latex(text.text)}}}" if text.bold else for_latex(text.text)
    return shown + (_superscript(*text.notes) if text.notes else "")


def _superscript(*numbers: int) -> str:
    return rf"\textsuperscript{{{','.join(map(str, numbers))}}}"
