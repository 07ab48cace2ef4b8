"""Kernel Inception Distance: how far the samples' Inception features are from real ones, without assuming Gaussians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import features
from dpgen_bench.evaluate.metric import EvalContext


def kid(
    features_generated: np.ndarray, features_real: np.ndarray, subsets: int, subset_size: int, seed: int
) -> tuple[float, float]:
    """Squared maximum mean discrepancy of two sets of features: mean and standard deviation over random subsets.

    Each of the `subsets` times, `subset_size` rows of either set are drawn without replacement, those of
    `features_generated` first, all from one `np.random.RandomState(seed)`: torch-fidelity's order, so that the same
    features give the same subsets and values. With subset_size = n on both sides, one subset is the whole estimator.

    All in float64: the figure is what is left, often 1e-3 or less, of means of kernel values from 1 to 100 that cancel.
    torch-fidelity 0.4 computes in the features' own float32 and is off by about 1e-7 for it, which is 1e-4 of a figure
    of 1e-3 (tests/test_kid.py shows it); given the same features in float64 it agrees with this to 1e-9.

    Args:
        features_generated, features_real: [n, d] and [m, d].
        subsets: how many subsets are drawn, 1 or more.
        subset_size: rows of each subset, 2 or more.
        seed: of the draws.

    Returns:
        The mean, which estimates MMD² without bias and so may be negative, and the standard deviation (over
        `subsets`, not `subsets - 1`). The latter is the spread of subsets that share rows, not the mean's error.

    Raises:
        ValueError: if a set has fewer rows than `subset_size`, the sets differ in width, or a feature is not finite.
    """
    check_sizes(len(features_generated), len(features_real), subset_size)
    if features_generated.shape[1] != features_real.shape[1]:
        raise ValueError(
            f"expected as many features of the samples as of the real images, got {features_generated.shape[1]} and "
            f"{features_real.shape[1]}."
        )
    if not (np.isfinite(features_generated).all() and np.isfinite(features_real).all()):
        raise ValueError("expected finite features, got NaN or infinity.")
    draws = np.random.RandomState(seed % 2**32)
    values = np.empty(subsets)
    for i in range(subsets):
        made = features_generated[draws.choice(len(features_generated), subset_size, replace=False)]
        real = features_real[draws.choice(len(features_real), subset_size, replace=False)]
        values[i] = mmd_squared(made.astype(np.float64), real.astype(np.float64))
    return float(values.mean()), float(values.std())


def mmd_squared(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased estimate of MMD² under the kernel k(a, b) = (a·b / d + 1)³, from float64 rows x [m, d] and y [n, d],

    mean of k(x_i, x_j) over i ≠ j + the same of y - 2 · mean of k(x_i, y_j) over all i, j.
    """
    d = x.shape[1]

    def within(z: np.ndarray) -> float:
        kernel = (z @ z.T / d + 1.0) ** 3
        return float(kernel.sum() - np.trace(kernel)) / (len(z) * (len(z) - 1))

    return within(x) + within(y) - 2.0 * float(((x @ y.T / d + 1.0) ** 3).mean())


def check_sizes(num_generated: int, num_real: int, subset_size: int) -> None:
    """Raises ValueError if either set is smaller than a subset; a smaller subset would be another figure."""
    for name, n in (("samples", num_generated), ("real images", num_real)):
        if n < subset_size:
            raise ValueError(
                f"expected at least subset_size={subset_size} of the {name}, got {n}. Set the metric's subset_size to "
                f"{min(num_generated, num_real)} or less (figures of different subset_size differ in spread), or raise "
                "protocol.num_samples if the samples are too few."
            )


@dataclass
class Kid:
    """Kernel Inception Distance of the samples to real images (Bińkowski, Sutherland, Arbel, Gretton, 2018).

    The squared maximum mean discrepancy of Inception features (2,048 a picture, the FID's) under the polynomial kernel
    (a·b/2048 + 1)³: 0 if the two distributions are the same, else more. It is estimated without bias: equal
    distributions give values around 0, often negative, and the number of samples does not shift it, as it does the FID.
    Papers often print 100 or 1,000 times this figure. Kernel, subsets and subset_size are torch-fidelity's defaults.

    Returned: `kid`, the mean over subsets; `kid_std_subsets`, their standard deviation, which falls with `subset_size`
    and is no error bar of `kid`; the numbers of images on both sides, `kid_num_samples` and `kid_num_reference`; and
    `kid_subset_size`. Subsets are drawn by the context's seed. See `kid` for the arithmetic.

    Args:
        subsets: random pairs of subsets over which is averaged.
        subset_size: images of each subset.
        reference: "test", the real test images, or "train", the real training images.

    Raises:
        ValueError: for fewer than 1 subset, subsets of fewer than 2 images, or another reference; when called, if the
            samples or the real images are fewer than `subset_size`.
        NotMeasured: when called, if the network's weights or the training images are not to be had.
    """

    subsets: int = 100
    subset_size: int = 1000
    reference: Literal["test", "train"] = "test"

    def __post_init__(self) -> None:
        if self.subsets < 1 or self.subset_size < 2:
            raise ValueError(
                "expected subsets of 1 or more and subset_size of 2 or more, "
                f"got {self.subsets} and {self.subset_size}."
            )
        if self.reference not in ("test", "train"):
            raise ValueError(f"expected reference 'test' or 'train', got {self.reference!r}.")

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        real = real_test if self.reference == "test" else ctx.train()
        # Before the features, which may take an hour.
        check_sizes(len(samples), len(real), self.subset_size)
        made_features = features.features_of(samples, ctx, real=False)
        real_features = features.features_of(real, ctx, real=True)
        mean, std = kid(made_features, real_features, self.subsets, self.subset_size, ctx.seed)
        return {
            "kid": mean,
            "kid_std_subsets": std,
            "kid_num_samples": float(len(samples)),
            "kid_num_reference": float(len(real)),
            "kid_subset_size": float(self.subset_size),
        }
