"""Sim-PE with fonts: Private Evolution in which a program that draws characters takes the place of a diffusion model.

Private Evolution: Lin et al., "Differentially Private Synthetic Data via Foundation Model APIs 1: Images" (ICLR 2024).
With a simulator: Lin et al., "Differentially Private Synthetic Data via APIs 3: Using Simulators Instead of Foundation
Models" (2025, arXiv:2502.05505). For each class k there are N candidates, each drawn in a face and a style.

    vote        a record of class k votes for the candidate of class k whose embedding is the nearest to its own
    release     histogram over the candidates of all classes + N(0, s^2 I), once in each of T rounds
    selection   w = max(histogram - H s, 0); N parents of each class are drawn with probabilities ~ w
    variation   a parent's style moves by degree_t, and with probability degree_t it gets another face

Everything but the vote uses public inputs (fonts, the characters of the classes) and releases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from dpgen_bench.data.fonts import FontSettings
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.glyphs import STYLE, GlyphGenerator, draw, embed, varied
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.utils.validation import Count, Fraction, Interval, NonNegative


@dataclass
class SimPE(FontSettings):
    """T rounds of votes on drawn candidates; the generator draws variations of the last round's candidates.

    Guarantees: a record votes once in each of T rounds, so that a release has the sensitivity 1 under add/remove and
    sqrt(2) under replace-one (`Votes`). The noise is calibrated to privacy.epsilon. Embeddings are whole numbers, and
    their distances are computed without rounding, so that votes are the same on every device.

    Args:
        candidates: N, the number of candidates of each class.
        rounds: T, the number of rounds.
        decay: degree_t = decay^t for t = 1 .. T-1; the candidates of the first round are random.
        threshold: H, the number of noise standard deviations that are subtracted from the votes.
        degree: how far the style of an image is from that of its candidate.

    Raises:
        ValueError: for a setting outside its range, a folder without fonts, and classes that are no characters.
    """

    version = 1  # raise it when the same settings make a different generator
    public_data = "fonts"
    candidates: Count
    rounds: Count
    decay: Annotated[float, Interval("(0, 1]")]
    threshold: NonNegative
    degree: Fraction

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        K, N = data.num_classes, self.candidates
        release = data.mechanism("votes", sample=Full(), bound=Votes(bins=K * N), times=ctx.limit(self.rounds))
        fields = self.read_glyphs(data.class_names).fields  # [faces, K, S, S]
        classes = torch.arange(K).repeat_interleave(N)
        faces = torch.randint(len(fields), (K * N,), generator=ctx.generator)
        styles = self._noise(ctx, K * N)
        generator = NetGenerator.build(
            GlyphGenerator,
            data,
            ctx.device,
            latent_dim=1 + STYLE,
            latent="uniform",
            drawings=N,
            degree=self.degree,
        )
        net = generator.net
        assert isinstance(net, GlyphGenerator)
        for t in ctx.steps(release.times, net=net):
            if t > 0:  # select parents by the last round's histogram, and vary them
                parents, degree = self._parents(net, ctx), self.decay**t
                faces, styles = net.faces.data.cpu()[parents], net.styles.data.cpu()[parents]
                changed = torch.rand(K * N, generator=ctx.generator) < degree
                faces = torch.where(changed, torch.randint(len(fields), (K * N,), generator=ctx.generator), faces)
                styles = varied(styles, self._noise(ctx, K * N), degree)
            images = draw(fields[faces, classes], styles, *data.image_shape[1:])[:, None]
            histogram = release(nearest(embed(images).reshape(K, N, -1).to(ctx.device))).cpu()
            weights = (histogram - self.threshold * release.std).clamp_min(0.0).reshape(K, N)
            weights[weights.sum(dim=1) == 0] = 1.0  # nothing is known of a class without votes above the threshold
            net.fill(faces, fields[faces, classes], styles, weights)
            ctx.log(candidates_above_threshold=int((weights > 0).sum()), faces=len(fields))
        return generator

    def _noise(self, ctx: Context, rows: int) -> Tensor:
        """Uniform on [-1, 1], of the shape [rows, STYLE]."""
        return 2.0 * torch.rand(rows, STYLE, generator=ctx.generator) - 1.0

    def _parents(self, net: GlyphGenerator, ctx: Context) -> Tensor:
        """Rows of candidates, N for each class, drawn with the probabilities of the last round."""
        u = torch.rand(net.chances.shape, generator=ctx.generator)
        drawn = torch.searchsorted(net.chances.data.cpu(), u, right=True).clamp(max=self.candidates - 1)
        return (drawn + self.candidates * torch.arange(len(drawn))[:, None]).flatten()


def nearest(candidates: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A private function: each record votes for the nearest candidate of its class.

    Args:
        candidates: embeddings [K, N, d], whole numbers of `embed`. Candidate j of class k is bin k N + j.
    """
    K, N, _ = candidates.shape
    candidates = candidates.double()  # in float32, squared distances of wide images would be rounded
    lengths = candidates.square().sum(dim=2)

    def votes(images: Tensor, labels: Tensor) -> Tensor:
        embedded = embed(images).double()
        out = torch.empty_like(labels)
        for k in range(K):
            own = labels == k
            distances = lengths[k] - 2.0 * embedded[own] @ candidates[k].T  # up to a constant of the record
            out[own] = k * N + distances.argmin(dim=1)
        return out[:, None]

    return votes
