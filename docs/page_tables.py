"""Tables in Markdown, and the part of a page between two marks that a script makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ("---",) * len(header), *rows))


def page_with(page: Path, begin: str, made: str, end: str) -> str:
    """The text of a page with `made` between the marks `begin` and `end`."""
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"
