"""DP-NTK against autograd: features, the released mean embedding, the generator's loss, and its settings."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.nets.ntk_features import NTKFeatures, squared_distance
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Observer, Services
from methods.dp_ntk import DPNTK
from tests.adam import expect_first_step_of_adam
from tests.defaults import build

SHAPE, PIXELS, WIDTH, SEED = (1, 8, 8), 64, 30, 3
TINY: dict[str, Any] = dict(width=WIDTH, latent_dim=3, batch_size=6, steps=1)
Parts = dict[str, Tensor]


class Seen(Context):
    """A context that stores the states of the method's loop, and the learning rate of each step."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        self.stateful: dict[str, Any] = stateful
        self.rates: list[float] = []
        for t in super().steps(total, phase=phase, **stateful):
            self.rates.append(stateful["adam"].param_groups[0]["lr"])
            yield t


class Watcher(Observer):
    """Keeps the exact and the noisy value of each release."""

    def __init__(self) -> None:
        self.releases: list[tuple[Parts, Parts]] = []

    def release(self, mechanism: Any, index: int, drawn: np.ndarray, exact: Parts, noisy: Parts) -> Parts:
        self.releases.append((dict(exact), dict(noisy)))
        return noisy

    def before_records(self) -> None:
        pass


def fit(
    method: DPNTK,
    images: Tensor,
    labels: Tensor,
    classes: int,
    eps: float = math.inf,
    relation: str = "replace_one",
    device: str = "cpu",
) -> tuple[Watcher, Seen, Ledger]:
    watcher, ledger = Watcher(), Ledger(Budget(eps, 1e-5, relation, "pld"), len(labels))
    data = PrivateData(
        images, labels, classes, Services(ledger, Key.seeded("test"), torch.device(device), observer=watcher)
    )
    context = Seen(SEED, device, services=data._services)
    method.fit(data, context)
    return watcher, context, ledger


def features(classes: int) -> NTKFeatures:
    """The feature map that the method draws from its public randomness."""
    return NTKFeatures.draw(PIXELS, WIDTH, classes, torch.Generator().manual_seed(SEED), torch.device("cpu"))


class Network(nn.Module):
    """f(x) = V LN(relu(W x + b)) + c as PyTorch modules, in float64, with the weights of a feature map."""

    def __init__(self, drawn: NTKFeatures, seed: int = 0) -> None:
        super().__init__()
        width, pixels = drawn.weight.shape
        self.first, self.norm = nn.Linear(pixels, width), nn.LayerNorm(width, elementwise_affine=False)
        self.last = nn.Linear(width, drawn.outputs)
        self.double()
        rest = torch.randn(drawn.outputs, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.first.weight.copy_(drawn.weight)
            self.first.bias.copy_(drawn.bias)
            # Any V whose rows sum to the drawn slope has the same features.
            self.last.weight.copy_(rest - rest.mean(dim=0) + drawn.slope / drawn.outputs)

    def feature(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of the summed outputs in (W, b, V, c), scaled to norm 1 and differentiable in the image."""
        outputs = self.last(self.norm(self.first(image.flatten().double()).relu()))
        gradients = torch.autograd.grad(outputs.sum(), list(self.parameters()), create_graph=True)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        W, b, V, c = (gradient / norm for gradient in gradients)
        return W, b, V, c

    def mean_embedding(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """(1/n) sum_i e(x_i, y_i) by a loop over images: [classes, width, pixels + 1] and [classes, k, width + 1]."""
        width, pixels = self.first.weight.shape
        first = [torch.zeros(width, pixels + 1, dtype=torch.float64) for _ in range(classes)]
        last = [torch.zeros(len(self.last.bias), width + 1, dtype=torch.float64) for _ in range(classes)]
        for image, label in zip(images, labels.tolist(), strict=True):
            W, b, V, c = self.feature(image)
            first[label] = first[label] + torch.cat([W, b[:, None]], dim=1) / len(images)
            last[label] = last[label] + torch.cat([V, c[:, None]], dim=1) / len(images)
        return torch.stack(first), torch.stack(last)


def some_images(n: int, seed: int = 7) -> Tensor:
    """Random images, of which the first is black, the second white and the third has one white pixel."""
    images = torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(seed))
    images[0], images[1], images[2] = 0.0, 1.0, 0.0
    images[2, 0, 4, 4] = 1.0
    return images


@pytest.mark.parametrize(("pixels", "width", "outputs"), [(784, 800, 10), (64, 30, 3), (12, 5, 1)])
def test_features_are_the_gradients_of_each_record_by_autograd(pixels: int, width: int, outputs: int) -> None:
    """To 1e-6 of their norm, which is 1: W and b as an outer product, V as k equal rows, c as k equal numbers."""
    drawn = NTKFeatures.draw(pixels, width, outputs, torch.Generator().manual_seed(SEED), torch.device("cpu"))
    images = torch.rand(6, 1, 1, pixels, generator=torch.Generator().manual_seed(1))
    images[0], images[1] = 0.0, 1.0
    made, network = drawn(images), Network(drawn)
    for i, image in enumerate(images):
        W, b, V, c = network.feature(image)
        first = torch.cat([W, b[:, None]], dim=1) - made.outer[i][:, None] * made.inputs[i]
        last = torch.cat([V, c[:, None]], dim=1) - made.hidden[i] / outputs**0.5
        assert float(torch.cat([first.flatten(), last.flatten()]).norm().detach()) < 1e-6


def test_a_feature_has_norm_one_and_inner_products_are_the_normalised_tangent_kernel() -> None:
    images = some_images(6)
    outer, inputs, hidden = features(4)(images)
    kernel = (outer @ outer.T) * (inputs @ inputs.T) + hidden @ hidden.T
    network = Network(features(4))
    rows = torch.stack([torch.cat([part.flatten() for part in network.feature(image)]) for image in images]).detach()
    assert torch.allclose(kernel.double(), rows @ rows.T, atol=1e-6)
    assert torch.allclose(kernel.diagonal(), torch.ones(6), atol=1e-6)


def test_a_larger_bias_makes_features_depend_on_the_brightness_of_an_image() -> None:
    """The inner product of the features of an image and of a copy with half of its brightness; 1 is no difference."""
    image = some_images(4)[3:]

    def likeness(bias_scale: float) -> float:
        drawn = NTKFeatures.draw(PIXELS, 800, 10, torch.Generator().manual_seed(SEED), torch.device("cpu"), bias_scale)
        outer, inputs, hidden = drawn(torch.cat([image, 0.5 * image]))
        return float(outer[0] @ outer[1] * (inputs[0] @ inputs[1]) + hidden[0] @ hidden[1])

    assert 1.0 > likeness(1.0) > likeness(3.0) + 0.01
    drawn = [NTKFeatures.draw(4, 3, 2, torch.Generator().manual_seed(1), torch.device("cpu"), b) for b in (1.0, 5.0)]
    assert torch.equal(drawn[1].bias, 5.0 * drawn[0].bias)
    assert torch.equal(drawn[1].weight, drawn[0].weight)


def test_a_network_without_an_active_unit_has_a_feature_of_norm_one() -> None:
    """Then h and its gradient are zero, and only c has a gradient."""
    drawn = NTKFeatures(-torch.ones(5, PIXELS), -torch.ones(5), torch.randn(5), 4)
    outer, inputs, hidden = drawn(some_images(4))
    assert not outer.any()
    assert torch.equal(hidden, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]).expand(4, 6))
    assert torch.isfinite(inputs).all()


def test_the_release_at_infinite_epsilon_is_the_sum_of_the_records_gradients() -> None:
    """Nothing is clipped or noised, every record counts once under its own label, and a class may be empty."""
    images, labels = some_images(12), torch.tensor([0, 3, 1, 1, 0, 0, 3, 0, 1, 0, 3, 0])
    watcher, _, _ = fit(build(DPNTK, **TINY), images, labels, 4)
    ((exact, noisy),) = watcher.releases
    first, last = Network(features(4)).mean_embedding(images, labels, 4)
    assert float((exact["first"] / 12 - first).norm().detach()) < 1e-6
    assert float((exact["last"] / 12 - last.sum(dim=1, keepdim=True) / 2.0).norm().detach()) < 1e-6  # sqrt(k) = 2
    assert all(torch.equal(exact[part].float(), noisy[part]) for part in exact)
    assert not exact["first"][2].any()


@pytest.mark.parametrize(("relation", "sensitivity"), [("replace_one", 2.0), ("add_remove", 1.0)])
def test_the_noise_is_that_of_one_gaussian_release_of_rows_of_norm_one(relation: str, sensitivity: float) -> None:
    """The multiplier 0.49990 of epsilon 10 at delta 1e-5, and noise of that size in every number of the release."""
    images, labels = some_images(12), torch.arange(12) % 4
    watcher, _, ledger = fit(build(DPNTK, **TINY), images, labels, 4, eps=10.0, relation=relation)
    (entry,) = ledger.to_dict()["entries"]
    assert (entry["sensitivity"]["add_remove"], entry["sensitivity"]["replace_one"]) == (1.0, 2.0)
    assert entry["std"] / sensitivity == pytest.approx(0.4999, abs=2e-4)
    ((exact, noisy),) = watcher.releases
    noise = torch.cat([(noisy[part].double() - exact[part].double()).flatten() for part in exact])
    assert len(noise) == 4 * (WIDTH * (PIXELS + 1) + WIDTH + 1)
    # The sample's standard deviation lies within 5 / sqrt(2 n) of the true one, but for one in a million samples.
    assert float(noise.std()) == pytest.approx(entry["std"], rel=5 / math.sqrt(2 * len(noise)))


def test_a_step_descends_on_the_squared_distance_to_the_noisy_target() -> None:
    """The first loss and its gradient by autograd of each image's gradient, and Adam's first step.

    The k equal rows of V's gradient are compared with the released row divided by sqrt(k), each of them. Adam's first
    step is -lr g / (|g| + 1e-8), so every coordinate with a clear gradient moves against it by lr.
    """
    images, labels = some_images(12), torch.arange(12) % 4
    watcher, context, _ = fit(build(DPNTK, **TINY, lr=0.02), images, labels, 4, eps=10.0)
    ((_, noisy),) = watcher.releases
    torch.manual_seed(SEED)
    before = CodeGenerator(3, 4, SHAPE, align_corners=True)
    public = torch.Generator().manual_seed(SEED)
    drawn = NTKFeatures.draw(PIXELS, WIDTH, 4, public, torch.device("cpu"))
    zeta, y = torch.randn(6, 3, generator=public), torch.randint(4, (6,), generator=public)
    assert len(y.unique()) in (2, 3)  # a class without generated images counts, too
    net = copy.deepcopy(before).double()
    first, last = Network(drawn).mean_embedding(net(zeta.double(), y), y, 4)
    target, target_last = noisy["first"].double() / 12, noisy["last"].double() / 12 / 2.0
    loss = (target - first).square().sum() + (target_last - last).square().sum()
    loss.backward()
    assert context.history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)

    expect_first_step_of_adam(before, net, context.stateful["net"], lr=0.02)


def test_balanced_labels_are_each_class_in_turn_and_change_nothing_else() -> None:
    """The first losses of both settings, with the latents and the target of the same public randomness."""
    images, y = some_images(12), torch.arange(12) % 4
    torch.manual_seed(SEED)
    net = CodeGenerator(3, 4, SHAPE, align_corners=True).double()
    public = torch.Generator().manual_seed(SEED)
    drawn = NTKFeatures.draw(PIXELS, WIDTH, 4, public, torch.device("cpu"))
    zeta, uniform = torch.randn(6, 3, generator=public), torch.randint(4, (6,), generator=public)
    target, target_last = Network(drawn).mean_embedding(images, y, 4)
    for labels, chosen in (("uniform", uniform), ("balanced", torch.tensor([0, 1, 2, 3, 0, 1]))):
        _, context, _ = fit(build(DPNTK, **TINY, labels=labels), images, y, 4)
        first, last = Network(drawn).mean_embedding(net(zeta.double(), chosen), chosen, 4)
        loss = (target - first).square().sum() + (target_last - last).square().sum()
        assert context.history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4), labels


def test_the_distance_to_the_own_embedding_is_zero_and_a_shift_of_the_target_adds_its_square() -> None:
    images, labels = some_images(9), torch.tensor([0, 0, 2, 2, 2, 1, 0, 1, 2])
    first, last = Network(features(3)).mean_embedding(images, labels, 3)
    target, target_last = first.detach().float(), 3**0.5 * last[:, 0].detach().float()
    made = features(3)(images)
    assert float(squared_distance(target, target_last, made, labels)) < 1e-12
    shifted = squared_distance(target + 0.1, target_last - 0.2, made, labels)
    assert float(shifted) == pytest.approx(0.01 * target.numel() + 0.04 * target_last.numel(), rel=1e-5)


@pytest.mark.gpu
def test_on_an_accelerator_the_release_and_the_losses_are_those_of_a_cpu() -> None:
    """To the rounding of float32, and of TF32 in the generator's convolutions."""
    images, labels = some_images(12), torch.arange(12) % 4
    method = build(DPNTK, **{**TINY, "steps": 51, "batch_size": 64})
    (cpu, cpu_context, _), (gpu, gpu_context, _) = (
        fit(method, images, labels, 4, device=device) for device in ("cpu", "cuda")
    )
    ((cpu_exact, _),), ((gpu_exact, gpu_noisy),) = cpu.releases, gpu.releases
    assert all(gpu_noisy[part].is_cuda for part in gpu_noisy)
    for part, exact in cpu_exact.items():
        assert torch.allclose(gpu_exact[part].cpu(), exact, atol=1e-5)
    first, later = ([context.history[i]["loss"] for context in (cpu_context, gpu_context)] for i in range(2))
    assert first[0] == pytest.approx(first[1], rel=1e-3)
    assert max(later) < 0.8 * min(first)  # there is no noise in the target
    assert later[0] == pytest.approx(later[1], rel=0.2)


def test_the_learning_rate_decays_by_its_factor_after_every_period() -> None:
    method = build(DPNTK, **{**TINY, "steps": 8}, lr=0.08, lr_decay=0.25, decay_steps=3)
    _, context, _ = fit(method, some_images(4), torch.arange(4), 4)
    assert context.rates == pytest.approx([0.08] * 3 + [0.02] * 3 + [0.005] * 2)


def test_the_settings_are_those_of_the_authors_and_the_presets_keep_them() -> None:
    """Golden: the authors' script for MNIST; a feature has 636,010 numbers, of which 628,801 differ."""
    published = DPNTK(
        width=800,
        bias_scale=1.0,
        latent_dim=5,
        batch_size=5000,
        labels="uniform",
        steps=2000,
        lr=0.01,
        lr_decay=0.9,
        decay_steps=1500,
    )
    for name in ("mnist", "fashion_mnist", "mnist_add_remove", "fashion_mnist_add_remove"):
        config = compose_config([f"experiment=dp_ntk/{name}"])
        assert build_method(config) == published
        assert config.scale.name == "paper"
        assert config.privacy.relation == ("add_remove" if "add_remove" in name else "replace_one")
        assert build_spec(config).training["dataset"]["name"] == name.removesuffix("_add_remove")
    for name in ("reduced_mnist", "reduced_fashion_mnist"):
        config = compose_config([f"experiment=dp_ntk/{name}"])
        assert vars(build_method(config)) == {**vars(published), "batch_size": 500, "labels": "balanced"}
        assert config.scale.name == "reduced"
    network = Network(NTKFeatures.draw(784, 800, 10, torch.Generator(), torch.device("cpu")))
    assert sum(p.numel() for p in network.parameters()) == 636_010
    assert 800 * 785 + 801 == 628_801


@pytest.mark.parametrize(
    "change",
    [{"width": 0}, {"decay_steps": 0}, {"lr": -1.0}, {"batch_size": 0}, {"batch_size": 1}, {"labels": "x"}],
)
def test_values_that_are_out_of_range_are_refused(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"method.{name}: expected .*, got '?{value}"):
        build(DPNTK, **change)
