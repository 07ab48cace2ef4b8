"""Draws the samples of a run's generator as a protocol configures them, and describes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from dpgen_bench.config.spec import protocol_choice
from dpgen_bench.data.records import Records
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.store.folders import RunFolder
from dpgen_bench.utils.cache import read_arrays, write_arrays
from dpgen_bench.utils.files import atomic

MUCH_CLIPPED = 0.3  # a share of the pixels; noisy means clip up to a fifth, and a tanh half and more


def sample_labels(n: int, num_classes: int, kind: str, seed: int) -> Tensor:
    """Labels, int64 [n]: `balanced` cycles through the classes, `uniform` draws each label independently.

    Raises:
        ValueError: for another `kind`.
    """
    if kind == "balanced":
        return torch.arange(n) % num_classes
    if kind == "uniform":
        return torch.randint(num_classes, (n,), generator=torch.Generator().manual_seed(seed))
    raise ValueError(f"expected protocol.labels balanced or uniform, got {kind!r}.")


def sample_by_protocol(generator: Generator, protocol: DictConfig, seed: int) -> Records:
    """Samples of a generator, drawn with `seed`: images [n, c, h, w], uint8 or unrounded, and labels [n].

    A generator with labels of its own (a data set) gives at most as many samples as it has labels.

    Args:
        protocol: the protocol. `num_samples` is n. With `rounding: none` pixels stay unrounded floats. Pixels below
            `floor` become 0. With `batch_statistics: B` batch normalisation uses the statistics of each batch of B
            images instead of running statistics.
    """
    n, rounding = int(protocol.num_samples), protocol_choice(protocol, "rounding")
    floor, batch = protocol.get("floor"), protocol.get("batch_statistics")
    labels = generator.draw_labels(n, seed)
    if labels is None:
        labels = sample_labels(n, generator.num_classes, protocol_choice(protocol, "labels"), seed)
    if batch is not None:
        images = generator.sample_by_batch(labels, seed, batch)
        images = images.round().to(torch.uint8) if rounding == "uint8" else images
    else:
        images = generator.sample(labels, seed) if rounding == "uint8" else generator.sample_unrounded(labels, seed)
    if floor is not None:
        images = torch.where(images < floor, torch.zeros_like(images), images)
    return Records(images, labels)


def draw_samples(folder: RunFolder, protocol: DictConfig, seed: int, keep: bool = True) -> Records:
    """Samples of a run's generator as `sample_by_protocol` draws them.

    Args:
        keep: read the samples from samples.npz if it holds these; else draw them and write them there, together with
            samples.png, a grid with one column for each class.
    """
    floor, batch = protocol.get("floor"), protocol.get("batch_statistics")
    choices = {key: protocol_choice(protocol, key) for key in ("labels", "rounding")}
    settings = {"n": int(protocol.num_samples), **choices, "floor": floor, "seed": seed}
    made_by = json.dumps(settings if batch is None else {**settings, "batch_statistics": batch})
    path = folder.path / "samples.npz"
    if keep and (stored := _stored_samples(path, made_by)):
        return stored
    generator = Generator.load(folder.path)
    samples = sample_by_protocol(generator, protocol, seed)
    if not keep:
        return samples
    from torchvision.utils import save_image  # imported here because it is slow and most uses do not need it

    with atomic(folder.path / "samples.png") as temporary:
        save_image(class_grid(samples, generator.num_classes), temporary, format="png")
    # samples.npz is written last, so that samples.png exists wherever it does.
    arrays = {"images": samples.images.numpy(), "labels": samples.labels.numpy(), "made_by": np.array(made_by)}
    write_arrays(path, arrays, compress=True)
    return samples


def clipping_note(generator: Generator) -> str:
    """A note on a generator that clipped many pixels of its last samples, whose range may not be the declared one."""
    if not isinstance(generator, NetGenerator) or generator.clipped <= MUCH_CLIPPED:
        return ""
    return (
        f"{100 * generator.clipped:.0f}% of the pixels of a few samples are far outside of the generator's "
        f"value_range, {generator.value_range}, and are clipped; if the network's outputs have another range, such as "
        "(-1, 1) of a tanh, give it to NetGenerator."
    )


def set_size(folder: RunFolder) -> int | None:
    """The number of images, if the run's generator draws from a finite set of them."""
    return Generator.load(folder.path).set_size


def _stored_samples(path: Path, made_by: str) -> Records | None:
    """The samples in a samples.npz if they were drawn with the settings `made_by`; else None."""
    stored = read_arrays(path)
    if stored is None or str(stored.get("made_by")) != made_by:
        return None
    return Records(torch.from_numpy(stored["images"]), torch.from_numpy(stored["labels"]))


def describe_samples(samples: Records, num_classes: int, expected: int | None = None) -> dict[str, Any]:
    """Numbers that reveal a collapsed generator, with notes on what is unusual.

    Args:
        expected: the number of samples that the protocol asks for, if it is to be compared.

    Returns:
        "n" samples, of which "distinct" are different and "blank" of one colour; "missing_classes", "notes".
    """
    flat = samples.images.flatten(1)
    distinct = len({row.tobytes() for row in flat.numpy()})
    blank = int((flat == flat[:, :1]).all(dim=1).sum())
    missing = sorted(set(range(num_classes)) - set(samples.labels.unique().tolist()))
    notes = []
    if expected is not None and len(samples) < expected:
        notes.append(f"{len(samples)} samples instead of the protocol's {expected}: the generator has no more")
    if missing:
        notes.append(f"no sample of class {', '.join(map(str, missing))}")
    if distinct < len(samples):
        notes.append(f"only {distinct} different images among {len(samples)} samples")
    if blank:
        notes.append(f"{blank} samples are of one colour")
    return {"n": len(samples), "distinct": distinct, "blank": blank, "missing_classes": missing, "notes": notes}


def class_grid(samples: Records, num_classes: int, rows: int = 8) -> Tensor:
    """An image [3, H, W] in [0, 1] with the first `rows` samples of each class, one column for each class."""
    from torchvision.utils import make_grid

    columns = []
    for label in range(num_classes):
        images = samples.images[samples.labels == label][:rows].float() / 255.0
        missing = images.new_zeros(rows - len(images), *samples.images.shape[1:])
        columns.append(torch.cat([images, missing]))
    cells = torch.stack(columns, dim=1).flatten(0, 1)
    return make_grid(cells, nrow=num_classes, padding=2, pad_value=0.5)
