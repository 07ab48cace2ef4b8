"""`make bench` measures what it can: a part that fails or cannot be measured does not stop the others."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from dpgen_bench.evaluate.metric import NotMeasured
from tests.bench import __main__ as bench


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Replaces benchmarks by functions; calls the command with them and returns the folder of its results."""

    def run(**measures):
        modules = {f"tests.bench.{name}": SimpleNamespace(measure=measure) for name, measure in measures.items()}
        monkeypatch.setattr(bench.importlib, "import_module", modules.__getitem__)
        monkeypatch.setattr(
            bench.pkgutil, "iter_modules", lambda path: [SimpleNamespace(name=name) for name in measures]
        )
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(tmp_path)])
        bench.main()

    return run


def raises(error):
    def measure():
        raise error

    return measure


def test_a_part_that_cannot_be_measured_is_named_and_no_failure(parts, tmp_path, capsys):
    parts(first=raises(NotMeasured("no weights")), second=lambda: {"ratio": 2})
    assert "first was not measured: no weights" in capsys.readouterr().out
    assert json.loads((tmp_path / "second.json").read_text()) == {"ratio": 2}
    assert not (tmp_path / "first.json").exists()


def test_the_others_are_measured_after_an_error_which_the_status_tells(parts, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"first failed: RuntimeError\('out of memory'\)"):
        parts(first=raises(RuntimeError("out of memory")), second=lambda: {"ratio": 2})
    assert "Traceback" in capsys.readouterr().err
    assert (tmp_path / "second.json").exists()
