"""Each method trains on a GPU as on a CPU: the exact value of its first release is equal up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing.suite import random_data
from tests import toys

METHODS = [
    *("datalens", "dp_cgan", "dp_gauss", "dp_hp", "dp_merf", "dp_ntk", "dp_sinkhorn", "dpdm", "dpgan", "fed_gs_wgan"),
    *("fedavg_gan", "g_pate", "gs_wgan", "pate_gan", "psg"),
]


class First(toys.Watcher):
    """Keeps the exact value of the first release, and the answers of its shards, as one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Tensor | None = None

    def before_release(self, *args: Any) -> None:
        pass

    def answers(self, rows: Any) -> None:
        pass

    def release(self, mechanism: Any, index: int, drawn: Any, exact: Any, noisy: Any) -> Any:
        if self.value is None:
            self.value = torch.cat([part.detach().flatten().double().cpu() for part in exact.values()])
        return noisy


def trained(method: str, device: str) -> tuple[Tensor | None, Tensor]:
    """The first exact release, and eight images of the generator, of a fit at the settings of `check:`."""
    config = compose_config([f"method={method}", "dataset=mnist"])
    for key, value in config.method.check.items():
        OmegaConf.update(config, key if key.startswith("privacy.") else f"method.{key}", value)
    made, watcher = random_data((1, 28, 28), 48, 10, 8, seed=0), First()
    ledger = Ledger(RunSpec(config, training={}).budget(), 48)
    services = Services(ledger, Key.seeded("accelerator"), torch.device(device), observer=watcher)
    data = PrivateData(made.images, made.labels, 10, services, ids=made.ids, clients=made.clients, num_clients=8)
    generator = fit_method(build_method(config), data, Context(0, device, services=services))
    return watcher.value, generator.sample(torch.arange(8), seed=0).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_the_first_release_of_a_fit_is_that_of_a_cpu_and_the_generator_can_be_sampled(method):
    expected, _ = trained(method, "cpu")
    value, images = trained(method, "cuda")
    assert len(images) == 8
    assert torch.isfinite(images.float()).all()
    assert (value is None) == (expected is None)
    if value is not None:
        assert float((value - expected).norm()) <= 1e-2 * float(expected.norm())
