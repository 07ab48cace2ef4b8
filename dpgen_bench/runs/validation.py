"""Checks that a run's folder can be used: its files can be read, and it holds the run that its name says.

An unusable folder does not hide other runs, and none of its values enters a table or the report.
"""

from __future__ import annotations

from dpgen_bench.runs.config import identify
from dpgen_bench.runs.store import RunFolder

FILES = ("identity", "ledger", "training", "status", "environment", "dataset")  # the JSON files of a trained run


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
        _ = folder.config
    except Exception:  # the errors of yaml and of OmegaConf have no common base class
        return "config.yaml cannot be read"
    return ""
