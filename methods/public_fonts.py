"""Characters in random faces and styles of fonts: a generator that uses no private data, with a proven epsilon of 0.

It is the simulator of `sim_pe` without its votes. A method on the same classes that is not better has learnt nothing
from the records. docs/methods/public_fonts.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dpgen_bench.data.fonts import FontSettings
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.glyphs import STYLE, GlyphGenerator
from dpgen_bench.utils.validation import Fraction


@dataclass
class PublicFonts(FontSettings):
    """Every face is equally likely for every class, and a style is uniform around the plain one.

    Guarantees: no mechanism is requested, so the generator depends on no record: epsilon 0 for every delta.

    Args:
        degree: the largest distance of a style from the plain one, from 0 (the characters as the fonts have them) to 1.

    Raises:
        ValueError: for a folder without fonts, and classes that are no characters.
    """

    version = 1  # raise it when the same settings make a different generator
    public_data = "fonts"
    degree: Fraction

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        fields = self.read_glyphs(data.class_names).fields.transpose(0, 1)  # [classes, faces, S, S]
        K, faces = fields.shape[:2]
        generator = NetGenerator.build(
            GlyphGenerator,
            data,
            ctx.device,
            latent_dim=1 + STYLE,
            latent="uniform",
            drawings=faces,
            degree=self.degree,
        )
        assert isinstance(generator.net, GlyphGenerator)
        numbers = torch.arange(faces).repeat(K)
        generator.net.fill(numbers, fields.flatten(0, 1), torch.zeros(K * faces, STYLE), torch.ones(K, faces))
        return generator
