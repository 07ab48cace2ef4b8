"""The Fréchet Inception distance of samples to real images (Heusel et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.linalg
import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.features import Tool, check_precision, check_tool, features_of
from dpgen_bench.evaluate.metric import EvalContext, Unmeasurable
from dpgen_bench.utils.execution import Precision

CHUNK = 4096  # features turned to float64 at a time


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
    # In chunks, because 60,000 rows of 2,048 features take a gigabyte in float64.
    for start in range(0, n, CHUNK):
        centred = features[start : start + CHUNK] - mean
        covariance += centred.T @ centred
    return mean, covariance / (n - 1)


def frechet_distance(mean1: np.ndarray, cov1: np.ndarray, mean2: np.ndarray, cov2: np.ndarray) -> float:
    """Squared Fréchet (2-Wasserstein) distance of two Gaussians,

        |m1 - m2|² + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2)).

    With a factor C1 = A Aᵀ, the last trace equals that of (Aᵀ C2 A)^(1/2): this matrix is symmetric and has the same
    nonzero eigenvalues as C1 C2. A is the Cholesky factor, or V √w from C1 = V w Vᵀ if C1 is not positive definite
    (fewer images than features). Eigenvalues below the rounding error of the largest one count as zero, because their
    roots (1e-8 for 1e-16) would add up over the null space.

    Args:
        mean1, mean2: [d].
        cov1, cov2: [d, d], symmetric positive semi-definite.
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
    # For two equal Gaussians, rounding may give -1e-12.
    return max(float(distance), 0.0)


@dataclass
class Fid:
    """FID of the samples to real images, and the numbers of samples and of real images, on which it depends.

    Args:
        reference: the real images: "test" (DPGAN, DP-Sinkhorn) or "train" (GS-WGAN) records.
        num_samples: how many of the samples are used, drawn by the seed without replacement; None uses all.
        num_reference: how many of the real images are used, the same ones for every seed; None uses all.
        tool: the tool with whose FID this one is comparable: "pytorch_fid" (used by *Private GANs, Revisited*), or
            "tensorflow1", the graph in the code of the FID's authors (used by GS-WGAN's and DP-Sinkhorn's released
            code). Their features differ, see `features.InceptionFeatures`; we measured FIDs that differ by up to 5 %.
        precision: of Inception; "tf32" (a GPU) and "bf16" are faster than "fp32", and change the value
            (docs/protocols.md, "Precision of Inception").

    Raises:
        ValueError: for an unknown reference, tool or precision, or a number below 2; when called, for fewer images than
            that.
        NotMeasured: when called, if the network's weights or the training images are not available.
        Unmeasurable: when called, for a generator that is a finite set of images.
    """

    reference: Literal["test", "train"] = "test"
    num_samples: int | None = None
    num_reference: int | None = None
    tool: Tool = "pytorch_fid"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        if self.reference not in ("test", "train"):
            raise ValueError(f"expected reference 'test' or 'train', got {self.reference!r}.")
        check_tool(self.tool)
        check_precision(self.precision)
        for name in ("num_samples", "num_reference"):
            if (count := getattr(self, name)) is not None and count < 2:
                raise ValueError(f"expected {name} of 2 or more, or null for all, got {count}.")

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        if ctx.set_size is not None:
            raise Unmeasurable(f"{ctx.set_size} images: the generator is a finite set, and FID compares distributions")
        generated = part_of(samples, self.num_samples, ctx.seed, "samples")
        reference = real_test if self.reference == "test" else ctx.train()
        real = part_of(reference, self.num_reference, 0, f"{self.reference} records")
        how: Any = {"tool": self.tool, "precision": self.precision}
        real_moments = mean_and_covariance(features_of(real, ctx, real=True, **how))
        features = features_of(generated, ctx, real=False, **how)
        dim = features.shape[1]
        for what, count in (("samples", len(generated)), ("reference images", len(real))):
            if count <= dim:
                ctx.note(f"{count} {what} for {dim} features: the covariance is singular, which biases FID upwards")
        return {
            "fid": frechet_distance(*mean_and_covariance(features), *real_moments),
            "fid_num_samples": float(len(generated)),
            "fid_num_reference": float(len(real)),
        }


def part_of(records: Records, count: int | None, seed: int, what: str) -> Records:
    """`count` of the records, drawn by `seed` without replacement. None is all of them, in order.

    `what` names the records in the error.

    Raises:
        ValueError: if there are fewer than `count`.
    """
    if count is None or count == len(records):
        return records
    if count > len(records):
        raise ValueError(f"expected at least {count} {what}, got {len(records)}; lower the number in the protocol.")
    chosen = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[:count]
    return Records(records.images[chosen], records.labels[chosen])
