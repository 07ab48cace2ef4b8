"""Each method trains on a GPU as on a CPU: the exact value of its first release is equal up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpgen_bench.config.building import build_dataset, build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.small import make_small
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing.suite import random_data
from tests.test_compiled_methods import Exact
from tests.test_stalls import READINGS


def trained(method: str, device: str) -> tuple[Tensor, Tensor]:
    """The first exact release, and eight images of the generator, of a fit at the settings of `check:`."""
    config = compose_config([f"method={method}", "dataset=mnist"])
    make_small(config, kept=())
    dataset, watcher = build_dataset(config), Exact()
    made = random_data(dataset.image_shape, 48, dataset.num_classes, 8, seed=0)
    ledger = Ledger(RunSpec(config, training={}).budget(), len(made))
    services = Services(ledger, Key.seeded("accelerator"), torch.device(device), observer=watcher)
    data = PrivateData(
        made.images,
        made.labels,
        dataset.num_classes,
        services,
        ids=made.ids,
        clients=made.clients,
        num_clients=8,
        class_names=dataset.class_names,
    )
    generator = fit_method(build_method(config), data, Context(0, device, services=services))
    return watcher.values[0].cpu(), generator.sample(torch.arange(8), seed=0).cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("method", READINGS)
def test_the_first_release_of_a_fit_is_that_of_a_cpu_and_the_generator_can_be_sampled(method):
    expected, _ = trained(method, "cpu")
    value, images = trained(method, "cuda")
    assert len(images) == 8
    assert torch.isfinite(images.float()).all()
    assert float((value - expected).norm()) <= 1e-2 * float(expected.norm())
