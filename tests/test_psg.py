"""PSG: the released set, gradient matching against its formulas, accounting, and metrics of finite sets."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.fidelity import Fid
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.image_set import ImageSet, MatchNet, PriorSet, cosine_distance
from dpgen_bench.privacy.accountants.calibration import calibrate_std
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from methods.psg import PSG
from tests.defaults import build, check_settings
from tests.toys import records

TINY: dict[str, Any] = check_settings("psg")


class Seen(Context):
    """A context that stores the states of the method's loop before its first step."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
        self.total, self.stateful = total, stateful
        self.first = {name: copy.deepcopy(stateful[name]) for name in ("images", "net")}
        return super().steps(total, phase=phase, **stateful)


def fit(n: int = 12, **settings: Any) -> tuple[NetGenerator, Seen]:
    services = Services(Ledger(Budget(math.inf, 1e-5, "add_remove", "rdp"), n), Key.seeded("test"))
    data = PrivateData(*records(n), 10, services)
    ctx = Seen(3, services=services)
    generator = build(PSG, **{**TINY, **settings}).fit(data, ctx)
    assert isinstance(generator, NetGenerator)
    return generator, ctx


def test_the_classifier_has_the_papers_number_of_parameters() -> None:
    assert sum(p.numel() for p in MatchNet((1, 28, 28), 10).parameters()) == 317_706


def test_scale_and_shift_are_those_of_instance_normalisation() -> None:
    torch.manual_seed(0)
    net = MatchNet((1, 28, 28), 10, width=4)
    for layer in net.affine:
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
    x = torch.rand(3, 1, 28, 28) * 2.0 - 1.0
    h = F.pad(x, (2, 2, 2, 2), value=-1.0)
    for convolution, affine in zip(net.convolutions, net.affine, strict=True):
        h = F.instance_norm(convolution(h), weight=affine.weight.flatten(), bias=affine.bias)
        h = F.avg_pool2d(F.relu(h), 2)
    torch.testing.assert_close(net(x), net.linear(h.flatten(1)), atol=1e-5, rtol=1e-5)


def test_the_distance_is_the_sum_of_one_minus_cosines_over_output_channels() -> None:
    a, b = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    expected = sum(1.0 - float((p * q).sum() / (p.norm() * q.norm())) for p, q in zip(a, b, strict=True))
    assert cosine_distance({"w": a, "v": b}, {"w": b, "v": 3.0 * b}).item() == pytest.approx(expected, abs=1e-5)
    assert cosine_distance({"w": a}, {"w": -a}).item() == pytest.approx(6.0, abs=1e-5)


def test_an_update_moves_the_images_towards_the_gradient_of_all_records() -> None:
    """One release of all records without noise; SGD's first step is -lr times the gradient of the distance."""
    generator, ctx = fit(batch_size=12, networks=1, rounds=1, updates=1, epochs=0, lr_images=0.3)
    assert ctx.total == 1
    net, before = ctx.stateful["net"], ctx.first["images"].images.detach()  # reset() in step 0, and not trained
    x, y = records(12)
    names, weights = list(net.matched()), list(net.matched().values())
    assert names == ["convolutions.0.weight", "convolutions.1.weight", "convolutions.2.weight", "linear.weight"]
    loss = F.cross_entropy(net(2.0 * x.float() / 255.0 - 1.0), y, reduction="sum")
    private = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))

    images = before.clone().requires_grad_()
    labels = torch.arange(10).repeat_interleave(2)
    own = torch.autograd.grad(F.cross_entropy(net(images.flatten(0, 1)), labels), weights, create_graph=True)
    (gradient,) = torch.autograd.grad(cosine_distance(dict(zip(names, own, strict=True)), private), [images])
    assert gradient.abs().max() > 1e-3
    moved = generator.net.images.detach() - before  # type: ignore[operator]
    torch.testing.assert_close(moved, -0.3 * gradient, atol=1e-4, rtol=1e-3)


def test_with_a_prior_the_parameters_of_a_generator_follow_the_gradient_and_the_set_is_what_it_draws() -> None:
    """One release of all records without noise; Adam's first step is lr times the sign of the gradient."""
    generator, ctx = fit(prior="dcgan", batch_size=12, networks=1, rounds=1, updates=1, epochs=0, lr_prior=0.002)
    net, before, after = ctx.stateful["net"], ctx.first["images"], generator.net
    assert isinstance(after, PriorSet)
    torch.testing.assert_close(after.optimised().reshape(after.images.shape), after.images)
    assert torch.equal(before.latents, after.latents)
    names, weights = list(net.matched()), list(net.matched().values())
    x, y = records(12)
    loss = F.cross_entropy(net(2.0 * x.float() / 255.0 - 1.0), y, reduction="sum")
    private = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
    own = torch.autograd.grad(F.cross_entropy(net(before.optimised()), before.labels), weights, create_graph=True)
    parameters = dict(before.named_parameters())
    gradients = torch.autograd.grad(cosine_distance(dict(zip(names, own, strict=True)), private), parameters.values())
    for name, gradient in zip(parameters, gradients, strict=True):
        moved, large = after.get_parameter(name) - parameters[name], gradient.abs() > 1e-3
        torch.testing.assert_close(moved[large], -0.002 * gradient[large].sign(), atol=1e-6, rtol=1e-2)
    assert sum(int((gradient.abs() > 1e-3).sum()) for gradient in gradients) > 1000


def test_classifiers_are_drawn_again_and_trained_on_the_images_after_each_round() -> None:
    _, untrained = fit(networks=1, rounds=1, updates=2, epochs=0)
    _, trained = fit(networks=1, rounds=1, updates=2, epochs=3)
    _, again = fit(networks=2, rounds=1, updates=2, epochs=0)
    one, two, three = (ctx.stateful["net"].linear.weight for ctx in (untrained, trained, again))
    assert not torch.equal(one, two)
    assert not torch.equal(one, three)
    images, labels = untrained.stateful["images"].images.flatten(0, 1), torch.arange(10).repeat_interleave(2)
    method, net = build(PSG, **{**TINY, "epochs": 30, "lr_net": 0.05}), untrained.stateful["net"]
    before = F.cross_entropy(net(images), labels).item()
    method.train(net, images.detach(), labels, torch.Generator().manual_seed(0))
    assert F.cross_entropy(net(images), labels).item() < 0.8 * before


def drawn(generator: Generator, n: int = 400) -> tuple[Tensor, Tensor]:
    labels = torch.arange(n) % 10
    return generator.sample(labels, seed=0), labels


@pytest.mark.parametrize("prior", ["none", "dcgan"])
def test_samples_are_images_of_the_set_of_their_class_drawn_with_replacement(tmp_path: Path, prior: str) -> None:
    generator, _ = fit(prior=prior)
    assert generator.set_size == 20
    x, y = drawn(generator)
    stored = ((generator.net.images.detach() + 1.0) / 2.0).clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)  # type: ignore[operator]
    for label in range(10):
        own = x[y == label].flatten(1)
        counts = [int((own == image.flatten()).all(dim=1).sum()) for image in stored[label]]
        assert sum(counts) == len(own)
        assert min(counts) >= 8  # of 40, by a fair coin: 8 or fewer with probability 1e-4
    generator.save(tmp_path)
    loaded = Generator.load(tmp_path)
    assert loaded.set_size == 20
    assert torch.equal(drawn(loaded)[0], x)


def test_fid_of_a_finite_set_is_not_measured(tmp_path: Path) -> None:
    samples = Records(torch.zeros(4, 1, 28, 28, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    ctx = EvalContext(0, "cpu", 10, tmp_path, set_size=200)
    with pytest.raises(NotMeasured, match="200 images: the generator is a finite set"):
        Fid()(samples, samples, ctx)


def test_the_set_has_a_default_latent_interval() -> None:
    net = ImageSet((1, 2, 2), 3, 1, 4)
    assert net.set_size == 12
    y = torch.tensor([2, 2, 2, 0])
    chosen = net(torch.tensor([[0.0], [0.26], [1.0], [0.5]]), y)
    torch.testing.assert_close(chosen, net.images[y, torch.tensor([0, 1, 3, 2])])


@pytest.mark.parametrize(
    ("images", "rounds", "eps", "sigma", "proven"),
    [(10, 10, 10, 0.9657, 9.29), (10, 10, 1, 5.510, 0.915), (20, 20, 10, 1.2136, 9.31), (20, 20, 1, 7.756, 0.915)],
)
def test_the_noise_of_the_published_settings(images: int, rounds: int, eps: int, sigma: float, proven: float) -> None:
    method = build(PSG, images_per_class=images, rounds=rounds)
    times = method.networks * method.rounds * method.updates
    assert times == 10_000 * rounds
    sampling, unit = Poisson(method.batch_size / 60_000), Sensitivity(1.0, 2.0)
    std = calibrate_std(Budget(eps, 1e-5, "add_remove", "rdp"), [], sampling, unit, times)
    assert std == pytest.approx(sigma, rel=2e-3)
    event = Event(sampling, unit, std, times)
    assert epsilon([event], 1e-5, "add_remove", "pld") == pytest.approx(proven, abs=0.02)


@pytest.mark.parametrize(
    ("setting", "value"), [("images_per_class", 0), ("rounds", 0), ("epochs", -1), ("momentum", 1.0)]
)
def test_wrong_settings_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"method.{setting}"):
        build(PSG, **{**TINY, setting: value})
