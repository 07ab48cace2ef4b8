"""Software and settings that determine a run's sums, which a run with noise for release must keep when it continues.

Releases after the last checkpoint of a run that was stopped or killed are made again, with the same noise. If their
sums were of other functions, or rounded in another way, the two noisy values would differ by what no noise covers.
Seeded noise promises nothing against someone who has the seed, so a run with it may continue in any way.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from dpgen_bench.config.runtime import backend_of, number_of_processes
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.store.folders import ARITHMETIC, RunFolder
from dpgen_bench.utils.files import make_private, write_atomic
from dpgen_bench.utils.paths import METHODS, PACKAGE

OTHER_SOURCE = " (a hash of the source of the bench: use the version that began the run)"


def arithmetic(spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """What changes the sums of a run, by name: the bench's source, libraries, and settings that change the rounding.

    The number of threads is that of this process. Two processors may round differently with the same settings, which
    this does not see. The source of a user's own method is checked by `expect_same_source`.
    """
    return {
        "dpgen_bench": source_of_the_bench(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "runtime.processes": number_of_processes(spec.config),
        "runtime.padded": OmegaConf.select(spec.config, "runtime.padded"),
        "runtime.stack": OmegaConf.select(spec.config, "runtime.stack"),
        "runtime.compile": backend_of(spec.config),
        "runtime.device": device.type,
        "runtime.threads": torch.get_num_threads(),
    }


@cache
def source_of_the_bench() -> str:
    """Hash of all source files of the harness and of its methods: networks and losses are a part of every release."""
    digest = hashlib.sha256()
    for folder in (PACKAGE, METHODS):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def expect_same_arithmetic(spec: RunSpec, folder: RunFolder, device: torch.device) -> None:
    """Check that a run that continues with `privacy.noise=os` has the software and settings of its releases.

    Raises:
        ValueError: for other ones.
    """
    path = _file_of(folder)
    if spec.config.privacy.noise != "os" or not path.exists() or not has_released(folder):
        return
    before, now = json.loads(path.read_text()), arithmetic(spec, device)
    if different := [name for name in now if before.get(name) != now[name]]:
        before = dict.fromkeys(now, "unknown") | before  # an earlier version of the bench recorded less
        needed, got = (" ".join(f"{name}={_text(of[name])}" for name in different) for of in (before, now))
        raise ValueError(
            f"expected {needed}, with which run {spec.id} made its releases, got {got}: with privacy.noise=os, "
            f"releases that are made again would have the same noise on other sums; continue it with {needed}"
            f"{OTHER_SOURCE if 'dpgen_bench' in different else ''}."
        )


def record_arithmetic(spec: RunSpec, folder: RunFolder, device: torch.device) -> None:
    """Record what determines the sums of a run with `privacy.noise=os`, until it is finished."""
    if spec.config.privacy.noise != "os":
        return
    path = _file_of(folder)
    make_private(path.parent)
    write_atomic(path, json.dumps(arithmetic(spec, device)), private=True)


def _file_of(folder: RunFolder) -> Path:
    return folder.path / "private" / ARITHMETIC


def _text(value: Any) -> str:
    """A value as in an override of Hydra."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def has_released(folder: RunFolder) -> bool:
    """Whether the run itself, and not the run that it continues, made a release."""
    path = folder.path / "ledger.json"
    return path.exists() and any(entry.executed for entry in Ledger.load(path).own.values())
