"""What a strict build of the documentation refuses (docs/site_hooks.py), with a planted fault of each kind."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from docs import site_hooks as hooks

ROOT = Path(__file__).parent.parent


def package(folder: Path, source: str) -> Path:
    (folder / "planted").mkdir()
    (folder / "planted" / "__init__.py").write_text("")
    (folder / "planted" / "names.py").write_text(textwrap.dedent(source))
    return folder


def test_public_names_without_a_docstring_are_reported(tmp_path):
    root = package(
        tmp_path,
        '''
        """Names with and without docstrings."""

        class Base:
            """A base."""

            def inherited(self):
                """Documented here."""

        class Derived(Base):
            """Documented, with a public and a private member that are not."""

            def inherited(self): ...
            def bare(self): ...
            def _private(self): ...

        class Bare: ...

        def function(): ...
        ''',
    )
    names = [f"planted.names.{name}" for name in ("Base", "Derived", "Bare", "function", "missing")]
    assert hooks.undocumented(names, root) == [
        "planted.names.Derived.bare",
        "planted.names.Bare",
        "planted.names.function",
        "planted.names.missing",
    ]


def names_of_the_reference() -> list[str]:
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    return re.findall(r"^::: (\S+)", pages, re.MULTILINE)


def test_every_name_of_the_reference_is_documented():
    names = names_of_the_reference()
    assert len(names) > 30
    assert hooks.undocumented(names) == []


def test_the_functions_of_the_package_are_in_the_reference():
    import dpgen_bench

    shown = {name.rpartition(".")[2] for name in names_of_the_reference()}
    assert set(dpgen_bench.__all__) - {"__version__"} <= shown


@pytest.mark.parametrize(
    ("html", "expected"),
    [
        ('<script src="https://unpkg.com/a.js"></script>', ["https://unpkg.com/a.js"]),
        ('<img alt="" src="//example.org/a.png">', ["//example.org/a.png"]),
        ('<link rel="stylesheet" href="https://example.org/a.css">', ["https://example.org/a.css"]),
        ('<a href="https://example.org">a link</a><img src="../a.png"><script src="assets/a.js"></script>', []),
    ],
)
def test_what_a_page_fetches_is_reported(html, expected):
    assert hooks.fetched(html) == expected
