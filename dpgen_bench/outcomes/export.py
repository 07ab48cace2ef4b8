"""`dpgen export`: writes the generator of a finished run as a folder that a model hub accepts, with a model card.

The folder has only what may leave the run: the weights, how to build the generator, the card, the ledger and a picture.
Records, private state, checkpoints, diagnostics, logs, paths and names of machines stay in the run's folder. So do the
id of a run with privacy.noise=os, a hash of its records, and its metric values, which are computed from test records.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpgen_bench import __version__
from dpgen_bench.data.records import Records
from dpgen_bench.generator import EXPORTED_CONFIG, EXPORTED_WEIGHTS, WEIGHTS, Generator, NetGenerator
from dpgen_bench.outcomes.card import write_card
from dpgen_bench.outcomes.listing import is_unbounded
from dpgen_bench.outcomes.sample_command import expect_for_release
from dpgen_bench.runs.measure import is_for_release
from dpgen_bench.runs.samples import class_grid
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.utils.errors import without_paths
from dpgen_bench.utils.files import atomic_folder

CARD, LEDGER, PICTURE = "README.md", "ledger.json", "samples.png"
FILES = (EXPORTED_WEIGHTS, EXPORTED_CONFIG, CARD, LEDGER, PICTURE)
ROWS = 8  # images of each class in the picture


def export_run(
    results: Path, run: str, out: Path, benchmark: bool = False, overwrite: bool = False, license_id: str = "other"
) -> Path:
    """Write the generator of a finished run to the folder `out`, which appears when it is complete.

    Args:
        results: the folder of results.
        run: the run's id or the start of it.
        benchmark: also export a generator that must not be released as private; its card says so at the top.
        overwrite: replace `out` if it is an earlier export.
        license_id: the hub's name of the license of the weights.

    Returns:
        `out`.

    Raises:
        NotForRelease: if `benchmark` is false and the run must not be released as private, see `expect_for_release`.
        LookupError: if no run, or more than one, matches `run`.
        ValueError: if the run is not finished, its generator holds records, or `out` exists and is not replaced.
    """
    folder = Store(results).find(run)
    expect_for_release(folder, benchmark)
    _expect_free(out, overwrite)
    generator, ledger = Generator.load(folder.path), folder.read_json("ledger.json")
    if is_unbounded(ledger) and not isinstance(generator, NetGenerator):
        raise ValueError(
            f"expected a run with noise, or whose generator is a network, got run {folder.id}, whose generator "
            f"{type(generator).__name__} may hold training records; they are never exported."
        )
    # The images that the snippet in the card draws.
    labels = torch.arange(generator.num_classes).repeat(ROWS)
    picture = class_grid(Records(generator.sample(labels, seed=0), labels), generator.num_classes, ROWS)

    with atomic_folder(out) as temporary:
        shutil.copyfile(folder.path / WEIGHTS, temporary / EXPORTED_WEIGHTS)
        shared = without_run_ids(portable(ledger)) if is_for_release(folder.config) else portable(ledger)
        (temporary / EXPORTED_CONFIG).write_text(json.dumps(_config(folder, generator), indent=2) + "\n")
        (temporary / LEDGER).write_text(json.dumps(shared, indent=2) + "\n")
        (temporary / CARD).write_text(write_card(folder, generator, shared, license_id))
        _save_picture(picture, temporary / PICTURE)
    return out


def portable(value: Any) -> Any:
    """The content of a JSON file, with `[path]` in place of each absolute path, which would name this machine."""
    return _in_texts(value, without_paths)


def _in_texts(value: Any, replace: Callable[[str], str]) -> Any:
    """The content of a JSON file with each text replaced."""
    if isinstance(value, dict):
        return {key: _in_texts(item, replace) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_texts(item, replace) for item in value]
    return replace(value) if isinstance(value, str) else value


def without_run_ids(value: Any) -> Any:
    """The content of a ledger with `[run]` in place of each run's id.

    The id is a hash of, among others, the records of a user's own data set. Someone who knows all records but one
    could test guesses of that one with it.
    """
    return _in_texts(value, lambda text: re.sub(r"\b[0-9a-f]{12}\b", "[run]", text))


def _config(folder: RunFolder, generator: Generator) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "library_name": "dpgen_bench",
        "dpgen_bench_version": __version__,
        "run": None if is_for_release(folder.config) else folder.id,
        "method": str(folder.config.method.name),
        "dataset": str(folder.config.dataset.name),
        "image_shape": list(generator.image_shape),
        "num_classes": generator.num_classes,
        "class_names": folder.read_json("dataset.json").get("class_names"),
        "generator": {"kind": f"{type(generator).__module__}.{type(generator).__qualname__}", **generator.config()},
    }


def _save_picture(picture: torch.Tensor, path: Path) -> None:
    from torchvision.utils import save_image  # imported here because it is slow and most uses do not need it

    save_image(picture, path)


def _expect_free(out: Path, overwrite: bool) -> None:
    """
    Raises:
        ValueError: if `out` is a file, or a folder with files that are not replaced.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"expected a new folder, got {out}, which is a file; name another folder.")
    names = sorted(os.listdir(out))
    if not names:
        return
    if other := [name for name in names if name not in FILES]:
        raise ValueError(
            f"expected a new or empty folder, or an earlier export, got {out}, which has other files ({other[0]}); "
            "name another folder, because these would be lost."
        )
    if not overwrite:
        raise ValueError(f"expected a new or empty folder, got {out}, which has files; add --overwrite to replace it.")
