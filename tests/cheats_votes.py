"""Methods whose records vote for candidates: an honest one, and planted cheats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.votes import Votes
from tests.toys import Painter, release_painter

CANDIDATES = 6


@dataclass
class Voters:
    """Each record votes for the two nearest of some grey images; their noisy mean is the generator's image.

    Attributes:
        how: "honest", or a cheat: "twice" (both votes for the nearest), "balanced" (few records vote for one bin),
            "mean" (the distance is that of the record minus the mean record), "position" (odd positions vote for the
            opposite).
    """

    how: str = "honest"

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape)).to(ctx.device)
        greys = torch.linspace(0, 1, CANDIDATES)
        release = data.mechanism("votes", sample=Full(), bound=Votes(bins=CANDIDATES, k=2), times=2)

        def votes(images: Tensor, labels: Tensor) -> Tensor:
            means = images.flatten(1).mean(dim=1).nan_to_num(0.5)
            if self.how == "mean":
                means = means - means.mean() + 0.5
            nearest = (means[:, None] - greys).abs().topk(2, largest=False).indices
            if self.how == "twice":
                nearest[:, 1] = nearest[:, 0]
            if self.how == "balanced":
                ranks = (nearest[:, :1] == nearest[:, 0]).tril().sum(dim=1) - 1
                nearest[:, 0], nearest[:, 1] = (nearest[:, 0] + ranks // 4) % CANDIDATES, -1
            if self.how == "position":
                nearest[1::2] = CANDIDATES - 1 - nearest[1::2]
            return nearest

        for _ in ctx.steps(release.times, net=net):
            histogram = release(votes).clamp_min(0.0)
            with torch.no_grad():
                net.means.fill_(float((histogram * greys).sum() / histogram.sum().clamp_min(1.0)))
        return release_painter(net, data)
