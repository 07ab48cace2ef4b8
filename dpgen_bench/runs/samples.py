"""A run's samples, drawn as a protocol asks for them, and what can be told of them at a glance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.generator import Generator
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.utils.cache import read_arrays, write_arrays
from dpgen_bench.utils.files import atomic


def sample_labels(n: int, num_classes: int, how: str, seed: int) -> Tensor:
    """int64 [n]: `balanced` cycles through the classes, `uniform` draws each label independently."""
    if how == "balanced":
        return torch.arange(n) % num_classes
    if how == "uniform":
        return torch.randint(num_classes, (n,), generator=torch.Generator().manual_seed(seed))
    raise ValueError(f"expected protocol.labels balanced or uniform, got {how!r}.")


def draw_samples(folder: RunFolder, protocol: DictConfig, seed: int, keep: bool = True) -> Records:
    """The protocol's samples of a run's generator, drawn by `seed`.

    With `keep` they are read from samples.npz if it holds them, else drawn and written there, with samples.png, a grid
    of one column per class. `protocol.rounding` none leaves pixels unrounded; pixels below `protocol.floor` become 0.
    `protocol.batch_statistics` B has batch normalisation take the statistics of each B images in place of running ones.
    A generator with labels of its own (a data set) gives as many of them as it has.
    """
    n = int(protocol.num_samples)
    rounding, floor = protocol.get("rounding", "uint8"), protocol.get("floor")
    batch = protocol.get("batch_statistics")
    how = {"n": n, "labels": protocol.labels, "rounding": rounding, "floor": floor, "seed": seed}
    made_by = json.dumps(how if batch is None else {**how, "batch_statistics": batch})
    path = folder.path / "samples.npz"
    if keep and (kept := _kept_samples(path, made_by)):
        return kept
    generator = Generator.load(folder.path)
    labels = generator.draw_labels(n, seed)
    if labels is None:
        labels = sample_labels(n, generator.num_classes, protocol.labels, seed)
    if batch is not None:
        images = generator.sample_by_batch(labels, seed, batch)
        images = images.round().to(torch.uint8) if rounding == "uint8" else images
    else:
        images = generator.sample(labels, seed) if rounding == "uint8" else generator.sample_unrounded(labels, seed)
    if floor is not None:
        images = torch.where(images < floor, torch.zeros_like(images), images)
    samples = Records(images, labels)
    if not keep:
        return samples
    from torchvision.utils import save_image  # as long to import as torch, and tables need neither

    with atomic(folder.path / "samples.png") as temporary:
        save_image(class_grid(samples, generator.num_classes), temporary, format="png")
    # Written last: where this file is, the picture is too.
    arrays = {"images": samples.images.numpy(), "labels": labels.numpy(), "made_by": np.array(made_by)}
    write_arrays(path, arrays, compress=True)
    return samples


def _kept_samples(path: Path, made_by: str) -> Records | None:
    kept = read_arrays(path)
    if kept is None or str(kept.get("made_by")) != made_by:
        return None
    return Records(torch.from_numpy(kept["images"]), torch.from_numpy(kept["labels"]))


def describe_samples(samples: Records, num_classes: int, asked: int | None = None) -> dict[str, Any]:
    """Numbers that tell a collapsed generator: how many samples, how many different ones, which classes are missing."""
    flat = samples.images.flatten(1)
    distinct = len({row.tobytes() for row in flat.numpy()})
    blank = int((flat == flat[:, :1]).all(dim=1).sum())
    missing = sorted(set(range(num_classes)) - set(samples.labels.unique().tolist()))
    notes = []
    if asked is not None and len(samples) < asked:
        notes.append(f"{len(samples)} samples, where the protocol asks for {asked}: the generator has no more")
    if missing:
        notes.append(f"no sample of class {', '.join(map(str, missing))}")
    if distinct < len(samples):
        notes.append(f"only {distinct} different images among {len(samples)} samples")
    if blank:
        notes.append(f"{blank} samples are of one colour")
    return {"n": len(samples), "distinct": distinct, "blank": blank, "missing_classes": missing, "notes": notes}


def class_grid(samples: Records, num_classes: int, rows: int = 8) -> Tensor:
    """A picture [3, H, W] in [0, 1] of the first `rows` samples of each class, one column per class."""
    from torchvision.utils import make_grid

    columns = []
    for label in range(num_classes):
        images = samples.images[samples.labels == label][:rows].float() / 255.0
        missing = images.new_zeros(rows - len(images), *samples.images.shape[1:])
        columns.append(torch.cat([images, missing]))
    cells = torch.stack(columns, dim=1).flatten(0, 1)
    return make_grid(cells, nrow=num_classes, padding=2, pad_value=0.5)
