"""Images from a finished run, for whoever wants to use them; no training record is read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from dpgen_bench.generator import Generator
from dpgen_bench.runs.samples import sample_labels
from dpgen_bench.runs.soundness import release_problems
from dpgen_bench.runs.spent import describe_total
from dpgen_bench.runs.store import Store
from dpgen_bench.utils.files import atomic


class NotForRelease(ValueError):
    """The run's images carry no privacy guarantee, for example because anyone can recompute its noise."""


def sample_run(results: Path, run: str, n: int, seed: int, out: Path, labels: str, benchmark: bool) -> None:
    """Write `n` images of a run to `out`: a .npz with images uint8 [n, c, h, w] and labels [n], or a folder of PNGs.

    Raises:
        NotForRelease: the run, or one that it inherits from, was not made with privacy.noise=os, its epsilon is
            infinite, or private diagnostics were kept, and `benchmark` is not set.
        ValueError: n < 1, or `out` is there already.
    """
    if n < 1:
        raise ValueError(f"expected --n of at least 1, got {n}.")
    folder = Store(results).find(run)
    if not folder.done:
        raise ValueError(f"run {folder.id} is {folder.status()}, not finished; finish it with `dpgen run` first.")
    if not benchmark and (why := release_problems(folder.read_json("ledger.json"))):
        raise NotForRelease(
            f"run {folder.id} is not for release: {'; '.join(why)}. Train with privacy.noise=os and a finite epsilon "
            "for images that are, or pass --benchmark if the training data are public."
        )
    if out.exists():
        raise ValueError(f"{out} is there already; give --out a new name.")
    generator = Generator.load(folder.path)
    chosen = sample_labels(n, generator.num_classes, labels, seed)
    images = generator.sample(chosen, seed)
    if out.suffix == ".npz":
        with atomic(out) as temporary:
            np.savez_compressed(temporary, images=images.numpy(), labels=chosen.numpy())
    else:
        from torchvision.io import write_png

        half = out.with_name(f".{out.name}.tmp")
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir(parents=True)
        for i, (image, label) in enumerate(zip(images, chosen, strict=True)):
            write_png(image, str(half / f"{i:06d}_class{int(label)}.png"))
        half.rename(out)
    print(f"{n} images of run {folder.id} written to {out}")
    for line in describe_total(results, folder):
        print(f"  {line}")
