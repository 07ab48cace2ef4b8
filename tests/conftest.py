"""Shared by all tests: one thread, weights and data from beside the repository where they lie there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from dpgen_bench.utils.environment import one_thread
from tests.perturbed import perturbation

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

torch.set_num_threads(int(os.environ.get("DPGEN_TEST_THREADS", 1)))
# The same examples on every machine, and no verdict about time: the machines that run this are shared.
settings.register_profile("bench", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bench")
if (SHARED / "torch_home").is_dir():
    os.environ.setdefault("TORCH_HOME", str(SHARED / "torch_home"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--perturb", type=int, metavar="SEED", help="perturb matrix products and convolutions as another machine would"
    )


def pytest_configure(config: pytest.Config) -> None:
    """For the whole session, and so in fixtures of every scope; where tests are distributed, by the workers alone."""
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests and (seed := config.getoption("perturb")) is not None:
        perturbation.install(seed)
        perturbation.install_in_children(seed)


@pytest.fixture(autouse=True)
def own_rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `rounding` measure the rounding of the machine they run on, so that is not perturbed."""
    if request.node.get_closest_marker("rounding"):
        with perturbation.suspended():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def one_thread_of_torch() -> Iterator[None]:
    """For tests that fork: in a child of a process that has computed with several threads, PyTorch waits for ever."""
    with one_thread():
        yield


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with real data: $DPGEN_DATA, else ../shared/data beside the repository. Skips if neither is there."""
    root = Path(os.environ.get("DPGEN_DATA", SHARED))
    if not root.is_dir():
        pytest.skip(f"no real data: {root} is not there (set DPGEN_DATA to a folder that holds MNIST/raw)")
    return root
