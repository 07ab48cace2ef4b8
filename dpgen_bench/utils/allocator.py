"""Keeps freed memory in the process, because the system clears each page before it gives it out again.

By default, glibc returns the memory of every large tensor to the system when the tensor is freed, and gets it back for
the next one. Training and evaluation free tensors of the same sizes in each step, so processors spend a part of their
time on clearing pages (`make bench`, `allocator`).
"""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of `mallopt` (malloc.h), and the variables that set them in a process from its start (`man mallopt`).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MOST = 2**31 - 1
KEEP = {"MALLOC_TRIM_THRESHOLD_": (M_TRIM_THRESHOLD, MOST), "MALLOC_MMAP_MAX_": (M_MMAP_MAX, 0)}
OWN_CHOICES = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process, and those that it starts, keep up to 2 GiB of freed memory for tensors to come.

    Results do not depend on it. The peak memory may be larger, because free blocks that are too small for a tensor are
    kept, too. A process whose environment sets an allocator, or a parameter of glibc's, is left as it is.

    Returns:
        Whether anything was changed; False where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(OWN_CHOICES) for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    for name, (parameter, value) in KEEP.items():
        library.mallopt(parameter, value)
        os.environ[name] = str(value)
    return True


def return_freed_memory() -> None:
    """Return freed memory to the system, so that what is measured from now on does not contain it; only by glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
