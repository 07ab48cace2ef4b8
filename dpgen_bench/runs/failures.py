"""Handles private functions that raised: keeps the error private, and records the operator's statement about it.

Whether a function raises may depend on the records, and is then an answer without noise. The ledger is marked (see
`privacy.ledger`). The error's text, which may contain records, is written only to the run's private folder.
"""

from __future__ import annotations

import sys
import traceback

import torch

from dpgen_bench.config.spec import RunSpec
from dpgen_bench.privacy.isolation import public_type
from dpgen_bench.privacy.ledger import Failure, Ledger
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.utils.files import append_private

OPTION = "runtime.failures_independent_of_records"


class PrivateFailure(RuntimeError):
    """Raised in place of a private function's error. Its text is public: the function, and the error's type if safe."""


def keep_private(folder: RunFolder, ledger: Ledger, ending: BaseException) -> PrivateFailure:
    """Write the errors with tracebacks and causes to private/errors.txt, and the mark in the ledger once more.

    A file that cannot be written raises nothing, because the error would have the private one as its context.

    Args:
        ending: the error that `fit` ended with. It is private, too: the method may have copied the text of the private
            function's error into it.

    Returns:
        A public error, to be raised instead.
    """
    path = folder.path / "private" / "errors.txt"
    errors = [ending] if ledger.raised in (None, ending) else [ledger.raised, ending]
    texts = ["".join(traceback.format_exception(error)) for error in errors]
    kept = f"only in {path}"
    marked = "the ledger is marked, and the proven epsilon of this run is infinite"
    advice = (
        "If it shows that the failure did not depend on records (a full disk, for example), state that by running the "
        f"same command with {OPTION}=true."
    )
    try:
        append_private(path, "\n".join([f"{ledger.invalidated}; the run ended with:", *texts, ""]))
    except OSError as error:
        kept = f"in no file, because {path} cannot be written ({error.strerror})"
    try:
        ledger.save()
    except OSError as error:
        marked = f"nothing is proven of this run, but its ledger cannot be written ({error.strerror})"
        advice = (
            f"Do not continue this run, whose next attempt would not know it: remove it with `dpgen rm {folder.id}`."
        )
    return PrivateFailure(
        f"{ledger.invalidated} while it saw records; the training ended with {public_type(ending)}. Whether a private "
        f"function raises may depend on the records, which is an answer without noise: {marked}. The error's text may "
        f"contain records and is therefore {kept}. {advice}"
    )


def mark_late_error(ledger: Ledger, ending: BaseException) -> None:
    """Mark the ledger if `fit`, after a release, ended with an error of an accelerator or because of one.

    An accelerator computes after the function that asks for it has returned, so a private function's error, such as an
    index out of range, can be raised outside of its release.
    """
    if ledger.invalidated is not None or not any(entry.executed for entry in ledger.own.values()):
        return
    chain: list[BaseException] = []
    follow: list[BaseException | None] = [ending]
    while follow:
        error = follow.pop()
        if error is not None and not any(error is each for each in chain):  # a plugin may make a cycle of them
            chain.append(error)
            follow += [error.__cause__, error.__context__]
    if late := [error for error in chain if isinstance(error, torch.AcceleratorError)]:
        ledger.invalidate("the accelerator failed, perhaps in a private function", late[0])


def failures_to_settle(spec: RunSpec, folder: RunFolder) -> list[Failure]:
    """Failures in the ledger that the operator states now, by the option, to be independent of records.

    Raises:
        ValueError: if the option is neither true nor false.
    """
    stated = spec.config.runtime.get(OPTION.split(".")[1], False)
    if not isinstance(stated, bool):
        raise ValueError(f"expected {OPTION} to be true or false, got {stated!r}.")
    path = folder.path / "ledger.json"
    if not stated or not path.exists():
        return []
    return [failure for failure in Ledger.load(path).failures if failure.statement is None]


def settle_failures(spec: RunSpec, folder: RunFolder) -> None:
    """Write the operator's statement into the ledger, and print which failures have none.

    The statement covers the failures that are in the ledger now. A later failure needs a statement of its own.
    """
    path = folder.path / "ledger.json"
    if not path.exists():
        return
    ledger = Ledger.load(path)
    if failures_to_settle(spec, folder):
        for failure in ledger.state_failures_independent(f"stated by the operator with {OPTION}=true"):
            print(f"run {spec.id}: {failure.what}: the ledger notes the statement that this did not depend on records")
    for failure in ledger.failures:
        if failure.statement is None:
            print(
                f"run {spec.id}: in an earlier attempt, {failure.reason}; epsilon proven is infinite", file=sys.stderr
            )
