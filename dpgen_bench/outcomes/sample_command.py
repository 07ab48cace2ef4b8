"""`dpgen sample`: draws images from a finished run for use outside the benchmark; no training record is read."""

from __future__ import annotations

from pathlib import Path

from dpgen_bench.generator import Generator
from dpgen_bench.outcomes.sample_files import Samples, writer
from dpgen_bench.outcomes.soundness import release_problems
from dpgen_bench.outcomes.spent import describe_total
from dpgen_bench.runs.samples import sample_labels
from dpgen_bench.runs.validation import expect_generator
from dpgen_bench.store.folders import RunFolder, Store


class NotForRelease(ValueError):
    """Raised if images of a run have no privacy guarantee, for example because its noise can be recomputed."""


def sample_run(
    results: Path, run: str, n: int, seed: int, out: Path, labels: str, benchmark: bool, overwrite: bool = False
) -> None:
    """Write `n` images of a run to `out`, whose ending chooses the format (see `outcomes.sample_files`).

    Args:
        results: the folder of results.
        run: the run's id or the start of it.
        labels: "balanced" or "uniform", see `sample_labels`.
        benchmark: also write images that must not be released as private.
        overwrite: replace `out` if it exists.

    Raises:
        NotForRelease: if `benchmark` is false and the run, or one that it inherits from, was not made with
            privacy.noise=os, its epsilon is infinite, or private diagnostics were kept.
        LookupError: if no run, or more than one, matches `run`.
        ValueError: if n < 1, the run is not finished, or `out` has another ending or exists.
    """
    if n < 1:
        raise ValueError(f"expected --n of at least 1, got {n}.")
    folder = Store(results).find(run)
    expect_for_release(folder, benchmark)
    write = writer(out, overwrite)
    generator = Generator.load(folder.path)
    drawn_labels = sample_labels(n, generator.num_classes, labels, seed)
    images = generator.sample(drawn_labels, seed)
    write(Samples(images.numpy(), drawn_labels.numpy(), _class_names(folder, generator.num_classes)))
    print(f"{n} images of run {folder.id} written to {out}")
    for line in describe_total(results, folder):
        print(f"  {line}")


def expect_for_release(folder: RunFolder, benchmark: bool) -> None:
    """Check that a run is finished, and that what its generator gives may be released as private.

    Args:
        benchmark: also accept a run that must not be released, for data that are public.

    Raises:
        ValueError: if the run is not finished, or its files are damaged.
        NotForRelease: if `benchmark` is false and the run, or one that it inherits from, was not made with
            privacy.noise=os, its epsilon is infinite, or private diagnostics were kept.
    """
    if not folder.done:
        raise ValueError(f"run {folder.id} is {folder.status()}, not finished; finish it with `dpgen run` first.")
    expect_generator(folder)
    if not benchmark and (problems := release_problems(folder.read_json("ledger.json"))):
        raise NotForRelease(
            f"run {folder.id} is not for release: {'; '.join(problems)}. Train with privacy.noise=os and a finite "
            "epsilon for images that are, or pass --benchmark if the training data are public."
        )


def _class_names(folder: RunFolder, num_classes: int) -> tuple[str, ...]:
    """The names of the classes as the run's dataset.json has them; numbers for older runs, which have no such file."""
    names = folder.read_json("dataset.json").get("class_names", [])
    return tuple(names) if len(names) == num_classes else tuple(str(label) for label in range(num_classes))
