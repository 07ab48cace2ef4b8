"""Whether samples look like inverted images: the detector of the debugging task of GS-WGAN, section 5.4.

Ink covers little of an image, so that inverted images are bright, and the mean intensity tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext


@dataclass
class Inversion:
    """`mean_intensity` of the samples, within [0, 1]; `inverted_score` and `inverted_verdict` (1 or 0), see below.

    The detector is ours; it stands in for a person who looks at the samples. Grey noise has a score of 0.5, so that
    the verdict on a generator that learnt nothing is worth nothing.
    """

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        mean, expected = mean_intensity(samples.images), mean_intensity(real_test.images)
        score = inverted_score(mean, expected)
        return {"mean_intensity": mean, "inverted_score": score, "inverted_verdict": float(verdict(mean, expected))}


def mean_intensity(images: Tensor) -> float:
    """Mean intensity in [0, 1] of images [n, c, h, w], uint8 or float32 within 0..255.

    Raises:
        ValueError: for other images, or none.
    """
    records = Records(images, torch.zeros(len(images), dtype=torch.int64))  # checks them
    if not records.images.numel():
        raise ValueError("expected at least one image, got none.")
    kind = torch.float64 if images.is_floating_point() else torch.int64
    return float(images.sum(dtype=kind)) / (255 * images.numel())


def inverted_score(mean: float, expected: float) -> float:
    """How far `mean` lies on the way from e, that of images as they should be, to 1 - e, that of inverted ones.

    (mean - e) / (1 - 2 e), so 0 at e and 1 at 1 - e; e is `expected`.

    Raises:
        ValueError: for intensities outside [0, 1], or e = 0.5, which inversion does not change.
    """
    for what, value in (("mean", mean), ("expected mean", expected)):
        if not 0 <= value <= 1:
            raise ValueError(f"expected the {what} intensity within [0, 1], got {value!r}.")
    if abs(1 - 2 * expected) < 1e-9:
        raise ValueError(
            "the expected mean intensity is 0.5, and inverted images have it, too: the mean tells nothing."
        )
    return (mean - expected) / (1 - 2 * expected)


def verdict(mean: float, expected: float) -> bool:
    """Whether images of this mean intensity look inverted: `inverted_score` above one half."""
    return inverted_score(mean, expected) > 0.5
