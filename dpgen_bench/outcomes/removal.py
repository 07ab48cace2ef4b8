"""`dpgen rm`: removes runs, but never the evidence of privacy that was spent.

A run with private noise (privacy.noise=os) has spent epsilon on its records, whether or not it is kept. Its ledger
therefore stays in its folder, next to a file REMOVED, and `dpgen runs --spent` goes on counting it. Such a run is
refused by `dpgen run`: with another key its noise would be new, and its epsilon would be spent a second time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from dpgen_bench.config.identity import is_stale, method_version
from dpgen_bench.outcomes.overview import UNREADABLE
from dpgen_bench.outcomes.spent import population_for
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.validation import file_problem
from dpgen_bench.store.folders import REMOVED, RunFolder, Store
from dpgen_bench.utils.files import write_atomic


def runs_to_remove(results: Path, names: Sequence[str], failed: bool, stale: bool) -> list[RunFolder]:
    """The runs that are named, the failed ones and the stale ones, sorted by id; unreadable ones only if named.

    Raises:
        ValueError: if a named run is running.
        LookupError: if a name matches no run, or several.
    """
    store = Store(results)
    named = [store.find(name) for name in names]
    if running := [folder.id for folder in named if _status(folder) == "running"]:
        raise ValueError(f"expected runs that have ended, got {', '.join(running)}, which is running; stop it first.")
    version_of = cache(method_version)
    chosen = {folder.id: folder for folder in named}
    for folder in store.runs() if failed or stale else ():
        state = _status(folder)
        if (failed and state == "failed") or (stale and state != "running" and _is_stale(folder, version_of)):
            chosen[folder.id] = folder
    return [chosen[name] for name in sorted(chosen)]


def _status(folder: RunFolder) -> str:
    """The status of a run; "unreadable" if its settings or its status cannot be read and it is not running."""
    try:
        status = folder.status()
    except Exception:  # its status.json is damaged
        return UNREADABLE
    return status if status == "running" or _settings(folder) else UNREADABLE


def _settings(folder: RunFolder) -> str:
    """The method, data set and seed of a run; "" if they cannot be read."""
    try:
        config = folder.config
        return f"{config.method.name} {config.dataset.name} seed {config.seed}"
    except Exception:  # its config.yaml is damaged, or lacks one of them
        return ""


def _is_stale(folder: RunFolder, version_of: Callable[[type], int | str]) -> bool:
    try:
        return bool(is_stale(folder.config, folder.read_json("identity.json"), version_of))
    except Exception:  # an unreadable run is removed only by its name
        return False


def describe_removal(results: Path, folders: Sequence[RunFolder]) -> list[str]:
    """A line for each run that would be removed: what it is, which runs restart from it, and what is kept of it."""
    children = children_of(results)
    lines = []
    for folder in folders:
        status = _status(folder)
        what = f"{UNREADABLE}: {file_problem(folder)}" if status == UNREADABLE else f"{_settings(folder)}, {status}"
        line = f"{folder.id}  {what}"
        if others := [child for child in children.get(folder.id, []) if child not in {each.id for each in folders}]:
            line += f"; {', '.join(others)} restart{'s' if len(others) == 1 else ''} from it"
        if spends(folder):
            line += "; its ledger is kept, because what it spent stays spent (dpgen runs --spent)"
        lines.append(line)
    return lines


def children_of(results: Path) -> dict[str, list[str]]:
    """For each run, the ids of the runs that restart from it."""
    children: dict[str, list[str]] = {}
    for folder in Store(results).runs():
        try:
            restart = folder.read_json("identity.json").get("restart")
        except ValueError:  # an unreadable run: nobody knows its parent
            continue
        if restart:
            children.setdefault(str(restart["run"]), []).append(folder.id)
    return children


def spends(folder: RunFolder) -> bool:
    """Whether `dpgen runs --spent` counts the run, or cannot read its ledger and says so."""
    path = folder.path / "ledger.json"
    if not path.exists():
        return False
    try:
        return any(entry.noise != "seeded" for entry in Ledger.load(path).entries.values())
    except Exception:  # what an unreadable ledger says is unknown
        return True


def remove(folder: RunFolder) -> None:
    """Remove a run; its ledger is kept if it `spends`.

    Raises:
        RunBusy: if the run is running.
    """
    with folder.locked(timeout_s=0.0):
        if spends(folder):
            _keep_ledger(folder)
            return
        # Renamed first, so that no half of a run is left if this process is killed.
        hidden = folder.path.parent.parent / f".{folder.id}.tmp"
        shutil.rmtree(hidden, ignore_errors=True)
        folder.path.rename(hidden)
    shutil.rmtree(hidden)


def _keep_ledger(folder: RunFolder) -> None:
    path = folder.path / "ledger.json"
    try:
        ledger = Ledger.load(path)
        if ledger.population is None:  # an older run, whose population follows from its config
            ledger.population = population_for(folder, ledger)
            ledger.save()
    except Exception:  # an unreadable ledger, or one whose run's config is unreadable, is kept as it is
        pass
    write_atomic(folder.path / REMOVED, "")
    for part in sorted(folder.path.iterdir()):
        if part.name in ("ledger.json", REMOVED, ".lock"):
            continue
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()
