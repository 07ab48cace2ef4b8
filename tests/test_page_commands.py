"""Commands on the pages are parsed: the verb and its options exist, the overrides compose, tables and targets exist.

Nothing is executed. Lines of blocks of code that begin with `dpgen` or `make`, and `dpgen ...` in the text, are read.
"""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from dpgen_bench.cli.parser import build_parser
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.overrides import parse_override
from dpgen_bench.tables.load import load_table
from dpgen_bench.utils.paths import CONF
from tests.test_page_examples import PAGES, ROOT, page_id, write_files

NOT_CODE = re.compile(r"^```(?:python|yaml|bibtex|mermaid|text).*?^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^(?: {4,}|\t)?(?:\$ )?((?:dpgen|make|\.venv/bin/dpgen) .*)$", re.MULTILINE)
INLINE = re.compile(r"`(dpgen [^`]+|make [^`]+)`")
VALUES = {"method": "dp_merf", "dataset": "digits", "protocol": "quick", "table": "demo"}  # of the placeholder NAME


def in_blocks(text: str) -> list[str]:
    """Commands in blocks of code, up to `...`; a backslash continues a line."""
    text = NOT_CODE.sub("", text).replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    indented = "\n".join(line for line in text.splitlines() if line.startswith("    "))
    lines = [line.partition(" ...")[0] for line in (*LINE.findall(fenced), *LINE.findall(indented))]
    return [part for line in lines for part in re.split(r"\s(?:&&|\|)\s", line)]


def in_text(text: str) -> list[str]:
    """Commands in backticks; those with `...` or `[`, which show a form, without what follows."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [re.split(r" \S*(?:\.\.\.|\[)", command)[0] for command in INLINE.findall(text)]


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def composes(overrides: tuple[str, ...], folder: Path) -> None:
    """Compose overrides; raises an exception if they are invalid."""
    compose_config(list(overrides))


def one_choice_each(overrides: list[str]) -> list[tuple[str, ...]]:
    """Overrides without sweeps: the first choice of each, and every other choice of a config group."""
    choices: list[list[str]] = []
    for text in overrides:
        override = parse_override(text)
        if override.is_delete() or not override.is_sweep_override():
            choices.append([text])
        elif (CONF / override.key_or_group).is_dir():
            choices.append([f"{override.key_or_group}={value}" for value in text.partition("=")[2].split(",")])
        else:
            choices.append([f"{override.key_or_group}={text.partition('=')[2].split(',')[0]}"])
    first = [each[0] for each in choices]
    others = [[*first[:i], other, *first[i + 1 :]] for i, each in enumerate(choices) for other in each[1:]]
    return [tuple(each) for each in (first, *others)]


def filled(argument: str) -> str:
    """An argument with values for the placeholders NAME and P."""
    key, equals, value = argument.partition("=")
    if equals and value in ("NAME", "P"):
        return f"{key}={VALUES[key]}"
    return "3" if argument in ("N", "T") else argument


def check(command: str, folder: Path) -> None:
    """Check a command; raises an exception if a part of it does not exist."""
    words = [filled(word) for word in shlex.split(command, comments=True)]
    program, arguments = words[0], words[1:]
    if program == "make":
        unknown = {word for word in arguments if "=" not in word} - targets()
        assert not unknown, f"{command}: no targets of the Makefile"
        return
    verbs = build_parser()[1]
    if not arguments or arguments[0] in ("VERB", "help") or arguments[0].startswith("-"):
        return
    assert arguments[0] in verbs, f"{command}: no verb of dpgen"
    if "--help" in arguments:
        return
    try:
        options = verbs[arguments[0]].parse(arguments[1:])
    except SystemExit as end:
        pytest.fail(f"{command}: exit status {end.code}")
    folders = getattr(options, "config_dir", None) or []
    if arguments[0] in ("tables", "sweep"):
        given = options.names if arguments[0] == "tables" else options.arguments
        for name in (each for each in given if "=" not in each and each != "NAME"):
            if not any((folder / each / "table" / f"{name}.yaml").exists() for each in folders):
                load_table(name)
        overrides = [each for each in given if "=" in each]
    else:
        overrides = getattr(options, "overrides", [])
    for choice in one_choice_each(overrides) if overrides else []:
        composes((*(f"--config-dir={each}" for each in folders), *choice), folder)


def is_complete(command: str) -> bool:
    """Whether a command of the text can be parsed: a lone verb names only itself."""
    return len(command.split()) > 2


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_commands_of_a_page_can_be_parsed(page, tmp_path, monkeypatch):
    text = page.read_text()
    commands = [*in_blocks(text), *filter(is_complete, in_text(text))]
    if "--config-dir my_conf" in text:
        write_files(ROOT / "docs" / "extend" / "method.md", tmp_path)  # the example of most pages
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("images", "my_images", "DIR"):
        (tmp_path / name).mkdir()
    for command in commands:
        check(command, tmp_path)
    verbs = {command.split()[1] for command in in_text(text) if command.startswith("dpgen ")}
    assert not {verb for verb in verbs if re.fullmatch("[a-z]+", verb)} - set(build_parser()[1])


@pytest.mark.parametrize(
    "command",
    [
        "dpgen paint",
        "dpgen runs --no-such-option",
        "dpgen run method=no_such_method",
        "dpgen run -m method=dpgan,no_such_method",
        "dpgen run method=dpgan method.no_such_setting=1",
        "dpgen run dataset=mnist privacy.epsilon==",
        "dpgen tables no_such_table",
        "dpgen sample RUN --n many --out x.npz",
        "dpgen account --q two --sigma 1 --steps 10",
        "dpgen check --config-dir no_such_folder method=dp_merf",
        "make no-such-target",
    ],
)
def test_a_wrong_command_is_found(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Exception, pytest.fail.Exception)):
        check(command, tmp_path)


def test_commands_are_found_in_blocks_and_in_the_text():
    blocks = "    dpgen runs  # a comment\n    make demo\n\n```sh\n$ dpgen list && dpgen report\n```\n"
    page = f"Use `dpgen tables NAME` and\n\n{blocks}"
    assert in_blocks(page) == ["dpgen list", "dpgen report", "dpgen runs  # a comment", "make demo"]
    assert in_text(page) == ["dpgen tables NAME"]
    assert sum(len(in_blocks(path.read_text())) for path in PAGES) > 100
