"""Shared by all tests: one thread, weights and data from beside the repository where they lie there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

torch.set_num_threads(1)
# The same examples on every machine, and no verdict about time: the machines that run this are shared.
settings.register_profile("bench", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bench")
if (SHARED / "torch_home").is_dir():
    os.environ.setdefault("TORCH_HOME", str(SHARED / "torch_home"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real data: $DPGEN_DATA, else ../shared/data beside the repository. Skips if neither is there."""
    root = Path(os.environ.get("DPGEN_DATA", SHARED))
    if not root.is_dir():
        pytest.skip(f"no real data: {root} is not there (set DPGEN_DATA to a folder that holds MNIST/raw)")
    return root
