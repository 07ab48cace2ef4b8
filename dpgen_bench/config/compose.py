"""Composes the config of overrides; what the user can have mistyped is refused in one sentence, by its key or file."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpgen_bench.config.catalogue import names
from dpgen_bench.config.overrides import parse_override, quote_value, split_config_dir
from dpgen_bench.utils.own_folders import own_folders
from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.validation import suggestion

SHOW = "`dpgen run --cfg job` shows all settings"
MOST_FILES = 2000  # of the folders of yamls; with more, every config is composed whole


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """The config that `dpgen run` composes from these overrides; `--config-dir DIR` and `=DIR` are accepted, too.

    Yamls are also found in the folders of `own_folders`. Hydra needs a tenth of a second to compose yamls, and sets
    values last. So choices of yamls are composed once, until a yaml changes, and values are set in a copy. Overrides
    for which that may differ are composed whole by Hydra: those that add or delete a key, and those that are refused.

    Raises:
        ValueError: for an override that is none, or of an unknown key or name, a yaml that cannot be read, or a folder
            of `--config-dir` that does not exist. The message says what to write.
    """
    directory, texts = split_config_dir(overrides)
    if directory is not None and not Path(directory).is_dir():
        raise ValueError(f"expected --config-dir to be a folder, got {directory!r}; create it, or correct the path.")
    roots = _roots(directory)
    if folders := roots[1:]:
        texts.append(f"hydra.searchpath=[{','.join(quote_value(f'file://{folder}') for folder in folders)}]")
    parsed = [parse_override(text) for text in texts]
    _check_values(parsed, roots)
    settings = [each for each in parsed if not _is_group(each.key_or_group, roots) and not each.is_hydra_override()]
    state = _state(roots)
    if state and all(each.type is OverrideType.CHANGE and not each.package for each in settings):
        choices = tuple(str(each.input_line) for each in parsed if each not in settings)
        try:
            config = copy.deepcopy(_of_choices(choices, state))
            for each in settings:
                OmegaConf.update(config, each.key_or_group, each.value(), merge=True)
            return config
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError):
            pass  # composed whole, the error says which override is wrong
    try:
        return _compose(texts)
    except MissingConfigException as error:
        raise ValueError(_unknown_name(str(error.missing_cfg_file or ""), roots, error)) from None
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, yaml.YAMLError):
            raise ValueError(_broken_yaml(error.__cause__)) from None
        raise ValueError(_refused(error, parsed, texts)) from None
    except yaml.YAMLError as error:
        raise ValueError(_broken_yaml(error)) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected yaml files of UTF-8 text in {' and '.join(map(str, roots))}, got other bytes ({error}); save "
            "the file as text."
        ) from None


def expect_composable(overrides: Sequence[str], multirun: bool) -> None:
    """Check that Hydra can compose the config, or those of a multirun, before any run starts.

    Of a multirun, every value of every swept override is composed once, with the first values of the others.

    Raises:
        ValueError: see `compose_config`.
    """
    directory, texts = split_config_dir(overrides)
    option = [] if directory is None else [f"--config-dir={directory}"]
    if not multirun:
        _check_results(compose_config([*option, *texts]))
        return
    choices = [_choices(text) for text in texts]
    first = [values[0] for values in choices]
    _check_results(compose_config([*option, *first]))
    for number, values in enumerate(choices):
        # Names of yamls may be unknown. Of a single setting, each value can be composed if one can.
        if _is_group(values[0].split("=")[0], _roots(directory)):
            for value in values[1:]:
                compose_config([*option, *first[:number], value, *first[number + 1 :]])


def _check_results(config: DictConfig) -> None:
    """Check that the folder of results is a folder, or can be one; Hydra writes there before a multirun begins.

    Raises:
        ValueError: if it, or the folder that it would be made in, is a file.
    """
    results = Path(str(config.get("results") or ".")).absolute()
    existing = next(place for place in (results, *results.parents) if place.exists())
    if not existing.is_dir():
        raise ValueError(
            f"expected a folder of results, got {results}, and {existing} is a file; set another folder with "
            "results=FOLDER, --results or the environment variable DPGEN_RESULTS."
        )


def _choices(text: str) -> list[str]:
    """The overrides that a multirun makes of one.

    Raises:
        ValueError: if it has no values, or cannot be swept.
    """
    override = parse_override(text)
    if not override.is_sweep_override():
        return [text]
    try:
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ValueError(f"expected values to sweep over, got {text!r} ({error}); write KEY=A,B,C.") from None


def _roots(directory: str | None) -> list[Path]:
    """The folders of yamls: the bench's, that of `--config-dir`, and those of `own_folders`."""
    return list(dict.fromkeys([CONF, *([Path(directory).resolve()] if directory else []), *own_folders()]))


def _is_group(key: str, roots: Sequence[Path]) -> bool:
    """Whether yamls are chosen by this key."""
    return any((root / key).is_dir() for root in roots)


def _state(roots: Sequence[Path]) -> tuple[tuple[str, int], ...]:
    """All yamls of the folders, with the times at which they were written; () if the folders have too many files.

    A folder of `--config-dir` may hold anything else, too, such as data: to look at all of it would take longer than to
    compose.
    """
    files = (os.path.join(folder, name) for root in roots for folder, _, names in os.walk(root) for name in names)
    found = list(islice(files, MOST_FILES + 1))
    if len(found) > MOST_FILES:
        return ()
    # An editor marks a file as open by a link to nowhere.
    yamls = (path for path in found if path.endswith(".yaml") and os.path.exists(path))
    return tuple((path, os.stat(path).st_mtime_ns) for path in yamls)


@lru_cache(maxsize=1024)
def _of_choices(texts: tuple[str, ...], _: tuple[tuple[str, int], ...]) -> DictConfig:
    """The config of these choices of yamls, cached for each state of the yamls."""
    return _compose(texts)


def _compose(texts: Sequence[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(texts))


def _check_values(overrides: Sequence[Override], roots: Sequence[Path]) -> None:
    """Check that overrides have one value each, and that those of groups name a yaml.

    Raises:
        ValueError: for the first that does not.
    """
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override():
            raise ValueError(
                f"expected one value of {key}, got {override.input_line!r}; write -m after `dpgen run` to execute one "
                f"run for each value, or [...] for a list."
            )
        if not key:
            raise ValueError(f"expected KEY=VALUE, got {override.input_line!r}; {SHOW}.")
        if _is_group(key, roots) and not override.is_delete() and not isinstance(override.value(), str | list):
            raise ValueError(
                f"expected {key}=NAME, got {override.input_line!r}{_known(names(key, roots))}; `dpgen list` describes "
                "them."
            )


def _known(options: Collection[str]) -> str:
    return f"; known are {', '.join(options)}" if 0 < len(options) <= 25 else ""


def _unknown_name(file: str, roots: Sequence[Path], error: Exception) -> str:
    """The message for a name of a group that has no yaml."""
    group, _, name = file.partition("/")
    is_ours = group != "hydra"  # Hydra names the options of its own groups, with those of conf/hydra/
    has_group = is_ours and name and _is_group(group, roots)
    if has_group and (known := names(group, roots)):
        return (
            f"expected {group}=NAME of a yaml in conf/{group}/ or in --config-dir, got {name!r}"
            f"{suggestion(name, known)}{_known(known)}; `dpgen list` describes them."
        )
    options = getattr(error, "options", None) or []
    return f"expected a config that exists, got {file!r}{suggestion(name, options)}{_known(options)}; correct the name."


def _broken_yaml(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{mark.name}, line {mark.line + 1}" if mark else getattr(error, "name", None) or "a config file"
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    return f"expected YAML in {where}, got a broken file ({problem}); correct that line."


def _refused(error: Exception, parsed: Sequence[Override], texts: list[str]) -> str:
    """The message for an override that Hydra refuses: its key is unknown, or its value has no place."""
    reason = " ".join(f"{error} {error.__cause__ or ''}".split())
    if merged := re.search(r"Error merging override (([^=\s]+)=\S*) Cannot merge", reason):
        key = merged[2]
        return (
            f"expected the settings below {key} one by one, such as {key}.NAME=VALUE, or ~{key}.NAME to leave one out, "
            f"got {merged[1]!r}; {SHOW}."
        )
    found = re.search(r"Could not (?:override|delete from config\.|append to config\.?|append to) '?([^'\s]+)'", reason)
    found = found or re.search(r"Could not (?:append|delete)[^']*'([^']+)'", reason)
    culprit = next((each for each in parsed if found and each.key_or_group == found[1].split("@")[0]), None)
    if culprit is None:
        return f"expected overrides and yamls that make one config, got {reason.rstrip('.')}; {SHOW}."
    key = culprit.key_or_group
    if culprit.is_add():
        return f"expected a new key after +, got {culprit.input_line!r}, but the config has {key}; write it without +."
    hint = suggestion(key, _keys(texts, culprit))
    if culprit.is_delete():
        return f"expected a key of the config after ~, got {culprit.input_line!r}{hint}; leave it out ({SHOW})."
    return (
        f"expected a setting of the config, got {culprit.input_line!r}{hint}; correct the name ({SHOW}), or write "
        f"+{culprit.input_line} for a setting that the yaml lacks."
    )


def _keys(texts: list[str], culprit: Override) -> list[str]:
    """Paths of all settings of the config without the override that was refused; none if it has other errors."""
    try:
        config = _compose([text for text in texts if text != culprit.input_line])
    except Exception:  # only a suggestion is lost
        return []

    def paths(content: Any, prefix: str) -> Iterator[str]:
        for key, item in content.items() if isinstance(content, dict) else ():
            yield prefix + str(key)
            yield from paths(item, f"{prefix}{key}.")

    return list(paths(OmegaConf.to_container(config), ""))
