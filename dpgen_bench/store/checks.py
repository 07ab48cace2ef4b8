"""Results of the conformance suite on plugins: checks/FINGERPRINT.json is the last one for one source of a method.

The source is that of `config.identity.source_fingerprint`, which a run's folder has in the file `source`. A result says
nothing about other settings than those that were checked.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dpgen_bench.store.folders import ReadableRun, RunFolder
from dpgen_bench.utils.files import write_atomic
from dpgen_bench.utils.paths import METHODS, PACKAGE


@dataclass(frozen=True)
class Check:
    """The result of one `dpgen check`.

    Attributes:
        method: the class, as `_target_` names it.
        passed: whether it conforms.
        date: as YYYY-MM-DD.
        settings: at which settings it ran, as text.
    """

    method: str
    passed: bool
    date: str
    settings: str


def keep_check(results: Path, source: str, check: Check) -> None:
    """Write the result of a check, in place of an earlier one of the same source."""
    path = _file(results, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(check), indent=2))


def last_check(results: Path, source: str) -> Check | None:
    """The last result for this source; None if there is none that can be read."""
    try:
        return Check(**json.loads(_file(results, source).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_plugin(target: str) -> bool:
    """Whether a class, as `_target_` names it, is not of the bench; a user may have a package `methods`, too."""
    package, _, rest = target.partition(".")
    if package == METHODS.name:
        return not (METHODS / f"{rest.partition('.')[0]}.py").is_file()
    return package != PACKAGE.name


def plugin_note(run: ReadableRun) -> str:
    """What is known of the source on which a plugin's proven epsilon rests; "" for a method of the bench."""
    target = str(run.read_json("identity.json").get("method", {}).get("_target_", ""))
    if not target or not is_plugin(target):
        return ""
    stated = f"the class {target} is not of the bench, and ε proven rests on its source, which"
    source = run.path / "source" if isinstance(run, RunFolder) else None
    check = last_check(source.parents[2], source.read_text().strip()) if source and source.is_file() else None
    if check is None:
        return f"{stated} `dpgen check` has not checked here"
    return f"{stated} {'passed' if check.passed else 'FAILED'} `dpgen check` on {check.date} ({check.settings})"


def _file(results: Path, source: str) -> Path:
    return results / "checks" / f"{source}.json"
