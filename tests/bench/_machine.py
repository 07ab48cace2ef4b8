"""Describes the machine on which a benchmark was measured, and measures on each kind of device that it has."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

# The kinds of device that a benchmark measures on, if the machine has them.
DEVICES = ["cpu", "cuda"]


def machine(*libraries: str) -> dict[str, Any]:
    """The processor, PyTorch's instruction set and threads, and the versions of Python, PyTorch and `libraries`."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{library: version(library) for library in libraries},
    }


def on_each_device(doc: str | None, values: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What a benchmark measures (the docstring of its module), on which machine, and its values on each device."""
    torch.set_num_threads(1)
    devices = [each for each in DEVICES if each == "cpu" or torch.cuda.is_available()]
    return {"what": " ".join((doc or "").split()), "machine": machine(), **{each: values(each) for each in devices}}
