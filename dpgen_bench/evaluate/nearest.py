"""Metrics of nearest neighbours: precision, recall, density and coverage in features, and memorisation in pixels.

These metrics test whether distances are equal, so distances of whole numbers are computed exactly: in float64,
|a|² + |b|² - 2 a·b of whole numbers below 2⁵³ has no rounding error, in any order of its terms. Therefore a point and
its copy have distance 0, d(a, b) = d(b, a), and no value depends on the size of a chunk or on the device.
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

# Distances in memory at the same time: 128 MiB of float64.
PAIRS = 2**24
# References converted to float64 at the same time: 100 MB of 3x32x32 pixels.
REFERENCES = 4096


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """|a_i - b_j|², float64 [n, m], of float64 rows a [n, d] and b [m, d]; exact for whole numbers, see the module."""
    return torch.addmm(b.square().sum(1), a, b.T, alpha=-2.0).add_(a.square().sum(1)[:, None])


def random_positions(n: int, at_most: int, seed: int) -> Tensor:
    """int64: all positions below `n`, in order, or `at_most` of them drawn by `seed` if there are more."""
    if n <= at_most:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:at_most]


# Precision, recall, density, coverage


def whole_numbers(*sets: np.ndarray) -> list[Tensor]:
    """Scale the features [n, d] of all sets by one factor and round them to whole numbers, so that distances are exact.

    The largest feature becomes 2^b with 4 d 4^b <= 2⁵³, so b = 20 for d = 2,048. The relative error of a distance is
    about 1e-7, as large as that of the float32 features.

    Raises:
        ValueError: if a feature is not finite.
    """
    largest = max(float(np.abs(rows).max(initial=0.0)) for rows in sets)
    if not math.isfinite(largest):
        raise ValueError("expected finite features, got NaN or infinity.")
    bits = (51 - math.ceil(math.log2(max(sets[0].shape[1], 1)))) // 2
    scale = 2.0**bits / largest if largest > 0.0 else 1.0
    return [torch.from_numpy(rows.astype(np.float64)).mul_(scale).round_() for rows in sets]


def squared_radii(rows: Tensor, ks: tuple[int, ...]) -> list[Tensor]:
    """For each k, the squared distance [n] of each of `rows` [n, d] to its k-th nearest neighbour among the other rows.

    Another row with the same values is a neighbour at distance 0.
    """
    radii = []
    for part in rows.split(max(1, PAIRS // len(rows))):
        # The nearest row, at position 0, is the row itself, so that its k-th neighbour is at position k.
        radii.append(squared_distances(part, rows).topk(max(ks) + 1, largest=False).values[:, list(ks)])
    return list(torch.cat(radii).unbind(dim=1))


def prdc(
    generated: np.ndarray, real: np.ndarray, k: int = 5, precision_k: int = 3, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Precision, recall, density and coverage of features `generated` [n, d] against `real` [m, d]; see `Prdc`.

    At most `PAIRS` distances are in memory at the same time.

    Raises:
        ValueError: if a set has fewer than max(k, precision_k) + 1 rows, or a feature is not finite.
    """
    check_neighbours(len(generated), len(real), max(k, precision_k))
    generated_rows, real_rows = (rows.to(device) for rows in whole_numbers(generated, real))
    (generated_radius,) = squared_radii(generated_rows, (precision_k,))
    real_radius, real_radius_k = squared_radii(real_rows, (precision_k, k))
    precise = torch.zeros(len(generated), dtype=torch.bool, device=generated_rows.device)
    recalled = covered = pairs_in_balls = 0
    step = max(1, PAIRS // len(generated))
    for start in range(0, len(real), step):
        part = slice(start, start + step)
        distances = squared_distances(real_rows[part], generated_rows)
        # Precision and recall: a point on the surface of a ball lies in it.
        precise |= (distances <= real_radius[part, None]).any(dim=0)
        recalled += int((distances <= generated_radius).any(dim=1).sum())
        # Density and coverage: it does not.
        samples_in_ball = (distances < real_radius_k[part, None]).sum(dim=1)
        pairs_in_balls += int(samples_in_ball.sum())
        covered += int((samples_in_ball > 0).sum())
    return {
        "precision": int(precise.sum()) / len(generated),
        "recall": recalled / len(real),
        "density": pairs_in_balls / (k * len(generated)),
        "coverage": covered / len(real),
    }


def check_neighbours(num_generated: int, num_real: int, k: int) -> None:
    """Check that each image has k other images in its set.

    Raises:
        ValueError: if a set has k images or fewer.
    """
    for name, n in (("samples", num_generated), ("real images", num_real)):
        if n < k + 1:
            raise ValueError(
                f"expected at least {k + 1} of the {name}, each with {k} neighbours, got {n}. Raise "
                "protocol.num_samples or the metric's max_images, or lower its k and precision_k."
            )


@dataclass
class Prdc:
    """Precision, recall, density and coverage of the samples, in the Inception features of the FID.

    All values lie between 0 and 1, except density, which can exceed 1. The ball of an image has the distance to its
    k-th nearest neighbour in the same set as its radius.

    - `precision` is the share of samples that lie in the ball of a real image; `recall` is the share of real images
      that lie in the ball of a sample. They are the improved precision and recall of Kynkäänniemi, Karras, Laine,
      Lehtinen and Aila (2019), with k = `precision_k` = 3. A point on the surface of a ball lies in it (<=), as in
      their formula and in torch-fidelity.
    - `density` is the mean number of balls of real images in which a sample lies, divided by k; its expectation for
      real images is 1. `coverage` is the share of real images whose ball contains a sample. They are defined by Naeem,
      Oh, Uh, Choi and Yoo (2020), with k = 5. A point on the surface of a ball does not lie in it (<), as in the
      authors' package prdc, so that the density of the real images themselves is 1 and not (k + 1) / k. For n new real
      images against n others, the expectation of coverage is very close to 1 - 2^-k.

    All values depend on the numbers of images, precision and recall strongly: compare them at equal values of
    `prdc_num_samples` and `prdc_num_reference`, which are returned, too. If there are more than `max_images` samples or
    real test images, a subset is drawn by the context's seed, because images may be sorted by class.

    If an image has k copies or more, the radius of its ball is 0. All values are still defined (a collapsed generator
    recalls only exact copies of its image), and a note states the number of such images.

    Args:
        k: number of neighbours for density and coverage.
        precision_k: number of neighbours for precision and recall.
        max_images: largest number of samples, and of real test images, that are used.

    Raises:
        ValueError: for a setting below 1; when called, for fewer samples or test images than max(k, precision_k) + 1.
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
        generated = random_positions(len(samples), self.max_images, ctx.seed)
        real = random_positions(len(real_test), self.max_images, ctx.seed)
        # Checked before the features are computed, which may take an hour.
        check_neighbours(len(generated), len(real), max(self.k, self.precision_k))
        # Features of all samples, because other metrics use them all, and features are computed once.
        generated_features = features.features_of(samples, ctx, real=False)[generated.numpy()]
        real_features = features.features_of(real_test, ctx, real=True)[real.numpy()]
        values = prdc(generated_features, real_features, self.k, self.precision_k, ctx.device)
        note_copies("samples", samples.images[generated], self.precision_k, ctx)
        note_copies("real test images", real_test.images[real], min(self.k, self.precision_k), ctx)
        return values | {"prdc_num_samples": float(len(generated)), "prdc_num_reference": float(len(real))}


def note_copies(name: str, images: Tensor, k: int, ctx: EvalContext) -> None:
    """Add a note if an image equals k others or more, so that the radius of its ball is 0."""
    counts = Counter(row.tobytes() for row in images.cpu().numpy())
    collapsed = sum(count for count in counts.values() if count > k)
    if collapsed:
        ctx.note(
            f"precision, recall, density, coverage: {collapsed:,} of the {len(images):,} {name} used equal {k} or more "
            f"others ({len(counts):,} are distinct), so the balls around them have radius 0, up to rounding"
        )


# Memorisation


def nearest(queries: Tensor, references: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Squared distance, float64 [n] on the CPU, of each query image to its nearest reference image, in grey levels.

    Images are uint8 or float32 [n, c, h, w] within [0, 255]. The nearest reference is searched for by matrix products
    in float64, and its distance is then computed from the difference of the pixels: it is 0 if and only if the images
    are equal. For whole pixels both steps are exact; for unrounded ones, the squared distance of the selected reference
    exceeds the smallest one by about 1e-8 at most.

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
            smallest, index = squared_distances(rows[part], block).min(dim=1)
            where[part] = torch.where(smallest < best[part], start + index, where[part])
            best[part] = torch.minimum(smallest, best[part])
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        selected = references[where[part].to(references.device)].flatten(1).to(device, torch.float64)
        best[part] = (rows[part] - selected).square_().sum(dim=1)
    return best.cpu()


def mean_distance(squared: Tensor) -> float:
    """Mean distance for pixels in [0, 1], from squared distances for pixels in 0..255."""
    return float(squared.sqrt().mean()) / 255.0


@dataclass
class Memorisation:
    """Whether samples are nearer to training images than to test images. The metric is not from a paper.

    The distance is the Euclidean one of all pixels in [0, 1], and the distance to a set is that to its nearest image.
    It decreases with the size of the set, so the training images are split at random (by the context's seed) into
    disjoint parts as large as the test set, and distances to the parts are averaged. A remainder that is smaller than a
    part is not used for these averages, and a note says so. If there are more test images than training images, a
    random subset of that size is used, with a note. Values:

    - `nn_train`: mean distance of a sample to one part of the training set.
    - `nn_test`: mean distance of a sample to as many test images.
    - `nn_closer_to_train_pct`: percentage of pairs (sample, part) in which the part is nearer than the test images; a
      tie counts one half. It is 100 if all samples are nearer to training images. Its expectation is 50 if nothing is
      memorised and training and test images have the same distribution. They differ a little: 2,000 of MNIST's
      training images, held out from 50,000 others, have 52.4 (the test images are by other writers), and those of
      Fashion-MNIST 49.6.
    - `nn_train_all`: mean distance of a sample to all training images.
    - `nn_test_to_train`: mean distance of a real test image to all training images. If `nn_train_all` is far below it,
      samples are nearer to the training images than new real images are.
    - `nn_copies_pct`: percentage of samples that equal a training image in every pixel. Samples are not rounded.
    - `nn_num_samples`; and `nn_num_reference`, the number of images in a part and of test images.

    These distances detect copies in pixels, but not shifted or recoloured copies. They are computed from the training
    records, and no epsilon covers them.

    Args:
        max_samples: largest number of samples, and of test images for `nn_test_to_train`; of more, a random subset is
            used.

    Raises:
        ValueError: for max_samples below 1; when called, if there are no training or no test images.
        NotMeasured: when called, if the training images are not available.
    """

    max_samples: int = 10_000

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ValueError(f"expected max_samples of 1 or more, got {self.max_samples}.")

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        train, test = ctx.train().images, real_test.images
        generated = samples.images[random_positions(len(samples), self.max_samples, ctx.seed)]
        size = min(len(train), len(test))
        if size == 0:
            raise ValueError(f"expected training and test images, got {len(train)} and {len(test)}.")
        # Distances to disjoint random parts of the training images, the last one of which may be smaller.
        shuffled = torch.randperm(len(train), generator=torch.Generator().manual_seed(ctx.seed))
        num_parts, left = divmod(len(train), size)
        pieces = [nearest(generated, train[piece], ctx.device) for piece in shuffled.split(size)]
        to_parts = torch.stack(pieces[:num_parts])
        to_all = torch.stack(pieces).amin(dim=0)
        to_test = nearest(generated, test[random_positions(len(test), size, ctx.seed)], ctx.device)
        baseline = nearest(test[random_positions(len(test), self.max_samples, ctx.seed)], train, ctx.device)
        if left:
            ctx.note(
                f"nn_train and nn_closer_to_train_pct use {num_parts} x {size:,} of the {len(train):,} training images "
                f"(parts as large as the test set); only nn_train_all and nn_copies_pct use the other {left:,}"
            )
        if len(test) > size:
            ctx.note(
                f"nn_test and nn_closer_to_train_pct use {size:,} of the {len(test):,} test images, as many as there "
                "are training images"
            )
        nearer = (to_parts < to_test).double().mean() + 0.5 * (to_parts == to_test).double().mean()
        return {
            "nn_train": mean_distance(to_parts),
            "nn_test": mean_distance(to_test),
            "nn_closer_to_train_pct": 100.0 * float(nearer),
            "nn_train_all": mean_distance(to_all),
            "nn_test_to_train": mean_distance(baseline),
            "nn_copies_pct": 100.0 * float((to_all == 0.0).double().mean()),
            "nn_num_samples": float(len(generated)),
            "nn_num_reference": float(size),
        }
