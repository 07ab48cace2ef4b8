"""DP-HP against its formulas: rows, releases, shares of the budget, the paper's count, the loss and its schedule.

The features themselves are covered in test_hermite.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context, Scale
from dpgen_bench.nets.code_generator import CodeGenerator, DenseGenerator
from dpgen_bench.nets.hermite import hermite_features, mehler_rho
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from methods.dp_hp import DPHP
from tests.defaults import build
from tests.toys import Watcher

SHAPE, PIXELS, SEED, CLASSES = (1, 8, 8), 64, 3, 4
TINY: dict[str, Any] = dict(
    sum_order=6, product_order=3, length_scale2=0.15, hidden=6, latent_dim=3, batch_size=6, steps=5, epoch_steps=2
)


def fit(method: DPHP, eps: float | None = math.inf, scale: Scale | None = None) -> tuple[Watcher, Context, Ledger]:
    watcher, ledger = Watcher(), Ledger(Budget(eps, 1e-5, "replace_one", "pld"), len(LABELS))
    data = PrivateData(IMAGES, LABELS, CLASSES, Services(ledger, Key.seeded("test"), observer=watcher))
    context = Context(SEED, services=data._services, scale=scale)
    method.fit(data, context)
    return watcher, context, ledger


IMAGES = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(7))
LABELS = torch.tensor([0, 3, 1, 1, 0, 0, 3, 0, 1, 0, 3, 0])  # no record of class 2


def drawn_pairs(epochs: int) -> tuple[list[tuple[int, int]], torch.Generator]:
    """The pixels of each epoch, and the public randomness after they were drawn."""
    public = torch.Generator().manual_seed(SEED)
    pairs = [torch.randperm(PIXELS, generator=public)[:2].tolist() for _ in range(epochs)]
    return [(a, b) for a, b in pairs], public


def phi(image: Tensor, order: int) -> Tensor:
    """phi_k(x_p) of one image, float64 [order + 1, P]."""
    return hermite_features(image.double().flatten(), mehler_rho(0.15), order)


def embeddings(images: Tensor, labels: Tensor, pair: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The two sums over images of outer products with their one-hot labels, image by image in float64."""
    sums, products = torch.zeros(CLASSES, 7, PIXELS).double(), torch.zeros(CLASSES, 4, 4).double()
    for image, label in zip(images, labels.tolist(), strict=True):
        sums[label] += phi(image, 6) / math.sqrt(PIXELS)
        features = phi(image, 3)
        products[label] += torch.outer(features[:, pair[0]], features[:, pair[1]])
    return sums, products


def test_the_releases_at_infinite_epsilon_are_the_exact_sums() -> None:
    """One of the sum kernel, and one of the product kernel for each of three epochs, each with its own two pixels."""
    watcher, _, _ = fit(build(DPHP, **TINY))
    pairs, _ = drawn_pairs(3)
    assert len(set(pairs)) == 3
    assert [len(drawn) for drawn, _, _ in watcher.releases] == [12] * 4
    sums, _ = embeddings(IMAGES, LABELS, pairs[0])
    exact = [value.squeeze(1) for _, value, _ in watcher.releases]
    torch.testing.assert_close(exact[0].reshape(CLASSES, 7, PIXELS), sums, rtol=0, atol=1e-5)
    for value, pair in zip(exact[1:], pairs, strict=True):
        torch.testing.assert_close(value, embeddings(IMAGES, LABELS, pair)[1], rtol=0, atol=1e-5)
    assert not exact[0][2].any()
    assert all(torch.equal(value.float(), noisy) for _, value, noisy in watcher.releases)


@pytest.mark.parametrize(("steps", "scale", "releases"), [(5, None, 3), (4, None, 2), (5, Scale("quick", 3), 2)])
def test_the_product_kernel_is_released_once_for_each_epoch_that_is_trained(
    steps: int, scale: Scale | None, releases: int
) -> None:
    _, context, ledger = fit(build(DPHP, **{**TINY, "steps": steps}), scale=scale)
    assert {name: entry.event.times for name, entry in ledger.entries.items()} == {
        "sum_embedding": 1,
        "product_embedding": releases,
    }
    assert context.steps_done["train"] == (steps if scale is None else 3)


# Noise


def test_joint_calibration_spends_the_budget_and_keeps_the_shares() -> None:
    method = build(DPHP, **TINY, share=0.8)
    _, _, ledger = fit(method, eps=1.0)
    assert epsilon(ledger.events, 1e-5, "replace_one", "pld") == pytest.approx(1.0, abs=2e-3)
    total, product = ledger.events
    mu2 = [event.times * (event.sensitivity.replace_one / event.std) ** 2 for event in (total, product)]
    assert mu2[0] / sum(mu2) == pytest.approx(0.8, abs=2e-3)


def test_the_authors_noise_proves_less_than_they_count() -> None:
    """Their sigmas for epsilon 1: 0.8 and 0.2 of it with half of delta each, by RDP; exact and joint it is 0.5855."""
    method = build_method(compose_config(["experiment=dp_hp/basic_mnist"]))
    assert isinstance(method, DPHP)
    small = copy.copy(method)
    small.sum_order, small.hidden, small.steps, small.epoch_steps = 3, 4, 10, 1
    _, _, ledger = fit(small, eps=None)
    total, product = ledger.events
    assert (total.std, total.times, product.std, product.times) == (2 * 6.276, 1, 2 * 78.44, 10)
    assert method.epsilon_claimed(ledger.events, 1e-5) == pytest.approx(1.0, abs=1e-3)
    assert method.epsilon_claimed([total, total], 1e-5) == pytest.approx(1.6, abs=1e-3)
    assert epsilon(ledger.events, 1e-5, "replace_one", "pld") == pytest.approx(0.5855, abs=5e-4)


def test_the_default_share_is_the_ratio_of_the_authors_noise() -> None:
    mu2 = [1 / 6.276**2, 10 / 78.44**2]
    assert build(DPHP).share == pytest.approx(mu2[0] / sum(mu2), abs=5e-3)


def test_no_count_for_other_numbers_of_mechanisms_and_infinity_without_noise() -> None:
    _, _, ledger = fit(build(DPHP, **TINY))
    assert build(DPHP).epsilon_claimed(ledger.events, 1e-5) == math.inf
    assert build(DPHP).epsilon_claimed(ledger.events[:1], 1e-5) is None


# Training


def test_the_loss_is_the_weighted_distance_to_the_noisy_means() -> None:
    """The first loss, computed in float64 from the released sums and the generator's first images."""
    watcher, context, _ = fit(build(DPHP, **TINY, gamma=7.0, generator="dense"), eps=20.0)
    (_, _, noisy_sums), (_, _, noisy_products), *_ = watcher.releases
    torch.manual_seed(SEED)
    net = DenseGenerator(3, CLASSES, SHAPE, hidden=6)
    pairs, public = drawn_pairs(3)
    z, labels = torch.randn(6, 3, generator=public), torch.randint(CLASSES, (6,), generator=public)
    assert len(labels.unique()) > 1
    sums, products = embeddings(net(z, labels).detach(), labels, pairs[0])
    expected = (noisy_products.double() / 12 - products / 6).square().sum()
    expected += 7.0 * (noisy_sums.double().reshape(CLASSES, 7, PIXELS) / 12 - sums / 6).square().sum()
    assert context.history[0]["loss"] == pytest.approx(float(expected), rel=1e-4)


def test_the_settings_and_the_generators_are_the_authors() -> None:
    """Golden: their commands for epsilon 1 (README at f608522), and the sizes of their generators."""
    common: dict[str, Any] = dict(
        sum_order=100, product_order=20, share=0.94, sigma_sum=None, sigma_product=None, hidden=500, latent_dim=5,
        batch_size=200, steps=3000, epoch_steps=300, lr=0.01, lr_decay=0.9,
    )  # fmt: skip
    digits = DPHP(length_scale2=0.005, gamma=20.0, generator="dense", **common)
    fashion = DPHP(length_scale2=0.15, gamma=10.0, generator="conv", **common)
    assert build_method(compose_config(["method=dp_hp"])) == digits
    assert build_method(compose_config(["experiment=dp_hp/mnist"])) == digits
    assert build_method(compose_config(["experiment=dp_hp/fashion_mnist"])) == fashion
    # By hand: 15·500 + 500·500 + 500·784 weights, 500 + 500 + 784 biases and 2·(500 + 500) of batch normalisation.
    assert sum(p.numel() for p in DenseGenerator(5, 10, (1, 28, 28)).parameters()) == 653_284
    # DP-MERF's generator with 500 in place of 200: 300·(15 + 1 + 2) + 300·784 more.
    conv = CodeGenerator(5, 10, (1, 28, 28), hidden=500)
    assert sum(p.numel() for p in conv.parameters()) == 166_161 + 300 * 18 + 300 * 784


@pytest.mark.parametrize("generator", ["dense", "conv"])
def test_both_generators_train_and_make_images_of_colour(generator: str) -> None:
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6) % 2
    ledger = Ledger(Budget(1.0, 1e-5, "add_remove", "pld"), 6)
    data = PrivateData(images, labels, 2, Services(ledger, Key.seeded("colour")))
    made = build(DPHP, **TINY, generator=generator).fit(data, Context(SEED, services=data._services))
    assert made.sample(torch.arange(2), 0).shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 1}, r"method.batch_size: expected a number in \[2, inf\), got 1"),
        ({"sum_order": -1}, r"method.sum_order: expected a number in \[0, inf\), got -1"),
        ({"length_scale2": 0.0}, r"method.length_scale2: expected a number in \(0, inf\), got 0.0"),
        ({"share": 1.5}, r"method.share: expected a number in \(0, 1\), got 1.5"),
        ({"share": 1.0}, r"method.share: expected a number in \(0, 1\), got 1"),
        ({"sigma_sum": 0.0}, "method.sigma_sum"),
        ({"generator": "dcgan"}, "method.generator"),
    ],
)
def test_values_that_are_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DPHP, **change)
