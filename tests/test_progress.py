"""Progress of a loop: lines without a terminal, a bar on a terminal, nothing for a fast loop."""

from __future__ import annotations

import io

import pytest

from dpgen_bench.training import progress
from dpgen_bench.training.progress import ProgressBar


def loop(bar: ProgressBar, first: int = 0) -> None:
    bar.start("train", 200, first)
    for t in range(first, 200):
        bar.step(t + 1)
    bar.finish()


@pytest.mark.parametrize(("first", "lines"), [(0, 10), (95, 6), (200, 0)])
def test_without_a_terminal_there_is_a_line_for_each_tenth(first, lines, monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    asked = []
    loop(ProgressBar("a run", lambda: asked.append(1) or "ε spent 3"), first)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == len(asked) == lines
    steps = [20 * (10 - lines + n + 1) for n in range(lines)]
    assert [line.split(",")[:2] for line in printed] == [[f"  a run train: {step}/200", " ε spent 3"] for step in steps]


def test_a_terminal_shows_a_bar_that_is_erased_at_the_end(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    bar = ProgressBar("a run", lambda: "ε spent 3")
    loop(bar)
    assert "a run train" in terminal.getvalue()
    assert "200/200" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # the bar is erased


def test_a_fast_loop_shows_nothing(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", 1e9)
    loop(ProgressBar("a run"))
    assert capsys.readouterr().err == ""
