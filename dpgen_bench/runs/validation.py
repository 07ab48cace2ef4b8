"""Whether the files of a run's folder can be used: they can be read, and the folder holds the run of its name.

A damaged folder does not hide the others, and none of its values enters a table or a report.
"""

from __future__ import annotations

from dpgen_bench.runs.config import identify
from dpgen_bench.runs.store import RunFolder

FILES = ("identity", "ledger", "training", "status", "environment")  # the JSON files that a run leaves


def folder_problem(folder: RunFolder) -> str:
    """Why a run folder cannot be used, without a path; "" if it can, or if there is no run yet. Raises nothing.

    A report that cannot be read is no damage: it counts as not there.
    """
    problem = file_problem(folder)
    if problem or not folder.path.exists() or not (identity := folder.read_json("identity.json")):
        return problem
    return "" if identify(identity) == folder.id else f"it holds run {identify(identity)}"


def file_problem(folder: RunFolder) -> str:
    """`damage` for readers that take a run for what it holds, whatever the name of its folder is."""
    if not folder.path.exists():
        return ""
    if not folder.path.is_dir():
        return "it is a file, not a folder"
    read = {}
    for name in FILES:
        try:
            read[name] = folder.read_json(f"{name}.json")
        except (ValueError, OSError):  # torn JSON, bytes that are no text, a folder in its place
            return f"{name}.json cannot be read"
        if not isinstance(read[name], dict):
            return f"{name}.json is not what a run leaves"
    if not read["identity"]:
        # A run writes its config, then this file, then the others: with none of them it is only not there yet.
        return "it does not say which run it is: identity.json is missing" if read["ledger"] or folder.done else ""
    try:
        _ = folder.config
    except Exception:  # yaml's errors have no common base with OmegaConf's
        return "config.yaml cannot be read"
    return ""
