"""The Kernel Inception Distance of samples to real images, which unlike FID does not assume Gaussian features."""

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

    For each subset, `subset_size` rows of both sets are drawn without replacement, those of `features_generated` first,
    all by one `np.random.RandomState(seed)`. This is torch-fidelity's order, so that the same features give the same
    subsets and values.

    Values are computed in float64, because means of kernel values from 1 to 100 cancel and leave 1e-3 or less.
    torch-fidelity 0.4 computes in the features' float32, with an error of about 1e-7, which is 1e-4 of a value of 1e-3
    (see tests/test_kid.py); for the same features in float64, the values agree to 1e-9.

    Args:
        features_generated, features_real: [n, d] and [m, d].
        subsets: how many subsets are drawn, 1 or more.
        subset_size: rows of each subset, 2 or more.
        seed: of the draws.

    Returns:
        The mean, an unbiased estimate of MMD² that may be negative, and the standard deviation (over `subsets`, not
        `subsets - 1`). Subsets share rows, so that the standard deviation is not the standard error of the mean.

    Raises:
        ValueError: if a set has fewer rows than `subset_size`, the sets have different d, or a feature is not finite.
    """
    check_sizes(len(features_generated), len(features_real), subset_size)
    if features_generated.shape[1] != features_real.shape[1]:
        raise ValueError(
            f"expected as many features of the samples as of the real images, got {features_generated.shape[1]} and "
            f"{features_real.shape[1]}."
        )
    if not (np.isfinite(features_generated).all() and np.isfinite(features_real).all()):
        raise ValueError("expected finite features, got NaN or infinity.")
    # torch-fidelity's generator, and its order of draws.
    draws = np.random.RandomState(seed % 2**32)
    values = np.empty(subsets)
    for i in range(subsets):
        generated = features_generated[draws.choice(len(features_generated), subset_size, replace=False)]
        real = features_real[draws.choice(len(features_real), subset_size, replace=False)]
        values[i] = mmd_squared(generated.astype(np.float64), real.astype(np.float64))
    return float(values.mean()), float(values.std())


def mmd_squared(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased estimate of MMD² under the kernel k(a, b) = (a·b / d + 1)³, from float64 rows x [m, d] and y [n, d].

    It is: mean of k(x_i, x_j) over i ≠ j + mean of k(y_i, y_j) over i ≠ j - 2 · mean of k(x_i, y_j) over all i, j.
    """
    d = x.shape[1]

    def within(z: np.ndarray) -> float:
        kernel = (z @ z.T / d + 1.0) ** 3
        return float(kernel.sum() - np.trace(kernel)) / (len(z) * (len(z) - 1))

    return within(x) + within(y) - 2.0 * float(((x @ y.T / d + 1.0) ** 3).mean())


def check_sizes(num_generated: int, num_real: int, subset_size: int) -> None:
    """Check that both sets have at least `subset_size` images.

    Raises:
        ValueError: if a set has fewer. Subsets are not made smaller, because the value depends on their size.
    """
    for name, n in (("samples", num_generated), ("real images", num_real)):
        if n < subset_size:
            raise ValueError(
                f"expected at least subset_size={subset_size} of the {name}, got {n}. Set the metric's subset_size to "
                f"{min(num_generated, num_real)} or less (values of different subset_size differ in spread), or raise "
                "protocol.num_samples if the samples are too few."
            )


@dataclass
class Kid:
    """Kernel Inception Distance of the samples to real images (Bińkowski, Sutherland, Arbel, Gretton, 2018).

    It is the squared maximum mean discrepancy of Inception features (the 2,048 features of the FID) under the
    polynomial kernel (a·b/2048 + 1)³: 0 if the two distributions are the same, else positive. The estimate is unbiased,
    unlike that of the FID: for equal distributions it is around 0 and often negative, for any number of samples. Papers
    often print 100 or 1,000 times this value. Kernel, subsets and subset_size are torch-fidelity's defaults.

    Values: `kid`, the mean over subsets; `kid_std_subsets`, their standard deviation, which decreases with
    `subset_size` and is not an error bar of `kid`; `kid_num_samples` and `kid_num_reference`, the numbers of images;
    and `kid_subset_size`. Subsets are drawn by the context's seed. See the function `kid`.

    Args:
        subsets: number of random pairs of subsets.
        subset_size: images in each subset.
        reference: "test", the real test images, or "train", the real training images.

    Raises:
        ValueError: for fewer than 1 subset, subsets of fewer than 2 images, or an unknown reference; when called, for
            fewer samples or real images than `subset_size`.
        NotMeasured: when called, if the network's weights or the training images are not available.
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
        # Checked before the features are computed, which may take an hour.
        check_sizes(len(samples), len(real), self.subset_size)
        generated_features = features.features_of(samples, ctx, real=False)
        real_features = features.features_of(real, ctx, real=True)
        mean, std = kid(generated_features, real_features, self.subsets, self.subset_size, ctx.seed)
        return {
            "kid": mean,
            "kid_std_subsets": std,
            "kid_num_samples": float(len(samples)),
            "kid_num_reference": float(len(real)),
            "kid_subset_size": float(self.subset_size),
        }
