"""Write a table as LaTeX, which a paper includes with \\input: booktabs, at most as wide as the text, and a caption."""

from __future__ import annotations

from collections.abc import Sequence

from dpgen_bench.tables.blocks import Block, Text
from dpgen_bench.tables.layout import Part, lay_out
from dpgen_bench.tables.lines import BuiltTable

MOST_LINES = 44  # lines of text in one table, so that it fits a page
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

    Letters that are not in `_LATEX`, such as those of a name, stay as they are; an engine for UTF-8 may know them.
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def to_latex(built: BuiltTable) -> str:
    """One `table` for each part, or several where a part has more lines than a page, and the notes below them.

    A document needs `PREAMBLE`. Tables are scaled to the width of the text.
    """
    layout = lay_out(built)
    tables = [(part, rows) for part in layout.parts for rows in _pages(part)]
    texts = [f"% In the preamble: {PREAMBLE}"]
    for number, (part, rows) in enumerate(tables):
        title = ": ".join(filter(None, [layout.title, layout.heading_of(part)]))
        caption = for_latex(title + ("" if number == 0 else " (continued)") + ".")
        label = rf"\label{{tab:{built.name}}}" if number == 0 else ""
        body = _tabular(part, rows)
        texts.append(
            "\n".join(
                [
                    *(r"\begin{table}[htbp]", r"\centering\small", rf"\caption{{{caption}{label}}}"),
                    r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                    *(f"{body}}}", r"\end{table}"),
                ]
            )
        )
    notes = [f"{_superscript(number)} {for_latex(note)}" for number, note in enumerate(layout.notes, start=1)]
    below = [*map(for_latex, layout.paragraphs), *notes, *map(for_latex, layout.remarks)]
    texts.append("\n\n".join([r"{\footnotesize\setlength{\parindent}{0pt}", *below, r"\par}"]))
    return "\n\n".join(texts) + "\n"


def _pages(part: Part) -> list[range]:
    """The rows of each table of a part, of which none has more than `MOST_LINES` lines."""
    pages, start, lines = [], 0, 0
    for number, row in enumerate(part.rows):
        height = max(len(block) for block in row)
        if lines and lines + height > MOST_LINES:
            pages.append(range(start, number))
            start, lines = number, 0
        lines += height
    return [*pages, range(start, len(part.rows))]


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
