"""The command that makes a run again, worked out from its config and checked by composing it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dpgen_bench.report.text import describe_error, flatten
from dpgen_bench.runs.config import CONF, TRAINING_VERSION, RunSpec, compose_config, identify, is_stale, specify
from dpgen_bench.runs.listing import is_changed
from dpgen_bench.runs.overrides import quoted

GROUPS = ("method", "dataset", "scale")  # of which a yaml is chosen before single settings are compared
TRIED = 3  # candidates that are composed and compared with the run's id, shortest first
STALE = "the code has changed since: stale; this is the nearest command, and it makes another run"


@dataclass(frozen=True)
class Command:
    """line: `dpgen run ...`, or "" where there is none. same: whether it was seen to give the run's own id. note: what
    must be known of it, in words."""

    line: str
    same: bool
    note: str


@dataclass(frozen=True)
class _Words:
    """Overrides as they are shown, and as they are here: a folder of this machine is shown as PATH."""

    shown: tuple[str, ...]
    real: tuple[str, ...]

    @property
    def cost(self) -> tuple[int, int, tuple[str, ...]]:
        return len(self.shown), sum(map(len, self.shown)), self.shown


def command_of(config: DictConfig, identity: Mapping[str, Any], recorded: Sequence[str], results: Path) -> Command:
    """The shortest command found that makes the run of this config again.

    Candidates start from the bench's defaults and from each preset that the run's own command line named. They choose
    groups and set what still differs. A candidate counts only if today's code gives it the run's id.

    Args:
        identity: what the id is the hash of.
        recorded: the words of the command line by which the run was made; only the presets in it are read.
        results: where a parent run is looked for.
    """
    run_id = identify(dict(identity))
    saved = {**_settings(config), "restart": identity.get("restart")}  # the parent by its whole id
    found = sorted(_candidates(saved, recorded), key=lambda words: words.cost)
    if not found:
        return Command("", False, "no group in conf/ has this method and data set any more: stale")
    if is_stale(config, str(identity.get("source", ""))) or identity.get("training_version") != TRAINING_VERSION:
        return Command(_line(found[0].shown), False, STALE)
    here = [f"results={quoted(str(results))}", f"data_root={quoted(str(config.data_root))}"]
    note = "no overrides give this run's id: conf/ has changed since, or holds a setting that no override says"
    for words in found[:TRIED]:
        try:
            composed = compose_config([*words.real, *here])
            if specify(composed, planned=True).id != run_id:
                continue
        except Exception as error:  # such as data that are not here
            note = f"cannot be checked here ({describe_error(error)})"
            continue
        protocol, remark = _protocol_word(config, composed)
        hidden = "; put your own folder for PATH" if words.shown != words.real else ""
        return Command(_line([*words.shown, *protocol]), True, (remark + hidden).removeprefix("; "))
    return Command(_line(found[0].shown), False, note)


def _line(words: Sequence[str]) -> str:
    return shlex.join(["dpgen", "run", *words])


def _candidates(saved: Mapping[str, Any], recorded: Sequence[str]) -> Iterator[_Words]:
    """Overrides that lead from the defaults, or from a recorded preset, to these settings."""
    there = {path.relative_to(CONF / "experiment").with_suffix("").as_posix() for path in _yamls("experiment")}
    named = {name for word in recorded if word.startswith("experiment=") for name in word[11:].split(",")}
    for preset in [None, *sorted(named & there)]:
        base = () if preset is None else (f"experiment={preset}",)
        start = _composed(base)
        if start is None:
            continue
        for choice in product(*(_choices(group, saved, start) for group in GROUPS)):
            words = (*base, *(word for word in choice if word))
            composed = _composed(words)
            if composed is not None:
                differing = list(_differences(saved, composed))
                yield _Words((*words, *(shown for shown, _ in differing)), (*words, *(real for _, real in differing)))


def _choices(group: str, saved: Mapping[str, Any], start: Mapping[str, Any]) -> list[str | None]:
    """What to say of a group: nothing if it is the right one, else each yaml of that name."""
    wanted = saved[group]
    if all(wanted.get(key) == start[group].get(key) for key in ("_target_", "name")):
        return [None]
    loaded = {path.stem: OmegaConf.load(path) for path in _yamls(group)}
    return [f"{group}={stem}" for stem, yaml in loaded.items() if OmegaConf.select(yaml, "name") == wanted.get("name")]


@lru_cache(maxsize=256)
def _composed(words: tuple[str, ...]) -> dict[str, Any] | None:
    """The settings under these overrides; None if they do not compose."""
    try:
        return _settings(compose_config(list(words)))
    except Exception:  # a preset that is broken, or asks for a setting that only the run has, leads nowhere
        return None


def _settings(config: DictConfig) -> dict[str, Any]:
    """What of a config is part of a run's identity; `root` says where data lie and is none."""
    tree = OmegaConf.to_container(config)
    assert isinstance(tree, dict)
    method = {key: value for key, value in tree["method"].items() if key != "check"}
    kept = {"method": method, "dataset": _unrooted(tree["dataset"])}
    kept |= {key: tree[key] for key in ("scale", "seed", "restart")}
    kept["privacy"] = {key: value for key, value in tree["privacy"].items() if key != "population"}
    return {**kept, "federation": {"faults": (tree.get("federation") or {}).get("faults") or {}}}


def _unrooted(tree: Any) -> Any:
    return {k: _unrooted(v) for k, v in tree.items() if k != "root"} if isinstance(tree, dict) else tree


def _differences(saved: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(shown, real) for each setting of `saved` that `base` has not, then for each that only `base` has."""
    ours, theirs = flatten({**saved, "restart": None}), flatten({**base, "restart": None})
    for key, value in sorted(ours.items()):
        if value == {} or (key in theirs and theirs[key] == value):
            continue
        name = key if key in theirs else f"+{key}"
        yield f"{name}={'PATH' if _is_path(value) else quoted(value)}", f"{name}={quoted(value)}"
    for key in sorted(set(theirs) - set(ours)):
        if not key.startswith("federation."):  # a run from before the federated setting plays no faults either
            yield f"~{key}", f"~{key}"
    if saved["restart"] != base["restart"]:
        word = f"restart={quoted(saved['restart'])}"
        yield word, word


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(re.match(r"~?[/\\]|[A-Za-z]:[\\/]", value))


def _protocol_word(config: DictConfig, composed: DictConfig) -> tuple[list[str], str]:
    """The override that gives the run's protocol, and a remark where none does."""
    wanted, given = (RunSpec(each, training={}).protocol_record() for each in (config, composed))
    name = str(wanted["name"])
    if wanted == given:
        return [], ""
    if (CONF / "protocol" / f"{name}.yaml").exists() and not is_changed(wanted):
        return [f"protocol={name}"], ""
    return [], f"its protocol, {name}, is not what conf/protocol says now, so this measures otherwise"


def _yamls(group: str) -> list[Path]:
    return sorted((CONF / group).rglob("*.yaml"))
