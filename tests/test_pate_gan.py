"""PATE-GAN against its formulas: votes of teachers, the noise, the labels of the student, and the generator's steps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, config_of, make_net
from dpgen_bench.method import Context, Scale
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.teachers import DenseTeacher
from dpgen_bench.nets.wasserstein import draw_batch
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.events import RELATIONS, Budget, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import EveryShard
from dpgen_bench.privacy.services import Services
from methods.pate_gan import PATEGAN
from tests.defaults import build
from tests.toys import Watcher

SHAPE, SEED, CLASSES = (1, 28, 28), 3, 2
TINY: dict[str, Any] = dict(
    teachers=3,
    rounds=2,
    batch_size=4,
    votes=8,
    n_teacher=2,
    n_student=2,
    n_generator=2,
    hidden=6,
    student_width=4,
    teacher_width=5,
    stack=2,
)
IMAGES = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(7))
LABELS = torch.arange(12) % CLASSES


class Format:
    image_shape, num_classes = SHAPE, CLASSES


def fit(
    eps: float = math.inf, scale: Scale | None = None, **changes: Any
) -> tuple[Watcher, Context, Ledger, NetGenerator]:
    watcher, ledger = Watcher(), Ledger(Budget(eps, 1e-5, "replace_one", "pld"), len(LABELS))
    data = PrivateData(IMAGES, LABELS, CLASSES, Services(ledger, Key.seeded("test"), observer=watcher))
    context = Context(SEED, services=data._services, scale=scale)
    generator = build(PATEGAN, **{**TINY, **changes}).fit(data, context)
    return watcher, context, ledger, generator


def test_a_round_is_one_release_of_a_vote_for_each_image_and_spends_the_budget() -> None:
    _, _, ledger, _ = fit(eps=2.0)
    (entry,) = ledger.entries.values()
    assert entry.event.sampling == EveryShard(3)
    assert entry.event.sensitivity == Sensitivity(math.sqrt(8), math.sqrt(8))
    assert (entry.event.times, entry.bound["bins"], entry.bound["votes"]) == (2, 8, 8)
    for relation in RELATIONS:
        assert epsilon(ledger.events, 1e-5, relation, "pld") == pytest.approx(2.0, abs=2e-3)


def test_stated_noise_and_the_scale_limit_the_rounds() -> None:
    _, context, ledger, _ = fit(eps=50.0, scale=Scale("quick", 1), sigma=40.0)
    (entry,) = ledger.entries.values()
    assert (entry.event.std, entry.event.times, context.steps_done["train"]) == (40.0, 1, 1)


@pytest.mark.parametrize("vote", ["sign", "median"])
def test_teachers_of_a_group_learn_and_vote_as_plain_networks(vote: str) -> None:
    make = partial(make_net, config_of(DenseTeacher, Format, width=5), torch.device("cpu"))
    states = Stack.initial(make, [torch.Generator().manual_seed(seed) for seed in range(2)])
    rng = torch.Generator().manual_seed(1)
    fakes = [(torch.rand(4, *SHAPE, generator=rng), torch.tensor([0, 1, 1, 0])) for _ in range(2)]
    shards = [(IMAGES[:5], LABELS[:5]), (IMAGES[5:12], LABELS[5:12])]
    x, y = torch.rand(8, *SHAPE, generator=rng), torch.arange(8) % CLASSES
    lr_d = 0.005  # a step of Adam divides by the gradient, and so enlarges the rounding of one near 0, up to lr_d
    method = build(PATEGAN, **{**TINY, "lr_d": lr_d, "vote": vote})
    rngs = [torch.Generator().manual_seed(seed) for seed in (9, 10)]
    votes, after = method._votes(make(), fakes, x, y, shards, states, rngs)
    assert votes.shape == (2, 8)
    for place, shard in enumerate(shards):
        net, batches = make(), torch.Generator().manual_seed(9 + place)
        net.load_state_dict({name: states[name][place] for name in net.state_dict()})
        adam = torch.optim.Adam(net.parameters(), lr_d, (0.5, 0.9))
        for fake, labels in fakes:
            real, real_labels = draw_batch(shard, 4, batches)
            logits, target = torch.cat([net(real, real_labels), net(fake, labels)]), torch.tensor([1.0, 0.0])
            adam.zero_grad()
            (2.0 * F.binary_cross_entropy_with_logits(logits, target.repeat_interleave(4))).backward()
            adam.step()
        for name, value in net.state_dict().items():
            torch.testing.assert_close(after[name][place], value, rtol=1e-4, atol=1e-5)
        logits = net(x, y).tolist()
        order = {label: sorted(logits[label::CLASSES]) for label in range(CLASSES)}
        least = {label: 0.0 if vote == "sign" else values[1] for label, values in order.items()}  # the second of four
        expected = [image if logit > least[image % CLASSES] else -1 for image, logit in enumerate(logits)]
        assert votes[place].tolist() == expected


@pytest.mark.parametrize(("target", "explore"), [("majority", 0.0), ("share", 0.3)])
def test_the_student_learns_from_votes_alone_and_the_generator_from_the_student(target: str, explore: float) -> None:
    """One round by hand, with the released counts."""
    watcher, _, _, generator = fit(eps=20.0, rounds=1, target=target, explore=explore)
    ((_, _, counts),) = watcher.releases
    torch.manual_seed(SEED)
    G = make_net(config_of(CodeGenerator, Format, latent_dim=16, hidden=6), torch.device("cpu"))
    S = make_net(config_of(DenseTeacher, Format, width=4, pool=2), torch.device("cpu"))
    public = torch.Generator().manual_seed(SEED)

    def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        z, y = torch.randn(n, 16, generator=public), torch.randint(CLASSES, (n,), generator=public)
        return G(z, y), y

    adam_G, adam_S = (torch.optim.Adam(net.parameters(), lr, (0.5, 0.9)) for net, lr in ((G, 1e-3), (S, 3e-3)))
    with torch.no_grad():
        for _ in range(2):  # images for the teachers, which also move the running means of the generator
            images(4)
        x, y = images(8)
        x = x + explore * torch.randn(8, 1, 14, 14, generator=public).repeat_interleave(2, 2).repeat_interleave(2, 3)
    real = counts / 3 if target == "share" else (counts > 1.5).float()
    assert len(set(real.tolist())) > 1
    for _ in range(2):
        for batch in torch.randperm(8, generator=public).split(4):
            probability = torch.sigmoid(S(x[batch], y[batch]))
            adam_S.zero_grad()
            entropy = -(real[batch] * probability.log() + (1.0 - real[batch]) * (1.0 - probability).log())
            (entropy if target == "majority" else (probability - real[batch]) ** 2).mean().backward()
            adam_S.step()
    for _ in range(2):
        x, y = images(4)
        adam_G.zero_grad()
        torch.log(1.0 - torch.sigmoid(S(x, y))).mean().backward()
        adam_G.step()
    for name, value in G.state_dict().items():
        # Biases before batch norm have the gradient 0, whose rounding Adam makes a part of a step (1e-3).
        torch.testing.assert_close(generator.net.state_dict()[name], value, rtol=1e-4, atol=1e-4)


def test_more_teachers_than_records_are_refused_before_a_release() -> None:
    with pytest.raises(ValueError, match=r"method.teachers: expected K <= N = 12 records, got 13"):
        fit(eps=2.0, teachers=13)


@pytest.mark.parametrize(
    "setting",
    [{"teachers": 0}, {"rounds": 0}, {"batch_size": 1}, {"votes": 1}, {"sigma": 0.0}, {"betas": [0.5, 1.0]}],
)
def test_settings_outside_their_range_are_refused(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=name):
        build(PATEGAN, **setting)


@pytest.mark.parametrize(
    ("lam", "target", "votes"), [(0.01, 1, 104), (0.01, 10, 7_702), (0.001, 1, 10_405), (0.001, 10, 770_294)]
)
def test_votes_that_the_papers_bound_for_any_votes_allows(lam: float, target: float, votes: int) -> None:
    """A vote has a log moment of at most 2 λ² k (k + 1) at order k, and ε = min over k of (T moment + log(1/δ)) / k."""
    allowed = max((target * k - math.log(1e5)) / (2 * lam**2 * k * (k + 1)) for k in range(1, 101))
    assert int(allowed) == votes
