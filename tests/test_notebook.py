"""docs/quickstart.ipynb runs from the first cell to the last, in an empty folder, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"


def test_the_notebook_is_valid_and_has_no_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("DPGEN_RESULTS", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises CellExecutionError for a cell that fails
    outputs = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert "finished" in outputs[0]
    assert "image/png" in outputs[1]
    assert "'proven'" in outputs[2]
    assert "add_remove" in outputs[3]
    assert "acc_logreg_pct" in outputs[4]
    assert "dp_merf" in outputs[5]
    assert "class_means" in outputs[-1]
    assert (tmp_path / "results" / "runs").is_dir()
