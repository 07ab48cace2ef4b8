"""Figures made of nearest neighbours: precision, recall, density and coverage in features; memorisation in pixels.

Whether a point lies in a ball, and whether an image is a copy, are questions of equality, so distances here are exact
wherever their inputs are whole numbers: |a|² + |b|² - 2 a·b of whole numbers below 2⁵³ has no rounding in float64,
whatever the order of its terms. A point and its copy are at distance 0, d(a, b) = d(b, a), and no value depends on
the size of a chunk or on the device.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import features
from dpgen_bench.evaluate.metric import EvalContext

# Distances in memory at a time: 128 MiB of float64.
PAIRS = 2**24
# References turned to float64 at a time: 100 MB of 3x32x32 pixels.
REFERENCES = 4096


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|², float64 [n, m], of float64 rows a [n, d] and b [m, d]; exact for whole numbers (see the module)."""
    return torch.addmm(b.square().sum(1), a, b.T, alpha=-2.0).add_(a.square().sum(1)[:, None])


def picked(n: int, at_most: int, seed: int) -> Tensor:
    """Positions int64 of all of `n`, in order, or of the first `at_most` in a random order that `seed` decides."""
    if n <= at_most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:at_most]


# Precision, recall, density, coverage


def whole_numbers(*sets: np.ndarray) -> list[Tensor]:
    """Features [n, d] of each set as whole numbers in float64, all on one scale on which distances are exact.

    The greatest feature becomes 2^b with 4 d 4^b <= 2⁵³, so b = 20 at d = 2,048. That moves a distance by some 1e-7 of
    itself, as much as the float32 in which the features were computed did.

    Raises:
        ValueError: if a feature is not finite.
    """
    greatest = max(float(np.abs(rows).max(initial=0.0)) for rows in sets)
    if not math.isfinite(greatest):
        raise ValueError("expected finite features, got NaN or infinity.")
    bits = (51 - math.ceil(math.log2(max(sets[0].shape[1], 1)))) // 2
    scale = 2.0**bits / greatest if greatest > 0.0 else 1.0
    return [torch.from_numpy(rows.astype(np.float64)).mul_(scale).round_() for rows in sets]


def squared_radii(rows: Tensor, ks: tuple[int, ...]) -> list[Tensor]:
    """For each k the squared distance [n] of each of `rows` [n, d] to its k-th nearest among the *other* rows.

    Another row that equals it is a neighbour at distance 0.
    """
    found = []
    for part in rows.split(max(1, PAIRS // len(rows))):
        # Each row is among its own neighbours, at 0: the k-th other one is at position k, counted from 0.
        found.append(squared_distances(part, rows).topk(max(ks) + 1, largest=False).values[:, list(ks)])
    return list(torch.cat(found).unbind(dim=1))


def prdc(
    made: np.ndarray, real: np.ndarray, k: int = 5, precision_k: int = 3, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Precision, recall, density and coverage of features `made` [n, d] against `real` [m, d]; see `Prdc`.

    Never more than `PAIRS` distances are held at a time.

    Raises:
        ValueError: if a set has fewer than max(k, precision_k) + 1 rows, or a feature is not finite.
    """
    check_neighbours(len(made), len(real), max(k, precision_k))
    made_rows, real_rows = (rows.to(device) for rows in whole_numbers(made, real))
    (made_radius,) = squared_radii(made_rows, (precision_k,))
    real_radius, real_radius_k = squared_radii(real_rows, (precision_k, k))
    precise = torch.zeros(len(made), dtype=torch.bool, device=made_rows.device)
    recalled = covered = inside = 0
    step = max(1, PAIRS // len(made))
    for start in range(0, len(real), step):
        part = slice(start, start + step)
        distances = squared_distances(real_rows[part], made_rows)
        precise |= (distances <= real_radius[part, None]).any(dim=0)
        recalled += int((distances <= made_radius).any(dim=1).sum())
        within = (distances < real_radius_k[part, None]).sum(dim=1)
        inside += int(within.sum())
        covered += int((within > 0).sum())
    return {
        "precision": int(precise.sum()) / len(made),
        "recall": recalled / len(real),
        "density": inside / (k * len(made)),
        "coverage": covered / len(real),
    }


def check_neighbours(num_generated: int, num_real: int, k: int) -> None:
    """Raises ValueError unless every image of either set has k others."""
    for name, n in (("samples", num_generated), ("real images", num_real)):
        if n < k + 1:
            raise ValueError(
                f"expected at least {k + 1} of the {name}, each with {k} neighbours, got {n}. Raise "
                "protocol.num_samples or the metric's max_images, or lower its k and precision_k."
            )


@dataclass
class Prdc:
    """Precision, recall, density and coverage of the samples, in the FID's Inception features, each from 0 to 1 but for
    density, which can exceed 1.

    Around each image of a set lies the ball that reaches to its k-th nearest neighbour among the set's others.

    - `precision`: share of samples that lie in the ball of some real image; `recall`: share of real images that lie in
      the ball of some sample. Improved precision and recall (Kynkäänniemi, Karras, Laine, Lehtinen, Aila, 2019), k =
      `precision_k` = 3. A point on a ball's surface counts (<=), as in their formula and in torch-fidelity.
    - `density`: in how many real images' balls a sample lies on average, over k: 1 is expected of real images.
      `coverage`: share of real images whose ball holds a sample. Naeem, Oh, Uh, Choi, Yoo (2020), k = 5. A point on the
      surface does not count (<), as in the authors' package prdc; so density of the real images themselves is 1 and
      not (k + 1) / k. Of n fresh real images against n, coverage is expected to be 1 - 2^-k, all but exactly.

    All depend on the numbers of images, precision and recall strongly: compare them at equal `prdc_num_samples` and
    `prdc_num_reference`, which are returned. Samples are chosen at random by the context's seed where there are more
    than `max_images`, because they come sorted by class; so are real test images.

    Where an image has k copies or more, its ball is that one point. Then everything is still defined (a collapsed
    generator recalls at most exact copies of its image), and a note says how many such images there are.

    Args:
        k: neighbours of density and coverage.
        precision_k: neighbours of precision and recall.
        max_images: samples, and real test images, used at most.

    Raises:
        ValueError: for a setting below 1; when called, with fewer images on a side than max(k, precision_k) + 1.
        NotMeasured: when called, if the network's weights are not on this machine.
    """

    k: int = 5
    precision_k: int = 3
    max_images: int = 10_000

    def __post_init__(self) -> None:
        if min(self.k, self.precision_k, self.max_images) < 1:
            raise ValueError(
                "expected k, precision_k and max_images of 1 or more, "
                f"got {self.k}, {self.precision_k} and {self.max_images}."
            )

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        made = picked(len(samples), self.max_images, ctx.seed)
        real = picked(len(real_test), self.max_images, ctx.seed)
        # Before the features, which may take an hour.
        check_neighbours(len(made), len(real), max(self.k, self.precision_k))
        # Of all samples, because other metrics use them all and features are computed once.
        made_features = features.features_of(samples, ctx, real=False)[made.numpy()]
        real_features = features.features_of(real_test, ctx, real=True)[real.numpy()]
        values = prdc(made_features, real_features, self.k, self.precision_k, ctx.device)
        note_copies("samples", samples.images[made], self.precision_k, ctx)
        note_copies("real test images", real_test.images[real], min(self.k, self.precision_k), ctx)
        return values | {"prdc_num_samples": float(len(made)), "prdc_num_reference": float(len(real))}


def note_copies(name: str, images: Tensor, k: int, ctx: EvalContext) -> None:
    """A note if some images are equal to k others or more, and their balls therefore a point."""
    counts = Counter(row.tobytes() for row in images.cpu().numpy())
    collapsed = sum(count for count in counts.values() if count > k)
    if collapsed:
        ctx.note(
            f"precision, recall, density, coverage: {collapsed:,} of the {len(images):,} {name} used equal {k} or more "
            f"others ({len(counts):,} are distinct), so the balls around them have radius 0, but for rounding"
        )


# Memorisation


def nearest(queries: Tensor, references: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Squared distance, float64 [n] on the CPU, of each query image to its nearest reference image, in grey levels.

    Images are uint8 or float32 [n, c, h, w] within [0, 255]. The nearest is found by matrix products in float64, and
    its distance then computed again from the difference of the pixels: it is 0 if and only if the two are equal. For
    whole pixels both are exact; for unrounded ones the reference found is nearest but for some 1e-8 squared levels.

    Raises:
        ValueError: if there are no references.
    """
    if len(references) == 0:
        raise ValueError("expected at least one reference image, got none.")
    rows = queries.flatten(1).to(device, torch.float64)
    best = torch.full((len(rows),), math.inf, dtype=torch.float64, device=rows.device)
    where = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    step = max(1, PAIRS // REFERENCES)
    for start in range(0, len(references), REFERENCES):
        block = references[start : start + REFERENCES].flatten(1).to(device, torch.float64)
        for first in range(0, len(rows), step):
            part = slice(first, first + step)
            found, index = squared_distances(rows[part], block).min(dim=1)
            where[part] = torch.where(found < best[part], start + index, where[part])
            best[part] = torch.minimum(found, best[part])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        winners = references[where[part].to(references.device)].flatten(1).to(device, torch.float64)
        best[part] = (rows[part] - winners).square_().sum(dim=1)
    return best.cpu()


def levels(squared: Tensor) -> float:
    """Mean distance in pixels of [0, 1], from squared distances in grey levels."""
    return float(squared.sqrt().mean()) / 255.0


@dataclass
class Memorisation:
    """Are samples nearer to training images than to test images? This bench's own figures, not a paper's.

    The distance is the Euclidean one of all pixels in [0, 1]; the nearest image of a set is meant. The nearest of
    60,000 is nearer than the nearest of 10,000 by their number alone, so the training images are cut at random (by the
    context's seed) into disjoint parts as large as the test set, and the parts' distances averaged; a remainder too
    small for a part is left out of these averages, and a note says so. If the test images are more than the training
    images, a random part of them of that size is used, and noted likewise. Returned:

    - `nn_train`: mean distance of a sample to the nearest image of one part of the training set.
    - `nn_test`: mean distance of a sample to the nearest of as many test images.
    - `nn_closer_to_train_pct`: share of pairs (sample, part) in which the part is nearer than the test images, a tie
      counting half. 100: all samples are nearer to training images; 50: what is expected if nothing is memorised and
      training and test images follow one law. They do not quite: 2,000 of MNIST's training images, held out against
      50,000 others and the test set, have 52.4 (its test images are by other writers), and Fashion-MNIST's 49.6.
    - `nn_train_all`: mean distance of a sample to the nearest of *all* training images.
    - `nn_test_to_train`: the same of a real test image, which memorises nothing: what `nn_train_all` compares with.
      Well below it, samples are nearer to the training images than new real images are.
    - `nn_copies_pct`: share of samples that equal a training image in every pixel (unrounded samples as they are).
    - `nn_num_samples`, and `nn_num_reference`, the size of a part and of the test side.

    These distances see copies in pixels, and no shifted or recoloured ones. They are computed from the training records
    and are covered by no epsilon.

    Args:
        max_samples: samples used at most, and test images for `nn_test_to_train`: a random choice if there are more.

    Raises:
        ValueError: for max_samples below 1.
        NotMeasured: when called, if the training images are not to be had.
    """

    max_samples: int = 10_000

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ValueError(f"expected max_samples of 1 or more, got {self.max_samples}.")

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        train, test = ctx.train().images, real_test.images
        made = samples.images[picked(len(samples), self.max_samples, ctx.seed)]
        size = min(len(train), len(test))
        if size == 0:
            raise ValueError(f"expected training and test images, got {len(train)} and {len(test)}.")
        shuffled = torch.randperm(len(train), generator=torch.Generator().manual_seed(ctx.seed))
        num_parts, left = divmod(len(train), size)
        pieces = [nearest(made, train[piece], ctx.device) for piece in shuffled.split(size)]
        to_parts = torch.stack(pieces[:num_parts])
        to_all = torch.stack(pieces).amin(dim=0)
        to_test = nearest(made, test[picked(len(test), size, ctx.seed)], ctx.device)
        baseline = nearest(test[picked(len(test), self.max_samples, ctx.seed)], train, ctx.device)
        if left:
            ctx.note(
                f"nn_train and nn_closer_to_train_pct use {num_parts} x {size:,} of the {len(train):,} training images "
                f"(parts as large as the test set); the other {left:,} are in nn_train_all and nn_copies_pct alone"
            )
        if len(test) > size:
            ctx.note(
                f"nn_test and nn_closer_to_train_pct use {size:,} of the {len(test):,} test images, as many as there "
                "are training images"
            )
        nearer = (to_parts < to_test).double().mean() + 0.5 * (to_parts == to_test).double().mean()
        return {
            "nn_train": levels(to_parts),
            "nn_test": levels(to_test),
            "nn_closer_to_train_pct": 100.0 * float(nearer),
            "nn_train_all": levels(to_all),
            "nn_test_to_train": levels(baseline),
            "nn_copies_pct": 100.0 * float((to_all == 0.0).double().mean()),
            "nn_num_samples": float(len(made)),
            "nn_num_reference": float(size),
        }
