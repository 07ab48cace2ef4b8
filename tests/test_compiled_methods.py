"""Releases and generators of the methods that `runtime.compile` compiles are equal to others up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, fit_method
from dpgen_bench.nets.biggan import BigGANGenerator
from dpgen_bench.nets.conv_generator import ConvGenerator
from dpgen_bench.nets.dpgan import GeneratorNet
from dpgen_bench.privacy.compiled_sums import CompiledSums
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing.suite import random_data
from dpgen_bench.utils import compiled
from tests import toys
from tests.test_compiled import cudagraphs, inductor


class Exact(toys.Watcher):
    """Keeps the exact value of each release as one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def before_release(self, *args: Any) -> None:
        pass

    def release(self, mechanism: Any, index: int, drawn: Any, exact: Any, noisy: Any) -> Any:
        self.values.append(torch.cat([part.detach().flatten() for part in exact.values()]).float())
        return noisy


def device_of(backend: str) -> torch.device:
    """Where this backend is compared with others: cudagraphs on a GPU, others on the CPU."""
    return torch.device("cuda" if backend == "cudagraphs" else "cpu")


def exact_values(
    settings: list[str], backend: str, device: torch.device, records: int = 48, **changes: Any
) -> list[Tensor]:
    """Those of a small fit of the method itself, of two releases on padded draws."""
    config = compose_config([*settings, "dataset=mnist"])
    for key, value in {**changes, "steps": 2}.items():
        OmegaConf.update(config, key if key.startswith("privacy.") else f"method.{key}", value)
    private, watcher = random_data((1, 28, 28), records, 10, 8, seed=0), Exact()
    ledger = Ledger(RunSpec(config, training={}).budget(), records)
    services = Services(ledger, Key.seeded("compiled"), device, observer=watcher, padded=True)
    data = PrivateData(private.images, private.labels, 10, services, ids=private.ids)
    with compiled.using(backend):
        fit_method(build_method(config), data, Context(0, device, services=services))
    return watcher.values


@pytest.mark.parametrize("method", ["dpgan", pytest.param("dpdm", marks=pytest.mark.slow)])
def test_releases_of_a_method_are_recorded_and_equal_up_to_rounding(method, monkeypatch):
    settings = [f"method={method}"]
    check = dict(compose_config([*settings, "dataset=mnist"]).method.check)
    cpu = torch.device("cpu")
    expected, used, total = exact_values(settings, "none", cpu, **check), [], CompiledSums.total
    monkeypatch.setattr(CompiledSums, "total", lambda *args: used.append(1) or total(*args))
    values = exact_values(settings, "graph", cpu, **check)
    assert len(used) == len(values) == len(expected) == 2
    first, second = zip(values, expected, strict=True)
    assert torch.allclose(*first, rtol=1e-5, atol=1e-6 * float(first[1].abs().max()))
    # Between the two, Adam divides by gradients that are nearly zero.
    assert float((second[0] - second[1]).norm()) <= 1e-3 * float(second[1].norm())


@pytest.mark.parametrize("backend", [inductor, cudagraphs])
@pytest.mark.parametrize("preset", ["quick/dpgan", "dpgan/eps10", "dpdm/reduced_mnist"])
def test_releases_compiled_at_the_sizes_of_presets_are_equal_up_to_rounding(preset, backend):
    """The sizes of DPGAN's quick preset, of its paper, and of DPDM's reduced preset."""
    settings = [f"experiment={preset}"]
    expected, values = (exact_values(settings, name, device_of(backend), records=800) for name in ("none", backend))
    for value, exact in zip(values, expected, strict=True):
        # A leaky ReLU whose input is zero up to rounding has another slope, in the gradient of one record.
        assert float((value - exact).norm()) <= 1e-3 * float(exact.norm())


NETS = {
    "dpgan": lambda: GeneratorNet((1, 28, 28), 10, latent_dim=4, width=4),
    "dcgan": lambda: ConvGenerator((1, 28, 28), 10, latent_dim=4, width=4, label_dim=4, activation="relu"),
    "biggan": lambda: BigGANGenerator((1, 32, 32), 10, latent_dim=4, width=4),
}


@pytest.mark.parametrize("backend", [inductor])
@pytest.mark.parametrize("name", NETS)
def test_images_and_gradients_of_a_compiled_generator_are_equal_up_to_rounding(name, backend):
    torch.manual_seed(0)
    net: nn.Module = NETS[name]()
    z, y = torch.rand(6, 4, generator=toys.seeded(1)), torch.arange(6) % 10
    size = 32 if name == "biggan" else 28
    weights = torch.rand(6, 1, size, size, generator=toys.seeded(2))

    def step(name: str) -> tuple[Tensor, Tensor]:
        with compiled.using(name):
            images = compiled.network(net)(z, y)
        gradients = torch.autograd.grad((images * weights).sum(), list(net.parameters()))
        return images.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    state = {key: value.clone() for key, value in net.state_dict().items()}
    images, gradient = step(backend)
    net.load_state_dict(state)  # layers have running averages and spectral vectors
    expected, of_expected = step("none")
    assert torch.allclose(images, expected, rtol=1e-4, atol=1e-5)
    # As one vector: that of a bias before a batch normalisation is zero, but for rounding.
    assert float((gradient - of_expected).norm()) <= 1e-4 * float(of_expected.norm())
