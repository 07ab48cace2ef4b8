"""DP-MERF against its formulas: the random features, the released mean embedding, the loss and its schedule.

What the noise costs is covered in test_privacy_core and test_accountants, for this method's release among others.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from methods.dp_merf import DPMERF
from tests.adam import expect_first_step_of_adam
from tests.defaults import build
from tests.toys import Watcher

SHAPE, PIXELS, SEED = (1, 8, 8), 64, 3
TINY: dict[str, Any] = dict(features=40, length_scale2=8.0, latent_dim=3, batch_size=6, steps=1)


class Seen(Context):
    """A context that stores the states of the method's loop, and the learning rate of each step."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        self.stateful: dict[str, Any] = stateful
        self.rates: list[float] = []
        for t in super().steps(total, phase=phase, **stateful):
            self.rates.append(stateful["adam"].param_groups[0]["lr"])
            yield t


def fit(method: DPMERF, images: Tensor, labels: Tensor, classes: int, eps: float = math.inf) -> tuple[Watcher, Seen]:
    watcher, ledger = Watcher(), Ledger(Budget(eps, 1e-5, "replace_one", "pld"), len(labels))
    data = PrivateData(images, labels, classes, Services(ledger, Key.seeded("test"), observer=watcher))
    context = Seen(SEED, services=data._services)
    method.fit(data, context)
    return watcher, context


def embeddings_of(images: Tensor, eps: float = math.inf, **settings: Any) -> Tensor:
    """The method's embedding of each image, float64 [n, D]: each image has its own label, hence a column of the sum."""
    n = len(images)
    watcher, _ = fit(build(DPMERF, **{**TINY, **settings}), images, torch.arange(n), n, eps)
    ((_, exact, _),) = watcher.releases
    return exact.T.double()


def frequencies(features: int, length_scale2: float) -> Tensor:
    """w_1 .. w_{D/2}, float64, from the same public randomness as the method's."""
    drawn = torch.randn(features // 2, PIXELS, generator=torch.Generator().manual_seed(SEED))
    return drawn.double() / math.sqrt(length_scale2)


def embed(images: Tensor, w: Tensor) -> Tensor:
    """z(x), float64 [n, D]."""
    angles = images.double().flatten(1) @ w.T
    return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(len(w))


def mean_embedding(images: Tensor, labels: Tensor, classes: int, w: Tensor) -> Tensor:
    """(1/n) sum_i z(x_i) ⊗ onehot(y_i), float64 [D, classes], class by class."""
    z = embed(images, w)
    return torch.stack([z[labels == k].sum(0) for k in range(classes)], dim=1) / len(labels)


def binary_images(n: int) -> Tensor:
    return torch.randint(2, (n, *SHAPE), generator=torch.Generator().manual_seed(7)).float()


# float32 angles of size 10 are known to about 1e-5, however the product is summed, and entries are 1 / sqrt(D / 2).
TOLERANCE = 1e-4


def test_an_embedding_has_norm_one_and_clipping_does_not_change_it() -> None:
    """Of any image, the extreme ones included; C = 1 is the norm, which clipping rounds up by a few units of 1e-7."""
    images = torch.cat([torch.zeros(1, *SHAPE), torch.ones(1, *SHAPE), binary_images(3)])
    for eps in (math.inf, 10.0):
        assert torch.allclose(embeddings_of(images, eps).norm(dim=1), torch.ones(5, dtype=torch.float64), atol=1e-5)


def test_inner_products_of_embeddings_are_the_gaussian_kernel() -> None:
    """z(x)·z(x') estimates exp(-|x - x'|^2 / 2l^2) by a mean of D/2 cosines, which lie in [-1, 1].

    By Hoeffding's inequality one of the 15 pairs is off by t with probability at most 15 · 2 exp(-D t² / 4). The bound
    is for 1e-7. Distances go from kernel values near 1 to 0.1.
    """
    D, length_scale2 = 10_000, 8.0
    one, other = binary_images(2)
    images = torch.stack([one.lerp(other, share) for share in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)])
    z = embeddings_of(images, features=D, length_scale2=length_scale2)
    kernel = (-torch.cdist(images.flatten(1).double(), images.flatten(1).double()).square() / (2 * length_scale2)).exp()
    assert kernel[0, 1] > 0.95
    assert kernel[0, -1] < 0.2
    bound = math.sqrt(4 / D * math.log(15 * 2 / 1e-7))
    assert bound < 0.1
    assert float((z @ z.T - kernel).abs().max()) < bound


def test_the_target_at_infinite_epsilon_is_the_exact_mean_embedding() -> None:
    """Nothing is clipped or noised, every record counts once under its own label, and a class may be empty."""
    images, labels = binary_images(12), torch.tensor([0, 3, 1, 1, 0, 0, 3, 0, 1, 0, 3, 0])
    watcher, _ = fit(build(DPMERF, **TINY), images, labels, 4)
    ((drawn, exact, noisy),) = watcher.releases
    expected = 12 * mean_embedding(images, labels, 4, frequencies(40, 8.0))
    assert len(drawn) == 12
    assert torch.equal(exact.float(), noisy)
    assert float((exact - expected).abs().max()) < 12 * TOLERANCE / math.sqrt(20)
    assert not exact[:, 2].any()


def test_a_step_descends_on_the_squared_distance_to_the_noisy_target() -> None:
    """The first loss and its gradient, computed in float64 from the released sum, and Adam's first step.

    Adam's first step is -lr g / (|g| + 1e-8), so every coordinate with a clear gradient moves against it by lr.
    """
    images, labels = binary_images(12), torch.arange(12) % 4
    watcher, context = fit(build(DPMERF, **TINY, lr=0.02), images, labels, 4, eps=10.0)
    ((_, _, noisy),) = watcher.releases
    torch.manual_seed(SEED)
    before = CodeGenerator(3, 4, SHAPE)
    public = torch.Generator().manual_seed(SEED)
    torch.randn(20, PIXELS, generator=public)  # the frequencies
    zeta, y = torch.randn(6, 3, generator=public), torch.randint(4, (6,), generator=public)
    assert len(y.unique()) > 2
    net = copy.deepcopy(before).double()
    fakes = mean_embedding(net(zeta.double(), y), y, 4, frequencies(40, 8.0))
    loss = (noisy.double() / 12 - fakes).square().sum()
    loss.backward()
    assert context.history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)

    expect_first_step_of_adam(before, net, context.stateful["net"], lr=0.02)


def test_the_learning_rate_decays_by_its_factor_after_every_period() -> None:
    method = build(DPMERF, **{**TINY, "steps": 8}, lr=0.08, lr_decay=0.25, decay_steps=3)
    _, context = fit(method, binary_images(4), torch.arange(4), 4)
    assert context.rates == pytest.approx([0.08] * 3 + [0.02] * 3 + [0.005] * 2)


def test_the_generator_and_the_settings_are_the_published_ones() -> None:
    """Golden: the authors' label-balanced script for MNIST, and the size of its conditional generator."""
    assert sum(p.numel() for p in CodeGenerator(5, 10, (1, 28, 28)).parameters()) == 166_161
    assert build_method(compose_config(["method=dp_merf"])) == DPMERF(
        features=10_000,
        length_scale2=105.0,
        latent_dim=5,
        batch_size=100,
        steps=3000,
        lr=0.01,
        lr_decay=0.9,
        decay_steps=600,
    )


@pytest.mark.parametrize("shape", [(1, 30, 28), (3, 32, 30)])
def test_sides_that_are_not_multiples_of_4_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 4"):
        CodeGenerator(5, 10, shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": 41}, "method.features: expected an even number"),
        ({"length_scale2": 0.0}, r"method.length_scale2: expected a number in \(0, inf\), got 0.0"),
        ({"decay_steps": 0}, r"method.decay_steps: expected a number in \[1, inf\), got 0"),
        ({"lr": -1.0}, r"method.lr: expected a number in \(0, inf\), got -1.0"),
        ({"batch_size": 1}, r"method.batch_size: expected a number in \[2, inf\), got 1"),
    ],
)
def test_values_that_are_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DPMERF, **change)
