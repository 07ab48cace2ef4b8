"""G-PATE against its formulas: votes for bins, winners, the generator's step, and what the printed settings prove."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, config_of, make_net
from dpgen_bench.method import Context
from dpgen_bench.nets.g_pate import ConvTeacher, PateGenerator
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import DenseTeacher
from dpgen_bench.nets.wasserstein import draw_batch
from dpgen_bench.privacy.accountants.calibration import calibrate_times
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.votes import Votes
from methods.g_pate import GPATE
from tests.bench.teachers import Planes
from tests.defaults import build
from tests.toys import Watcher

SHAPE, SEED, CLASSES = (1, 28, 28), 3, 2
TINY: dict[str, Any] = dict(
    teachers=3, steps=2, batch_size=3, dims=2, bins=4, sigma=None, latent_dim=4, width=4, teacher_width=4, stack=2
)
IMAGES = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(7))
LABELS = torch.arange(12) % CLASSES


class Format:
    image_shape, num_classes = SHAPE, CLASSES


def fit(eps: float = math.inf, **changes: Any) -> tuple[Watcher, Ledger, NetGenerator]:
    watcher, ledger = Watcher(), Ledger(Budget(eps, 1e-5, "replace_one", "pld"), len(LABELS))
    data = PrivateData(IMAGES, LABELS, CLASSES, Services(ledger, Key.seeded("test"), observer=watcher))
    generator = build(GPATE, **{**TINY, **changes}).fit(data, Context(SEED, services=data._services))
    return watcher, ledger, generator


def test_networks_have_the_sizes_of_the_authors_code() -> None:
    assert sum(parameter.numel() for parameter in ConvTeacher(SHAPE, 10).parameters()) == 555_059
    assert PateGenerator(SHAPE, 10, 50)(torch.rand(2, 50), torch.arange(2)).shape == (2, *SHAPE)
    assert ConvTeacher((3, 32, 32), 2)(torch.rand(2, 3, 32, 32), torch.arange(2)).shape == (2,)
    for net in (ConvTeacher, PateGenerator):
        with pytest.raises(ValueError, match="expected square images whose side is a multiple of 4"):
            net((1, 30, 30), 10)


@pytest.mark.parametrize("shape", [SHAPE, (3, 8, 8)])
def test_a_teacher_sees_the_label_as_constant_planes(shape: tuple[int, int, int]) -> None:
    teacher, plain = (net(shape, 3, width=5, filters=4).double() for net in (ConvTeacher, Planes))
    plain.load_state_dict(teacher.state_dict())
    x, y = torch.rand(4, *shape, dtype=torch.float64, requires_grad=True), torch.tensor([2, 0, 1, 2])
    torch.testing.assert_close(teacher(x, y), plain(x, y))
    weights = torch.randn(4, dtype=torch.float64)
    gradients = [torch.autograd.grad(weights @ net(x, y), [x, *net.parameters()]) for net in (teacher, plain)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_is_one_histogram_of_votes() -> None:
    watcher, ledger, _ = fit(eps=2.0)
    (entry,) = ledger.entries.values()
    assert entry.event.sampling == EveryShard(3)
    assert (entry.bound["bins"], entry.bound["votes"], entry.event.times) == (24, 6, 2)
    assert entry.event.sensitivity == Sensitivity(math.sqrt(12), math.sqrt(12))
    for _, exact, _ in watcher.releases:
        assert exact.reshape(3, 2, 4).sum(dim=2).tolist() == [[3.0, 3.0]] * 3, (
            "each teacher has a vote in each dimension"
        )


def test_a_teacher_votes_for_the_bin_of_its_projected_gradient() -> None:
    make = partial(make_net, config_of(DenseTeacher, Format, width=5), torch.device("cpu"))
    states = Stack.initial(make, [torch.Generator().manual_seed(0)])
    x, y = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(5)), torch.tensor([0, 1, 1])
    basis = torch.randn(3, 784, 2, generator=torch.Generator().manual_seed(6))
    method = build(GPATE, **{**TINY, "clip": 3e-3})
    shard = (IMAGES[:5], LABELS[:5])
    votes, after = method._votes(make(), x, y, basis, [shard], states, [torch.Generator().manual_seed(9)])

    net = make()
    net.load_state_dict({name: states[name][0] for name in net.state_dict()})
    adam = torch.optim.Adam(net.parameters(), 1e-3, (0.5, 0.999))
    real, labels = draw_batch(shard, 3, torch.Generator().manual_seed(9))
    loss = F.binary_cross_entropy_with_logits(net(real, labels), torch.ones(3))
    (loss + F.binary_cross_entropy_with_logits(net(x, y), torch.zeros(3))).backward()
    adam.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(after[name][0], value, rtol=1e-4, atol=1e-5)
    images = x.clone().requires_grad_()
    F.binary_cross_entropy_with_logits(net(images, y), torch.ones(3)).backward()
    assert images.grad is not None
    edges = torch.tensor([-1.5e-3, 0.0, 1.5e-3])  # four bins of [-3e-3, 3e-3]
    expected = []
    for image in range(3):
        projected = -images.grad[image].flatten() @ basis[image]
        bins = torch.bucketize(projected, edges, right=True)
        expected += [image * 8 + dim * 4 + int(place) for dim, place in enumerate(bins)]
    assert votes[0].tolist() == expected
    assert len({vote % 4 for vote in expected}) > 1


@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_the_generator_moves_towards_the_winning_bins_that_have_enough_votes(threshold: float) -> None:
    watcher, _, generator = fit(eps=40.0, steps=1, threshold=threshold)
    ((_, _, noisy),) = watcher.releases
    torch.manual_seed(SEED)
    G = make_net(config_of(PateGenerator, Format, latent_dim=4, width=4), torch.device("cpu"))
    adam = torch.optim.Adam(G.parameters(), 1e-3, (0.5, 0.999))
    public = torch.Generator().manual_seed(SEED)
    z, y = torch.rand(3, 4, generator=public), torch.randint(CLASSES, (3,), generator=public)
    basis = torch.randn(3, 784, 2, generator=public) / math.sqrt(2)
    x = G(z, y)
    centres = [-0.75e-4, -0.25e-4, 0.25e-4, 0.75e-4]
    goal = x.detach().clone()
    skipped = 0
    for image, counts in enumerate(noisy.reshape(3, 2, 4)):
        for dim in range(2):
            if float(counts[dim].max()) < threshold * 3:
                skipped += 1
                continue
            goal[image] += centres[int(counts[dim].argmax())] * basis[image, :, dim].reshape(SHAPE)
    assert skipped < 6
    adam.zero_grad()
    (0.5 * (x.double() - goal.double()).square().sum()).backward()
    adam.step()
    for name, value in generator.net.state_dict().items():
        torch.testing.assert_close(value, G.state_dict()[name], rtol=1e-2, atol=2e-4)


def printed(name: str) -> tuple[GPATE, Event]:
    """A method with printed settings, and the release of one of its steps."""
    method = build_method(compose_config([f"experiment=g_pate/{name}"]))
    assert isinstance(method, GPATE)
    assert method.sigma is not None
    votes = method.batch_size * method.dims
    bound = Votes(bins=votes * method.bins, k=votes, voters="shards")
    return method, Event(EveryShard(method.teachers), bound.sensitivity, method.sigma, 1)


@pytest.mark.parametrize(("name", "eps", "steps"), [("mnist_eps10", 10.0, 66), ("mnist", 1.0, 239)])
def test_steps_that_a_proven_epsilon_allows_at_the_printed_noise(name: str, eps: float, steps: int) -> None:
    method, one = printed(name)
    assert method.batch_size == 60_000 // method.teachers
    budget = Budget(eps, 1e-5, "replace_one", "pld")
    assert calibrate_times(budget, [], one.sampling, one.sensitivity, one.std) == steps


def test_what_the_printed_number_of_steps_proves() -> None:
    """3,697 updates at a claimed epsilon of 10: the authors' count with votes of which most are in one bin."""
    _, one = printed("mnist_eps10")
    event = Event(one.sampling, one.sensitivity, one.std, 3697)
    assert epsilon([event], 1e-5, "replace_one", "pld") == pytest.approx(173.55, abs=0.05)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bins": 1}, r"method.bins: expected .*\[2, inf\).*, got 1"),
        ({"dims": 785}, "method.dims: expected d <= 784, the pixels of an image, got 785"),
        ({"teachers": 13}, "method.teachers: expected K <= N = 12 records, got 13"),
    ],
)
def test_settings_with_which_votes_say_nothing_are_refused_before_a_release(change: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        fit(eps=2.0, **change)


def test_either_noise_or_steps_must_be_stated() -> None:
    with pytest.raises(ValueError, match=r"method.sigma and method.steps are both null"):
        build(GPATE, sigma=None)
