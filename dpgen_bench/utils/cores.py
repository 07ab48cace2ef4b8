"""The CPU cores of this process, without PyTorch, whose import takes seconds."""

from __future__ import annotations


def usable_cores() -> int:
    """The number of CPU cores that this process may use, by its affinity and the limits of its container."""
    import loky  # not at the top of the module: it takes a tenth of a second

    return loky.cpu_count()
