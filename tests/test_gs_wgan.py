"""Tests GS-WGAN against Algorithm 1, and that it resumes after an interruption and refuses bad settings."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.method import Context, Scale
from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.nets.wasserstein import CriticTraining
from dpgen_bench.nets.wgan import DCGANGenerator, ResNetGenerator
from dpgen_bench.privacy.bounds import PerRow, Whole
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import OneShard
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.training.signals import Preempted
from methods.gs_wgan import GSWGAN
from tests.defaults import build
from tests.gs_wgan_toys import SHAPE, TINY, fit, private
from tests.toys import Watcher


def weights(generator: Generator) -> Tensor:
    return torch.cat([value.flatten() for value in generator.state().values()])


# Algorithm 1


@pytest.mark.parametrize(("clip", "bound"), [("per_row", PerRow), ("whole", Whole)])
def test_the_release_is_the_gradient_in_b_images_with_noise_2_c_sigma(clip: str, bound: type) -> None:
    data = private(eps=1e4)
    fit(build(GSWGAN, **{**TINY, "sigma": 1.5, "clip_norm": 0.7, "clip": clip}), data)
    (mechanism,) = data.mechanisms.values()
    assert type(mechanism.bound) is bound
    assert mechanism.std == pytest.approx(2 * 0.7 * 1.5)
    assert mechanism.event.sampling == OneShard(3, "random")
    for relation in ("add_remove", "replace_one"):  # the joint sensitivity of B rows is 2 C sqrt(B) either way
        assert mechanism.event.multiplier(relation) == pytest.approx(1.5 / math.sqrt(4))
    assert mechanism.executed == mechanism.times == 4


def test_without_noise_the_gradient_is_the_critics_own() -> None:
    """One shard, no warm start: the critic is that of a WGAN-GP, which is trained here by hand."""
    watcher = Watcher()
    method = build(GSWGAN, **{**TINY, "shards": 1, "steps": 1, "n_critic": 2, "warm_start": 0})
    data = private(watcher=watcher)
    seen: list[Tensor] = []
    improve = method.training.improve

    class Spy(CriticTraining):
        def improve(self, critics: Any, *args: Any) -> None:
            improve(critics, *args)
            seen.append(copy.deepcopy(critics))

        def image_gradient(self, critics: Any, images: Tensor, labels: Tensor) -> Tensor:
            seen.append(images[0].clone())
            seen.append(labels[0].clone())
            return super().image_gradient(critics, images, labels)

    method.training = Spy(**{**vars(method.training)})
    fit(method, data)
    critics, x, y = seen
    critics.power_iteration()
    x.requires_grad_()
    (-critics(x[None], y[None]).sum()).backward()
    torch.manual_seed(3)
    public = torch.Generator().manual_seed(3)
    z = draw_latents("bernoulli", (4, 3), public, torch.device("cpu"))
    assert torch.equal(y, torch.randint(10, (4,), generator=public))
    assert torch.allclose(x, DCGANGenerator(SHAPE, 10, latent_dim=3, width=2)(z, y), atol=1e-5)
    (_, exact, noisy) = watcher.releases[0]
    assert torch.allclose(exact, x.grad, atol=1e-6)
    assert torch.equal(exact, noisy)


def test_the_generator_descends_along_what_was_released() -> None:
    """Zero gradients in, the initial generator out; if all pixels have one gradient, images get darker, or brighter.

    Over 20 seeds they change by 0.11 to 0.31, with AVX-512 as with SSE.
    """

    class Even(Watcher):
        def release(self, mechanism: Mechanism, index: int, drawn: Any, exact: Any, noisy: Any) -> dict[str, Tensor]:
            return {"value": torch.full_like(noisy["value"], gradient)}

    means = {}
    for gradient in (0.0, 1.0, -1.0):
        method = build(GSWGAN, **{**TINY, "lr": 1e-2, "latent": "normal", "steps": 8, "ema": 0.0})
        generated = fit(method, private(watcher=Even()))
        means[gradient] = float(generated.sample(torch.arange(40) % 10, 1).float().mean()) / 255
        if not gradient:
            torch.manual_seed(3)
            initial = DCGANGenerator(SHAPE, 10, latent_dim=3, width=2).state_dict()
            assert torch.allclose(weights(generated), torch.cat([v.flatten() for v in initial.values()]), atol=1e-6)
    assert means[1.0] < means[0.0] - 0.05
    assert means[-1.0] > means[0.0] + 0.05


def test_both_networks_learn_at_the_configured_rate() -> None:
    kept: list[Any] = []

    class Seen(Context):
        def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
            kept.append(stateful.get("adam"))
            return super().steps(total, phase=phase, **stateful)

    data = private()
    method = build(GSWGAN, **{**TINY, "steps": 1, "lr": 3e-3, "betas": (0.4, 0.8)})
    method.fit(data, Seen(3, services=data._services))
    (group,) = kept[-1].param_groups
    assert (group["lr"], group["betas"]) == (3e-3, (0.4, 0.8)) == (method.training.lr, method.training.betas)


def test_the_released_generator_is_the_moving_average() -> None:
    """Its decay is min(1 - 1/(t + 1), ema): 0, then 1/2, from then on ema = 0.6 instead of 2/3; none for ema = 0."""

    class Trajectory(Context):
        def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Any:
            for t in super().steps(total, phase=phase, **stateful):
                yield t
                if phase == "train":
                    seen.append([p.detach().clone() for p in stateful["g"].parameters()])

    for ema in (0.6, 0.0):
        seen: list[list[Tensor]] = []
        data = private()
        generator = build(GSWGAN, **{**TINY, "ema": ema}).fit(data, Trajectory(3, services=data._services))
        assert isinstance(generator, NetGenerator)
        expected = [0.36 * (a + b) / 2 + 0.24 * c + 0.4 * d if ema else d for a, b, c, d in zip(*seen, strict=True)]
        for mean, parameter in zip(expected, generator.net.parameters(), strict=True):
            assert torch.allclose(mean, parameter, atol=1e-6)


@pytest.mark.parametrize("schedule", ["random", "public_balanced"])
def test_draws_are_shards_by_the_schedule(schedule: str) -> None:
    watcher = Watcher()
    fit(build(GSWGAN, **{**TINY, "schedule": schedule, "steps": 6}), private(watcher=watcher))
    shards = [tuple(drawn) for drawn, _, _ in watcher.releases]
    assert all(len(shard) == 4 for shard in shards)
    if schedule == "public_balanced":
        assert len(set(shards[:3])) == len(set(shards[3:])) == 3


def test_a_critic_is_trained_in_its_own_steps_only() -> None:
    """The private state after T steps: after the warm start, Adam makes n_critic steps for each draw."""
    data = private()
    kept: list[PrivateState] = []
    make = data.private_state
    data.private_state = lambda *args, **kwargs: kept.append(make(*args, **kwargs)) or kept[-1]  # type: ignore[method-assign]
    fit(build(GSWGAN, **{**TINY, "schedule": "public_balanced", "steps": 7, "n_critic": 2}), data)
    (state,) = kept
    assert state._visits is not None
    assert sorted(np.bincount(state._visits)) == [2, 2, 3]
    for shard, visits in enumerate(np.bincount(state._visits)):
        assert float(state._before_group(range(shard, shard + 1), 7)["step"]) == 2 * visits


def test_a_stack_changes_results_by_rounding_alone() -> None:
    settings = {**TINY, "warm_start": 2, "shards": 3, "steps": 3}
    one, two = (weights(fit(build(GSWGAN, **{**settings, "stack": stack}), private())) for stack in (1, 2))
    untrained = weights(fit(build(GSWGAN, **{**settings, "warm_start": 0}), private()))
    assert not torch.equal(one, two)  # else this test would compare a run with itself
    assert float((one - two).norm()) < 0.02 * float((one - untrained).norm())


@pytest.mark.parametrize(("generator", "net"), [("dcgan", DCGANGenerator), ("resnet", ResNetGenerator)])
@pytest.mark.parametrize("latent", ["bernoulli", "normal"])
def test_networks_and_latents_are_the_configured(generator: str, net: type, latent: str) -> None:
    generated = fit(build(GSWGAN, **{**TINY, "generator": generator, "latent": latent, "steps": 1}), private())
    assert isinstance(generated, NetGenerator)
    assert type(generated.net) is net
    assert generated.latent == latent
    assert generated.sample(torch.arange(3), 0).shape == (3, *SHAPE)


# Interruption, scale, errors


def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Any) -> None:
    def context(data: PrivateData, stop_after: int | None, folder: Any) -> Context:
        steps_made = iter(range(100))
        return Context(
            3,
            services=data._services,
            folder=folder,
            due=lambda seconds: True,
            should_stop=lambda: 15 if stop_after is not None and next(steps_made) >= stop_after else None,
        )

    settings = {**TINY, "steps": 6, "schedule": "public_balanced", "sigma": None}
    straight = private(eps=10.0, place=StatePlace(tmp_path / "s0", tmp_path / "c0", {}))
    expected = weights(build(GSWGAN, **settings).fit(straight, context(straight, None, tmp_path / "run0")))
    for stop_after in (0, 2, 4, 7):
        folder = tmp_path / f"run-{stop_after}"
        place = StatePlace(folder / "private", folder / "cache", {})
        data = private(eps=10.0, place=place)
        with pytest.raises(Preempted):
            build(GSWGAN, **settings).fit(data, context(data, stop_after, folder))
        again = private(eps=10.0, place=place)
        resumed = build(GSWGAN, **settings).fit(again, context(again, None, folder))
        assert torch.equal(weights(resumed), expected), stop_after


def test_a_scales_limit_is_for_all_critics_together() -> None:
    def iterations(cap: int | None, **settings: Any) -> int:
        method = build(GSWGAN, **settings)
        return method.warm_start_iterations(method.shards, Context(scale=Scale("test", cap)).limit)

    assert iterations(None) == 2000
    assert iterations(300) == 1
    assert iterations(300, shards=100) == 3
    assert iterations(300, warm_start=0) == 0
    assert iterations(300, shards=10, warm_start=20) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": 0}, r"method.shards: expected a number in \[1, inf\), got 0"),
        ({"shards": 2.5}, "method.shards: expected an integer"),
        ({"batch_size": 0}, "method.batch_size"),
        ({"schedule": "fair"}, "method.schedule"),
        ({"clip": "none"}, "method.clip"),
        ({"generator": "biggan"}, "method.generator"),
        ({"latent": "uniform"}, "method.latent"),
        ({"sigma": 0.0}, "method.sigma"),
        ({"sigma": math.nan}, "method.sigma"),
        ({"clip_norm": math.inf}, "method.clip_norm"),
        ({"lr": -1.0}, "method.lr"),
        ({"betas": (0.5, 1.0)}, "method.betas"),
        ({"betas": (0.5,)}, "method.betas"),
        ({"ema": 1.0}, "method.ema"),
        ({"warm_start": -1}, "method.warm_start"),
        ({"gp_weight": -0.1}, "method.gp_weight"),
        ({"stack": 0}, "method.stack"),
        ({"sigma": None, "steps": None}, "both null"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(GSWGAN, **changes)


def test_more_shards_than_records_are_refused() -> None:
    with pytest.raises(ValueError, match="expected K <= N = 12 records, got 13"):
        fit(build(GSWGAN, **{**TINY, "shards": 13}), private())
