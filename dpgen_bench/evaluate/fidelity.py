"""How close the samples' distribution is to the real one: the Fréchet Inception distance (Heusel et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.linalg
import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.features import Tool, check_tool, features_of
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
    """FID of the samples to the real images, with the numbers of images on both sides, on which it depends.

    Args:
        reference: "test" (DPGAN, DP-Sinkhorn) or "train" (GS-WGAN) records.
        num_samples: measure so many of the samples, drawn by the seed without replacement; None is all of them.
        num_reference: likewise of the reference; always the same ones.
        tool: with whose FID this one compares: "pytorch_fid" (which *Private GANs, Revisited* used), or "tensorflow1",
            the graph in the code of the FID's authors (which GS-WGAN's and DP-Sinkhorn's released code uses). Their
            features differ, see `features.InceptionFeatures`, and so does FID, by up to 5 % in what we measured.

    Raises:
        ValueError: for another reference or tool, or fewer images than asked for.
    """

    reference: Literal["test", "train"] = "test"
    num_samples: int | None = None
    num_reference: int | None = None
    tool: Tool = "pytorch_fid"

    def __post_init__(self) -> None:
        if self.reference not in ("test", "train"):
            raise ValueError(f"expected reference 'test' or 'train', got {self.reference!r}.")
        check_tool(self.tool)
        for name in ("num_samples", "num_reference"):
            if (count := getattr(self, name)) is not None and count < 2:
                raise ValueError(f"expected {name} of 2 or more, or null for all, got {count}.")

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        made = part_of(samples, self.num_samples, ctx.seed, "samples")
        reference = real_test if self.reference == "test" else ctx.train()
        real = part_of(reference, self.num_reference, 0, f"{self.reference} records")
        real_moments = mean_and_covariance(features_of(real, ctx, real=True, tool=self.tool))
        features = features_of(made, ctx, real=False, tool=self.tool)
        dim = features.shape[1]
        for what, count in (("samples", len(made)), ("reference images", len(real))):
            if count <= dim:
                ctx.note(f"{count} {what} for {dim} features: the covariance is singular, which biases FID upwards")
        return {
            "fid": frechet_distance(*mean_and_covariance(features), *real_moments),
            "fid_num_samples": float(len(made)),
            "fid_num_reference": float(len(real)),
        }


def part_of(records: Records, count: int | None, seed: int, what: str) -> Records:
    """`count` of the records, drawn by `seed` without replacement; all of them, in order, for None.

    Raises:
        ValueError: if there are not so many.
    """
    if count is None or count == len(records):
        return records
    if count > len(records):
        raise ValueError(f"expected at least {count} {what}, got {len(records)}; lower the number in the protocol.")
    chosen = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[:count]
    return Records(records.images[chosen], records.labels[chosen])
