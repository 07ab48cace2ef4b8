"""Settings and fixtures of all tests: one thread, and data and weights from a folder next to the repository, if any."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import absl.logging
import pytest
import torch
from hypothesis import HealthCheck, settings

from dpgen_bench.utils.allocator import keep_freed_memory
from dpgen_bench.utils.environment import one_thread
from tests.perturbed import perturbation

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

torch.set_num_threads(int(os.environ.get("DPGEN_TEST_THREADS", 1)))
keep_freed_memory()  # as `dpgen` does
# The same examples on every machine, and no deadlines, because machines that run tests are shared.
settings.register_profile("bench", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bench")
if (SHARED / "torch_home").is_dir():
    os.environ.setdefault("TORCH_HOME", str(SHARED / "torch_home"))

# fsync protects files if the machine stops, which no test can see, and takes time in tests with runs.
os.fsync = lambda fd: None

# absl's handler writes to the standard error at its import, which is pytest's capture, and closes it when Hydra
# configures logging.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--perturb", type=int, metavar="SEED", help="perturb matrix products and convolutions as another machine would"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Perturb the whole session, including fixtures of every scope; if tests are distributed, only in the workers."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and (seed := config.getoption("perturb")) is not None:
        perturbation.install(seed)
        perturbation.install_in_children(seed)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the modules and thousands of tests, which live as long as the session, out of garbage collections.

    A full collection visits 800,000 objects otherwise, and takes half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries print at the end of the process that their objects leak


@pytest.fixture(autouse=True)
def own_randomness() -> None:
    """Seed PyTorch's global generator, so that no test depends on those that ran before it."""
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def own_rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Suspend the perturbation in tests marked `rounding`, which measure the rounding of the machine."""
    if request.node.get_closest_marker("rounding"):
        with perturbation.suspended():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def one_thread_of_torch() -> Iterator[None]:
    """One thread, for tests that fork: PyTorch hangs in the child of a process that computed with several threads."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real data: $DPGEN_DATA or, by default, ../shared/data. Skips the test if it does not exist."""
    root = Path(os.environ.get("DPGEN_DATA", SHARED))
    if not root.is_dir():
        pytest.skip(f"no real data: {root} does not exist (set DPGEN_DATA to a folder that contains MNIST/raw)")
    return root
