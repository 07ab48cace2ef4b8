"""Toy methods for runs of several processes, which act in one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from tests.toys import MeanImage


class RaisesInProcessOne(MeanImage):
    """Its private function raises in process 1, in the first release."""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("text with a record")
        return images


class StopsOnce(MeanImage):
    """Process 0 receives a stop signal in the fourth release of the first attempt."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        self.releases = 0
        return super().fit(data, ctx)

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.releases += 1
        stopped = Path(os.environ["STOPPED"])
        if not stopped.exists() and dist.get_rank() == 0 and self.releases == 4:
            stopped.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return images
