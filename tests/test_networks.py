"""Tests of networks that classify samples: numbers of parameters, architectures, inputs and settings."""

from __future__ import annotations

import pickle

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional as F
from torchvision.models.vgg import cfgs, make_layers

from dpgen_bench.evaluate.architectures import NETS, DpganNet, Linear, PaperCnn, PaperMlp, SinkhornCnn, Vgg11
from dpgen_bench.evaluate.classifiers import fingerprint
from dpgen_bench.evaluate.networks import Network
from dpgen_bench.evaluate.training import network_input

DPGAN = Network("dpgan_cnn", holdout=5000, keep="best")


# Architectures


@pytest.mark.parametrize(
    ("net", "shape", "classes", "parameters"),
    [
        # "Private GANs, Revisited": its released classifier, instantiated at both image sizes.
        ("dpgan_cnn", (1, 28, 28), 10, 1_199_882),
        ("dpgan_cnn", (3, 32, 32), 2, 1_625_410),
        # By hand: 784·100 + 100 + 100·10 + 10.
        ("paper_mlp", (1, 28, 28), 10, 79_510),
        # By hand: (9 + 1)·32 + (9·32 + 1)·64 + 64·7·7·10 + 10.
        ("paper_cnn", (1, 28, 28), 10, 50_186),
        ("paper_cnn", (3, 32, 32), 2, 27_586),
        # By hand: 784·10 + 10.
        ("linear", (1, 28, 28), 10, 7_850),
        # By hand: (9 + 1)·32 + (9·32 + 1)·64 + (9·64 + 1)·128 + (128·9 + 1)·128 + 129·10; the authors' linear layer has
        # 1,152 inputs at 28 pixels and 2,048 at 32.
        ("sinkhorn_cnn", (1, 28, 28), 10, 241_546),
        ("sinkhorn_cnn", (3, 32, 32), 2, 355_778),
        # By hand: 9,219,328 in eight convolutions, 2·2,752 in batch norms, 512·10 + 10.
        ("vgg11", (1, 28, 28), 10, 9_229_962),
        ("vgg11", (3, 32, 32), 2, 9_227_010),
    ],
)
def test_sizes(net, shape, classes, parameters):
    module = NETS[net](shape, classes)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    assert module.eval()(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(("net", "least"), [("dpgan_cnn", 6), ("paper_cnn", 4), ("sinkhorn_cnn", 18), ("vgg11", 28)])
def test_images_too_small_are_named(net, least):
    assert NETS[net]((1, least, least), 3).eval()(torch.zeros(1, 1, least, least)).shape == (1, 3)
    with pytest.raises(ValueError, match=rf"at least {least}x{least} pixels, got {least}x{least - 1}"):
        NETS[net]((1, least, least - 1), 3)


def test_dpgan_net_is_its_description():
    """The same values in both modes, and gradients, as with ReLU before pooling and the same randomness."""
    net, images = DpganNet((1, 28, 28), 10), torch.rand(4, 1, 28, 28)

    def written(training: bool) -> Tensor:
        x = net.conv2(net.conv1(images).relu()).relu()
        x = F.dropout(F.max_pool2d(x, 2), 0.25, training).flatten(1)
        return net.fc2(F.dropout(net.fc1(x).relu(), 0.5, training))

    for mode in (True, False):
        net.train(mode)
        grads = []
        for forward in (lambda: net(images), lambda mode=mode: written(mode)):
            torch.manual_seed(1)
            logits = forward()
            grads.append([logits, *torch.autograd.grad(logits.square().sum(), list(net.parameters()))])
        for one, two in zip(*grads, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_mlp_and_cnn_are_their_descriptions():
    images = torch.rand(3, 2, 9, 8)
    mlp = PaperMlp((2, 9, 8), 4, hidden=7)
    hidden = (images.flatten(1) @ mlp.fc1.weight.T + mlp.fc1.bias).clamp(min=0)
    torch.testing.assert_close(mlp(images), hidden @ mlp.fc2.weight.T + mlp.fc2.bias)
    cnn = PaperCnn((2, 9, 8), 4).eval()
    x = F.max_pool2d(F.conv2d(images, cnn.conv1.weight, cnn.conv1.bias, padding=1).relu(), 2)
    x = F.max_pool2d(F.conv2d(x, cnn.conv2.weight, cnn.conv2.bias, padding=1).relu(), 2)
    assert x.shape == (3, 64, 2, 2)
    torch.testing.assert_close(cnn(images), x.flatten(1) @ cnn.fc.weight.T + cnn.fc.bias)


def test_the_linear_net_is_logistic_regression_and_the_cnn_of_dp_sinkhorn_is_its_description():
    images = torch.rand(3, 2, 20, 19)
    linear = Linear((2, 20, 19), 4)
    torch.testing.assert_close(linear(images), images.flatten(1) @ linear.fc.weight.T + linear.fc.bias)
    cnn = SinkhornCnn((2, 20, 19), 4).eval()
    x = F.max_pool2d(F.conv2d(images, cnn.conv1.weight, cnn.conv1.bias), 2).relu()
    x = F.max_pool2d(F.conv2d(x, cnn.conv2.weight, cnn.conv2.bias), 2).relu()
    x = F.conv2d(x, cnn.conv3.weight, cnn.conv3.bias).relu().flatten(1)
    assert x.shape == (3, 128)
    torch.testing.assert_close(cnn(images), cnn.fc2(cnn.fc1(x).relu()))


def test_the_cnn_of_dp_sinkhorn_drops_channels_of_maps_and_units_of_the_linear_layer():
    """In training, with the masks of PyTorch's modules that the authors' code has at these places."""
    cnn, images = SinkhornCnn((1, 28, 28), 10).train(), torch.rand(2, 1, 28, 28)
    torch.manual_seed(0)
    got = cnn(images)
    torch.manual_seed(0)
    channels, units = torch.nn.Dropout2d(0.5), torch.nn.Dropout(0.5)
    x = channels(F.max_pool2d(cnn.conv1(images), 2).relu())
    x = channels(F.max_pool2d(cnn.conv2(x), 2).relu())
    dropped = (x == 0).flatten(2).all(2)
    assert dropped.any()
    assert not dropped.all()
    torch.testing.assert_close(got, cnn.fc2(units(cnn.fc1(cnn.conv3(x).relu().flatten(1)).relu())))


@pytest.mark.parametrize("net", ["dpgan_cnn", "paper_cnn", "sinkhorn_cnn"])
def test_dropout_in_training_only(net):
    module, images = NETS[net]((1, 18, 18), 10), torch.rand(2, 1, 18, 18)
    assert not torch.equal(module(images), module(images))
    module.eval()
    assert torch.equal(module(images), module(images))


def test_paper_cnn_drops_with_its_own_probability():
    images = torch.rand(2, 1, 8, 8)
    none = PaperCnn((1, 8, 8), 10, dropout=0.0)
    assert torch.equal(none(images), none(images))
    everything = PaperCnn((1, 8, 8), 10, dropout=1.0)
    torch.testing.assert_close(everything(images), everything.fc.bias.expand(2, 10))


def test_vgg11_equals_that_of_torchvision_up_to_the_classifier():
    net, reference = Vgg11((3, 32, 32), 10).eval(), make_layers(cfgs["A"], batch_norm=True).eval()
    net.features.load_state_dict(reference.state_dict())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(net.features(images), reference(images))


def test_vgg11_pads_28_pixels_to_32():
    small, large = Vgg11((1, 28, 28), 10).eval(), Vgg11((1, 32, 32), 10).eval()
    large.load_state_dict(small.state_dict())
    images = torch.rand(2, 1, 28, 28)
    torch.testing.assert_close(small(images), large(F.pad(images, (2, 2, 2, 2))))


# Pixels


def test_pixels_are_scaled_then_normalised():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(3, 1, 1, 1)
    torch.testing.assert_close(network_input(images, None).flatten(), torch.tensor([0.0, 0.2, 1.0]))
    torch.testing.assert_close(network_input(images, (0.2, 0.5)).flatten(), torch.tensor([-0.4, 0.0, 1.6]))


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"net": "resnet"},
            "expected net among conv_net, dpgan_cnn, linear, paper_cnn, paper_mlp, sinkhorn_cnn, vgg11, got 'resnet'",
        ),
        ({"optimiser": "lion"}, "expected optimiser among adam, sgd"),
        ({"keep": "worst"}, "expected keep among best, last"),
        ({"augment": "cutout"}, "expected augment among none, crop_flip, crop_scale_rotate"),
        ({"net_params": {"dropout": 0.1}}, r"paper_mlp takes hidden as net_params, got \['dropout'\]"),
        ({"net": "vgg11", "net_params": {"hidden": 1}}, "vgg11 takes nothing"),
        ({"momentum": 0.9}, "expected momentum with optimiser sgd only"),
        ({"epochs": 0}, "epochs of 1 or more"),
        ({"batch_size": 0}, "batch_size and epochs of 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate above 0"),
        ({"holdout": -1}, "whole number or a fraction below 1"),
        ({"holdout": 1.5}, "whole number or a fraction below 1"),
        ({"keep": "best"}, "expected a holdout above 0"),
        ({"patience": 3}, "expected a holdout above 0"),
        ({"holdout": 10, "patience": 0}, "patience of 1 epoch or more"),
        ({"normalise": (0.5, 0.0)}, "a mean and a deviation above 0"),
        ({"normalise": (0.5,)}, "a mean and a deviation above 0"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        Network(**{"net": "paper_mlp"} | settings)


def test_from_yaml_and_to_another_process():
    yaml = """
      _target_: dpgen_bench.evaluate.networks.Network
      net: paper_cnn
      net_params: {dropout: 0.25}
      optimiser: sgd
      milestones: [40, 45]
      normalise: [0.1307, 0.3081]
    """
    network = instantiate(OmegaConf.create(yaml), _convert_="all")
    expected = Network("paper_cnn", {"dropout": 0.25}, "sgd", milestones=(40, 45), normalise=(0.1307, 0.3081))
    assert network == expected == pickle.loads(pickle.dumps(network))
    assert fingerprint(network) == fingerprint(expected) != fingerprint(Network("paper_cnn"))
    assert isinstance(hash(network), int)


def test_one_core_on_a_cpu_only():
    assert DPGAN.one_core("cpu")
    assert DPGAN.one_core(torch.device("cpu"))
    assert not DPGAN.one_core("cuda")
