"""Tests the networks of Fed-Avg GAN: their published sizes, their use of labels, and their normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpgen_bench.nets.fedavg_gan import DiscriminatorNet, GeneratorNet, Norm
from tests import toys

SHAPE = (1, 28, 28)


def test_the_networks_are_as_large_as_the_published_ones() -> None:
    """The generator: 128*1024 + 1024 in the first layer with its shift, 1024*12544 + 12544, 256*64*16 + 64,
    64*32*16 + 32, and 32*16 + 1 in the last convolution. The discriminator: 16*64 + 64, 64*128*16 + 128,
    6272*1024 + 1024, and 1024 + 1. Batch normalisation has a shift and no scale.
    """
    with torch.device("meta"):
        G, D = GeneratorNet(SHAPE, 36, conditional=False), DiscriminatorNet(SHAPE, 36, conditional=False)
    assert sum(p.numel() for p in G.parameters()) == 13_285_217
    assert sum(p.numel() for p in D.parameters()) == 6_556_865


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_networks_of_both_sizes_use_labels_if_conditional(shape: tuple[int, ...], conditional: bool) -> None:
    G = GeneratorNet(shape, 10, latent_dim=4, width=0.02, conditional=conditional)
    D = DiscriminatorNet(shape, 10, width=0.02, conditional=conditional)
    z, y = torch.randn(6, 4, generator=toys.seeded()), torch.arange(6)
    x = G(z, y).detach()
    assert x.shape == (6, *shape)
    assert 0.0 <= float(x.min()) < float(x.max()) <= 1.0
    scores = D(x, y)
    assert scores.shape == (6,)
    for one, other in ((x, G(z, y + 1).detach()), (scores, D(x, y + 1))):
        assert torch.equal(one, other) == (not conditional)


@pytest.mark.parametrize("shape", [(1, 30, 30), (1, 28, 32)])
@pytest.mark.parametrize("net", [GeneratorNet, DiscriminatorNet])
def test_other_sizes_are_refused(net: type, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="square images whose side is a multiple of 4"):
        net(shape, 10)


def test_norm_is_batch_normalisation_with_a_shift_and_no_scale() -> None:
    h = 3.0 + 2.0 * torch.randn(8, 5, 4, 4, generator=toys.seeded())
    for features in (h, h[:, :, 0, 0]):
        norm, expected_norm = Norm(5, running=True), nn.BatchNorm2d(5)
        norm.shift.data, expected_norm.bias.data = torch.arange(5.0), torch.arange(5.0)
        assert [name for name, _ in norm.named_parameters()] == ["shift"]
        as_images = features[..., None, None] if features.dim() == 2 else features
        for _ in ("by the batch", "by running statistics"):
            expected = expected_norm(as_images).reshape(features.shape)
            assert torch.allclose(norm(features), expected, atol=1e-6)
            norm.eval(), expected_norm.eval()
        always = Norm(5, running=False).eval()(features)
        others = [dim for dim in range(features.dim()) if dim != 1]
        assert torch.allclose(always.mean(others), torch.zeros(5), atol=1e-5)
        assert torch.allclose(always.var(others, correction=0), torch.ones(5), atol=1e-4)
