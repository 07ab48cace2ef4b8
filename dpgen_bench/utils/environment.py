"""The environment of a run: its description for environment.json, the choice of the device, and PyTorch's threads."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import torch

from dpgen_bench.utils.paths import HOME, IS_CHECKOUT

_PACKAGES = [
    "torch",
    "torchvision",
    "opacus",
    "prv-accountant",
    "dp-accounting",
    "pytorch-fid",
    "scikit-learn",
    "xgboost",
    "xgboost-cpu",
    "hydra-core",
    "numpy",
    "scipy",
    "pandas",
]


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions of Python and the libraries, the machine, the device, and the git commit of the source.

    The commit ends with `+changes` if the working tree differs from it. It is None outside a git repository, and for an
    installed package, which may lie in a repository of the user.
    """
    return {
        "python": platform.python_version(),
        "packages": package_versions(),
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "commit": _commit(),
    }


def with_earlier(environment: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of a run that goes on, with the key "earlier": those of its earlier sessions that differ.

    Args:
        environment: as `describe_environment` makes it.
        before: the environment of the session before, or {} if there was none; other keys are left out.
    """
    last = {key: before[key] for key in environment if key in before}
    earlier: list[dict[str, Any]] = []
    for each in (*before.get("earlier", []), last):
        if each and each not in (environment, *earlier):
            earlier.append(each)
    return {**environment, "earlier": earlier} if earlier else environment


def package_versions() -> dict[str, str]:
    """Versions of the libraries that training and evaluation compute with, of those that are installed.

    On a cluster without network, xgboost may be absent, or its smaller distribution for CPUs may be there instead.
    """
    installed = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def choose_device(name: str) -> torch.device:
    """The device of a name such as "cpu" or "cuda:0"; "auto" is the first GPU, or the CPU if there is no GPU.

    Raises:
        ValueError: For a device of another kind than CPU and CUDA, or a CUDA device that PyTorch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(
            f"expected runtime.device auto, cpu, cuda or cuda:NUMBER, got {name!r}; use runtime.device=auto."
        )
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"expected a device of this machine, got runtime.device={name}, but PyTorch sees no CUDA device here; use "
            "runtime.device=auto or cpu."
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"expected a device of this machine, got runtime.device={name}, but PyTorch sees "
            f"{torch.cuda.device_count()} CUDA devices, which count from cuda:0; use runtime.device=auto."
        )
    return device


@contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread, because the rounding of sums depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None or not IS_CHECKOUT:
        return None
    result = subprocess.run([git, "describe", "--always", "--dirty=+changes"], cwd=HOME, capture_output=True, text=True)
    return result.stdout.strip() or None
