"""The cost of a run: a measurement of its peak memory, and the content of training.json as columns of a table."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpgen_bench.utils.allocator import return_freed_memory

MIB = 2**20

# Linux: writing "5" to the first file resets VmHWM in the second one to the present memory.
CLEAR_REFS, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """Measures the peak memory since this object was made, in MiB, on the host and on the accelerator.

    On the host it is the resident memory of the process, which includes the interpreter, PyTorch, and memory that
    earlier runs of the process did not free. If the system cannot reset this measurement, it is the peak since the
    process started, and `since` says so. On a CUDA device it is the memory of live tensors.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        return_freed_memory()
        self._host_was_reset = _reset_host_peak()
        if self._device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, earlier: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The peaks as {"host": MiB, "accelerator": MiB or None, "since": "run start" or "process start"}.

        Args:
            earlier: The result before the run was interrupted, if it was. The larger values are returned, with
                "process start" if either result has it.
        """
        accelerator = torch.cuda.max_memory_allocated(self._device) / MIB if self._device.type == "cuda" else None
        host = _host_peak() if self._host_was_reset else None
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


def _reset_host_peak() -> bool:
    """Reset the system's peak of the process to its present memory; whether the system could."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:  # not Linux, or a /proc that cannot be written
        return False
    return _host_peak() is not None


def _host_peak() -> float | None:
    """Peak resident memory in MiB since the last reset, or None if /proc does not have it."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kib[0]) / 1024 if kib else None


def _process_peak() -> float:
    """Peak resident memory in MiB since the process started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024  # macOS counts bytes, Linux KiB


def trainable_parameters(module: nn.Module) -> int:
    """The number of trainable parameters of a network."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def cost_values(training: Mapping[str, Any]) -> dict[str, float]:
    """The columns of a table for the content of a run's training.json. Missing entries of older files have no column.

    - seconds_total: Seconds of `fit`. seconds_<phase>, steps_<phase>: Seconds and steps of one loop.
      seconds_outside_loops: Seconds of the rest of `fit`. cpu_seconds: Processor time of `fit`, over all threads, which
      depends less than the seconds on what else the machine does.
    - peak_memory_mib: Peak of the process's resident memory during the run. If it could not be measured for the run
      alone, the column is peak_memory_since_process_start_mib. peak_memory_accelerator_mib: Peak of tensors on the
      accelerator, if one was used.
    - parameters_<name>, bytes_<direction>: As in the file. rounds, clients_asked, generator_updates: The counters.
    - comm_cost_bytes: Bytes in both directions for one update of the generator, for the average client that takes part
      (GS-WGAN's Table 2).
    """
    values: dict[str, float] = {}
    if "seconds" in training:
        outside = training.get("seconds_outside_loops")
        values["seconds_total"] = sum(training["seconds"].values()) + (outside or 0.0)
        values.update({f"seconds_{phase}": seconds for phase, seconds in training["seconds"].items()})
        if outside is not None:
            values["seconds_outside_loops"] = outside
    if training.get("cpu_seconds") is not None:
        values["cpu_seconds"] = training["cpu_seconds"]
    values.update({f"steps_{phase}": steps for phase, steps in training.get("steps", {}).items()})
    if memory := training.get("peak_memory_mib"):
        since_run_start = memory["since"] == "run start"
        values["peak_memory_mib" if since_run_start else "peak_memory_since_process_start_mib"] = memory["host"]
        if memory["accelerator"] is not None:
            values["peak_memory_accelerator_mib"] = memory["accelerator"]
    values.update({f"parameters_{name}": count for name, count in training.get("parameters", {}).items()})
    values.update({f"bytes_{direction}": count for direction, count in training.get("bytes", {}).items()})
    counters = training.get("counters", {})
    values.update(counters)
    if counters.get("clients_asked") and counters.get("generator_updates"):
        bytes_per_client = sum(training["bytes"].values()) / counters["clients_asked"]
        values["comm_cost_bytes"] = bytes_per_client * counters["rounds"] / counters["generator_updates"]
    return {name: float(value) for name, value in values.items()}
