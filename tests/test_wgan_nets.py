"""GS-WGAN's networks: golden sizes, the architectures written out, stacks under vmap, purity in evaluation mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils.parametrize import is_parametrized

from dpgen_bench.nets.wgan import (
    DCGANGenerator,
    ProjectionCritic,
    ResNetGenerator,
    pixel_norm,
    upsample_conv3x3,
)

MNIST, COLOUR = (1, 28, 28), (3, 32, 32)
GENERATORS = [(ResNetGenerator, MNIST, 5), (ResNetGenerator, COLOUR, 5), (DCGANGenerator, MNIST, 4)]
CRITICS = [(ProjectionCritic, MNIST, 3), (ProjectionCritic, COLOUR, 3)]
NETS = GENERATORS + CRITICS


def build(case, classes: int = 4, dtype: torch.dtype = torch.float64) -> nn.Module:
    net, shape, width = case
    return net(shape, classes, width=width).to(dtype).eval()


def inputs(case, b: int = 3) -> tuple[Tensor, Tensor]:
    """The network's inputs: latents of {0, 1} or images, and labels."""
    net, shape, _ = case
    y = torch.arange(b) % 4
    if net is ProjectionCritic:
        return torch.rand(b, *shape, dtype=torch.float64), y
    return torch.randint(0, 2, (b, 10)).double(), y


def numbers(net: nn.Module) -> tuple[int, int]:
    """Numbers of trainable parameters and of entries of buffers, which are all spectral vectors."""
    return sum(p.numel() for p in net.parameters() if p.requires_grad), sum(b.numel() for b in net.buffers())


# Sizes and shapes


@pytest.mark.parametrize(
    ("net", "trainable", "with_vectors"),
    [
        # The authors' three networks, instantiated. They keep the vectors of their own spectral norm as parameters
        # that are not trained, one u [o] and one v [prod(i...)] for each layer: as many numbers as our buffers have.
        (ResNetGenerator, 3_826_177, 3_849_494),
        (DCGANGenerator, 1_114_305, 1_114_305),
        (ProjectionCritic, 1_071_105, 1_084_581),
    ],
)
def test_golden_sizes(net, trainable, with_vectors):
    assert numbers(net(MNIST, 10)) == (trainable, with_vectors - trainable)


@pytest.mark.parametrize(
    ("case", "trainable"),
    [
        # By hand, with 4 labels and 10 latents, at 3x32x32, width 5 and 3, by layers.
        ((ResNetGenerator, COLOUR, 5), 15 * 80 + 3 * (2 * 230 + 30) + 3 * 46),
        ((ProjectionCritic, COLOUR, 3), 228 + (3 * 25 + 1) * 6 + (6 * 25 + 1) * 12 + 193 + 4 * 192),
        ((DCGANGenerator, MNIST, 4), 15 * 256 + 8 * (16 * 25 + 1) + 4 * (8 * 25 + 1) + 4 * 64 + 1),
    ],
)
def test_sizes_of_other_widths(case, trainable):
    assert numbers(build(case))[0] == trainable


@pytest.mark.parametrize("case", GENERATORS)
@pytest.mark.parametrize("b", [1, 3])
def test_generators_make_images_in_0_1(case, b):
    torch.manual_seed(12)
    net = build(case)
    images = net(*inputs(case, b))
    assert images.shape == (b, *case[1])
    assert images.min() > 0.0
    assert images.max() < 1.0
    bias = (net.conv3 if case[0] is DCGANGenerator else net.image).bias
    for value, pixel in ((50.0, 1.0), (-50.0, 0.0)):
        nn.init.constant_(bias, value)
        torch.testing.assert_close(net(*inputs(case, b)), torch.full_like(images, pixel), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", NETS)
def test_labels_matter_and_images_of_a_batch_do_not(case):
    torch.manual_seed(0)
    net = build(case)
    x, y = inputs(case, 3)
    together = net(x, y)
    alone = torch.cat([net(x[i : i + 1], y[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    relabelled = net(x, torch.tensor([3, 1, 2]))
    assert (relabelled[0] - together[0]).abs().max() > 1e-4
    torch.testing.assert_close(relabelled[1:], together[1:], rtol=0, atol=1e-12)
    if case[0] is ProjectionCritic:
        assert together.shape == (3,)


@pytest.mark.parametrize("case", NETS)
def test_gradients_reach_all_parameters(case):
    torch.manual_seed(1)
    net = build(case).train()
    net(*inputs(case, 4)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        if name.startswith("label"):
            assert (parameter.grad.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize(("net", "named"), [(ResNetGenerator, "28x28 or 32x32"), (ProjectionCritic, "28x28 or 32x32")])
def test_other_images_are_refused(net, named):
    for shape in ((1, 8, 8), (3, 64, 64), (1, 28, 32)):
        with pytest.raises(ValueError, match=rf"{named} images, got {shape[1]}x{shape[2]}: choose a dataset"):
            net(shape, 10)


def test_dcgan_names_the_other_generator():
    with pytest.raises(ValueError, match=r"28x28 images, got 32x32: choose the resnet generator"):
        DCGANGenerator(COLOUR, 10)


@pytest.mark.parametrize("case", NETS)
def test_sizes_below_1_are_refused(case):
    net, (_, h, w), _ = case
    with pytest.raises(ValueError, match=r"width of at least 1 for the .*, got 0"):
        net((1, h, w), 4, width=0)
    with pytest.raises(ValueError, match=r"num_classes of at least 1 for the .*, got 0"):
        net((1, h, w), 0)
    with pytest.raises(ValueError, match=r"channels of at least 1 for the .*, got 0"):
        net((0, h, w), 4)
    if net is not ProjectionCritic:
        with pytest.raises(ValueError, match=r"latent_dim of at least 1 for the .*, got -1"):
            net((1, h, w), 4, latent_dim=-1)


# The architectures written out


def unit(h: Tensor) -> Tensor:
    return h / (h.pow(2).mean(dim=1, keepdim=True) + 1e-10).sqrt()


def labelled(z: Tensor, y: Tensor, classes: int) -> Tensor:
    return torch.cat([z, torch.eye(classes, dtype=z.dtype)[y]], dim=1)


def test_pixel_norm():
    torch.manual_seed(2)
    h = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    h[0, :, 0, 0] = 0.0
    out = pixel_norm(h)
    torch.testing.assert_close(out, unit(h), rtol=1e-14, atol=0)
    squares = out.square().mean(dim=1)
    assert squares[0, 0, 0] == 0.0
    assert squares.flatten()[1:].tolist() == pytest.approx([1.0] * 17, abs=1e-8)


@pytest.mark.parametrize("shape", [MNIST, COLOUR])
def test_resnet_generator_is_its_description(shape):
    torch.manual_seed(3)
    case = (ResNetGenerator, shape, 6)
    net, (z, y) = build(case), inputs(case)
    h = net.linear(labelled(z, y, 4)).reshape(3, 6, 4, 4)
    h = unit(F.relu(h))
    for block in net.blocks:
        main = F.interpolate(unit(h), scale_factor=2, mode="nearest")
        main = F.conv2d(main, block.conv1.weight, block.conv1.bias, padding=1)
        main = F.conv2d(F.relu(unit(main)), block.conv2.weight, block.conv2.bias, padding=1)
        side = F.interpolate(h, scale_factor=2, mode="nearest")
        h = main + F.conv2d(side, block.shortcut.weight, block.shortcut.bias)
    padding = {28: 0, 32: 1}[shape[1]]
    images = torch.sigmoid(F.conv2d(h, net.image.weight, net.image.bias, padding=padding))
    images = images[:, :, : shape[1], : shape[2]]
    torch.testing.assert_close(net(z, y), images, rtol=0, atol=1e-12)


def test_dcgan_generator_is_its_description():
    torch.manual_seed(4)
    case = (DCGANGenerator, MNIST, 4)
    net, (z, y) = build(case), inputs(case)
    h = unit(F.relu(net.linear(labelled(z, y, 4)).reshape(3, 16, 4, 4)))
    h = F.conv_transpose2d(h, net.conv1.weight, net.conv1.bias)
    assert h.shape == (3, 8, 8, 8)
    h = F.conv_transpose2d(unit(F.relu(h[:, :, :-1, :-1])), net.conv2.weight, net.conv2.bias)
    assert h.shape == (3, 4, 11, 11)
    h = F.conv_transpose2d(unit(F.relu(h)), net.conv3.weight, net.conv3.bias, stride=2)
    torch.testing.assert_close(net(z, y), torch.sigmoid(h), rtol=0, atol=1e-14)
    assert not any(is_parametrized(module) for module in net.modules())


def test_critic_is_its_description():
    torch.manual_seed(5)
    case = (ProjectionCritic, MNIST, 3)
    net, (x, y) = build(case), inputs(case)
    h = x
    for conv, size in ((net.conv1, 14), (net.conv2, 7), (net.conv3, 4)):
        h = F.relu(F.conv2d(h, conv.weight, conv.bias, stride=2, padding=2))
        assert h.shape[-2:] == (size, size)
    h = h.reshape(3, -1)
    scores = h @ net.linear.weight[0] + net.linear.bias + torch.stack([net.label.weight[y[i]] @ h[i] for i in range(3)])
    torch.testing.assert_close(net(x, y), scores, rtol=0, atol=1e-12)


# The upsampling convolution


def upsample_then_conv(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(F.interpolate(h, scale_factor=2, mode="nearest"), weight, bias, padding=1)


@pytest.mark.parametrize("sides", [(1, 1), (2, 3), (4, 4), (7, 5)])
@pytest.mark.parametrize("biased", [True, False])
def test_upsample_conv_is_upsampling_and_convolution(sides, biased):
    """Values, and gradients with respect to image, weight and bias, with different numbers of channels."""
    torch.manual_seed(6)
    tensors = [torch.randn(2, 3, *sides), torch.randn(5, 3, 3, 3), torch.randn(5)][: 3 if biased else 2]
    tensors = [tensor.double().requires_grad_() for tensor in tensors]
    results = []
    for function in (upsample_conv3x3, upsample_then_conv):
        out = function(*tensors, *[None] * (3 - len(tensors)))
        weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out)
        results.append([out, *torch.autograd.grad((weights * out).sum(), tensors)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_upsample_conv_under_vmap():
    torch.manual_seed(7)
    h, weight, bias = torch.randn(3, 2, 4, 3, 3), torch.randn(3, 5, 4, 3, 3), torch.randn(3, 5)
    tensors = [tensor.double().requires_grad_() for tensor in (h, weight, bias)]
    stacked = torch.vmap(upsample_conv3x3)(*tensors)
    single = torch.stack([upsample_then_conv(*(tensor[i] for tensor in tensors)) for i in range(3)])
    torch.testing.assert_close(stacked, single, rtol=0, atol=1e-12)
    for one, two in zip(
        torch.autograd.grad(stacked.square().sum(), tensors),
        torch.autograd.grad(single.square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12 * float(two.abs().max()))


# Evaluation mode, training mode, and stacks


@pytest.mark.parametrize("case", NETS)
def test_evaluation_mode_is_pure_and_training_mode_moves_only_the_vectors(case):
    torch.manual_seed(8)
    net, (x, y) = build(case), inputs(case)
    with torch.no_grad():  # away from the weights that the vectors were estimated for
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    first, x_before = net(x, y), x.clone()
    assert torch.equal(net(x, y), first)
    assert torch.equal(x, x_before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    net.train()(x, y)
    moved = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
    vectors = {name for name, tensor in before.items() if name.endswith(("._u", "._v")) and tensor.numel() > 1}
    assert moved == vectors
    assert bool(vectors) == (case[0] is not DCGANGenerator)


@pytest.mark.parametrize("case", [GENERATORS[0], CRITICS[0]])
def test_spectral_norms_go_to_1(case):
    """The largest singular value of each normalised weight, by SVD: it is above 1 while its estimate is too small."""
    torch.manual_seed(9)
    net, (x, y) = build(case), inputs(case, 1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(3.0 * torch.randn_like(weight))

    def norms() -> list[float]:
        net.eval()
        layers = [module for module in net.modules() if is_parametrized(module)]
        return [torch.linalg.matrix_norm(layer.weight.flatten(1), 2).item() for layer in layers]

    assert max(norms()) > 1.1
    net.train()
    with torch.no_grad():
        for _ in range(200):
            net(x, y)
    assert len(norms()) == (11 if case[0] is ResNetGenerator else 5)
    assert norms() == pytest.approx([1.0] * len(norms()), abs=0.02)


@pytest.mark.parametrize("case", NETS)
@pytest.mark.parametrize("shared", [True, False], ids=["same inputs", "own inputs"])
def test_stack_of_networks(case, shared):
    """Under vmap: values and gradients of inputs and parameters are those of the networks one by one."""
    torch.manual_seed(10)
    nets = [build(case) for _ in range(3)]
    parameters, buffers = stack_module_state(nets)
    x, y = inputs(case)
    xs = x.expand(3, *x.shape) if shared else torch.stack([x, x.flip(0), 0.5 * x])
    xs = xs.clone().requires_grad_()
    ys = torch.stack([y, y if shared else y.flip(0), y])

    def forward(parameters, buffers, x, y):
        return functional_call(nets[0], (parameters, buffers), (x, y))

    stacked = torch.vmap(forward, in_dims=(0, 0, 0, None if shared else 0))(
        parameters, buffers, xs, y if shared else ys
    )
    grad_x, *grads = torch.autograd.grad(stacked.square().sum(), [xs, *parameters.values()])
    for i, net in enumerate(nets):
        x = xs[i].detach().requires_grad_()
        out = net(x, ys[i])
        torch.testing.assert_close(stacked[i], out, rtol=0, atol=1e-10)
        own_x, *own = torch.autograd.grad(out.square().sum(), [x, *net.parameters()])
        torch.testing.assert_close(grad_x[i], own_x, rtol=0, atol=1e-10)
        for name, one, two in zip(parameters, grads, own, strict=True):
            largest = max(1.0, float(two.abs().max()))  # sums over positions and images cancel in single entries
            torch.testing.assert_close(one[i], two, rtol=0, atol=1e-10 * largest, msg=name)


def penalty(scores: Tensor, x: Tensor) -> Tensor:
    """Σ_i (||d score_i / d x_i|| - 1)² over all images of all networks, to be differentiated again."""
    (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    return (gradient.flatten(-3).norm(dim=-1) - 1.0).square().sum()


@pytest.mark.parametrize("case", CRITICS)
def test_gradient_penalty_of_a_stack_of_critics(case):
    """Double backward through vmap: the penalty's gradients are those of the critics one by one."""
    torch.manual_seed(11)
    nets = [build(case) for _ in range(3)]
    parameters, buffers = stack_module_state(nets)
    xs = torch.stack([inputs(case)[0] for _ in nets]).requires_grad_()
    ys = torch.tensor([[0, 1, 2], [3, 3, 1], [2, 0, 0]])

    def forward(parameters, buffers, x, y):
        return functional_call(nets[0], (parameters, buffers), (x, y))

    stacked = penalty(torch.vmap(forward)(parameters, buffers, xs, ys), xs)
    grads = torch.autograd.grad(stacked, list(parameters.values()), allow_unused=True, materialize_grads=True)
    total = 0.0
    for i, net in enumerate(nets):
        x = xs[i].detach().requires_grad_()
        single = penalty(net(x, ys[i]), x)
        total += single.item()
        own = torch.autograd.grad(single, list(net.parameters()), allow_unused=True, materialize_grads=True)
        for name, one, two in zip(parameters, grads, own, strict=True):
            torch.testing.assert_close(one[i], two, rtol=1e-10, atol=1e-10, msg=name)
            assert name.endswith("bias") or two.abs().max() > 1e-6, name
    assert stacked.item() == pytest.approx(total, rel=1e-10)
