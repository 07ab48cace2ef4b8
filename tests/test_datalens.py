"""DataLens: one step by hand, the signs of a teacher, its sensitivity, and what the authors' settings prove."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.datasets import Mnist
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import DenseTeacher
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.shards import PerShard
from methods.datalens import DataLens
from tests.defaults import build

SHAPE, CLASSES, PIXELS = (1, 8, 8), 3, 64
TINY: dict[str, Any] = dict(
    teachers=4, steps=2, batch_size=5, top_k=7, width=4, latent_dim=4, teacher="dense", teacher_width=6, stack=3
)
IMAGES = torch.rand(20, *SHAPE, generator=torch.Generator().manual_seed(7))
LABELS = torch.arange(20) % CLASSES


def answers(max_grad: float, updates: int = 1, **settings: Any) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """The signs of two teachers for five images, their states, and the exact gradients and labels of the images."""
    method = build(DataLens, **{**TINY, "max_grad": max_grad, **settings})
    make = partial(DenseTeacher, SHAPE, CLASSES, 6)
    rngs = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    states = Stack.initial(make, rngs)
    torch.manual_seed(0)
    x, y = torch.rand(5, *SHAPE), torch.arange(5) % CLASSES
    shards = [(IMAGES[:10], LABELS[:10]), (IMAGES[10:10], LABELS[10:10])]  # the second has no record
    signs, after = method._signs(make(), updates, 7, x, y, shards, states, rngs)
    gradients = []
    for g in range(2):
        net = make()
        net.load_state_dict({name: value[g] for name, value in after.items() if name in net.state_dict()})
        images = x.clone().requires_grad_()
        F.logsigmoid(net(images, y)).mean().backward()
        assert images.grad is not None
        gradients.append(images.grad.flatten(1))
    return signs, after, torch.stack(gradients), y


def test_a_teacher_answers_with_the_signs_of_its_largest_gradients() -> None:
    """With a scale far below the gradients, no sign is random."""
    signs, _, gradient, _ = answers(max_grad=1e-12)
    assert signs.shape == (2, 5, PIXELS)
    assert (signs.abs().sum(dim=2) == 7).all()
    largest = gradient.abs().topk(7, dim=2).values[:, :, -1:]
    assert (gradient.abs() >= largest * 0.9999)[signs != 0].all()
    assert torch.equal(signs[signs != 0], gradient.sign()[signs != 0])


def test_random_signs_have_the_gradient_as_their_mean() -> None:
    """With the largest coordinate as the scale b, the mean sign is g / b: sure at the largest, random elsewhere."""
    signs, _, gradient, _ = answers(max_grad=1e9)
    sure = (gradient.abs() == gradient.abs().amax(dim=2, keepdim=True)) & (signs != 0)
    assert torch.equal(signs[sure], gradient.sign()[sure])
    method = build(DataLens, **{**TINY, "batch_size": 4000, "max_grad": 1e9})
    make = partial(DenseTeacher, SHAPE, CLASSES, 6)
    states = Stack.initial(make, [torch.Generator().manual_seed(1)])
    x, y = torch.rand(1, *SHAPE).expand(4000, *SHAPE), torch.zeros(4000, dtype=torch.int64)
    images = x[:1].clone().requires_grad_()
    rng = [torch.Generator().manual_seed(3)]
    signs, after = method._signs(make(), 1, PIXELS, x, y, [(IMAGES, LABELS)], states, rng)
    net = make()
    net.load_state_dict({name: value[0] for name, value in after.items() if name in net.state_dict()})
    F.logsigmoid(net(images, y[:1])).sum().backward()  # a mean would scale all coordinates
    assert images.grad is not None
    g = images.grad.flatten()
    assert torch.allclose(signs[0].mean(dim=0), g / g.abs().max(), atol=5 / math.sqrt(4000))


def test_each_update_trains_the_teachers_on_their_own_records() -> None:
    once, twice = answers(1e-5, updates=1)[1], answers(1e-5, updates=2)[1]
    assert float(once["step"][0]) == 1
    assert float(twice["step"][0]) == 2
    assert not torch.equal(once["image.weight"][0], once["image.weight"][1])


def fit(**settings: Any) -> tuple[Ledger, Context, list[Tensor]]:
    ledger = Ledger(Budget(math.inf, 1e-5, "replace_one", "pld"), len(LABELS))
    services = Services(ledger, Key.seeded("test"))
    data = PrivateData(IMAGES, LABELS, CLASSES, services)
    context = Context(3, services=services)
    generator = build(DataLens, **{**TINY, **settings}).fit(data, context)
    data.close()
    return ledger, context, list(generator.net.parameters())


def test_more_teachers_than_records_are_refused_before_a_release() -> None:
    with pytest.raises(ValueError, match=r"method.teachers: expected K <= N = 20 records, got 21"):
        fit(sigma=1.0, threshold=0.5, teachers=21)


def test_a_release_has_the_sensitivity_of_one_teacher_and_no_pixel_moves_without_agreement() -> None:
    ledger, context, trained = fit(sigma=1e-6, threshold=1.0)
    (event,) = ledger.events
    assert event.sensitivity.add_remove == event.sensitivity.replace_one == pytest.approx(2 * math.sqrt(5 * 7))
    assert event.std == 1e-6
    assert event.times == 2
    # More than all four teachers never agree, so nothing is learnt: Adam makes steps of size 0.
    untrained = fit(sigma=1e-6, threshold=1.0, steps=1)[2]
    assert all(torch.equal(one, other) for one, other in zip(trained, untrained, strict=True))
    assert context.history[0]["share_of_agreement"] == 0.0
    moved = fit(sigma=1e-6, threshold=0.0)[2]
    assert not all(torch.equal(one, other) for one, other in zip(trained, moved, strict=True))


@pytest.mark.parametrize(
    ("preset", "steps", "k", "proven"),
    [("mnist", 86, 200, 0.738), ("mnist_eps10", 109, 300, 8.496), ("fashion_mnist_eps10", 146, 350, 8.497)],
)
def test_the_authors_settings_prove_less_than_they_claim(preset: str, steps: int, k: int, proven: float) -> None:
    """The claimed value is the authors' count, which is the last below the target."""
    config = compose_config([f"experiment=datalens/{preset}"])
    method = build_spec(config).method()
    assert (method.teachers, method.steps, method.top_k, method.batch_size) == (4000, steps, k, 15)
    sensitivity = PerShard(C=math.sqrt(15 * k), shape=(15, 784)).sensitivity

    def event(times: int) -> Event:
        return Event(EveryShard(4000), sensitivity, method.sigma, times)

    for relation in ("add_remove", "replace_one"):
        assert epsilon([event(steps)], 1e-5, relation, "pld") == pytest.approx(proven, rel=1e-3)
    target = float(config.privacy.epsilon)
    assert method.epsilon_claimed([event(steps)], 1e-5) <= target < method.epsilon_claimed([event(steps + 1)], 1e-5)


@pytest.mark.parametrize("data", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("eps", ["", "_eps10"])
def test_the_reduced_presets_differ_in_the_teachers_alone(data: str, eps: str) -> None:
    full, reduced = (compose_config([f"experiment=datalens/{name}{data}{eps}"]) for name in ("", "reduced_"))
    changed = {key for key in full.method if full.method[key] != reduced.method[key]}
    assert changed == {"teacher", "teacher_width", "stack"}
    assert reduced.scale.name == "reduced"
    assert full.privacy == reduced.privacy


def test_the_authors_shards_take_some_records_of_mnist_twice(data_root: Path) -> None:
    """Their 4,000 shards of 15 records take 6,000 records of each class, in turn, and begin a class again."""
    if not (data_root / "MNIST").is_dir():
        pytest.skip(f"no MNIST below {data_root}")
    numbers = torch.bincount(Mnist(root=str(data_root)).load("train").labels).tolist()
    assert [max(6000 - number, 0) for number in numbers] == [77, 0, 42, 0, 158, 579, 82, 0, 149, 51]
    assert sum(max(6000 - number, 0) for number in numbers) == 1138


@pytest.mark.parametrize(("k", "sigma", "steps", "proven"), [(300, 800.0, 109, 20.41), (200, 5000.0, 86, 1.582)])
def test_what_a_record_in_two_shards_costs_at_the_authors_noise(
    k: int, sigma: float, steps: int, proven: float
) -> None:
    moved = 2 * PerShard(C=math.sqrt(15 * k), shape=(15, 784)).sensitivity.replace_one
    event = Event(EveryShard(4000), Sensitivity(moved, moved), sigma, steps)
    assert epsilon([event], 1e-5, "replace_one", "pld") == pytest.approx(proven, rel=1e-3)
