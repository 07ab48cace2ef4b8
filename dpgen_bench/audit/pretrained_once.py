"""`PretrainedOnce`: a method with a first stage, which is pretrained once for all fits of an audit."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, Method
from dpgen_bench.pretraining.gaussians import LabelledImages
from dpgen_bench.pretraining.pretrained import FirstStage, Pretrained
from dpgen_bench.testing.digest import digests
from dpgen_bench.training.checkpoint import public_randomness, restore_randomness

Known = dict[tuple[int, str], tuple[dict[str, nn.Module], Any]]


class PretrainedOnce(Pretrained):
    """A `Pretrained` for audits, which fit a method again and again on neighbours, with the same released values.

    Every fit is that of `Pretrained`: networks, and public randomness after the pretraining, are those of an earlier
    fit if the released images, the seed and public randomness before the pretraining are the same to the last bit.
    A fit with another seed than the first, from which an audit takes noise alone, has the networks of the first fit.

    Args:
        method, stage, pretraining: As those of `Pretrained`.
        known: What earlier fits trained, by seed and digest; shared by all fits of an audit.
    """

    def __init__(self, method: Method, stage: FirstStage, pretraining: Method, known: Known) -> None:
        super().__init__(method, stage, pretraining)
        self._known = known

    def _networks(self, images: LabelledImages, data: PrivateData, ctx: Context) -> dict[str, nn.Module]:
        key = ctx.seed, str(digests([*images, public_randomness(ctx.generator)]))
        first = next(iter(self._known), key)
        if key not in self._known and first[0] == ctx.seed:
            self._known[key] = super()._networks(images, data, ctx), public_randomness(ctx.generator)
        networks, randomness = self._known.get(key, self._known[first])
        restore_randomness(randomness, ctx.generator)
        return dict(networks)
