"""Private functions that raised: what is kept of the error, and the operator's statement about it.

That a function raises on records is an answer without noise. `privacy.ledger` keeps the mark; the error's text, which
may contain records, goes to the run's private folder alone.
"""

from __future__ import annotations

import sys
import traceback

from dpgen_bench.privacy.isolation import public_type
from dpgen_bench.privacy.ledger import Failure, Ledger
from dpgen_bench.runs.config import RunSpec
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.utils.files import append_private

OPTION = "runtime.failures_independent_of_records"


class PrivateFailure(RuntimeError):
    """A private function raised. The text is public: it names the function, and the error's type if it may."""


def keep_private(folder: RunFolder, ledger: Ledger, ending: BaseException) -> PrivateFailure:
    """Write what was raised, with tracebacks and causes, into private/errors.txt; an error for the public in its place.

    Args:
        ending: what `fit` ended with. It is private, too: the method may have put the first error's text into it.
    """
    path = folder.path / "private" / "errors.txt"
    parts = [ending] if ledger.raised in (None, ending) else [ledger.raised, ending]
    texts = ["".join(traceback.format_exception(error)) for error in parts]
    append_private(path, "\n".join([f"{ledger.invalidated}; the run ended with:", *texts, ""]))
    return PrivateFailure(
        f"{ledger.invalidated} while it saw records; the training ended with {public_type(ending)}. Whether a private "
        "function raises may depend on the records, which is an answer without noise: the ledger is marked, and the "
        f"proven epsilon of this run is infinite. The error's text may contain records, so it is in {path} alone. If "
        "it shows that the failure did not depend on records (a full disk, for example), say so by running the same "
        f"command with {OPTION}=true."
    )


def failures_to_settle(spec: RunSpec, folder: RunFolder) -> list[Failure]:
    """Failures on record that the operator now states to be independent of records.

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
    """Write the operator's statement into the ledger; say which failures are on record without one.

    The statement covers the failures that are on record now. A later one has to be looked at, and needs another.
    """
    path = folder.path / "ledger.json"
    if not path.exists():
        return
    ledger = Ledger.load(path)
    if failures_to_settle(spec, folder):
        for failure in ledger.state_failures_independent(f"stated by the operator with {OPTION}=true"):
            print(f"run {spec.id}: {failure.what}: noted in the ledger that this did not depend on records, as stated")
    for failure in ledger.failures:
        if failure.statement is None:
            print(
                f"run {spec.id}: in an earlier attempt, {failure.reason}; epsilon proven is infinite", file=sys.stderr
            )
