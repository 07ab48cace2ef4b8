"""DP-Gauss: noisy class means, a noisy principal subspace, and one noisy normal distribution per class in it.

A baseline of this bench in the family of RON-Gauss (Chanyaswad, Liu & Mittal 2019; its first version is PCA-Gauss), of
P3GM (Takagi et al. 2021) and of "Analyze Gauss" (Dwork et al. 2014). Its releases, and what is computed from them, are
those of `dpgen_bench.pretraining.gaussians`, which states the equations.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.pretraining.gaussians import GaussianModel


@dataclass
class DPGauss(GaussianModel):
    """The releases of `GaussianModel`, with the whole budget. `init=gauss` makes them with a part of it."""

    # Runs from before these options existed keep their ids.
    added = ("clusters", "share_clusters", *GaussianModel.added)
    version = 1  # raise it when the same settings train a different generator

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        return self.request_model(data, ctx)()
