"""Fed-Avg GAN against Algorithm 1 of Augenstein et al.; planted faults must be detected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation import client as client_side
from dpgen_bench.federation import client_mechanism as server_side
from dpgen_bench.federation.client import BrokenProgram
from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.faults import Faults
from dpgen_bench.federation.settings import Settings
from dpgen_bench.method import Context
from dpgen_bench.nets.fedavg_gan import DiscriminatorNet, GeneratorNet, make_optimizer
from dpgen_bench.nets.latents import draw_latents
from dpgen_bench.nets.wasserstein import CriticTraining, draw_batch
from dpgen_bench.privacy.accountants.claims import opacus_rdp
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import FixedSize, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing import ConformanceError, check_method
from dpgen_bench.utils.paths import CONF
from methods import fedavg_gan
from methods.fedavg_gan import DiscriminatorClient, FedAvgGAN
from tests import toys
from tests.defaults import build

SHAPE, B, DELTA = (1, 28, 28), 4, 1e-5
FREE = Budget(math.inf, DELTA, "replace_one", "pld")
PRESETS = [
    *sorted(path.stem for path in (CONF / "experiment" / "fedavg_gan").glob("*.yaml")),
    "federated_emnist method.sigma=0.1",
    "federated_emnist method.sigma=0.5",
    "federated_emnist_all dataset=debugging_emnist",
    "federated_emnist_all privacy.epsilon=10 method.selection=poisson method.sigma=null",
    "reduced_proven privacy.epsilon=inf",
    "reduced_proven dataset=debugging_mnist method.steps=60",
]
TINY: dict[str, Any] = dict(
    clients_per_round=3, steps=6, local_steps=1, g_steps=1, batch_size=B, latent_dim=4, width=0.01
)
Answer = tuple[Tensor, dict[str, Tensor]]


def program(**changes: Any) -> DiscriminatorClient:
    d_config, config = (
        {"_target_": f"dpgen_bench.nets.fedavg_gan.{name}", "image_shape": [*SHAPE], "num_classes": 10, "width": 0.03}
        for name in ("DiscriminatorNet", "GeneratorNet")
    )
    training = CriticTraining(B, 1, drift=0.0, latent="normal", latent_dim=4)
    options: dict[str, Any] = {"local_steps": 1, "optimizer": "sgd", "lr": 1e-3, "weight_decay": 0.1} | changes
    return DiscriminatorClient(training, d_config, config | {"latent_dim": 4}, **options)


def nets() -> tuple[DiscriminatorNet, GeneratorNet, dict[str, Tensor]]:
    torch.manual_seed(0)
    D, G = DiscriminatorNet(SHAPE, 10, width=0.03), GeneratorNet(SHAPE, 10, latent_dim=4, width=0.03)
    vectors = (parameters_to_vector(net.parameters()).detach() for net in (D, G))
    return D, G, dict(zip(("discriminator", "generator"), vectors, strict=True))


def own_records(n: int = 7) -> tuple[Tensor, Tensor]:
    images, labels = toys.records(n)
    return images / 255.0, labels


def by_hand(D: DiscriminatorNet, G: GeneratorNet) -> Tensor:
    """Gradient of L_D in the parameters, [P], for the batch that `seeded(4)` draws; each batch is normalised alone."""
    same = toys.seeded(4)
    real, y = draw_batch(own_records(), B, same)
    z, mix = draw_latents("normal", (B, 4), same, torch.device("cpu")), torch.rand(1, B, 1, 1, 1, generator=same)[0]
    fake = G(z, y).detach()
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slopes,) = torch.autograd.grad(D(between, y).sum(), between, create_graph=True)
    penalty = (slopes.flatten(1).norm(dim=1) - 1).square().mean()
    (D(fake, y).mean() - D(real, y).mean() + 10 * penalty).backward()
    return torch.cat([p.grad.flatten() for p in D.parameters() if p.grad is not None])


def test_one_step_of_sgd_is_minus_lr_times_the_gradient() -> None:
    D, G, message = nets()
    sent = {name: vector.clone() for name, vector in message.items()}
    difference, state = program().answer(message, own_records(), {}, toys.seeded(4))
    expected = -1e-3 * (by_hand(D, G) + 0.1 * message["discriminator"])
    assert state == {}
    assert float(difference.norm()) > 1e-3
    assert torch.allclose(
        difference, expected, rtol=1e-2, atol=2e-7
    )  # parameters near 1, of which both sides are parts
    assert all(torch.equal(message[name], sent[name]) for name in sent)


def test_one_step_of_adam_has_no_earlier_moments() -> None:
    """Its first step is -lr g / (|g| + 1e-8), for any earlier round; further steps are larger than the first."""
    D, G, message = nets()
    options = {"optimizer": "adam", "weight_decay": 0.0}
    difference, _ = program(**options).answer(message, own_records(), {}, toys.seeded(4))
    gradient = by_hand(D, G)
    clear = gradient.abs() > 1e-3
    assert int(clear.sum()) > 100
    assert torch.allclose(difference[clear], -1e-3 * gradient[clear].sign(), rtol=1e-2)
    three, _ = program(**options, local_steps=3).answer(message, own_records(), {}, toys.seeded(4))
    assert float(three.norm()) > 1.5 * float(difference.norm())
    assert make_optimizer("adam", D, 1e-3, 0.0).param_groups[0]["betas"] == (0.5, 0.9)


def test_a_client_without_records_computes_finite_numbers() -> None:
    empty = torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64)
    assert program().start(empty, toys.seeded()) == {}
    difference, _ = program(local_steps=3).answer(nets()[2], empty, {}, toys.seeded())
    assert bool(difference.isfinite().all())


# The server's round


class Known(DiscriminatorClient):
    """Its answer is the number of its records in each of P entries."""

    def answer(self, message: Any, records: Any, state: Any, rng: Any) -> Answer:
        return torch.full_like(message["discriminator"], float(len(records[1]))), {}


class Steps(Context):
    """Keeps the discriminator before and after each round."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        self.rounds: list[tuple[Tensor, Tensor]] = []
        self.stateful: dict[str, Any] = stateful
        for t in super().steps(total, phase=phase, **stateful):
            before = parameters_to_vector(stateful["D"].parameters()).detach().clone()
            yield t
            self.rounds.append((before, parameters_to_vector(stateful["D"].parameters()).detach().clone()))


def test_the_mean_is_the_sum_of_clipped_answers_over_a_fixed_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients of 0, 1, 1, 8 and 20 records; the norms of 8 and 20 are beyond C. Half of the answers are lost."""
    monkeypatch.setattr(fedavg_gan, "DiscriminatorClient", Known)
    of, played = np.repeat(np.arange(5), [0, 1, 1, 8, 20]), Settings(faults=Faults(drop=0.5))
    ledger = Ledger(FREE, 5)
    data = PrivateData(
        *toys.records(30), 10, Services(ledger, Key.seeded("m")), clients=of, num_clients=5, federation=played
    )
    context = Steps(3, services=data._services)
    settings = {"steps": 12, "sigma": 1e-9, "clip_norm": 100.0, "lr_server": 0.01}
    build(FedAvgGAN, **{**TINY, **settings}).fit(data, context)
    (mechanism,) = data.mechanisms.values()
    assert isinstance(mechanism, ClientMechanism)
    answered = []
    for (before, after), (t, asked) in zip(context.rounds, enumerate(mechanism._rounds), strict=True):
        answered.append([int(c) for c in asked if not mechanism._opened().dropped(t, int(c))])
        highest = settings["clip_norm"] / math.sqrt(len(before))
        total = sum(min((0.0, 1.0, 1.0, 8.0, 20.0)[c], highest) for c in answered[-1])
        assert torch.allclose(after - before, torch.full_like(before, 0.01 * total / 3), atol=1e-6)
    assert 1.0 < highest < 8.0
    assert len({len(those) for those in answered}) > 2
    assert sum(map(len, answered)) < sum(map(len, mechanism._rounds))


def test_a_round_is_algorithm_1_with_each_sides_own_optimiser_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients get the server's networks, lr_d and optimizer_d; then g_steps of lr_g, on fresh images, by hand."""
    programs: list[Known] = []
    sent: list[dict[str, Tensor]] = []
    call = ClientMechanism.__call__
    monkeypatch.setattr(fedavg_gan, "DiscriminatorClient", lambda *args: programs.append(Known(*args)) or programs[-1])
    monkeypatch.setattr(ClientMechanism, "__call__", lambda self, message: sent.append(message) or call(self, message))
    data = PrivateData(
        *toys.records(30), 10, Services(Ledger(FREE, 5), Key.seeded("m")), clients=np.arange(30) % 5, num_clients=5
    )
    context = Steps(3, services=data._services)
    settings = {"steps": 1, "g_steps": 3, "lr_g": 0.5, "lr_d": 2e-4, "lr_server": 1e-3, "optimizer_d": "adam"}
    build(FedAvgGAN, **{**TINY, **settings}).fit(data, context)
    assert (programs[0].lr, programs[0].optimizer, programs[0].local_steps) == (2e-4, "adam", 1)

    torch.manual_seed(3)
    G, D, public = GeneratorNet(SHAPE, 10, latent_dim=4, width=0.01), context.stateful["D"], toys.seeded(3)
    assert torch.equal(sent[0]["generator"], parameters_to_vector(G.parameters()))
    sgd = torch.optim.SGD(G.parameters(), 0.5, weight_decay=2.5e-5)
    for _ in range(3):
        z = draw_latents("normal", (B, 4), public, torch.device("cpu"))
        y = torch.randint(10, (B,), generator=public)
        sgd.zero_grad()
        (-D(G(z, y), y).mean()).backward()
        sgd.step()
    for by_hand, trained in zip(G.parameters(), context.stateful["G"].parameters(), strict=True):
        assert torch.allclose(by_hand, trained, atol=1e-5)


@pytest.mark.slow
def test_the_generator_learns_how_bright_the_images_of_clients_are() -> None:
    """Two federations with images of one intensity each, and one seed: untrained, both generate the same images.

    Over 20 seeds the two mean intensities are 9 to 56 and 200 to 251, with AVX-512 as with SSE, each with a standard
    deviation of 13. The margin lies more than five standard deviations below their mean difference of 200.
    """
    adam = {"optimizer_d": "adam", "optimizer_g": "adam", "lr_d": 1e-2, "lr_g": 1.5e-2, "norm": "layer"}
    sizes = {"clients_per_round": 2, "steps": 40, "local_steps": 2, "batch_size": 8, "width": 0.03, "gp_weight": 1.0}
    learnt = []
    for pixel in (25, 230):
        images, of, ledger = torch.full((80, *SHAPE), pixel, dtype=torch.uint8), np.arange(80) % 20, Ledger(FREE, 20)
        data = PrivateData(
            images, torch.arange(80) % 10, 10, Services(ledger, Key.seeded("l")), clients=of, num_clients=20
        )
        trained = build(FedAvgGAN, **{**TINY, **adam, **sizes}).fit(data, Context(0, services=data._services))
        learnt.append(float(trained.sample(torch.arange(80) % 10, 1).float().mean()))
    assert learnt[1] - learnt[0] > 100


# Privacy


def planned(method: FedAvgGAN, n: int, budget: Budget) -> ClientMechanism:
    """The mechanism of the method for n clients; there is no record."""
    none = torch.zeros(0, *SHAPE, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    key, no_clients = Key.seeded("plan"), np.zeros(0, np.int64)
    data = PrivateData(*none, 36, Services(Ledger(budget, n), key), clients=no_clients, num_clients=n)
    return method._mechanism(data.grouped("client"), Context(0, services=data._services), program(), 1000)


def test_the_published_setting() -> None:
    """Golden: the epsilon of the preset's comment, and its law: Binomial(1000, 10/3400) Gaussian releases of 2C."""
    method = build(FedAvgGAN, selection="fixed", sigma=0.01)
    mechanism = planned(method, 3400, FREE)
    assert mechanism.bound == PerRecord(C=0.1, shape=(1000,))
    assert mechanism.std == pytest.approx(0.001)
    assert (mechanism.event.sampling, mechanism.times) == (FixedSize(10, 3400), 1000)
    epsilon_value = epsilon([mechanism.event], DELTA, "replace_one", "pld")
    assert epsilon_value == pytest.approx(259_528, abs=1)
    h = np.arange(1, 60)
    mu = np.sqrt(h) * 0.2 / 0.001
    tail = np.exp(epsilon_value + stats.norm.logcdf(-mu / 2 - epsilon_value / mu))
    delta = stats.binom.pmf(h, 1000, 10 / 3400) @ (stats.norm.cdf(mu / 2 - epsilon_value / mu) - tail)
    assert float(delta) == pytest.approx(DELTA, rel=1e-2)
    with_noise = planned(build(FedAvgGAN, sigma=1.5), 3400, FREE).event
    assert method.epsilon_claimed([with_noise], DELTA) == pytest.approx(opacus_rdp(10 / 3400, 1.5, 1000, DELTA))
    assert method.epsilon_claimed([mechanism.event] * 2, DELTA) is None
    without_noise = planned(build(FedAvgGAN), 3400, FREE)
    assert (without_noise.std, without_noise.bound.C) == (0.0, math.inf)
    assert without_noise.event.sampling == Poisson(10 / 3400)
    assert method.epsilon_claimed([without_noise.event], DELTA) == math.inf
    with pytest.raises(ValueError, match="at most N = 9 clients, got 10"):
        planned(method, 9, FREE)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_runs_within_their_budget(preset: str) -> None:
    """The authors' experiments: 10 clients, 6 and 6 steps, 1000 rounds, C 0.1, sigma 0.01, SGD of 5e-4 and 5e-3."""
    spec = build_spec(compose_config(f"experiment=fedavg_gan/{preset}".split()))
    method, eps = spec.method(), spec.budget().epsilon
    assert isinstance(method, FedAvgGAN)
    assert spec.budget() == Budget(eps, DELTA, "replace_one", "pld")
    published: dict[str, Any] = {"selection": "fixed", "sigma": 0.01, "conditional": False}
    if preset.startswith("federated_") and "privacy" not in preset:
        noise = float(preset.split("sigma=")[1]) if "sigma" in preset else 0.01
        assert vars(method) == vars(build(FedAvgGAN, **published | {"sigma": noise}))
    if eps is not None and math.isfinite(eps):
        mechanism = planned(method, spec.dataset().num_clients or 0, spec.budget())
        assert 0.999 * eps < epsilon([mechanism.event], DELTA, "replace_one", "pld") <= eps


def test_the_defaults_are_the_published_ones_except_sampling_noise_and_labels() -> None:
    method = build(FedAvgGAN)
    assert (method.steps, method.clip_norm, method.clients_per_round, method.batch_size) == (1000, 0.1, 10, 32)
    assert (method.local_steps, method.g_steps, method.lr_d, method.lr_g, method.lr_server) == (6, 6, 5e-4, 5e-3, 1.0)
    assert (method.optimizer_d, method.optimizer_g, method.latent_dim, method.gp_weight) == ("sgd", "sgd", 128, 10.0)


# Conformance and planted faults


def check(budget: Budget | None = None, **settings: Any) -> str:
    """The line of the first check."""
    lines: list[str] = []
    check_method(lambda: build(FedAvgGAN, **{**TINY, **settings}), records=24, budget=budget, echo=lines.append)
    return lines[0]


ADAM = {"selection": "fixed", "norm": "layer", "optimizer_d": "adam", "optimizer_g": "adam"}
VARIANTS = {
    "poisson": (Budget(10.0, DELTA, "add_remove"), {}),
    "fixed": (Budget(10.0, DELTA, "replace_one", "rdp"), ADAM | {"steps": 3}),
}


@pytest.mark.parametrize(
    ("budget", "settings"),
    [  # the yaml's `check` settings are "poisson", too; both are slow
        pytest.param(*VARIANTS["poisson"], id="poisson", marks=pytest.mark.slow),
        pytest.param(*VARIANTS["fixed"], id="fixed"),
    ],
)
def test_variants_conform(budget: Budget, settings: dict[str, Any]) -> None:
    assert "unit: one of 8 clients;" in check(budget, **settings)


class Keeps(DiscriminatorClient):
    """Cheat: it stores a value for the next round."""

    def answer(self, message: Any, records: Any, state: Any, rng: Any) -> Answer:
        return super().answer(message, records, state, rng)[0], {"note": records[1].float()}


class Gossip(DiscriminatorClient):
    """Cheat: an answer contains records of the client that was asked before."""

    heard: ClassVar[Tensor] = torch.zeros(())

    def answer(self, message: Any, records: Any, state: Any, rng: Any) -> Answer:
        difference, _ = super().answer(message, records, state, rng)
        before, Gossip.heard = Gossip.heard, records[1].float().mean().nan_to_num()
        return difference + 1e-6 * before, {}


@pytest.mark.parametrize(
    ("cheat", "error", "reason"),
    [
        (Keeps, BrokenProgram, "return no state"),
        (Gossip, ConformanceError, "the row of client"),
    ],
)
def test_clients_that_remember_are_detected(cheat, error, reason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedavg_gan, "DiscriminatorClient", cheat)
    with pytest.raises(error, match=reason):
        check()


def test_unclipped_differences_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for side in (client_side, server_side):
        monkeypatch.setattr(side, "clip_rows", lambda rows, C: rows.nan_to_num())
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check(lr_d=0.1, clip_norm=1e-3)


def test_half_the_noise_at_the_server_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientMechanism, "std", property(lambda self: self.event.std / 2))
    with pytest.raises(ConformanceError, match=r"0\.(49|50)\d* of the standard deviation in the ledger"):
        check()
