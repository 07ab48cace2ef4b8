"""A client of federated GS-WGAN: its critic's training, its answer, and the records that it draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpgen_bench.nets.wasserstein import CriticTraining, draw_matching
from dpgen_bench.nets.wgan import ProjectionCritic
from methods import fed_gs_wgan
from methods.fed_gs_wgan import CriticClient
from tests import toys

SHAPE, B = (1, 28, 28), 4


def net(name: str, **sizes: int) -> dict[str, Any]:
    return {"_target_": f"dpgen_bench.nets.wgan.{name}", "image_shape": [*SHAPE], "num_classes": 10, "width": 2} | sizes


def program(n_critic: int = 2) -> CriticClient:
    training = CriticTraining(B, n_critic, drift=0.3, latent_dim=3, lr=1e-2)
    return CriticClient(training, net("ProjectionCritic"), net("DCGANGenerator", latent_dim=3), 1, 10)


def records(*labels: int) -> tuple[Tensor, Tensor]:
    return torch.rand(len(labels), *SHAPE, generator=toys.seeded(7)), torch.tensor(labels, dtype=torch.int64)


def message(*batches: list[int], seed: int = 1) -> dict[str, Tensor]:
    labels = torch.tensor(batches)
    return {"images": torch.rand(*labels.shape, *SHAPE, generator=toys.seeded(seed)), "labels": labels}


def plain(state: dict[str, Tensor]) -> ProjectionCritic:
    critic = ProjectionCritic(SHAPE, 10, width=2)
    critic.load_state_dict({name: state[name] for name in critic.state_dict()})
    return critic


def iterate(critic: ProjectionCritic) -> None:
    """One power iteration of each norm, as any forward pass in training mode makes."""
    with torch.no_grad():
        critic.train()(torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.int64))
    critic.eval()


def gradient_in(critic: ProjectionCritic, x: Tensor, y: Tensor) -> Tensor:
    iterate(critic)
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(-critic(x, y).sum(), x)
    return gradient


def test_the_gradient_is_that_of_the_stored_critic_in_the_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fed_gs_wgan, "draw_matching", lambda *args: None)  # no update before it
    asked, own = message([3] * B, [3, 5, 3, 5]), records(3, 5, 5)
    state = program().start(own, toys.seeded())
    gradient, after = program().answer(asked, own, state, toys.seeded())
    expected = gradient_in(plain(state), asked["images"][-1], asked["labels"][-1])
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-6)
    assert float(expected.flatten(1).norm(dim=1).min()) > 1e-3
    assert after == {}


def test_one_update_is_adams_step_on_the_loss_of_the_matching_records() -> None:
    """The loss, its gradient and the step, computed with a plain module and autograd."""
    asked, own, same = message([3, 5, 5, 3]), records(5, 3, 8, 3, 5), toys.seeded(4)
    client, (x,), (y,) = program(n_critic=1), asked["images"], asked["labels"]
    state = client.start(own, toys.seeded())
    gradient, after = client.answer(asked, own, state, toys.seeded(4))
    pairs = draw_matching(own, y, B, same)
    assert pairs is not None
    real, mix = pairs[1], torch.rand(1, B, 1, 1, 1, generator=same)[0]
    critic = plain(state)
    iterate(critic)
    adam = torch.optim.Adam(critic.parameters(), 1e-2, (0.5, 0.9))
    between = (mix * real + (1 - mix) * x).requires_grad_()
    (slopes,) = torch.autograd.grad(critic(between, y).sum(), between, create_graph=True)
    penalty = (slopes.flatten(1).norm(dim=1) - 1).square().mean()
    scores = critic(real, y)
    (critic(x, y).mean() - scores.mean() + 10 * penalty + 0.3 * scores.square().mean()).backward()
    adam.step()
    assert torch.allclose(gradient, gradient_in(critic, x, y), rtol=1e-3, atol=1e-6)
    assert all(torch.allclose(after[name], value, atol=1e-5) for name, value in critic.state_dict().items())
    for name, parameter in critic.named_parameters():
        moment = adam.state[parameter]["exp_avg"]
        assert torch.allclose(after[f"exp_avg.{name}"], moment, rtol=1e-3, atol=1e-5), name
        assert not torch.equal(after[name], state[name]), name
    assert float(after["step"]) == 1


def test_the_same_randomness_gives_the_same_answer_and_other_randomness_another() -> None:
    asked, own = message([3] * B, [5] * B), records(3, 5, 3, 5, 3)
    start, again = (program().start(own, toys.seeded()) for _ in range(2))
    (one, after), (same, kept), (other, _) = (program().answer(asked, own, start, toys.seeded(s)) for s in (1, 1, 2))
    for parts, others in ((start, again), (after, kept)):
        assert all(torch.equal(parts[name], others[name]) for name in parts)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_labels_without_records_train_nothing_and_have_zero_gradient() -> None:
    own, batches = records(3, 4, 3), ([5] * B, [3, 5, 4, 5], [5, 3, 5, 4])
    state, asked, changed = program().start(own, toys.seeded()), message(*batches), message(*batches, seed=2)
    strange = (asked["labels"] == 5)[..., None, None, None]
    changed["images"] = torch.where(strange, changed["images"], asked["images"])
    (one, after), (other, kept) = (program().answer(parts, own, state, toys.seeded(1)) for parts in (asked, changed))
    assert (one.flatten(1).norm(dim=1) > 0).tolist() == [False, True, False, True]
    assert (torch.equal(one, other), float(after["step"])) == (True, 2.0)
    assert all(torch.equal(after[name], kept[name]) for name in after)
    for holding in (own, records()):  # none of these, or no record at all
        start = program().start(holding, toys.seeded())
        nothing, unchanged = program().answer(message([5] * B, [9] * B), holding, start, toys.seeded(1))
        assert set(plain(start).state_dict()) == set(start)
        assert (nothing.shape, nothing.abs().max(), unchanged) == ((B, *SHAPE), 0.0, {})


def of_values(values: Tensor, *labels: int) -> tuple[Tensor, Tensor]:
    return values[:, None, None, None].expand(-1, *SHAPE), torch.tensor(labels)


def test_matching_records_are_uniform_among_those_of_the_label() -> None:
    """Chi-square; two chances of 1e-7 of a false alarm."""
    own, server_labels = of_values(torch.arange(8) / 100, 3, 1, 3, 3, 7, 1, 3, 3), torch.tensor([3, 1])
    pairs = draw_matching(own, server_labels, 6000, toys.seeded())
    assert pairs is not None
    positions, chosen = pairs[0], (pairs[1][:, 0, 0, 0] * 100).round().long()
    assert torch.equal(positions, torch.arange(6000) % 2)
    assert torch.equal(own[1][chosen], server_labels[positions])
    for label in (3, 1):
        assert stats.chisquare(torch.bincount(chosen, minlength=8)[own[1] == label].numpy()).pvalue > 1e-7


def test_positions_without_a_record_are_left_out_others_repeated_and_pixels_cleaned() -> None:
    own = of_values(torch.tensor([math.nan, 0.5, math.nan, -math.inf]), 3, 1, 3, 2)
    pairs = draw_matching(own, torch.tensor([5, 3, 9, 1, 0]), 5, toys.seeded())
    assert pairs is not None
    assert pairs[0].tolist() == [1, 3, 1, 3, 1]
    assert pairs[1][:, 0, 0, 0].tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]
    assert draw_matching(own, torch.tensor([5, 9]), 5, toys.seeded()) is None
