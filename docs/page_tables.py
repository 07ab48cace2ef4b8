"""Tables in Markdown, and the part of a page between two marks that a script makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = (header, ("---",) * len(header), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


def page_with(page: Path, begin: str, made: str, end: str, text: str | None = None) -> str:
    """The text of a page with `made` between the marks `begin` and `end`.

    Args:
        text: the page's text, for a page with several such parts; None: read it.

    Raises:
        ValueError: Unless the page has both marks once, in this order.
    """
    text = page.read_text() if text is None else text
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin!r} and then {end!r} in {page}, once each; restore these marks.")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
