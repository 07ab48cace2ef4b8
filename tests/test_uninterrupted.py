"""Tests that signals which stop a process wait for the end of a release."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
from omegaconf import OmegaConf

from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.uninterrupted import Uninterrupted
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import Store
from dpgen_bench.training.signals import STOP_SIGNALS, Preempted
from tests.run_toys import config, in_child

pytestmark = pytest.mark.usefixtures("one_thread_of_torch")


@pytest.fixture
def received():
    """The numbers of the signals that reached their handlers, in order; SIGINT has Python's handler."""
    numbers: list[int] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: numbers.append(number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_wait_for_the_end_of_the_block(received):
    inside = []

    def release() -> None:
        with Uninterrupted():
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)
            inside.append(list(received))

    with pytest.raises(KeyboardInterrupt):
        release()
    assert inside == [[]]
    assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.raise_signal(signal.SIGTERM)
    assert received[-1] == signal.SIGTERM


def test_signals_in_a_nested_block_wait_for_the_outer_one(received):
    with Uninterrupted():
        with Uninterrupted():
            signal.raise_signal(signal.SIGTERM)
        assert received == []
    assert received == [signal.SIGTERM]


def test_an_error_in_the_block_is_raised_and_handlers_are_restored(received):
    with pytest.raises(ZeroDivisionError), Uninterrupted():
        raise ZeroDivisionError
    signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]


def test_a_handler_that_raises_on_exit_hides_no_later_signal(received):
    def leave(number, frame):
        raise Preempted(128 + number)

    signal.signal(signal.SIGTERM, leave)
    with pytest.raises(Preempted), Uninterrupted():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGUSR1)
    assert received == [signal.SIGUSR1]


def test_ignored_signals_stay_ignored_and_default_handlers_run_after_the_block(tmp_path):
    def child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        with Uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.01)
            (tmp_path / "inside").touch()
        (tmp_path / "after").touch()

    assert in_child(child) == -signal.SIGUSR1
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_inside_a_private_function_never_marks_the_run(tmp_path, number):
    flag = tmp_path / "flag"
    flag.write_text(str(int(number)))
    made = config(tmp_path / "results", target="tests.failure_toys.Stopped")
    OmegaConf.update(made, "method", {"flag": str(flag)})

    def stopped() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            execute(made)
            os._exit(0)
        os._exit(130)

    assert in_child(stopped) == 128 + number
    assert flag.with_suffix(".after").exists()
    (run,) = Store(tmp_path / "results").runs()
    assert not run.trained
    ledger = Ledger.load(run.path / "ledger.json")
    assert (ledger.failures, ledger.unproven) == ([], [])
    execute(made)
    epsilon = Ledger.load(run.path / "ledger.json").epsilon
    assert epsilon is not None
    assert float(epsilon["proven"]) <= 10
