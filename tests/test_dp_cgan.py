"""DP-CGAN: its networks, one step by hand, the released variant, and the authors' count of its epsilon."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.dp_cgan import MLPDiscriminator, MLPGenerator
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from methods import dp_cgan
from methods.dp_cgan import DPCGAN
from tests.adam import expect_first_step_of_adam
from tests.defaults import build

SHAPE, SEED = (1, 8, 8), 3
TINY: dict[str, Any] = dict(batch_size=12, hidden=16, latent_dim=5, steps=1)
IMAGES = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(7))
LABELS = torch.arange(12) % 3


def fit(monkeypatch: pytest.MonkeyPatch, eps: float | None = math.inf, **settings: Any) -> dict[str, Any]:
    """A fit on 12 records of which each draw has all (the rate is B/n = 1), with the networks before and after."""
    kept: dict[str, Any] = {}

    def keep(name: str, net: nn.Module) -> nn.Module:
        kept[name], kept[f"{name}_before"] = net, copy.deepcopy(net)
        return net

    monkeypatch.setattr(dp_cgan, "MLPDiscriminator", lambda *sizes: keep("D", MLPDiscriminator(*sizes)))
    ledger = Ledger(Budget(eps, 1e-5, "add_remove", "rdp"), len(LABELS))
    services = Services(ledger, Key.seeded("test"))
    context = Context(SEED, services=services)
    original = NetGenerator.build

    def remember(*args: Any, **more: Any) -> NetGenerator:
        generator = original(*args, **more)
        keep("G", generator.net)
        return generator

    monkeypatch.setattr(NetGenerator, "build", remember)
    data = PrivateData(IMAGES, LABELS, 3, services)
    generator = build(DPCGAN, **{**TINY, **settings}).fit(data, context)
    assert isinstance(generator, NetGenerator)
    return {**kept, "ledger": ledger, "log": context.history, "generator": generator}


def public_draw(B: int = 12) -> tuple[Tensor, Tensor]:
    """The latents and labels of the first step."""
    rng = torch.Generator().manual_seed(SEED)
    generator = NetGenerator(MLPGenerator(5, 3, SHAPE), {}, 5, 3, SHAPE, "uniform")
    context = Context(SEED)
    context.generator = rng
    return context.latents(generator, B)


def test_parameter_counts() -> None:
    def count(net: nn.Module) -> int:
        return sum(p.numel() for p in net.parameters())

    G, D = MLPGenerator(100, 10, (1, 28, 28)), MLPDiscriminator((1, 28, 28), 10)
    assert count(G) == (110 * 128 + 128) + (128 * 784 + 784) == 115_344
    assert count(D) == (794 * 128 + 128) + (128 + 1) == 101_889
    assert len(list(D.parameters())) == 4


def test_networks_start_as_the_authors() -> None:
    torch.manual_seed(0)
    first = MLPDiscriminator((1, 28, 28), 10).layers[0]
    assert not first.bias.any()
    assert float(first.weight.detach().std()) == pytest.approx(math.sqrt(2 / 794), rel=0.01)
    G = MLPGenerator(100, 10, (1, 28, 28))
    z, y = torch.full((1, 100), 0.5), torch.tensor([4])
    hidden = torch.relu(G.layers[0].weight[:, 104])  # 2z - 1 = 0, and the label
    assert torch.allclose(G(z, y).flatten(), torch.sigmoid(G.layers[2].weight @ hidden), atol=1e-6)


@pytest.mark.parametrize("clip", ["joint", "per_tensor"])
def test_the_first_step_by_hand(monkeypatch: pytest.MonkeyPatch, clip: str) -> None:
    """A step of SGD for D with clipped gradients of 12 records and 12 generated images, then one of Adam for G. The
    noise is too small to be seen."""
    C = 0.4
    got = fit(monkeypatch, 1e5, clip=clip, clip_norm=C, sigma=0.01, lr_d=0.1)
    z, y = public_draw()
    before, G = got["D_before"], got["G_before"]
    x = G(z, y)
    total = {name: torch.zeros_like(p) for name, p in before.named_parameters()}
    rows = [(IMAGES[i], LABELS[i], 1.0) for i in range(12)] + [(x[i].detach(), y[i], 0.0) for i in range(12)]
    scales = []
    for image, label, real in rows:
        loss = F.binary_cross_entropy_with_logits(before(image[None], label[None]), torch.tensor([real]))
        gradients = torch.autograd.grad(loss, list(before.parameters()))
        joint = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for part, gradient in zip(total.values(), gradients, strict=True):
            norm = joint if clip == "joint" else float(gradient.norm())
            scales.append(min(1.0, C / max(norm, 1e-12)))
            part += gradient * scales[-1]
    assert min(scales) < 0.9, "nothing is clipped"
    for name, parameter in got["D"].named_parameters():
        start = dict(before.named_parameters())[name]
        noise = 5 * 0.1 * 0.01 * C / 12
        assert torch.allclose(parameter, start - 0.1 * total[name] / 12, atol=noise + 1e-5), name
        assert float((parameter - start).detach().abs().max()) > 2 * noise, name
    exact, D = copy.deepcopy(G).double(), copy.deepcopy(got["D"]).double()
    F.softplus(-D(exact(z.double(), y), y)).mean().backward(inputs=list(exact.parameters()))
    expect_first_step_of_adam(G, exact, got["G"], 1e-3)


def test_the_learning_rate_falls_linearly_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *args: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    fit(monkeypatch, steps=6, lr_d=0.1, lr_d_end=0.02, lr_d_steps=4)
    assert rates == [pytest.approx(rate) for rate in (0.1, 0.08, 0.06, 0.04, 0.02, 0.02)]


def test_the_noise_and_the_sensitivity_of_both_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for clip, factor in (("joint", 1.0), ("per_tensor", 2.0)):
        ledger = fit(monkeypatch, None, sigma=1.12, clip=clip)["ledger"]
        (event,) = ledger.events
        assert event.std == pytest.approx(1.12 * 1.1)
        assert event.sensitivity == Sensitivity(1.1 * factor, 2.2 * factor)
        assert event.multiplier("add_remove") == pytest.approx(1.12 / factor)


def test_the_authors_count_stops_at_the_step_of_the_config() -> None:
    """Their script stops after the step whose epsilon is above 9.6: 30,304 steps, with sigma C = 1.232 for sigma."""
    method = build(DPCGAN)

    def claimed(steps: int) -> float | None:
        event = Event(Poisson(0.01), Sensitivity(1.1, 2.2), 1.12 * 1.1, steps)
        return method.epsilon_claimed([event], 1e-5)

    assert claimed(30303) == pytest.approx(9.5999, abs=1e-4)
    assert claimed(30304) == pytest.approx(9.6001, abs=1e-4)
    assert method.steps == 30304


@pytest.mark.parametrize(("name", "clip"), [("published_mnist", "joint"), ("released_mnist", "per_tensor")])
def test_the_presets_with_the_authors_noise(name: str, clip: str) -> None:
    config = compose_config([f"experiment=dp_cgan/{name}"])
    assert config.privacy.epsilon is None
    assert (config.method.sigma, config.method.clip, config.method.steps) == (1.12, clip, 30304)
    assert config.dataset.name == "mnist"


def test_neither_sigma_nor_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="both null"):
        build(DPCGAN, sigma=None, steps=None)
