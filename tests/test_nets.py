"""Shared generator networks: the authors' parameter counts, layers against their formulas, and what sampling keeps.

Golden numbers: parameters of the networks of DP-Sinkhorn's released code (`conv_cond`, `conv_cond_sq`, `cond_biggan`),
instantiated with the released settings and, for the first, with those of the paper's appendix D.3.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.generator import BLOCK, Generator, NetGenerator
from dpgen_bench.nets.biggan import BigGANGenerator, ClassBatchNorm, GBlock, spectral
from dpgen_bench.nets.conv_generator import ConvGenerator

CONV, BIGGAN = "dpgen_bench.nets.conv_generator.ConvGenerator", "dpgen_bench.nets.biggan.BigGANGenerator"
LEAKY = dict(label_dim=4, activation="leaky_relu", width=2)
CONFIGS: dict[str, dict[str, Any]] = {
    "conv28": dict(_target_=CONV, image_shape=[1, 28, 28], num_classes=3, latent_dim=5, label_dim=2, width=2),
    "conv32": dict(_target_=CONV, image_shape=[3, 32, 32], num_classes=2, latent_dim=5, **LEAKY),
    "biggan": dict(_target_=BIGGAN, image_shape=[3, 32, 32], num_classes=3, latent_dim=5, width=6),
}
every_net = pytest.mark.parametrize("name", list(CONFIGS))


def built(name: str) -> nn.Module:
    """The small net of that name, with weights that differ from the initial ones, as after training."""
    torch.manual_seed(0)
    arguments = {key: value for key, value in CONFIGS[name].items() if key != "_target_"}
    net = (BigGANGenerator if name == "biggan" else ConvGenerator)(**arguments)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return net


def batch(name: str, b: int) -> tuple[Tensor, Tensor]:
    z = torch.rand(b, CONFIGS[name]["latent_dim"], generator=torch.Generator().manual_seed(1))
    return z, torch.arange(b) % CONFIGS[name]["num_classes"]


def trained(name: str) -> nn.Module:
    """The net `built(name)` after forward passes in training mode, which set its running statistics."""
    net = built(name).train()
    for _ in range(30):
        net(*batch(name, 12))
    return net


def sampler(name: str, net: nn.Module) -> NetGenerator:
    config = CONFIGS[name]
    return NetGenerator(
        net,
        config,
        latent_dim=config["latent_dim"],
        num_classes=config["num_classes"],
        image_shape=tuple(config["image_shape"]),
        latent="uniform",
        value_range=(-1.0, 1.0),
    )


def state(net: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(net.state_dict())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "arguments", "count"),
    [
        (ConvGenerator, dict(image_shape=(1, 28, 28), num_classes=10), 857_577),
        (ConvGenerator, dict(image_shape=(1, 28, 28), num_classes=10, latent_dim=16, label_dim=8), 957_969),
        (ConvGenerator, dict(image_shape=(3, 32, 32), num_classes=2, latent_dim=32, label_dim=4), 806_536),
        (BigGANGenerator, dict(image_shape=(3, 32, 32), num_classes=2), 3_886_595),
    ],
)
def test_parameter_counts_are_the_authors(net: type[nn.Module], arguments: dict[str, Any], count: int) -> None:
    assert sum(parameter.numel() for parameter in net(**arguments).parameters()) == count


def test_the_first_layer_makes_7x7_features_of_28x28_images_and_4x4_of_32x32() -> None:
    """Appendix D.3: "projects the input to 256 x 7 x 7", then depths 128, 64, 1."""
    for config, sizes in (
        (dict(image_shape=(1, 28, 28), num_classes=10), [(256, 7), (128, 14), (64, 28), (1, 28)]),
        (dict(image_shape=(3, 32, 32), num_classes=2), [(256, 4), (128, 8), (64, 16), (3, 32)]),
    ):
        seen = []
        net = ConvGenerator(**config)  # type: ignore[arg-type]
        for layer in net.modules():
            if isinstance(layer, nn.ConvTranspose2d):
                layer.register_forward_hook(lambda layer, args, out, seen=seen: seen.append(tuple(out.shape[1:3])))
        net(torch.rand(2, 12), torch.zeros(2, dtype=torch.int64))
        assert seen == sizes


@every_net
@pytest.mark.parametrize("b", [0, 1, 7])
def test_shapes_and_range(name: str, b: int) -> None:
    net = trained(name).eval()
    x = net(*batch(name, b)).detach()
    assert x.shape == (b, *CONFIGS[name]["image_shape"])
    assert bool((x.abs() <= 1).all())
    assert b == 0 or (float(x.min()) < 0 < float(x.max()))  # both halves of [-1, 1], not [0, 1]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 64, 64), (1, 28, 32)])
def test_other_sizes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"made for 28x28 or 32x32 images, got {shape[1]}x{shape[2]}: choose"):
        ConvGenerator(shape, 10)
    with pytest.raises(ValueError, match=f"made for 32x32 images, got {shape[1]}x{shape[2]}: choose"):
        BigGANGenerator(shape, 10)


def test_other_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="made for 32x32 images, got 28x28"):
        BigGANGenerator((1, 28, 28), 10)
    with pytest.raises(ValueError, match="expected activation among relu, leaky_relu, got 'tanh'"):
        ConvGenerator((1, 28, 28), 10, activation="tanh")  # type: ignore[arg-type]


# --- layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("activation", "slope"), [("relu", 0.0), ("leaky_relu", 0.2)])
def test_the_conv_generator_is_its_formula(activation: Any, slope: float) -> None:
    """Written out by weights, in evaluation mode; the last layer as the released code's Conv2d, its kernel turned."""
    torch.manual_seed(0)
    net = ConvGenerator((1, 28, 28), 3, 5, 2, activation, width=2)
    z, y = batch("conv28", 4)
    net(z, y)
    net.eval()
    weights = [layer for layer in net.layers if isinstance(layer, nn.ConvTranspose2d)]
    norms = [layer for layer in net.layers if isinstance(layer, nn.BatchNorm2d)]
    h = torch.cat([z, net.label.weight[y]], dim=1).reshape(4, 7, 1, 1)
    for conv, norm, (stride, padding) in zip(weights, norms, [(1, 0), (2, 1), (2, 1)], strict=False):
        assert conv.bias is None
        h = F.conv_transpose2d(h, conv.weight, stride=stride, padding=padding)
        h = norm(h)
        h = torch.maximum(h, slope * h)
    last = weights[3]
    expected = torch.tanh(F.conv2d(h, last.weight.transpose(0, 1).flip(2, 3), last.bias, padding=1))
    torch.testing.assert_close(net(z, y), expected, rtol=1e-5, atol=1e-6)


def test_the_last_layer_starts_as_a_conv2d() -> None:
    """U(-1/24, 1/24) as Conv2d(64, 1, 3); a transposed convolution's own ±1/3 leaves half of the pixels at ±1."""
    torch.manual_seed(0)
    net = ConvGenerator((1, 28, 28), 10)
    last = net.layers[-1]
    for parameter in last.parameters():
        assert float(parameter.detach().abs().max()) <= 1 / 24
    # 576 draws: the standard deviation is known to 1.9%; false alarm below 1e-6.
    assert float(last.weight.detach().std()) == pytest.approx(1 / (24 * math.sqrt(3)), rel=0.1)
    x = net(torch.rand(10, 12), torch.arange(10))
    assert float((x.abs() > 0.95).float().mean()) < 0.05


def test_class_batch_norm_is_its_formula() -> None:
    torch.manual_seed(0)
    norm = ClassBatchNorm(4, 3)
    h, y = 2.0 + 3.0 * torch.randn(6, 4, 5, 5), torch.tensor([0, 1, 2, 2, 1, 1])
    mean, var = h.mean(dim=(0, 2, 3), keepdim=True), h.var(dim=(0, 2, 3), keepdim=True, correction=0)
    gain, bias = norm.gain.weight[y][:, :, None, None], norm.bias.weight[y][:, :, None, None]
    expected = (1 + gain) * (h - mean) / torch.sqrt(var + 1e-5) + bias
    torch.testing.assert_close(norm(h, y), expected, rtol=1e-4, atol=1e-5)
    for weight in (norm.gain.weight, norm.bias.weight):  # 3 orthonormal rows of length 4
        torch.testing.assert_close(weight @ weight.T, torch.eye(3), rtol=0, atol=1e-5)


def test_a_block_is_its_formula() -> None:
    """Upsampling before the shortcut's convolution, as in BigGAN's figure."""
    torch.manual_seed(0)
    block = GBlock(3, 5, 2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    block.eval()
    h, y = torch.randn(4, 3, 6, 6), torch.arange(4) % 2

    def twice(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    def conv(x: Tensor, layer: Any, padding: int) -> Tensor:
        return F.conv2d(x, layer.weight, layer.bias, padding=padding)

    main = conv(twice(block.norm1(h, y).relu()), block.conv1, 1)
    main = conv(block.norm2(main, y).relu(), block.conv2, 1)
    torch.testing.assert_close(block(h, y), main + conv(twice(h), block.shortcut, 0), rtol=1e-4, atol=1e-5)


def test_biggan_is_its_formula() -> None:
    net: Any = trained("biggan").eval()
    z, y = batch("biggan", 4)
    h = F.linear(z, net.linear.weight, net.linear.bias).reshape(4, 6, 4, 4)
    for block in net.blocks:
        h = block(h, y)
    h = net.norm(h).clamp(min=0)
    expected = torch.tanh(F.conv2d(h, net.image.weight, net.image.bias, padding=1))
    torch.testing.assert_close(net(z, y), expected, rtol=1e-5, atol=1e-6)


def test_spectral_layers_start_orthogonal_and_stay_of_norm_one() -> None:
    torch.manual_seed(0)
    layer: Any = spectral(nn.Conv2d(4, 6, 3))
    rows = layer.weight.flatten(1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(6), rtol=0, atol=1e-5)
    with torch.no_grad():
        layer.parametrizations.weight.original.add_(torch.randn(6, 4, 3, 3))
    for _ in range(200):
        layer(torch.zeros(1, 4, 3, 3))
    layer.eval()
    assert float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2)) == pytest.approx(1.0, abs=1e-4)
    assert float(torch.linalg.matrix_norm(layer.parametrizations.weight.original.detach().flatten(1), 2)) > 2


def test_every_weight_of_biggan_is_orthogonal_or_spectrally_normalised() -> None:
    """All linear, convolutional and embedding layers are covered."""
    net: Any = BigGANGenerator((3, 32, 32), 2, latent_dim=5, width=6)
    layers = [layer for layer in net.modules() if isinstance(layer, (nn.Linear, nn.Conv2d, nn.Embedding))]
    assert len(layers) == 1 + 3 * (3 + 4) + 1
    for layer in layers:
        matrix = layer.weight.detach().flatten(1)
        values = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-4)
        assert isinstance(layer, nn.Embedding) or hasattr(layer, "parametrizations")


@every_net
def test_the_gradient_reaches_every_parameter_but_biases_that_batch_norm_takes_out(name: str) -> None:
    """In float64, so that differences are not due to rounding."""
    net = built(name).double().train()
    z, y = batch(name, 6)
    x = net(z.double(), y)
    (x * torch.randn(x.shape, dtype=x.dtype)).sum().backward()
    idle = {
        "conv28": set(),
        "conv32": {"layers.0.bias"},
        "biggan": {f"blocks.{i}.{part}.bias" for i in range(3) for part in ("conv1", "conv2", "shortcut")},
    }[name]
    assert idle <= {key for key, _ in net.named_parameters()}
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None
        largest = parameter.grad.abs().flatten(1).amax(dim=1) if parameter.ndim > 1 else parameter.grad.abs().max()
        if key in idle:
            assert float(largest) < 1e-10, key
        elif "label" in key or "norm" in key:  # each class on its own
            assert float(largest.min()) > 1e-4, key
        else:
            assert float(largest.max()) > 1e-4, key


# --- training and sampling --------------------------------------------------------------------------------------


@every_net
def test_a_training_forward_moves_the_buffers_and_an_evaluation_none(name: str) -> None:
    net = built(name).eval()
    before = state(net)
    x = net(*batch(name, 6))
    assert torch.equal(net(*batch(name, 6)), x)
    assert same(state(net), before)
    net.train()
    net(*batch(name, 6))
    moved = {key for key, value in state(net).items() if not torch.equal(value, before[key])}
    running = {key for key in before if key.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    spectra = {key for key in before if key.endswith(("._u", "._v"))}
    assert moved == running | spectra
    assert len(running) == 3 * {"conv28": 3, "conv32": 3, "biggan": 7}[name]
    assert len(spectra) == {"conv28": 0, "conv32": 0, "biggan": 2 * 11}[name]


@every_net
def test_in_evaluation_an_image_depends_on_its_own_latent_and_label(name: str) -> None:
    net = trained(name)
    z, y = batch(name, 6)
    assert not torch.allclose(net(z, y)[:3], net(z[:3], y[:3]), atol=1e-4)  # training couples a batch
    net.eval()
    x = net(z, y)
    torch.testing.assert_close(net(z[:3], y[:3]), x[:3], rtol=1e-4, atol=1e-5)
    for changed in (net(1 - z, y), net(z, (y + 1) % CONFIGS[name]["num_classes"])):
        assert float((changed - x).detach().abs().flatten(1).amax(dim=1).min()) > 1e-2


@every_net
def test_running_statistics_converge_to_those_of_the_batch(name: str) -> None:
    """Trained on one batch alone, evaluation gives what training gave: momentum leaves 0.9^200 of the start."""
    net = built(name).train()
    z, y = batch(name, 12)
    with torch.no_grad():
        for _ in range(200):
            x = net(z, y)
    # Batches estimate a variance with n - 1 for the running one and n for their own; least n here: 12 x 4 x 4.
    torch.testing.assert_close(net.eval()(z, y), x, rtol=0, atol=0.03)


@every_net
def test_sampled_images_do_not_depend_on_each_other(name: str) -> None:
    net = trained(name)
    generator, before = sampler(name, net), state(net)
    classes = CONFIGS[name]["num_classes"]
    labels = torch.arange(BLOCK + 9) % classes
    images = generator.sample(labels, 1)
    assert images.dtype == torch.uint8
    assert images.shape == (BLOCK + 9, *CONFIGS[name]["image_shape"])
    assert torch.equal(generator.sample(labels, 1), images)
    others = (labels + 1) % classes
    others[17] = labels[17]
    changed = generator.sample(others, 1)
    assert torch.equal(changed[17], images[17])
    assert not bool((changed == images).flatten(1).all(dim=1)[torch.arange(len(labels)) != 17].any())
    assert net.training
    assert same(state(net), before)


@every_net
def test_a_saved_generator_samples_the_same(name: str, tmp_path: Any) -> None:
    generator = sampler(name, trained(name))
    generator.save(tmp_path)
    loaded = Generator.load(tmp_path)
    assert same(loaded.state(), generator.state())
    assert loaded.num_parameters == generator.num_parameters == sum(p.numel() for p in generator.net.parameters())
    labels = torch.arange(20) % CONFIGS[name]["num_classes"]
    assert torch.equal(loaded.sample_unrounded(labels, 3), generator.sample_unrounded(labels, 3))


@every_net
def test_training_continues_from_a_state_dict_bit_by_bit(name: str, tmp_path: Any) -> None:
    """A resumed run needs this: the state consists of parameters, running statistics and spectral vectors."""

    def step(net: nn.Module) -> dict[str, Tensor]:
        net.train()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            net(*batch(name, 6)).square().sum().backward()
            sgd.step()
        return state(net)

    net = trained(name)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    expected = step(net)
    fresh = built(name)
    assert not same(state(fresh), torch.load(tmp_path / "net.pt"))
    fresh.load_state_dict(torch.load(tmp_path / "net.pt"))
    assert same(step(fresh), expected)
