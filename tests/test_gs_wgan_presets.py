"""GS-WGAN's settings against Tables 1, A1 and A2 and the sweeps of Figure 4 (Chen, Orekondy & Fritz, NeurIPS 2020)."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.data.datasets import FashionMnist, Mnist
from dpgen_bench.data.records import Records
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import OneShard, Poisson
from dpgen_bench.runs.config import CONF, compose_config, specify
from dpgen_bench.runs.plan import plan
from dpgen_bench.tables.rows import jobs_of, lines_of, load_table
from methods.gs_wgan import GSWGAN
from tests.defaults import build

FOLDER = CONF / "experiment" / "gs_wgan"
FIGURE_4_YAML = CONF / "table" / "gs_wgan_figure4.yaml"
PAGE = (CONF.parent / "methods" / "gs_wgan.md").read_text()
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

# Table 1: Inception Score, FID, accuracies of MLP and CNN, average accuracy, calibrated accuracy in percent.
TABLE_1 = {"mnist": "9.23 61.34 0.79 0.80 0.60 69", "fashion_mnist": "5.32 131.34 0.65 0.65 0.53 67"}
# Tables A1 and A2, columns "Ours" and "GAN (non-private)": accuracy, calibrated accuracy in percent.
CLASSIFIERS = (
    *("MLP", "CNN", "adaboost", "bagging", "bernoulli nb", "decision tree", "gaussian nb", "gbm", "lda", "linear svc"),
    *("logistic reg", "random forest", "xgboost", "Average"),
)
APPENDIX = {
    "mnist": """
        0.79 81  0.80 81  0.21 29  0.45 48  0.77 92  0.35 40  0.64 114  0.39 43  0.78 89  0.76 83
        0.79 85  0.52 54  0.50 55  0.60 69""",
    "nonprivate_gan_mnist": """
        0.84 85  0.84 85  0.28 39  0.46 49  0.80 95  0.40 45  0.71 126  0.50 55  0.84 95  0.81 88
        0.83 90  0.39 41  0.44 49  0.63 71""",
    "fashion_mnist": """
        0.65 74  0.64 70  0.25 45  0.47 56  0.55 85  0.40 51  0.48 81  0.38 46  0.67 84  0.65 77
        0.68 81  0.54 61  0.47 57  0.53 67""",
    "nonprivate_gan_fashion_mnist": """
        0.77 88  0.73 80  0.41 74  0.57 68  0.59 91  0.53 67  0.55 93  0.44 53  0.77 96  0.77 91
        0.76 90  0.69 78  0.65 78  0.61 77""",
}


def words(name: str) -> list[str]:
    preset, *overrides = (SETTINGS[name][0] if name in SETTINGS else name).split()
    return [f"experiment=gs_wgan/{preset}", *overrides]


def composed(name: str, *overrides: str) -> DictConfig:
    return compose_config([*words(name), *overrides])


def settings(config: DictConfig) -> dict[str, Any]:
    return {key: value for key, value in dict(config.method).items() if key not in ("_target_", "name", "check")}


def comment(path: Path) -> str:
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


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
    found = build(GSWGAN, **(PUBLISHED | changes)).epsilon_claimed([event(**changes)], DELTA)
    assert found is not None
    return found


# What a preset sets


def test_every_preset_is_checked_here() -> None:
    checked = {setting.split()[0] for setting, _, _ in SETTINGS.values()}
    assert {path.stem for path in FOLDER.iterdir()} == {*checked, "reduced_proven"}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_what_is_printed_and_compose_at_quick_scale(name: str) -> None:
    _, budget, changes = SETTINGS[name]
    config = composed(name, "scale=quick")
    assert settings(config) == PUBLISHED | changes
    assert composed(name).scale.name == "paper"
    assert config.dataset.name == ("fashion_mnist" if "fashion" in name else "mnist")
    assert (config.method.name, config.protocol.name) == ("gs_wgan", "gs_wgan")
    privacy = config.privacy
    got = (privacy.epsilon, privacy.delta, privacy.relation, privacy.accountant)
    assert got == (budget, DELTA, "replace_one", "pld")
    assert (config.scale.name, config.scale.max_steps) == ("quick", 300)
    assert specify(config).scale().name == "quick"


@pytest.mark.parametrize("epsilon", ["inf", "10"])
def test_the_reduced_preset_is_labelled_and_may_be_without_privacy(epsilon: str) -> None:
    config = composed("reduced_proven", f"privacy.epsilon={epsilon}")
    specify(config)
    assert (config.scale.name, config.protocol.name, config.runtime.threads) == ("reduced", "gs_wgan_2k", 1)
    assert (config.method.generator, config.method.schedule) == ("dcgan", "public_balanced")
    assert config.method.sigma is None
    assert composed("reduced_proven").privacy.epsilon == 10
    assert composed("reduced_proven", "scale=quick").scale.max_steps == 300


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
    assert config.method.steps % config.method.shards == 0  # each shard is visited equally often
    specify(config)


def test_the_reduced_protocol_is_dp_sinkhorns_but_for_how_samples_are_drawn() -> None:
    ours, theirs, papers = (
        compose_config([f"protocol={name}"]).protocol for name in ("gs_wgan_2k", "dp_sinkhorn_2k", "gs_wgan")
    )
    changed = {"name": "gs_wgan_2k", "labels": "balanced", "rounding": "none"}
    assert OmegaConf.to_container(ours) == {**OmegaConf.to_container(theirs), **changed}
    assert (papers.labels, papers.rounding) == ("balanced", "none")
    assert set(ours.metrics) == {"fid", "logreg", "mlp", "cnn"}
    assert (ours.num_samples, ours.metrics.fid.reference) == (2000, "test")


# Figures of the tables


def table_1(dataset: str) -> str:
    names = ("IS", "FID", "MLP", "CNN", "Avg", "Calibrated")
    return ", ".join(f"{name} {figure}" for name, figure in zip(names, TABLE_1[dataset].split(), strict=True)) + "%"


def appendix(preset: str) -> str:
    figures = APPENDIX[preset].split()
    cells = zip(CLASSIFIERS, figures[::2], figures[1::2], strict=True)
    return ", ".join(f"{name} {accuracy} ({calibrated}%)" for name, accuracy, calibrated in cells)


def test_the_comment_of_the_preset_has_its_figures() -> None:
    said = comment(FOLDER / "mnist.yaml")
    assert "Table A1" in said
    assert appendix("mnist") in said
    assert f'Table 1, row "Ours" ({table_1("mnist")})' in said
    assert "laimed 9.99" in said
    assert "proven 610.3" in said


def published(table: str) -> list[dict[str, str]]:
    root = CONF.parent
    for folder in (root / "results" / "published", root.parent / "shared" / "reference" / "published"):
        path = folder / f"gswgan_table{table}.csv"
        if path.exists():
            return list(csv.DictReader(path.open()))
    pytest.skip(f"gswgan_table{table}.csv, the paper's table as CSV, is not kept with this checkout")


@pytest.mark.parametrize("preset", APPENDIX)
def test_the_figures_typed_here_are_those_of_the_published_tables(preset: str) -> None:
    """Another person typed the CSVs from the paper."""
    dataset = "FashionMNIST" if "fashion" in preset else "MNIST"
    method = "GAN (non-private)" if "gan" in preset else "GS-WGAN"

    def values(table: str) -> dict[str, float]:
        rows = [row for row in published(table) if (row["dataset"], row["method"]) == (dataset, method)]
        return {row["metric"]: float(row["value"]) for row in rows}

    found, figures = values("A2" if "fashion" in preset else "A1"), APPENDIX[preset].split()
    for name, accuracy, calibrated in zip(CLASSIFIERS, figures[::2], figures[1::2], strict=True):
        key = name.lower().replace(" ", "_")
        assert found.pop(f"acc_{key}_frac") == float(accuracy)
        assert found.pop(f"acc_{key}_calibrated_pct") == float(calibrated)
    assert not found
    if preset in TABLE_1:
        assert list(values("1").values()) == [float(figure) for figure in TABLE_1[preset].split()]


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
    ("changes", "proven_figure"),
    [
        ({}, 610.3),
        (dict(sigma=2.66), 115.5),
        (dict(shards=min(K)), 1734.1),  # the dearest point of Figure 4(a)
        (dict(sigma=min(NOISE)), 1352.9),  # and of (c)
    ],
)
def test_the_proven_figures_of_settings_without_a_budget(changes: dict[str, Any], proven_figure: float) -> None:
    """Golden: binomial mixtures of Gaussians (hits of a shard), computed with scipy apart from this code."""
    assert proven(**changes) == pytest.approx(proven_figure, abs=0.06)


@pytest.mark.parametrize(
    ("sigma", "wanted"), [(1.07, 9.993), (2.66, 3.208)], ids=["as published (autodp: 9.993)", "conditional"]
)
def test_the_papers_count(sigma: float, wanted: float) -> None:
    assert claimed(sigma=sigma) == pytest.approx(wanted, abs=0.005)


@pytest.mark.parametrize(("sigma", "wanted"), [(1.07, 329.4), (2.66, 8.437)])
def test_the_figure_if_steps_were_memoryless(sigma: float, wanted: float) -> None:
    found = build(GSWGAN, **(PUBLISHED | dict(sigma=sigma))).epsilon_conditional([event(sigma=sigma)], DELTA)
    assert found is not None
    figure, assumption = found
    assert figure == pytest.approx(wanted, rel=2e-3)
    assert assumption.startswith("if ")


def test_the_conditional_sigma_keeps_to_ten_by_rdp_if_steps_were_memoryless() -> None:
    """The joint multiplier is sigma / sqrt(B) with either relation's distance, on a Poisson curve of rate 1/K."""
    joint = Event(Poisson(1 / 1000), Sensitivity(1.0, 1.0), 2.66 / math.sqrt(32), 20_000)
    assert epsilon([joint], DELTA, "add_remove", "rdp") == pytest.approx(9.94, abs=0.01)
    assert "9.94 by RDP and 8.44 by PLD IF steps were memoryless" in PAGE


def test_the_table_of_figure_4a_has_both_counts() -> None:
    """Each line of the comment's table: T, then for each K epsilon claimed and proven."""
    lines = re.findall(r"^#   ([\d,]+) +(\d.*)$", FIGURE_4_YAML.read_text(), flags=re.MULTILINE)
    assert [int(steps.replace(",", "")) for steps, _ in lines] == T
    for steps, (_, cells) in zip(T, lines, strict=True):
        figures = [float(number) for number in re.findall(r"\d+\.\d+", cells)]
        for shards, said_claimed, said_proven in zip(K, figures[::2], figures[1::2], strict=True):
            assert said_claimed == pytest.approx(claimed(shards=shards, steps=steps), abs=0.0051)
            assert said_proven == pytest.approx(proven(shards=shards, steps=steps), abs=0.06)


def test_the_comment_of_figure_4c_has_both_counts() -> None:
    said = comment(FIGURE_4_YAML)
    for sigma in NOISE:
        found = re.search(rf"{sigma} \(([\d.]+), ([\d.]+)\)", said)
        assert found is not None, sigma
        assert float(found[1]) == pytest.approx(claimed(sigma=sigma), abs=0.0051)
        assert float(found[2]) == pytest.approx(proven(sigma=sigma), abs=0.06)


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
    """Data sets of the right size without a record read: one black image, repeated without memory."""

    def load(self: Any, split: str) -> Records:
        image = torch.zeros((1, *SHAPE), dtype=torch.uint8)
        return Records(image.expand(RECORDS, -1, -1, -1), torch.zeros(1, dtype=torch.int64).expand(RECORDS))

    for spec in (Mnist, FashionMnist):
        monkeypatch.setattr(spec, "load", load)


TINY = ["method.generator=dcgan", "method.width=4", "method.critic_width=4"]  # no matter to privacy


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "conditional_mnist", "nonprivate_gan_mnist"])
def test_a_plan_releases_what_the_settings_say(name: str, no_files: None) -> None:
    """`dpgen account experiment=gs_wgan/PRESET`, but for the slow accountants."""
    ledger = plan([*words(name), *TINY])
    [got], budget = ledger.events, ledger.budget
    _, epsilon_allowed, changes = SETTINGS[name]
    assert budget == Budget(epsilon_allowed, DELTA, "replace_one", "pld")
    if changes.get("sigma", 1.07) is None:
        assert (got.std, got.times, got.sampling) == (0.0, PUBLISHED["steps"], OneShard(1, "random"))
        return
    wanted = event(**changes)
    assert (got.sampling, got.times) == (wanted.sampling, wanted.times)
    assert got.multiplier("replace_one") == pytest.approx(wanted.multiplier("replace_one"), rel=1e-12)


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
    """Sigmas computed with scipy apart from this code; the method's page has them."""
    ledger = plan(["experiment=gs_wgan/proven_mnist_eps10", *TINY, *overrides.split()])
    [got], budget = ledger.events, ledger.budget
    assert got.std / 2.0 == pytest.approx(sigma, rel=2e-3)
    assert 0.999 * budget.epsilon < epsilon([got], DELTA, "replace_one", "pld") <= budget.epsilon
    assert f"{sigma:g}" in PAGE
