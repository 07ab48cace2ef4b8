"""Where a run was made: versions, machine and commit, so that a figure can be traced; device and threads."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = [
    "torch",
    "torchvision",
    "opacus",
    "prv-accountant",
    "dp-accounting",
    "pytorch-fid",
    "scikit-learn",
    "xgboost",
    "hydra-core",
    "numpy",
    "scipy",
    "pandas",
]


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Library versions, machine, device, and git commit of the source (with `+changes`)."""
    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "commit": _commit(),
    }


def choose_device(wanted: str) -> torch.device:
    """`auto` is a GPU where there is one.

    Raises:
        ValueError: for a device this machine does not have.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"runtime.device={wanted}, but PyTorch sees no CUDA device here; use runtime.device=auto or cpu."
        )
    return torch.device(wanted)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread: sums, and so the last bits of figures and networks, depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    here = Path(__file__).parent
    found = subprocess.run([git, "describe", "--always", "--dirty=+changes"], cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or None
