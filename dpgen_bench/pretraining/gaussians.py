"""A normal distribution for each class, from noisy sums: the releases of `methods/dp_gauss.py` and of `init=gauss`.

An image x is a vector of p pixels in [0, 1], and y is its class. Three sums over all records are released, each once.
Everything else is post-processing. With K > 1 clusters in each class, Lloyd's algorithm releases three more sums, and
each cluster has a normal distribution. The radii are constants, or quantiles of noisy histograms: three more releases.

    means      by class, count and sum of x, |x| <= R              -> m_y = sum / count, m the mean of all
    residuals  sum r r^T of r = x - m_y, |r| <= R_r                -> S, the covariance within classes
    subspace   V [p, d], the top eigenvectors of S + b sum_y (n_y / n) (m_y - m)(m_y - m)^T; m_y <- m + V V^T (m_y - m)
    shrinkage  of m_y, S (for V) and mu_y towards zero, by how much of their energy is noise (`shrinkage.py`)
    codes      by class, sum z and sum z z^T of z = V^T (x - m_y), |z| <= R_z      -> mu_y and C_y
    clusters   by class and nearest of K centres, count and sum of z -> new centres; three times, starting at random
    radii      before each clip, a histogram of |x|, |r| or |z|  -> R, R_r or R_z, which holds a share q of the records
    texture    s^2 = (tr S - tr V^T S V) / (p - d), the variance of a pixel outside of the subspace
    samples    x = m_y + V (mu_y + C_y^(1/2) z') + s z'',  z' and z'' ~ N(0, I)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.class_gaussians import ClassGaussians
from dpgen_bench.nets.gaussian_clusters import Clusters, diagonal_blocks, normal_distributions
from dpgen_bench.pretraining.radii import BINS, bins_of, quantile_of
from dpgen_bench.pretraining.shrinkage import Bands, stein_factor
from dpgen_bench.privacy.bounds import DrawBound
from dpgen_bench.privacy.expect import MOST_NUMBERS
from dpgen_bench.privacy.factors import PerRecordMoments
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.planning import FIRST_STAGE
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.utils.exact import product
from dpgen_bench.utils.validation import Checked, Count, Decay, Fraction, Interval, NonNegative, Share

LLOYD_STEPS = 3
Radius = Annotated[float, Interval("[1e-3, 10]")]  # no vector of pixels in [0, 1] exceeds 1
LabelledImages = tuple[Tensor, Tensor]  # uint8 [n, c, h, w] and int64 [n]
PrivateRows = Callable[[Tensor, Tensor], Tensor]  # of images and labels, a vector for each record


@dataclass
class GaussianModel(Checked):
    """Releases that share the budget, with shares of the squared multiplier mu^2 of the Gaussian mechanism.

    Guarantees: each release has the sensitivity C = 1 under add/remove, and sqrt(2) under replace-one (1.4145 for the
    codes, 2 for a Lloyd step), by `PerRecordMoments`, and a histogram of lengths by `Votes`. With such histograms, a
    vector is multiplied by the constant radius over the released one, which depends on releases alone, and then clipped
    to the constant one, so that the sensitivities hold for any radius. The noise is calibrated to privacy.epsilon.

    Args:
        dim: d, the dimension of the subspace.
        radius: R as a root mean square over pixels: |x| <= radius sqrt(p). The other radii are in the same unit.
        radius_residual: R_r, for the deviation of an image from its class mean.
        radius_code: R_z, for the part of this deviation in the subspace.
        share_means: Share of the budget for the class means.
        share_residuals: Share of the budget for the covariance within classes; the codes get the rest.
        between: b, the weight of the covariance between classes in the choice of the subspace.
        texture: Multiplies s.
        threshold: Pixels of samples of at most this value become black.
        clusters: K, the number of clusters of each class.
        share_clusters: Share of the budget for all Lloyd steps together, if K > 1.
        share_radii: Share of the budget for the histograms that determine the three radii; with 0, these are constants.
        quantile: q, the share of the records that such a radius holds.
        shrinkage: Whether class means and means of codes are shrunk, and frequencies of the subspace weighted, by how
            much of them is noise. This is post-processing.

    Raises:
        ValueError: For a setting outside its range, for shares that leave nothing, and in `request_model`, for a d of
            at least the number of pixels, and for a release of more than 2^27 numbers.
    """

    # Runs from before these options existed keep their ids.
    added: ClassVar[tuple[str, ...]] = ("share_radii", "quantile", "shrinkage")
    dim: Count
    radius: Radius
    radius_residual: Radius
    radius_code: Radius
    share_means: Share
    share_residuals: Share
    between: NonNegative
    texture: NonNegative
    threshold: Fraction
    clusters: Count = 1
    share_clusters: Share = 0.15
    share_radii: Decay = 0.0
    quantile: Share = 0.5
    shrinkage: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names, shares = zip(*self._shares().items(), strict=True)
        if not sum(shares) < 1.0:
            raise ValueError(
                f"{' + '.join(f'{self.config_group}.{name}' for name in names)}: expected a sum below 1, because the "
                f"codes get the rest, got {' + '.join(f'{share:g}' for share in shares)}; lower one of them."
            )

    def _shares(self) -> dict[str, float]:
        """The shares of all releases but that of the codes, which gets the rest."""
        optional = {"share_clusters": self.clusters > 1, "share_radii": self.share_radii > 0.0}
        names = ["share_means", "share_residuals", *(name for name, used in optional.items() if used)]
        return {name: getattr(self, name) for name in names}

    def expect_data(self, class_names: Sequence[str], image_shape: Sequence[int]) -> None:
        """Check that d is below the number of pixels, and that their second moments are not too many numbers.

        Raises:
            ValueError: if it is not, or they are.
        """
        p = math.prod(image_shape)
        if p * (p + 1) // 2 > MOST_NUMBERS:
            raise ValueError(
                f"image_shape: expected at most {math.isqrt(2 * MOST_NUMBERS) - 1:,} pixels in all channels, because "
                f"their second moments are released, got {p:,}; choose a smaller dataset.image_size, or another method."
            )
        if self.dim >= p:
            raise ValueError(
                f"{self.config_group}.dim: expected less than {p}, the number of pixels of an image, got {self.dim}; "
                "lower it."
            )

    def request_model(
        self, data: PrivateData, ctx: Context, *, prefix: str = "", part: float | None = None
    ) -> Callable[[], NetGenerator]:
        """Request the mechanisms, and return the function that makes the releases and builds a generator of them.

        Args:
            prefix: Before the names of the mechanisms.
            part: The part of the run's budget that all releases get together; None means all that is left.
        """
        k, p, d, K = data.num_classes, math.prod(data.image_shape), self.dim, self.clusters
        self.expect_data(data.class_names, data.image_shape)
        R, R_r, R_z = (radius * p**0.5 for radius in (self.radius, self.radius_residual, self.radius_code))
        try:
            images = PerRecordMoments(dim=p, radius=R, weights=(0.2, 1.0, 0.0), classes=k, nonnegative=True)
            residuals = PerRecordMoments(dim=p, radius=R_r, weights=(0.0, 0.0, 1.0))
            steps = PerRecordMoments(dim=K * (d + 1), radius=R_z * 1.25**0.5, weights=(0.0, 1.0, 0.0), classes=k)
            codes = PerRecordMoments(dim=K * d, radius=R_z, weights=(0.0, 0.2, 1.0), classes=k)
        except ValueError as error:  # the sizes of the bounds are not settings
            settings = f"{self.config_group}.dim={d} and {self.config_group}.clusters={K}"
            raise ValueError(f"{settings} with {k} classes of images of {p} pixels: {error}") from None

        def mechanism(name: str, bound: DrawBound, share: float | None, times: int = 1) -> Mechanism:
            return data.mechanism(f"{prefix}{name}", sample=Full(), bound=bound, times=times, share=share)

        whole = 1.0 if part is None else part
        of_radii = mechanism("radii", Votes(bins=BINS), whole * self.share_radii, 3) if self.share_radii > 0.0 else None
        of_images = mechanism("images", images, whole * self.share_means)
        of_residuals = mechanism("residuals", residuals, whole * self.share_residuals)
        if K > 1:
            of_steps = mechanism("clusters", steps, whole * self.share_clusters, LLOYD_STEPS)
        of_codes = mechanism("codes", codes, None if part is None else part * (1.0 - sum(self._shares().values())))

        def stretch(radius: float, vectors: PrivateRows) -> float:
            """What to multiply vectors by, so that a share q of the records is not clipped at the constant radius."""
            if of_radii is None:
                return 1.0
            histogram = of_radii(lambda x, y: bins_of(vectors(x, y), p))
            return radius / quantile_of(histogram, self.quantile, data.n, p)

        def release() -> NetGenerator:
            # Class means. A class whose count is not above its noise is unknown: it gets mean and covariance of all.
            a = stretch(R, lambda x, y: x)
            sums = images.unpack(of_images(lambda x, y: a * x.flatten(1)))
            least = max(2.0 * of_images.std / images.coefficients[0], 1.0)
            count, known = sums.count.clamp(min=least)[:, None], (sums.count >= least).float()[:, None]
            overall = sums.first.sum(dim=0) / a / data.n
            between = known * (sums.first / a / count - overall)
            if self.shrinkage:
                bands = Bands(data.image_shape, ctx.device)
                variance = (of_images.std / images.coefficients[1] / a) ** 2  # of the noise of a sum, in each pixel
                overall = bands.shrunk(overall[None], k * variance / data.n**2)[0]
                of_mean = 1.0 / count**2 - 2.0 / (count * data.n) + k / data.n**2
                between = bands.shrunk(between, (known * variance * of_mean).sum())

            # Subspace. The signs of eigenvectors are fixed, so that all machines agree. Means are projected on it,
            # which removes most of their noise: a classifier would recognise the class by a fixed pattern of noise.
            def residual(x: Tensor, y: Tensor) -> Tensor:
                return x.flatten(1) - (overall + between)[y]

            a_r = stretch(R_r, residual)
            S = residuals.unpack(of_residuals(lambda x, y: a_r * residual(x, y))).second / a_r**2 / data.n
            B = (between * count / data.n).T @ between
            within = S
            if self.shrinkage:
                within = bands.weighted(S, _norm_of_noise(of_residuals, residuals, p) / a_r**2 / data.n)
            V = torch.linalg.eigh(within + self.between * B).eigenvectors[:, -d:].flip(1)
            V = torch.where(V.sum(dim=0) < 0.0, -V, V)
            m = overall + between @ V @ V.T
            largest = 1.0 + float(m.abs().max())  # of |x - m|, as pixels are in [0, 1]
            texture = self.texture * ((S.trace() - (V.T @ S @ V).trace()) / (p - d)).clamp(min=0.0).sqrt()

            def code(x: Tensor, y: Tensor) -> Tensor:
                return product(x.flatten(1) - m[y], V, limits=(largest, 1.0))  # exact: clusters and radii compare codes

            # Clusters, of codes times a_z. R_z / 2 is summed together with them, to count records. One below twice its
            # noise is unknown.
            a_z = stretch(R_z, code)
            clusters = Clusters.draw(k, K, a_z**2 * (V.T @ S @ V), ctx.generator)

            def row_of_step(x: Tensor, y: Tensor) -> Tensor:
                return clusters.rows_of_step(a_z * code(x, y), y, R_z / 2.0)

            for _ in range(LLOYD_STEPS if K > 1 else 0):
                of_cells, least = steps.unpack(of_steps(row_of_step)).first, 2.0 * of_steps.std / steps.coefficients[1]
                clusters = clusters.moved(of_cells, constant=R_z / 2.0, least=least / (R_z / 2.0))

            # Normal distributions of codes.
            z = codes.unpack(of_codes(lambda x, y: clusters.deviations(a_z * code(x, y), y)))
            noise = _norm_of_noise(of_codes, codes, d)
            count = (count * clusters.weights).clamp(min=1.0).view(-1, 1)
            known, first = (known * (clusters.size > 0.0)).view(-1, 1), z.first.view(-1, d)
            if self.shrinkage:
                variance = (of_codes.std / codes.coefficients[1]) ** 2
                first = first * stein_factor(
                    (known * first / count).square().sum(), d * (known * variance / count**2).sum()
                )
            mu, roots = normal_distributions(count, known, first, diagonal_blocks(z.second, K), noise)

            generator = NetGenerator.build(
                ClassGaussians, data, ctx.device, latent_dim=d + p + (K > 1), threshold=self.threshold, clusters=K
            )
            means = m.repeat_interleave(K, dim=0) + (clusters.centres.view(-1, d) + mu) / a_z @ V.T
            state = {"means": means, "basis": V, "roots": roots / a_z, "texture": texture}
            generator.net.load_state_dict(state | ({"cumulative": clusters.weights.cumsum(dim=1)} if K > 1 else {}))
            return generator

        return release


def _norm_of_noise(mechanism: Mechanism, bound: PerRecordMoments, dim: int) -> float:
    """The spectral norm that the noise of a block [dim, dim] of the second moments has for large dim."""
    return mechanism.std / bound.coefficients[2] * (2.0 * dim) ** 0.5


@dataclass(kw_only=True)
class GaussianImages(GaussianModel):
    """The first stage `init=gauss`: images of a `GaussianModel`.

    Args:
        share: Share of the budget for all releases together.
        images: The number of images, with each class in turn.
    """

    config_group = "init"
    share: Share
    images: Count

    def request(self, data: PrivateData, ctx: Context) -> Callable[[], LabelledImages]:
        """Request the mechanisms, and return the function that makes the releases and draws images from them."""
        released = self.request_model(data, ctx, prefix=FIRST_STAGE, part=self.share)

        def draw() -> LabelledImages:
            labels = torch.arange(self.images) % data.num_classes
            return released().sample(labels, ctx.seed), labels

        return draw
