"""Examples on the pages: files are written as a reader would write them, and Python is executed.

A fenced block of Python or yaml has a marker in the line above, `<!-- example: ... -->`, which is

- the path of a file, such as `mean_image.py`. All files of a page are written into one folder, and are there imported
  or read;
- `run`: Python, which is executed in that folder. All such blocks of a page share their names, in the page's order;
- `slow`: the same in the slow suite, together with the page's blocks `run`.

Every other block is in `ELSEWHERE`, with the reason.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")})
BLOCK = re.compile(
    r"(?:^<!-- example: (?P<marker>.+?) -->\n)?^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```", re.M | re.S
)

# (page, marker): why the block is no example of this file.
ELSEWHERE: dict[tuple[str, str], str] = {}

# The first lines of indented Python: excerpts of methods, which need more than a page shows.
EXCERPTS = {
    "def losses(images, labels, rng):": "tests/test_record_rng_mechanisms.py",
    "class MyProgram(Program):": "the form of a program; tests/client_toys.py has complete ones",
    "for t in ctx.steps(release.times, net=net, adam=adam, decay=decay):": "the form of a loop; methods/dpgan.py",
}
PYTHON = re.compile(r"(?:def|class|for|while|if|with|import|from)\b|@\w|\w+ = ")


@dataclass(frozen=True)
class Example:
    page: str
    language: str
    marker: str
    code: str


@cache
def examples(page: Path) -> tuple[Example, ...]:
    name = str(page.relative_to(ROOT))
    found = (
        Example(name, each["language"], each["marker"] or "", each["code"]) for each in BLOCK.finditer(page.read_text())
    )
    return tuple(each for each in found if each.language in ("python", "yaml"))


def is_file(example: Example) -> bool:
    return Path(example.marker).suffix in (".py", ".yaml")


def is_known(example: Example) -> bool:
    """Whether this file, or the test that `ELSEWHERE` names, uses the example."""
    if is_file(example) or (example.language == "python" and example.marker in ("run", "slow")):
        return True
    return (example.page, example.marker) in ELSEWHERE


def names(markers: tuple[str, ...] | None) -> list[Path]:
    """Pages with files (None), or with blocks of these markers."""
    return [
        page
        for page in PAGES
        if any(is_file(each) if markers is None else each.marker in markers for each in examples(page))
    ]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def write_files(page: Path, folder: Path) -> list[Path]:
    """Write the files of a page, each once, and return their paths."""
    written = []
    for example in filter(is_file, examples(page)):
        path = folder / example.marker
        assert path not in written, f"{page} has {example.marker} twice"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(example.code)
        written.append(path)
    return written


@pytest.fixture
def own_modules(tmp_path, monkeypatch) -> Iterator[Path]:
    """A working directory whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_of_code_is_an_example(page):
    unknown = [f"{each.marker}: {each.code.splitlines()[0]}" for each in examples(page) if not is_known(each)]
    assert not unknown, "blocks without a marker that this file knows"


def indented_python(text: str) -> list[str]:
    """The first lines of indented blocks of Python, without their comments."""
    lines = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).splitlines()
    first = [line for before, line in zip(["", *lines], lines, strict=False) if not before and line.startswith("    ")]
    return [line.partition("#")[0].strip() for line in first if PYTHON.match(line.strip())]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_is_in_fenced_blocks(page):
    """Indented blocks hold commands and formulas; an excerpt of Python is in `EXCERPTS`."""
    assert not set(indented_python(page.read_text())) - set(EXCERPTS)


def test_indented_python_is_found():
    fenced = "```python\n\n    z = 1\n```\n"
    text = f"Text\n\n    x = f(1)  # y\n    y = 2\n\n    dpgen run method=a\n\n    def f(x):\n\n{fenced}"
    assert indented_python(text) == ["x = f(1)", "def f(x):"]


def test_the_exceptions_exist():
    marked = {(each.page, each.marker) for page in PAGES for each in examples(page)}
    assert not set(ELSEWHERE) - marked
    assert not set(EXCERPTS) - {line for page in PAGES for line in indented_python(page.read_text())}


@pytest.mark.parametrize("page", names(None), ids=page_id)
def test_the_files_of_a_page_can_be_read(page, own_modules):
    for path in write_files(page, own_modules):
        if path.suffix == ".yaml":
            assert OmegaConf.load(path)
        else:
            compile(path.read_text(), str(path), "exec")
            __import__(".".join(path.relative_to(own_modules).with_suffix("").parts))


def execute(page: Path, folder: Path, markers: tuple[str, ...]) -> None:
    write_files(page, folder)
    code = "\n".join(each.code for each in examples(page) if each.marker in markers)
    exec(compile(code, str(page), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("page", names(("run",)), ids=page_id)
def test_the_python_of_a_page_runs(page, own_modules):
    execute(page, own_modules, ("run",))


@pytest.mark.slow
@pytest.mark.parametrize("page", names(("slow",)), ids=page_id)
def test_the_slow_python_of_a_page_runs(page, tmp_path):
    """In a process of its own, as a reader's script, because runs change what a process has loaded."""
    write_files(page, tmp_path)
    code = "\n".join(each.code for each in examples(page) if each.marker in ("run", "slow"))
    (tmp_path / "example.py").write_text(f"if __name__ == '__main__':\n{re.sub('(?m)^', '    ', code)}\n")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "DPGEN_RESULTS": str(tmp_path / "results"),
    }
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("<!-- example: a.py -->\n```python\nx = 1\n```\n", True),
        ("<!-- example: run -->\n```python\nx = 1\n```\n", True),
        ("<!-- example: run -->\n```yaml\nx: 1\n```\n", False),
        ("```python\nx = 1\n```\n", False),
        ("<!-- example: a.py -->\n\n```python\nx = 1\n```\n", False),
    ],
)
def test_a_block_without_a_marker_is_found(text, known):
    (match,) = BLOCK.finditer(text)
    assert is_known(Example("page.md", match["language"], match["marker"] or "", match["code"])) == known
