"""Freed memory is kept: tensors of sizes that were freed before are given no new pages by the system."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dpgen_bench.cli import main
from dpgen_bench.utils.allocator import KEEP, OWN_CHOICES, keep_freed_memory

ROOT = Path(__file__).resolve().parent.parent
on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these parameters")

# Page faults of twenty blocks of 64 MiB, each written to and freed before the next one; and what a child would inherit.
BLOCKS = """
import json, os, resource, sys
import numpy as np
from dpgen_bench.utils.allocator import keep_freed_memory
changed = keep_freed_memory() if sys.argv[1] == "keep" else None
np.ones(2**23)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(2**23)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
names = [name for name in os.environ if name.startswith("MALLOC_")]
print(json.dumps([changed, faults, names]))
"""


# Memory of the process after 256 MiB were freed, and after they were returned, above that before, in pages.
RETURNED = """
from pathlib import Path
import json
import numpy as np
from dpgen_bench.utils.allocator import keep_freed_memory, return_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
keep_freed_memory()
before = resident()
np.ones(2**25)
kept = resident() - before
return_freed_memory()
print(json.dumps([kept, resident() - before]))
"""


def printed(code: str, *arguments: str, **environment: str) -> list:
    """The list that code prints in a new process without choices of an allocator, except those of `environment`."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(OWN_CHOICES)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env={**without, **environment}, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@on_glibc
def test_blocks_of_a_size_that_was_freed_need_no_new_pages():
    _, usual, _ = printed(BLOCKS, "leave")
    changed, kept, inherited = printed(BLOCKS, "keep")
    assert changed
    assert 10 * kept < usual
    assert set(inherited) == set(KEEP)


@on_glibc
def test_a_process_that_is_started_keeps_it_too():
    _, usual, _ = printed(BLOCKS, "leave")
    _, kept, _ = printed(BLOCKS, "leave", **{name: str(value) for name, (_, value) in KEEP.items()})
    assert 10 * kept < usual


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_choices_of_the_user_are_left(name):
    changed, _, inherited = printed(BLOCKS, "keep", **{name: ""})
    assert not changed
    assert [each for each in inherited if each != name] == []


def test_another_c_library_is_left(monkeypatch):
    for each in [name for name in os.environ if name.startswith(OWN_CHOICES)]:
        monkeypatch.delenv(each)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    before = dict(os.environ)
    assert not keep_freed_memory()
    assert dict(os.environ) == before


def test_commands_keep_it_and_calls_within_a_process_do_not(monkeypatch):
    kept = []
    monkeypatch.setattr("dpgen_bench.cli.keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr("dpgen_bench.cli.libraries_first", lambda: None)  # it changes sys.path
    assert main(["list", "methods"]) == 0
    assert kept == []
    monkeypatch.setattr(sys, "argv", ["dpgen", "list", "methods"])
    assert main() == 0
    assert kept == [True]


@on_glibc
def test_memory_that_is_kept_can_be_returned():
    kept, returned = printed(RETURNED)
    assert kept > 10 * abs(returned)
