"""`make bench` measures what it can: a part that fails or cannot be measured does not stop the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from docs.make_results import cost_line
from dpgen_bench.evaluate.metric import NotMeasured
from dpgen_bench.store.records import read_record, record_paths
from tests.bench import __main__ as bench
from tests.bench import operations


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


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda: {"ratio": object()}, "first failed: TypeError"),
        (lambda: sys.exit("no memory"), r"first failed: SystemExit\('no memory'\)"),
        (lambda: sys.exit(0), r"first failed: SystemExit\(0\)"),
    ],
)
def test_a_part_whose_values_cannot_be_written_or_that_exits_does_not_stop_the_others(
    parts, tmp_path, measure, message
):
    with pytest.raises(SystemExit, match=message):
        parts(first=measure, second=lambda: {"ratio": 2})
    assert (tmp_path / "second.json").exists()
    assert not (tmp_path / "first.json").exists()


def test_a_file_that_cannot_be_written_does_not_stop_the_others(parts, tmp_path):
    (tmp_path / "first.json").mkdir()
    with pytest.raises(SystemExit, match="first failed: IsADirectoryError"):
        parts(first=lambda: {"ratio": 1}, second=lambda: {"ratio": 2})
    assert (tmp_path / "second.json").exists()


ROOT = Path(__file__).resolve().parent.parent


def test_the_page_has_the_measured_steps():
    measured = json.loads((ROOT / "results" / "bench" / "steps.json").read_text())["cpu"]
    page = (ROOT / "docs" / "accelerators.md").read_text()
    names = {"dpgan": "DPGAN", "dp_sinkhorn": "DP-Sinkhorn", "gs_wgan": "GS-WGAN", "dpdm": "DPDM"}
    for method, values in measured["step"].items():
        billions = f"{values['floating_point_operations'] / 1e9:.1f} | {values['bytes'] / 1e9:.2f}"
        bounds = f"{values['bound_h200_ms']:.2f} | {values['bound_h200_one_kernel_after_the_other_ms']:.1f}"
        row = f"| {names[method]} | {values['operations']:,} | {billions} | {bounds} | {values['measured_ms']:,.0f} |"
        assert row in page


def test_the_page_has_the_measured_parts_that_are_compiled():
    measured = json.loads((ROOT / "results" / "bench" / "compiled.json").read_text())["cpu"]
    page = (ROOT / "docs" / "accelerators.md").read_text()
    for part, ways in measured.items():
        none, inductor = ways["none"], ways["inductor"]
        calls = f"{inductor['calls_of_compiled_kernels']}, {inductor['outermost_events']}"
        times = f"{none['measured_ms']:,.0f}, {inductor['measured_ms']:,.0f}"
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {part}"))
        assert line.endswith(f"| {none['operations']:,} | {calls} | {times} |")


def test_the_page_has_what_runs_at_full_scale_must_take():
    measured = json.loads((ROOT / "results" / "bench" / "full_scale.json").read_text())
    page = (ROOT / "docs" / "accelerators.md").read_text()
    assert f"({measured['flops_of_a_core'] / 1e9:.0f} GFLOP/s)" in page
    for preset, values in measured["presets"].items():
        hours = (values["least_hours_h200"], values["least_hours_core"])
        cells = [f"{each:,.0f}" if each >= 10 else f"{each:.2g}" for each in hours]
        counted = f"{values['flops_of_a_step'] / 1e12:.3g} | {values['flops']:.1e}"
        assert f"| `{preset}` | {values['steps']:,} | {values['batch']:,} | {counted} | {' | '.join(cells)} |" in page


def test_operations_of_a_fit_follow_from_few_of_its_steps(monkeypatch):
    settings = ["method=dp_merf", "dataset=digits", "method.steps=8", "privacy.epsilon=1"]
    record = SimpleNamespace(content={"command": settings, "cost": {"steps": {"train": 8}}})
    monkeypatch.setattr(operations, "RECORDS", 50)
    few = operations.of_record(record)
    monkeypatch.setattr(operations, "STEPS", 8)
    assert few == operations.of_record(record)
    assert few["all"] == few["outside"] + 8 * few["step"]["train"] > 0


@pytest.mark.slow
def test_the_counted_operations_are_those_of_the_fits_in_the_table_of_costs():
    """The second moment of DP-Gauss is a product of 784 x 60,000 by 60,000 x 784, and most of what its fit computes."""
    counted = json.loads((ROOT / "results" / "bench" / "operations.json").read_text())["lines"]
    lines = {" | ".join(cost_line(read_record(path))) for path in record_paths(ROOT / "results").values()}
    assert counted.keys() <= lines
    (gauss,) = (values for line, values in counted.items() if "`dp_gauss/mnist_eps10`, `clusters=1`" in line)
    assert 1 <= gauss["all"] / (2 * 60_000 * 784**2) <= 1.2
