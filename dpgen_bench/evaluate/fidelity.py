"""How close the samples' distribution is to the real one: the Fréchet Inception distance (Heusel et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.linalg

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.features import InceptionFeatures, cached_features
from dpgen_bench.evaluate.metric import EvalContext

CHUNK = 4096


def mean_and_covariance(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [d] and unbiased covariance [d, d] of `features` [n, d], in float64.

    Raises:
        ValueError: if there are fewer than two rows, or one is not finite.
    """
    n, d = features.shape
    if n < 2:
        raise ValueError(f"expected at least 2 images for a covariance, got {n}.")
    mean = features.mean(axis=0, dtype=np.float64)
    if not np.isfinite(mean).all():
        raise ValueError("expected finite features, got NaN or infinity.")
    covariance = np.zeros((d, d))
    # In chunks: 60,000 rows of 2,048 in float64 would take a gigabyte for each copy.
    for start in range(0, n, CHUNK):
        centred = features[start : start + CHUNK] - mean
        covariance += centred.T @ centred
    return mean, covariance / (n - 1)


def frechet_distance(mean1: np.ndarray, cov1: np.ndarray, mean2: np.ndarray, cov2: np.ndarray) -> float:
    """Squared Fréchet (2-Wasserstein) distance of two Gaussians,

        |m1 - m2|² + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2)).

    With a factor C1 = A Aᵀ the last trace is that of (Aᵀ C2 A)^(1/2), a symmetric matrix with the same eigenvalues as
    C1 C2 but for zeros: no root of an unsymmetric matrix is taken. A is the Cholesky factor, or V √w from C1 = V w Vᵀ
    where C1 is not positive definite (fewer images than features). Eigenvalues under the rounding of the largest count
    as zero, or else their roots (1e-8 for 1e-16) would add up over the null space.

    Args:
        mean1, mean2: [d]. cov1, cov2: [d, d], symmetric positive semi-definite.
    """
    cov1, cov2 = np.asarray(cov1, dtype=np.float64), np.asarray(cov2, dtype=np.float64)
    gap = np.asarray(mean1, dtype=np.float64) - np.asarray(mean2, dtype=np.float64)
    try:
        factor = scipy.linalg.cholesky(cov1, lower=True)
    except np.linalg.LinAlgError:
        values, vectors = scipy.linalg.eigh(cov1)
        factor = vectors * np.sqrt(np.maximum(values, 0.0))
    product = factor.T @ cov2 @ factor
    values = scipy.linalg.eigvalsh((product + product.T) / 2.0)
    values = values[values > np.finfo(np.float64).eps * len(values) * max(values[-1], 0.0)]
    distance = gap @ gap + np.trace(cov1) + np.trace(cov2) - 2.0 * np.sqrt(values).sum()
    # Rounding may leave -1e-12 for two equal Gaussians.
    return max(float(distance), 0.0)


@dataclass
class Fid:
    """FID of the samples to the real test images, with the numbers of images on both sides, on which it depends.

    The papers use 60,000 samples. `reference` is "test", as in DPGAN's and DP-Sinkhorn's final figures; metrics are
    given no training records.

    Raises:
        ValueError: for another reference.
    """

    reference: Literal["test"] = "test"

    def __post_init__(self) -> None:
        if self.reference != "test":
            raise ValueError(
                f"expected reference 'test', got {self.reference!r}: metrics are given the test records alone."
            )

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        extractor = InceptionFeatures(ctx.device)
        real = mean_and_covariance(cached_features(real_test, extractor, ctx.cache, ctx.batch_size))
        made = mean_and_covariance(extractor(samples.images, ctx.batch_size))
        return {
            "fid": frechet_distance(*made, *real),
            "fid_num_samples": float(len(samples)),
            "fid_num_reference": float(len(real_test)),
        }
