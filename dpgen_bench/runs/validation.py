"""Checks that a run's folder can be used: its files can be read, and it holds the run that its name says.

An unusable folder does not hide other runs, and none of its values enters a table or the report.
"""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError, safe_open

from dpgen_bench.config.spec import identify
from dpgen_bench.generator import CONFIG, WEIGHTS
from dpgen_bench.store.folders import ReadableRun, RunFolder
from dpgen_bench.store.records import Record

FILES = ("identity", "ledger", "training", "status", "environment", "dataset")  # the JSON files of a trained run


def expect_usable(folder: RunFolder) -> None:
    """Check that a run's folder can be used.

    Raises:
        ValueError: if it cannot.
    """
    if problem := folder_problem(folder):
        raise ValueError(
            f"run {folder.id} cannot be used: {problem}. Restore {folder.path}, or delete it to execute the run again."
        )


def expect_generator(folder: RunFolder) -> None:
    """Check that a run has a generator and whole files. The folder may have any name.

    Raises:
        ValueError: if it has not.
    """
    if problem := file_problem(folder):
        raise ValueError(
            f"run {folder.id} cannot be used: {problem}. Restore {folder.path}, or delete it to execute the run again."
        )
    if not folder.trained and folder.done:
        raise ValueError(
            f"expected the generator of run {folder.id}, which is finished, in {folder.path / WEIGHTS}, got no file; "
            "restore it, or delete the folder and execute the run again."
        )
    if not folder.trained:
        raise ValueError(f"run {folder.id} has no generator yet ({folder.status()}); finish it with `dpgen run`.")


def problem_of(run: ReadableRun) -> str:
    """Why a run's folder or record cannot be used; "" if it can be used or does not exist. Never raises."""
    if isinstance(run, RunFolder):
        return folder_problem(run)
    assert isinstance(run, Record)
    identity = run.read_json("identity.json")
    return "" if identity and identify(identity) == run.id else "its record is of another run than its name says"


def folder_problem(folder: RunFolder) -> str:
    """Why a run's folder cannot be used, without paths; "" if it can be used or does not exist. Never raises.

    A measurement that cannot be read is no problem of the folder: it is ignored and can be made again.
    """
    problem = file_problem(folder)
    if problem or not folder.path.exists() or not (identity := folder.read_json("identity.json")):
        return problem
    return "" if identify(identity) == folder.id else f"it holds run {identify(identity)}"


def file_problem(folder: RunFolder) -> str:
    """As `folder_problem`, but the folder may have any name, such as that of a copy."""
    if not folder.path.exists():
        return ""
    if not folder.path.is_dir():
        return "it is a file, not a folder"
    if folder.removed:
        return "it was removed by `dpgen rm`, and only its ledger is kept"
    contents = {}
    for name in FILES:
        try:
            contents[name] = folder.read_json(f"{name}.json")
        except (ValueError, OSError):  # truncated JSON, bytes that are not text, a folder in place of the file
            return f"{name}.json cannot be read"
        if not isinstance(contents[name], dict):
            return f"{name}.json is not a JSON object"
    if not contents["identity"]:
        # A run writes its config, then its identity, then all others: a folder without them belongs to a new run.
        is_used = contents["ledger"] or folder.done
        return "its identity.json is missing, so it is unknown which run it is" if is_used else ""
    try:
        settings = folder.config
    except ValueError:
        return "config.yaml cannot be read"
    if missing := [key for key in ("method", "dataset", "privacy", "seed") if key not in settings]:
        return f"config.yaml lacks {', '.join(missing)}"
    if folder.done and not contents["ledger"]:
        return "its ledger.json is missing, so nothing is known of its privacy"
    return _ledger_problem(contents["ledger"]) or _generator_problem(folder)


def _ledger_problem(content: dict[str, Any]) -> str:
    """Why a ledger.json does not say what was released, such as one of another version; "" if it does, or is empty."""
    entries = content.get("entries")
    if not content or (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        return ""
    what = "has entries of another form" if "entries" in content else "lacks 'entries'"
    return f"its ledger.json {what}, so its releases are unknown (another version of dpgen_bench may have written it)"


def _generator_problem(folder: RunFolder) -> str:
    """Why a generator cannot be loaded; "" if its files look whole, or there is none. Only headers are read."""
    if not folder.trained:
        return ""
    try:
        with safe_open(folder.path / WEIGHTS, framework="numpy"):
            pass
    except (SafetensorError, OSError):
        return f"{WEIGHTS} cannot be read"
    try:
        is_whole = bool(folder.read_json(CONFIG).get("kind"))
    except (ValueError, AttributeError):
        is_whole = False
    return "" if is_whole else f"{CONFIG} cannot be read"
