"""What can be named on the command line: methods, datasets, protocols, presets and tables, with one line for each."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from rich.table import Table

from dpgen_bench.utils.console import Console
from dpgen_bench.utils.own_folders import own_folders
from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.validation import suggestion

# The plural that a user types -> the folder in conf/, and how a name of it is used.
GROUPS = {
    "methods": ("method", "dpgen run method=NAME"),
    "datasets": ("dataset", "dpgen run dataset=NAME"),
    "protocols": ("protocol", "dpgen run protocol=NAME"),
    "experiments": ("experiment", "dpgen run experiment=NAME"),
    "tables": ("table", "dpgen sweep NAME; dpgen tables NAME"),
}
_SENTENCE_END = re.compile(r"(?<!\bal)(?<!\be\.g)\.(?=\s|$)")
LONGEST = 180  # characters of one description


def catalogue(group: str) -> dict[str, str]:
    """Names of a group and what each is: the title of a table, else the first sentence of the comment of its yaml.

    Yamls in `own_folders` are listed, too. Of two with the same name the bench's own is used.

    Args:
        group: a key of `GROUPS`.

    Raises:
        ValueError: for another group.
    """
    if group not in GROUPS:
        raise ValueError(
            f"expected one of {', '.join(GROUPS)}, got {group!r}{suggestion(group, GROUPS)}; `dpgen list` lists "
            "all of them."
        )
    return {name: _describe(path) for name, path in names(GROUPS[group][0]).items()}


def names(folder: str, more: Sequence[Path] = ()) -> dict[str, Path]:
    """The yamls of a folder of conf/, of `own_folders` and of `more` by name, sorted; of two with a name the bench's.

    Yamls that are no choice of their own are left out: pieces of protocols, and what a scale changes for a method.
    """
    roots = [root / folder for root in (*more, *own_folders(), CONF)]
    found = {path.relative_to(root).with_suffix("").as_posix(): path for root in roots for path in root.rglob("*.yaml")}
    left_out = "quick/" if folder == "scale" else "part/"
    return {name: found[name] for name in sorted(found) if not name.startswith(left_out)}


def run_ids(results: Path) -> list[str]:
    """The ids of the runs in a folder of results, sorted."""
    return sorted(path.parent.name for path in (results / "runs").glob("*/config.yaml"))


def print_catalogue(groups: Iterable[str]) -> None:
    """Print the names of the groups, with one line for each."""
    console = Console(highlight=False)
    for group in groups:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in catalogue(group).items():
            table.add_row(name, text)
        console.print(f"{group} ({GROUPS[group][1]})", markup=False)
        console.print(table)


def _describe(path: Path) -> str:
    text = path.read_text()
    comment: list[str] = []
    for line in text.splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# ").rstrip())
    if not comment:
        content = yaml.safe_load(text)
        return str(content.get("title", "")) if isinstance(content, dict) else ""
    joined = " ".join(comment)
    end = _SENTENCE_END.search(joined)
    return textwrap.shorten(joined[: end.start()] if end else joined, LONGEST, placeholder=" …")
