"""Methods whose private functions return factors of rows: honest ones, and cheats with factors of other records."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.sampling import Full
from tests.toys import Painter, release_painter


@dataclass
class Factors:
    """One release of second moments or of products for each class, which become the class means.

    Attributes:
        kind: "moments" or "products".
        coupled: cheat: the vectors are centred at their mean in the draw.
        weights: of the moments.
        by_class: whether the moments of each class are released, or those of all records.
        nonnegative: whether the bound states that vectors have no negative entry, which centred ones have.
    """

    kind: str = "moments"
    coupled: bool = False
    weights: tuple[float, float, float] = (0.15, 0.45, 0.88)
    by_class: bool = True
    nonnegative: bool = False

    def vectors(self, images: Tensor) -> Tensor:
        x = images.flatten(1) - (0.5 if self.nonnegative else 0.0)
        return x - 0.5 * x.nan_to_num().clamp(0.0, 1.0).mean(dim=0) if self.coupled else x

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Painter(data.num_classes, list(data.image_shape))
        k, d = data.num_classes, net.means[0].numel()
        if self.kind == "moments":
            classes = k if self.by_class else None
            bound = PerRecordMoments(
                dim=d, radius=3.0, weights=self.weights, classes=classes, nonnegative=self.nonnegative
            )
            release = data.mechanism("moments", sample=Full(), bound=bound, times=1)
            sums = bound.unpack(release(lambda x, y: self.vectors(x))).first
        else:
            products = PerRecordProducts(C=3.0, shapes={"outer": (d, 4), "sum": (1, d)}, classes=k)
            release = data.mechanism("products", sample=Full(), bound=products, times=1)
            noisy = release(lambda x, y: self.pairs(self.vectors(x)))
            sums = noisy["outer"].sum(dim=2) + noisy["sum"][:, 0]
        with torch.no_grad():
            net.means.copy_(sums.reshape(-1, *data.image_shape) / data.n)
        return release_painter(net, data)

    def pairs(self, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"outer": (x, x[:, :4]), "sum": (torch.ones_like(x[:, :1]), x)}
