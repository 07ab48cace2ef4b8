"""The bar of a sweep on a terminal, and its lines elsewhere."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

from rich.console import Console

from dpgen_bench.tables import sweep_progress, sweeps
from dpgen_bench.tables.sweep_progress import SweepProgress


def test_the_bar_of_a_sweep_counts_finished_runs(monkeypatch):
    states = {"a": "not run", "b": "finished"}
    monkeypatch.setattr(sweep_progress, "state_of", lambda spec, folder: states[folder])
    jobs = [SimpleNamespace(spec=None, folder=name, finished=state == "finished") for name, state in states.items()]
    screen = io.StringIO()
    with SweepProgress("toy", jobs, Console(file=screen, force_terminal=True, width=80)) as progress:
        assert (progress.shows_bar, progress.finished) == (True, 1)
        states["a"] = "finished"
        progress.output("run abc123 (dp_merf digits) failed during training")
        assert progress.finished == 1
        progress.output("run abc123 (dp_merf digits) finished: there")
        assert progress.finished == 2
    assert "run abc123 (dp_merf digits) failed during training" in screen.getvalue()
    assert "2/2" in screen.getvalue()


def test_without_a_terminal_a_line_counts_the_finished_runs(capsys):
    with SweepProgress("toy", [], Console(file=io.StringIO())) as progress:
        assert not progress.shows_bar
        progress.report()
    assert capsys.readouterr().out == "toy: 0 of 0 runs finished\n"


def test_the_lines_of_a_command_are_passed_on():
    lines: list[str] = []
    program = "import sys; print('one'); print('two', file=sys.stderr, flush=True); sys.exit(3)"
    assert sweeps.run_stoppable([sys.executable, "-c", program], lines.append) == (3, None)
    assert sorted(lines) == ["one", "two"]
