"""`dpgen sample`: draws images from a finished run for use outside the benchmark; no training record is read."""

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
    """Raised if images of a run have no privacy guarantee, for example because its noise can be recomputed."""


def sample_run(results: Path, run: str, n: int, seed: int, out: Path, labels: str, benchmark: bool) -> None:
    """Write `n` images of a run to `out`: a .npz with images uint8 [n, c, h, w] and labels [n], or a folder of PNGs.

    Args:
        results: the folder of results.
        run: the run's id or the start of it.
        labels: "balanced" or "uniform", see `sample_labels`.
        benchmark: also write images that must not be released as private.

    Raises:
        NotForRelease: if `benchmark` is false and the run, or one that it inherits from, was not made with
            privacy.noise=os, its epsilon is infinite, or private diagnostics were kept.
        LookupError: if no run, or more than one, matches `run`.
        ValueError: if n < 1, the run is not finished, or `out` exists.
    """
    if n < 1:
        raise ValueError(f"expected --n of at least 1, got {n}.")
    folder = Store(results).find(run)
    if not folder.done:
        raise ValueError(f"run {folder.id} is {folder.status()}, not finished; finish it with `dpgen run` first.")
    if not benchmark and (problems := release_problems(folder.read_json("ledger.json"))):
        raise NotForRelease(
            f"run {folder.id} is not for release: {'; '.join(problems)}. Train with privacy.noise=os and a finite "
            "epsilon for images that are, or pass --benchmark if the training data are public."
        )
    if out.exists():
        raise ValueError(f"expected --out to name a new file or folder, got {out}, which exists.")
    generator = Generator.load(folder.path)
    drawn_labels = sample_labels(n, generator.num_classes, labels, seed)
    images = generator.sample(drawn_labels, seed)
    if out.suffix == ".npz":
        with atomic(out) as temporary:
            np.savez_compressed(temporary, images=images.numpy(), labels=drawn_labels.numpy())
    else:
        from torchvision.io import write_png

        temporary = out.with_name(f".{out.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for i, (image, label) in enumerate(zip(images, drawn_labels, strict=True)):
            write_png(image, str(temporary / f"{i:06d}_class{int(label)}.png"))
        temporary.rename(out)
    print(f"{n} images of run {folder.id} written to {out}")
    for line in describe_total(results, folder):
        print(f"  {line}")
