"""The first stage `init=central_images`: noisy class means of random batches, at half resolution.

The first stage of DP-FETA (Li et al. 2025), with two changes: a record is clipped to about the largest norm of usual
images instead of the norm of a white image, and the noise is calibrated to a share of the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.pretraining.gaussians import LabelledImages
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.planning import FIRST_STAGE
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.utils.validation import Checked, Count, Fraction, Interval, NonNegative, Positive, Share


@dataclass
class CentralImages(Checked):
    """Sums by class of random batches, divided by configured numbers; each image is a randomly moved mean.

    Guarantees: a release is the sum over a Poisson draw of one row for each record, of norm at most C, so its
    sensitivity is C under add/remove and 2 C under replace-one.

    Args:
        share: Share of the budget for all releases together.
        images: The number of images, with each class in turn.
        batches: S, the number of releases, and of central images of each class.
        rate: q, the probability with which a record takes part in a release.
        radius: C as a root mean square over the pixels at half resolution.
        rotation: Images are rotated by at most this number of degrees,
        shift: moved by at most this fraction of their width and height,
        zoom: and enlarged or reduced by at most this fraction.
    """

    config_group = "init"
    share: Share
    images: Count
    batches: Count
    rate: Annotated[float, Interval("(0, 1]")]
    radius: Positive
    rotation: NonNegative
    shift: Fraction
    zoom: Fraction

    def request(self, data: PrivateData, ctx: Context) -> Callable[[], LabelledImages]:
        """Request the mechanism, and return the function that makes the releases and draws images from them."""
        c, h, w = data.image_shape
        k, small = data.num_classes, (c, h // 2, w // 2)
        bound = PerRecord(C=self.radius * math.prod(small) ** 0.5, shape=(k, *small), microbatch=500)
        release = data.mechanism(
            f"{FIRST_STAGE}central_images", sample=Poisson(self.rate), bound=bound, times=self.batches, share=self.share
        )

        def rows(x: Tensor, y: Tensor) -> Tensor:
            halved = F.avg_pool2d(x, 2)
            return F.one_hot(y, k).to(x.dtype)[:, :, None, None, None] * halved[:, None]

        def draw() -> LabelledImages:
            sums = torch.stack([release(rows) for _ in range(self.batches)])
            means = (sums * k / (self.rate * data.n)).clamp(0.0, 1.0)  # the configured number of records of a class
            labels = torch.arange(self.images) % k
            chosen = torch.randint(self.batches, (self.images,), generator=ctx.generator)
            moves = torch.rand(4, self.images, generator=ctx.generator) * 2.0 - 1.0
            images = F.interpolate(means[chosen, labels].cpu(), size=(h, w), mode="bilinear", align_corners=False)
            return (self._moved(images, moves) * 255.0).round().to(torch.uint8), labels

        return draw

    def _moved(self, x: Tensor, moves: Tensor) -> Tensor:
        """Images [n, c, h, w] that are rotated, enlarged and shifted by `moves` [4, n] in [-1, 1]."""
        angle, scale = moves[0] * math.radians(self.rotation), 1.0 + moves[1] * self.zoom
        cos, sin, shift = angle.cos() * scale, angle.sin() * scale, 2.0 * self.shift * moves[2:]
        theta = torch.stack(
            [torch.stack([cos, -sin, shift[0]], dim=1), torch.stack([sin, cos, shift[1]], dim=1)], dim=1
        )
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)
