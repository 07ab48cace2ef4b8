"""Uniform noise in every pixel: a generator that uses no data at all, with a proven epsilon of 0.

It is the lower end of every leaderboard. docs/methods/uniform_noise.md.
"""

from __future__ import annotations

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.glyphs import UniformPixels


class UniformNoise:
    """Pixels are independent and uniform on 0..255, the same for all classes.

    Guarantees: no mechanism is requested, so the generator depends on no record: epsilon 0 for every delta.
    """

    version = 1  # raise it when the same settings make a different generator

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        c, h, w = data.image_shape
        return NetGenerator.build(UniformPixels, data, ctx.device, latent_dim=c * h * w, latent="uniform")
