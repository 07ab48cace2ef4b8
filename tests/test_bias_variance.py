"""Bias and variance of the semi-debiased gradient: against the gradient it averages, and where they are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

import dpgen_bench.plots.bias_variance as module
from dpgen_bench.nets.transport import Cost, Transport, semi_debiased
from dpgen_bench.plots.bias_variance import bias_variance, draws, image_gradients
from dpgen_bench.tables.plot_spec import BiasVarianceSpec


def clouds(classes: int, size: int, d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images in [-1, 1] [classes * size, d] around a centre for each class, and labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes * size) % classes
    centres = torch.rand(classes, d, generator=random) - 0.5
    return (centres[labels] + 0.2 * torch.randn(len(labels), d, generator=random)).clamp(-1, 1), labels


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_gradients_in_images_are_those_of_the_loss(m: float) -> None:
    settings = BiasVarianceSpec(p=(0.0, 0.5, 0.99), n=6, m=m)
    x, labels = clouds(2, 6, 5)
    y, real_labels = clouds(2, 4, 5, seed=1)
    result = image_gradients(x, labels, y, real_labels, 2, settings)

    def points(images: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return torch.cat([images, 15.0 * torch.nn.functional.one_hot(of, 2)], dim=1)

    for p, debias in ((0.0, 0), (0.5, 3), (0.99, 5), (1.0, 6)):
        X = points(x, labels)[: 6 + debias]
        _, gradient = semi_debiased(Transport(Cost(l1=m)), X, points(y, real_labels), 6)
        assert torch.allclose(result[p][: 6 + debias], gradient[:, :5], atol=1e-6)
        assert not result[p][6 + debias :].any()


def test_gradients_in_parameters_are_those_of_the_generator() -> None:
    """Backwards through x(theta) = c + (1 + gain) (x - c) + offset at theta = 0, for the same draws."""
    settings = BiasVarianceSpec(p=(0.4,), n=5, batches=2, m=0.0)
    images, labels = clouds(2, 8, 3)
    pools = [images[labels == label] for label in range(2)]
    result = next(draws(pools, images, labels, settings))

    random = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randint(2, (10,), generator=random)
    which = (torch.rand(10, generator=random) * 8).long()
    real = torch.randint(16, (5,), generator=random)
    x = torch.stack([pools[label][i] for label, i in zip(drawn.tolist(), which.tolist(), strict=True)])
    in_images = image_gradients(x, drawn, images[real], labels[real], 2, settings)[0.4]
    theta = torch.zeros(2, 2, 3, requires_grad=True)
    centres = torch.stack([pool.mean(dim=0) for pool in pools])[drawn]
    generated = centres + (1 + theta[1, drawn]) * (x - centres) + theta[0, drawn]
    generated.backward(in_images)
    assert theta.grad is not None
    assert torch.allclose(result[0.4], theta.grad, atol=1e-5)


POOL, REAL = [-0.2, 0.3, 0.9], [-0.9, -0.5, -0.1]
TRIPLES = list(itertools.product(POOL, POOL, REAL))  # all draws of x, x' and y of a batch with n = 1


def test_one_point_a_batch_has_a_closed_form() -> None:
    """n = 1 and no L1: W(x, y) = |x - y|^2, so G_0 = 4 (x - y), p = 1 gives 2 (x - x') from x to x'."""
    settings, label = BiasVarianceSpec(p=(0.0, 0.9), n=1, m=0.0), torch.zeros(2, dtype=torch.int64)
    for x, other, y in TRIPLES:
        result = image_gradients(torch.tensor([[x], [other]]), label, torch.tensor([[y]]), label[:1], 1, settings)
        expected = [4 * (x - y) - 2 * (x - other), 2 * (x - other)]
        assert result[1.0].flatten().tolist() == pytest.approx(expected, abs=1e-5)
        for p in (0.0, 0.9):  # floor(1 * 0.9) = 0 new points
            assert result[p].flatten().tolist() == pytest.approx([4 * (x - y), 0.0], abs=1e-5)


def test_the_moments_of_all_draws_are_their_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that are all draws, each once: D_0 has mean (0, 4 Var x), and every moment can be written down."""
    c = sum(POOL) / 3

    def all_draws(*_: object) -> Iterator[dict[float, torch.Tensor]]:
        for x, other, y in TRIPLES:
            biased = torch.tensor([4 * (x - y), 4 * (x - y) * (x - c)])
            yield {0.0: biased, 1.0: biased - torch.tensor([0.0, 2 * (x - other) ** 2])}

    monkeypatch.setattr(module, "draws", all_draws)
    images, labels = clouds(1, 8, 1)
    settings = BiasVarianceSpec(p=(0.0, 1.0), pool=(None,), batches=len(TRIPLES))
    frame = bias_variance(images, labels, settings).set_index("p")
    x, other, y = torch.tensor(TRIPLES, dtype=torch.float64).T
    apart = 2 * (x - other).square()
    offset, gain = 4 * (x - y), 4 * (x - y) * (x - c)
    unit = float(offset.var() + (gain - apart).var())
    assert float(apart.mean()) == pytest.approx(4 * float(torch.tensor(POOL).var(unbiased=False)))
    bias2 = float(apart.mean().square() - apart.var() / len(TRIPLES))
    assert frame["variance"][0.0] == pytest.approx(float(offset.var() + gain.var()) / unit, rel=1e-5)
    assert frame["bias"][0.0] == pytest.approx(math.sqrt(bias2 / unit), rel=1e-5)
    assert (frame["bias"][1.0], frame["variance"][1.0]) == (0.0, 1.0)


def test_the_debiased_gradient_vanishes_on_average_where_generator_and_data_agree() -> None:
    """2 W(X, Y) - W(X, X') of one law for all: its gradient has mean 0 by symmetry of W, the biased one's not."""
    images, labels = clouds(2, 10, 4)
    settings = BiasVarianceSpec(p=(0.0,), n=8, batches=150)
    result = list(draws([images[labels == 0], images[labels == 1]], images, labels, settings))
    for p, vanishes in ((1.0, True), (0.0, False)):
        got = torch.stack([batch[p].flatten() for batch in result])
        # |mean|^2 of B independent draws of mean 0 is tr Cov / B on average.
        ratio = float(got.mean(dim=0).square().sum() / (got.var(dim=0).sum() / len(got)))
        assert (ratio < 2.0) if vanishes else (ratio > 3.0)


def test_bias_falls_and_variance_rises_with_p() -> None:
    images, labels = clouds(2, 40, 6)
    frame = bias_variance(images, labels, BiasVarianceSpec(p=(0.0, 0.5, 1.0), pool=(None,), n=12, batches=100))
    bias, variance = frame["bias"].tolist(), frame["variance"].tolist()
    assert bias[0] > bias[1] > bias[2] == 0.0
    assert variance[0] < variance[1] < variance[2] == 1.0
    assert frame["pool"].tolist() == [24] * 3  # the larger class of the generator's half


def test_a_collapsed_generator_knows_no_p() -> None:
    """One class and one image: a new draw gives the same image."""
    images, labels = clouds(1, 20, 4)
    frame = bias_variance(images, labels, BiasVarianceSpec(pool=(1,), n=6, batches=20))
    assert frame["bias"].max() < 1e-3
    assert frame["variance"].to_numpy() == pytest.approx(1.0, abs=1e-4)


def test_the_same_settings_give_the_same_values_on_any_number_of_threads() -> None:
    images, labels = clouds(2, 10, 4)
    settings = BiasVarianceSpec(n=5, batches=5, pool=(2, None))
    before = torch.get_num_threads()
    one = bias_variance(images, labels, settings)
    try:
        torch.set_num_threads(2)
        assert bias_variance(images, labels, settings).equals(one)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert not bias_variance(images, labels, BiasVarianceSpec(n=5, batches=5, pool=(2, None), seed=1)).equals(one)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"p": (1.2,)}, r"plot\.p: expected a number in \[0, 1\], got"),
        ({"p": ()}, r"plot\.p: expected one value or more"),
        ({"pool": (0,)}, r"plot\.pool: expected a number in \[1, inf\)"),
        ({"n": 0}, r"plot\.n: expected a number in \[1, inf\), got 0"),
        ({"batches": 1}, r"plot\.batches: expected a number in \[2, inf\), got 1"),
        ({"noise": -0.1}, r"plot\.noise: expected a number in \[0, inf\), got -0\.1"),
    ],
)
def test_settings_out_of_range_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BiasVarianceSpec(**changed)


def test_data_that_cannot_be_used_are_refused() -> None:
    images, labels = clouds(2, 5, 3)
    with pytest.raises(ValueError, match=r"pixels in \[-1, 1\]"):
        bias_variance(images * 127 + 127, labels)
    with pytest.raises(ValueError, match="got 10 images and 9 labels"):
        bias_variance(images, labels[:9])
    with pytest.raises(ValueError, match="class 1 has none"):
        bias_variance(images, labels * 2)
    same = torch.zeros(10, 3)
    with pytest.raises(ValueError, match="the same in each"):
        bias_variance(same, torch.zeros(10, dtype=torch.int64), BiasVarianceSpec(noise=0.0, batches=3))
