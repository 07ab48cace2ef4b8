"""Methods whose shards all answer: honest ones, and planted cheats."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.shards import PerShard
from dpgen_bench.privacy.votes import Votes
from tests.toys import Painter, release_painter

BINS = 6
VOTES = ("votes", "twice", "records vote", "kept", "earlier group", "next state")


@dataclass
class Teachers:
    """Each of 6 shards has a teacher, a moving mean of its records; their noisy answers are the generator's image.

    Attributes:
        how: "honest" (each teacher answers with its mean) or "votes" (it votes for two of six greys); or a cheat:
            "two shards" (a teacher also learns from the next shard of its group), "whole group" (first states are
            means over the group), "earlier group" (they also have a part of the group's that was made before, which no
            vote shows), "next state" (a teacher leaves to the next shard a part of its mean, which no vote shows),
            "shard size" (the answers are divided by the number of records that were seen),
            "twice" (a teacher votes twice for one grey), "records vote" (each record of a shard casts a vote),
            "kept" (a teacher casts its votes of the release before once more, from memory).
    """

    how: str = "honest"
    seen: dict[str, Any] = field(default_factory=dict)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape)).to(ctx.device)
        sample = EveryShard(6)
        state = data.private_state("teachers", sample=sample, start=self._start, identity={}, stack=4)
        voting = self.how in VOTES
        bound = Votes(bins=BINS, k=2, voters="shards") if voting else PerShard(C=1.0, shape=(1,))
        release = data.mechanism("answers", sample=sample, bound=bound, times=3, state=state)
        self.seen.clear()
        for _ in ctx.steps(release.times, net=net):
            answer = release(self._votes if voting else self._answers)
            with torch.no_grad():
                net.means.fill_(float(answer.mean()) / (self.seen["records"] if self.how == "shard size" else 6.0))
        return release_painter(net, data)

    def _start(self, shards: Any, rngs: Any) -> dict[str, Tensor]:
        means = _means(shards)
        if self.how == "whole group":
            means = means.mean().expand(len(means))
        if self.how == "earlier group":
            means = means + 1e-3 * self.seen.get("mean", 0.0)
            self.seen["mean"] = float(means.mean())
        return {"mean": 0.1 * means}

    def _answers(self, shards: Any, states: Any, rngs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        means = _means(shards)
        if self.how == "two shards":
            means = 0.99 * means + 0.01 * means.roll(1)
        mean = 0.5 * states["mean"] + 0.5 * means
        self.seen["records"] = self.seen.get("records", 0) + sum(len(labels) for _, labels in shards)
        return mean[:, None], {"mean": mean}

    def _votes(self, shards: Any, states: Any, rngs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        greys = torch.linspace(0, 1, BINS)
        mean = 0.5 * states["mean"] + 0.5 * _means(shards)
        votes = (mean[:, None] - greys).abs().topk(2, largest=False).indices
        if self.how == "twice":
            votes[:, 1] = votes[:, 0]
        if self.how == "records vote":
            votes = torch.cat([vote.expand(len(labels), 2) for vote, (_, labels) in zip(votes, shards, strict=True)])
        if self.how == "kept":
            self.seen[f"{len(shards)} now"], votes = votes, self.seen.get(f"{len(shards)} now", votes)
        if self.how == "next state":
            mean = mean + 1e-3 * mean.roll(1)
        return votes, {"mean": mean}


def _means(shards: Any) -> Tensor:
    return torch.stack([images.nan_to_num(0.5).clamp(0, 1).sum() / max(images.numel(), 1) for images, _ in shards])
