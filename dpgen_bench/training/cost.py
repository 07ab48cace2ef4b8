"""What a run cost: its peak memory, and training.json as columns of a table."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20

# Linux: "5" written to the first makes VmHWM in the second start again from the memory held at that moment.
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """The largest memory held since this object was made, in MiB.

    host: resident memory of the process, which includes what it held before (the interpreter, PyTorch, what earlier
    runs of the same process left behind). Where the system cannot start that measurement anew, it is the peak of the
    whole process, and `since` says so. accelerator: memory of live tensors on a CUDA device; None elsewhere.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._restarted = _restart_host_peak()
        if self._device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """{"host": MiB, "accelerator": MiB or None, "since": "run start" or "process start"}.

        Args:
            earlier: what this said before the run was killed; the larger figures count, and the vaguer `since`.
        """
        accelerator = torch.cuda.max_memory_allocated(self._device) / MIB if self._device.type == "cuda" else None
        host = _host_peak() if self._restarted else None
        now = {
            "host": _process_peak() if host is None else host,
            "accelerator": accelerator,
            "since": "process start" if host is None else "run start",
        }
        if earlier is None:
            return now
        on_accelerator = [value for value in (earlier["accelerator"], accelerator) if value is not None]
        return {
            "host": max(earlier["host"], now["host"]),
            "accelerator": max(on_accelerator, default=None),
            "since": "process start" if "process start" in (earlier["since"], now["since"]) else "run start",
        }


def _restart_host_peak() -> bool:
    """Whether the system's figure for the process's peak could be set back to what it holds now."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or a /proc that cannot be written
        return False
    return _host_peak() is not None


def _host_peak() -> float | None:
    """Peak resident memory in MiB since it was last set back, or None where /proc does not tell."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kib[0]) / 1024 if kib else None


def _process_peak() -> float:
    """Peak resident memory in MiB since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024  # bytes there, KiB elsewhere


def trainable_parameters(module: nn.Module) -> int:
    """How many numbers of a network training may change."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def cost_values(training: Mapping[str, Any]) -> dict[str, float]:
    """The columns of a run's training.json; what an older one does not hold has no column.

    seconds_total: of the whole fit. seconds_<phase>, steps_<phase>: of one loop; seconds_outside_loops: of the rest.
    peak_memory_mib: of the process's resident memory during the run; peak_memory_since_process_start_mib instead, where
    it could not be measured for the run alone. peak_memory_accelerator_mib: of tensors on the accelerator, if one was
    used. parameters_<name>, bytes_<direction>: as in the file; rounds, clients_asked, generator_updates: as counted.
    comm_cost_bytes: bytes in both directions for one update of the generator, by the average client that takes part
    (GS-WGAN's Table 2).
    """
    values: dict[str, float] = {}
    if "seconds" in training:
        outside = training.get("seconds_outside_loops")
        values["seconds_total"] = sum(training["seconds"].values()) + (outside or 0.0)
        values.update({f"seconds_{phase}": seconds for phase, seconds in training["seconds"].items()})
        if outside is not None:
            values["seconds_outside_loops"] = outside
    values.update({f"steps_{phase}": steps for phase, steps in training.get("steps", {}).items()})
    if memory := training.get("peak_memory_mib"):
        of_the_run = memory["since"] == "run start"
        values["peak_memory_mib" if of_the_run else "peak_memory_since_process_start_mib"] = memory["host"]
        if memory["accelerator"] is not None:
            values["peak_memory_accelerator_mib"] = memory["accelerator"]
    values.update({f"parameters_{name}": count for name, count in training.get("parameters", {}).items()})
    values.update({f"bytes_{direction}": count for direction, count in training.get("bytes", {}).items()})
    counters = training.get("counters", {})
    values.update(counters)
    if counters.get("clients_asked") and counters.get("generator_updates"):
        of_a_client = sum(training["bytes"].values()) / counters["clients_asked"]
        values["comm_cost_bytes"] = of_a_client * counters["rounds"] / counters["generator_updates"]
    return {name: float(value) for name, value in values.items()}
