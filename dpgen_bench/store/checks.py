"""Results of the conformance suite on plugins: checks/FINGERPRINT.json has those for one source of a method.

The source is that of `config.identity.source_fingerprint`, which a run's folder has in the file `source`. A result says
nothing about other settings than those that were checked, so the last one at each settings is kept.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
        arguments: those that the method had, without numbers that `check` of its yaml made smaller.
    """

    method: str
    passed: bool
    date: str
    settings: str
    arguments: dict[str, Any] = field(default_factory=dict)


def keep_check(results: Path, source: str, check: Check) -> None:
    """Add the result of a check, in place of an earlier one of the same source, class and arguments."""
    path = _file(results, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    check = Check(**json.loads(json.dumps(asdict(check))))  # a tuple is a list in the file
    known = [
        each for each in checks_of(results, source) if (each.method, each.arguments) != (check.method, check.arguments)
    ]
    write_atomic(path, json.dumps([asdict(each) for each in (*known, check)], indent=2))


def checks_of(results: Path, source: str) -> list[Check]:
    """The results for this source, the last one at the end; [] if there is none that can be read."""
    try:
        return [Check(**each) for each in json.loads(_file(results, source).read_text())]
    except (OSError, ValueError, TypeError):
        return []


def is_plugin(target: str) -> bool:
    """Whether a class, as `_target_` names it, is not of the bench; a user may have a package `methods`, too."""
    package, _, rest = target.partition(".")
    if package == METHODS.name:
        return not (METHODS / f"{rest.partition('.')[0]}.py").is_file()
    return package != PACKAGE.name


def plugin_note(run: ReadableRun) -> str:
    """What is known of the source on which a plugin's proven epsilon rests; "" for a method of the bench.

    It is the result of the last check at the run's settings. Of checks at others alone, one that failed comes first.
    """
    arguments = run.read_json("identity.json").get("method", {})
    target = str(arguments.get("_target_", ""))
    if not target or not is_plugin(target):
        return ""
    stated = f"the class {target} is not of the bench, and ε proven rests on its source, which"
    source = run.path / "source" if isinstance(run, RunFolder) else None
    known = checks_of(source.parents[2], source.read_text().strip()) if source and source.is_file() else []
    checks = [check for check in known if check.method == target]
    if not checks:
        return f"{stated} `dpgen check` has not checked here"
    same = [check for check in checks if not _differing(check, arguments)]
    check = same[-1] if same else next((each for each in reversed(checks) if not each.passed), checks[-1])
    what = "passed" if check.passed else "FAILED"
    others = "" if same else f" with other settings, {', '.join(_differing(check, arguments))},"
    return f"{stated} {what} `dpgen check`{others} on {check.date} ({check.settings})"


def _differing(check: Check, arguments: dict[str, Any]) -> list[str]:
    """The checked arguments that are not those of a run, such as `how='none'`."""
    return [f"{key}={value!r}" for key, value in check.arguments.items() if arguments.get(key) != value]


def _file(results: Path, source: str) -> Path:
    return results / "checks" / f"{source}.json"
