"""GS-WGAN's presets: their settings, the sweeps of Figure 4, epsilon and plans (Chen et al., NeurIPS 2020)."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.datasets import FashionMnist, Mnist
from dpgen_bench.data.records import Records
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import OneShard, Poisson
from dpgen_bench.runs.plan import plan
from dpgen_bench.tables.expand import jobs_of, lines_of
from dpgen_bench.tables.load import load_table
from dpgen_bench.utils.paths import CONF
from methods.gs_wgan import GSWGAN
from tests.defaults import build, comment

FOLDER = CONF / "experiment" / "gs_wgan"
FIGURE_4_YAML = CONF / "table" / "gs_wgan_figure4.yaml"
PAGE = (CONF.parent / "docs" / "methods" / "gs_wgan.md").read_text()
RECORDS, SHAPE, DELTA = 60_000, (1, 28, 28), 1e-5

# Section 5.1 and appendix C.1; what those do not print is the authors' code's.
PUBLISHED: dict[str, Any] = dict(
    shards=1000,
    schedule="random",
    batch_size=32,
    steps=20_000,
    n_critic=5,
    warm_start=2000,
    sigma=1.07,
    clip="per_row",
    clip_norm=1.0,
    gp_weight=10.0,
    drift=1e-3,
    lr=1e-4,
    betas=[0.5, 0.9],
    generator="resnet",
    latent_dim=10,
    latent="bernoulli",
    width=None,
    critic_width=None,
    ema=0.999,
    stack=1,
)
PROVEN = dict(schedule="public_balanced", sigma=None)
ONE_CRITIC = dict(shards=1, warm_start=0, sigma=None)

FREE = "privacy.epsilon=inf method.sigma=null"
FASHION = "dataset=fashion_mnist"
ONE_GAN = f"{FREE} method.shards=1 method.warm_start=0"
# name: (preset and overrides, budget, what differs from the published settings)
SETTINGS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "mnist": ("mnist", None, {}),
    "fashion_mnist": (f"mnist {FASHION}", None, {}),
    "conditional_mnist": ("mnist method.sigma=2.66", None, dict(sigma=2.66)),
    "proven_mnist_eps10": ("proven_mnist_eps10", 10, PROVEN),
    "proven_mnist_eps1": ("proven_mnist_eps10 privacy.epsilon=1", 1, PROVEN),
    "proven_fashion_mnist_eps10": (f"proven_mnist_eps10 {FASHION}", 10, PROVEN),
    "whole_mnist": ("proven_mnist_eps10 method.clip=whole", 10, PROVEN | dict(clip="whole")),
    "nonprivate_mnist": (f"mnist {FREE}", math.inf, dict(sigma=None)),
    "nonprivate_gan_mnist": (f"mnist {ONE_GAN}", math.inf, ONE_CRITIC),
    "nonprivate_gan_fashion_mnist": (f"mnist {ONE_GAN} {FASHION}", math.inf, ONE_CRITIC),
    "proven_figure4_iterations": ("proven_mnist_eps10 method.sigma=12.65", 10, PROVEN | dict(sigma=12.65)),
}

K, T, NOISE = [250, 500, 1000, 1500], [5000, 10_000, 15_000, 20_000], [0.71, 1.07, 1.83, 4.14, 8.95]
BUDGETS = [20, 10, 5, 2, 1]
FIGURE_4 = [(k, t, 1.07) for k in K for t in T] + [(1000, 20_000, sigma) for sigma in NOISE if sigma != 1.07]


def overrides_of(name: str) -> list[str]:
    preset, *overrides = (SETTINGS[name][0] if name in SETTINGS else name).split()
    return [f"experiment=gs_wgan/{preset}", *overrides]


def composed(name: str, *overrides: str) -> DictConfig:
    return compose_config([*overrides_of(name), *overrides])


def settings(config: DictConfig) -> dict[str, Any]:
    return {
        key: value
        for key, value in dict(config.method).items()
        if key not in ("_target_", "name", "check", "pretraining")
    }


def event(**changes: Any) -> Event:
    """What a run of the published settings with these changes releases: noise of std 2 C sigma, T times."""
    expected = PUBLISHED | changes
    C, rows = expected["clip_norm"], (expected["batch_size"], *SHAPE)
    if expected["clip"] == "whole":
        C *= math.sqrt(expected["batch_size"])
    bound = (PerRow if expected["clip"] == "per_row" else Whole)(C=C, shape=rows)
    sampling = OneShard(expected["shards"], expected["schedule"])
    return Event(sampling, bound.sensitivity, 2.0 * expected["clip_norm"] * expected["sigma"], expected["steps"])


def proven(**changes: Any) -> float:
    return epsilon([event(**changes)], DELTA, "replace_one", "pld")


def claimed(**changes: Any) -> float:
    result = build(GSWGAN, **(PUBLISHED | changes)).epsilon_claimed([event(**changes)], DELTA)
    assert result is not None
    return result


# What a preset sets


def test_every_preset_is_checked_here() -> None:
    checked = {setting.split()[0] for setting, _, _ in SETTINGS.values()}
    assert {path.stem for path in FOLDER.iterdir()} == {*checked, "reduced_proven", "league_mnist"}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_what_is_printed_and_compose_at_quick_scale(name: str) -> None:
    _, budget, changes = SETTINGS[name]
    paper, config = composed(name), composed(name, "scale=quick")
    assert settings(paper) == PUBLISHED | changes
    # What a preset states holds at every scale; conf/scale/quick/gs_wgan.yaml sets the rest.
    assert settings(config) == PUBLISHED | changes | {"width": 32, "critic_width": 16}
    assert paper.scale.name == "paper"
    assert config.dataset.name == ("fashion_mnist" if "fashion" in name else "mnist")
    assert (config.method.name, config.protocol.name) == ("gs_wgan", "gs_wgan")
    privacy = config.privacy
    got = (privacy.epsilon, privacy.delta, privacy.relation, privacy.accountant)
    assert got == (budget, DELTA, "replace_one", "pld")
    assert (config.scale.name, config.scale.max_steps) == ("quick", 300)
    assert build_spec(config).scale().name == "quick"


@pytest.mark.parametrize("epsilon", ["inf", "10"])
def test_the_reduced_preset_is_labelled_and_may_be_without_privacy(epsilon: str) -> None:
    config = composed("reduced_proven", f"privacy.epsilon={epsilon}")
    build_spec(config)
    assert (config.scale.name, config.protocol.name, config.runtime.threads) == ("reduced", "gs_wgan_2k", 1)
    assert (config.method.generator, config.method.schedule) == ("dcgan", "public_balanced")
    assert config.method.sigma is None
    assert composed("reduced_proven").privacy.epsilon == 10
    assert composed("reduced_proven", "scale=quick").scale.max_steps == 300


def test_the_leagues_preset_differs_from_the_quick_one_by_what_its_search_found() -> None:
    ours, quick = (composed(name, "init=gauss", "privacy.epsilon=10") for name in ("league_mnist", "../quick/gs_wgan"))
    build_spec(ours)
    assert settings(ours) == settings(quick) | {"steps": 100}
    assert dict(ours.method.pretraining) == dict(quick.method.pretraining) | {"steps": 2000}
    assert {key for key in ours if ours[key] != quick[key]} == {"method"}


def test_no_batch_repeats_an_image() -> None:
    """A shard has B records or more at every point of a sweep, so that batches are of exactly B different ones."""
    for shards in [*K, *(changes.get("shards", 1000) for _, _, changes in SETTINGS.values())]:
        assert RECORDS // shards >= PUBLISHED["batch_size"]
    for preset, records in (("reduced_proven", RECORDS), ("../demo/gs_wgan", 1437)):
        method = composed(preset).method
        assert records // method.shards >= method.batch_size


def test_the_demo_is_of_digits_under_the_presets_relation() -> None:
    config = composed("../demo/gs_wgan")
    assert (config.dataset.name, config.scale.name, config.privacy.relation) == ("digits", "demo", "replace_one")
    assert config.method.steps % config.method.shards == 0  # each shard is drawn equally often
    build_spec(config)


def test_the_reduced_protocol_differs_from_dp_sinkhorns_in_sampling_alone() -> None:
    fast, base, papers = (
        compose_config([f"protocol={name}"]).protocol for name in ("gs_wgan_2k", "dp_sinkhorn_2k", "gs_wgan")
    )
    changed = {"name": "gs_wgan_2k", "labels": "balanced", "rounding": "none"}
    assert OmegaConf.to_container(fast) == {**OmegaConf.to_container(base), **changed}
    assert (papers.labels, papers.rounding) == ("balanced", "none")
    assert set(fast.metrics) == {"fid", "logreg", "mlp", "cnn"}
    assert (fast.num_samples, fast.metrics.fid.reference) == (2000, "test")


# Sweeps


def swept(table: str) -> list[DictConfig]:
    return [compose_config(job) for line in lines_of(load_table(table)) for job in jobs_of(line, {}) if "seed=0" in job]


@pytest.mark.parametrize("table", ["gs_wgan_figure4", "gs_wgan_figurea2"])
def test_the_runs_of_a_figure_are_the_published_settings_at_the_stated_points(table: str) -> None:
    """Figure A2 has the noise scales and the numbers of iterations alone, on Fashion-MNIST."""
    expected = FIGURE_4 if table == "gs_wgan_figure4" else [point for point in FIGURE_4 if point[0] == 1000]
    configs = swept(table)
    assert sorted((c.method.shards, c.method.steps, c.method.sigma) for c in configs) == sorted(expected)
    for config in configs:
        shards, steps, sigma = config.method.shards, config.method.steps, config.method.sigma
        assert settings(config) == PUBLISHED | dict(shards=shards, steps=steps, sigma=sigma)
        assert config.dataset.name == ("mnist" if table == "gs_wgan_figure4" else "fashion_mnist")
        assert (config.privacy.relation, config.privacy.delta) == ("replace_one", DELTA)


# Epsilon


@pytest.mark.parametrize(
    ("changes", "proven_epsilon"),
    [
        ({}, 610.3),
        (dict(sigma=2.66), 115.5),
        (dict(shards=min(K)), 1734.1),  # the largest epsilon of Figure 4(a)
        (dict(sigma=min(NOISE)), 1352.9),  # and of (c)
    ],
)
def test_the_proven_epsilons_of_settings_without_a_budget(changes: dict[str, Any], proven_epsilon: float) -> None:
    """Golden: binomial mixtures of Gaussians (participations of a shard), computed with scipy by other code."""
    assert proven(**changes) == pytest.approx(proven_epsilon, abs=0.06)


@pytest.mark.parametrize(
    ("sigma", "target"), [(1.07, 9.993), (2.66, 3.208)], ids=["as published (autodp: 9.993)", "conditional"]
)
def test_the_papers_count(sigma: float, target: float) -> None:
    assert claimed(sigma=sigma) == pytest.approx(target, abs=0.005)


@pytest.mark.parametrize(("sigma", "target"), [(1.07, 329.4), (2.66, 8.437)])
def test_the_epsilon_if_steps_were_memoryless(sigma: float, target: float) -> None:
    result = build(GSWGAN, **(PUBLISHED | dict(sigma=sigma))).epsilon_conditional([event(sigma=sigma)], DELTA)
    assert result is not None
    conditional_epsilon, assumption = result
    assert conditional_epsilon == pytest.approx(target, rel=2e-3)
    assert assumption.startswith("if ")


def test_the_conditional_sigma_keeps_to_ten_by_rdp_if_steps_were_memoryless() -> None:
    """The joint multiplier is sigma / sqrt(B) with either relation's distance, on a Poisson curve of rate 1/K."""
    joint = Event(Poisson(1 / 1000), Sensitivity(1.0, 1.0), 2.66 / math.sqrt(32), 20_000)
    assert epsilon([joint], DELTA, "add_remove", "rdp") == pytest.approx(9.94, abs=0.01)
    assert "9.94 by RDP and 8.44 by PLD if steps were memoryless" in PAGE


def test_the_table_of_figure_4a_has_both_counts() -> None:
    """Each line of the comment's table: T, then for each K epsilon claimed and proven."""
    lines = re.findall(r"^#   ([\d,]+) +(\d.*)$", FIGURE_4_YAML.read_text(), flags=re.MULTILINE)
    assert [int(steps.replace(",", "")) for steps, _ in lines] == T
    for steps, (_, cells) in zip(T, lines, strict=True):
        numbers = [float(number) for number in re.findall(r"\d+\.\d+", cells)]
        for shards, stated_claimed, stated_proven in zip(K, numbers[::2], numbers[1::2], strict=True):
            assert stated_claimed == pytest.approx(claimed(shards=shards, steps=steps), abs=0.0051)
            assert stated_proven == pytest.approx(proven(shards=shards, steps=steps), abs=0.06)


def test_the_comment_of_figure_4c_has_both_counts() -> None:
    text = comment(FIGURE_4_YAML)
    for sigma in NOISE:
        result = re.search(rf"{sigma} \(([\d.]+), ([\d.]+)\)", text)
        assert result is not None, sigma
        assert float(result[1]) == pytest.approx(claimed(sigma=sigma), abs=0.0051)
        assert float(result[2]) == pytest.approx(proven(sigma=sigma), abs=0.06)


def test_claims_of_the_noise_sweep_are_the_budgets_of_the_proven_one() -> None:
    for sigma, budget in zip(NOISE, BUDGETS, strict=True):
        assert 0.995 * budget <= claimed(sigma=sigma) <= budget


def test_the_proven_iterations_stay_within_their_budget() -> None:
    got = [proven(schedule="public_balanced", sigma=12.65, steps=steps) for steps in T]
    assert got == pytest.approx([4.377, 6.572, 8.385, 9.996], abs=0.002)
    assert ", ".join(f"{value:.2f}" for value in got[:-1]) + f" and {got[-1]:.2f}" in PAGE


# Plans


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets of the right size that read no file: one black image, repeated without using memory."""

    def load(self: Any, split: str) -> Records:
        image = torch.zeros((1, *SHAPE), dtype=torch.uint8)
        return Records(image.expand(RECORDS, -1, -1, -1), torch.zeros(1, dtype=torch.int64).expand(RECORDS))

    for spec in (Mnist, FashionMnist):
        monkeypatch.setattr(spec, "load", load)


TINY = ["method.generator=dcgan", "method.width=4", "method.critic_width=4"]  # they do not matter to privacy


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "conditional_mnist", "nonprivate_gan_mnist"])
def test_a_plan_releases_what_the_settings_say(name: str, no_files: None) -> None:
    """`dpgen account experiment=gs_wgan/PRESET`, without the slow accountants."""
    ledger = plan([*overrides_of(name), *TINY])
    [got], budget = ledger.events, ledger.budget
    _, epsilon_allowed, changes = SETTINGS[name]
    assert budget == Budget(epsilon_allowed, DELTA, "replace_one", "pld")
    if changes.get("sigma", 1.07) is None:
        assert (got.std, got.times, got.sampling) == (0.0, PUBLISHED["steps"], OneShard(1, "random"))
        return
    target = event(**changes)
    assert (got.sampling, got.times) == (target.sampling, target.times)
    assert got.multiplier("replace_one") == pytest.approx(target.multiplier("replace_one"), rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "sigma"),
    [
        ("", 12.65),
        ("privacy.epsilon=1", 94.4),
        (FASHION, 12.65),
        (f"{FASHION} privacy.epsilon=1", 94.4),
        ("method.clip=whole", 12.65),
        ("method.schedule=random", 14.02),
        ("method.shards=250", 25.3),
        ("method.shards=500", 17.9),
        ("method.shards=1500", 10.6),
        ("privacy.epsilon=20", 7.34),
        ("privacy.epsilon=5", 22.6),
        ("privacy.epsilon=2", 50.4),
    ],
)
def test_the_proven_preset_calibrates_sigma_to_its_budget(overrides: str, sigma: float, no_files: None) -> None:
    """Sigmas computed with scipy by other code; the method's page has them."""
    ledger = plan(["experiment=gs_wgan/proven_mnist_eps10", *TINY, *overrides.split()])
    [got], budget = ledger.events, ledger.budget
    assert got.std / 2.0 == pytest.approx(sigma, rel=2e-3)
    assert 0.999 * budget.epsilon < epsilon([got], DELTA, "replace_one", "pld") <= budget.epsilon
    assert f"{sigma:g}" in PAGE
