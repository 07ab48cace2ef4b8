"""DPGAN's settings: bad values are refused, and the presets are the published batch sizes, epsilons and steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import Poisson
from methods.dpgan import DPGAN
from tests.defaults import build

# --- numbers of the configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "B", "inverse_q", "fakes"),
    [(60_000, 128, 469, 128), (60_000, 512, 118, 508), (60_000, 2048, 30, 2000), (182_637, 2048, 90, 2029)],
)
def test_rates_and_batches_of_the_published_runs(n: int, B: int, inverse_q: int, fakes: int) -> None:
    loader = build(DPGAN, batch_size=B)
    assert loader.sampling_rate(n) == 1 / inverse_q
    assert loader.fake_batch_size(n) == fakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sigma": 0.0}, "method.sigma"),
        ({"sigma": -1.0}, "method.sigma"),
        ({"sigma": math.nan}, "method.sigma"),
        ({"steps": 0}, "method.steps"),
        ({"n_d": 0}, "method.n_d"),
        ({"n_d": "ladder"}, "method.n_d"),
        ({"n_d": 2.5}, "method.n_d"),
        ({"n_d": True}, "method.n_d"),
        ({"beta": 1.0}, "method.beta"),
        ({"threshold": 1.5}, "method.threshold"),
        ({"clip_norm": 0.0}, "method.clip_norm"),
        ({"clip_norm": math.inf}, "method.clip_norm"),
        ({"batch_size": 0}, "method.batch_size"),
        ({"d_d": 7}, "method.d_d"),
        ({"lr_g": 0.0}, "method.lr_g"),
        ({"betas": [0.5]}, "method.betas"),
        ({"sigma": None, "steps": None}, "both null"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DPGAN, **change)


# --- presets ----------------------------------------------------------------------------------------------------

PUBLISHED = {  # name: dataset, records, epsilon by RDP, B, σ, T, n_𝒟, threshold
    "gan": ("mnist", 60_000, math.inf, 128, None, 45_000, 1, 0.6),
    "eps10": ("mnist", 60_000, 9.963, 128, 1.0, 450_000, 50, 0.6),
    "eps10 dataset=fashion_mnist method.n_d=100": ("fashion_mnist", 60_000, 9.963, 128, 1.0, 450_000, 100, 0.6),
    "eps1": ("mnist", 60_000, 0.9935, 128, 5.0, 325_000, 200, 0.6),
    "large_batch_eps10": ("mnist", 60_000, 9.946, 2048, 5.6, 98_000, 20, 0.6),
    "large_batch_eps1": ("mnist", 60_000, 0.9960, 512, 14.0, 165_000, 50, 0.6),
    "adaptive_eps10": ("mnist", 60_000, 9.995, 512, 2.0, 174_000, "adaptive", 0.6),
    "adaptive_eps1": ("mnist", 60_000, 0.9960, 512, 14.0, 165_000, "adaptive", 0.7),
    "celeba_eps10": ("celeba_gender_trainval", 182_637, 9.984, 2048, 4.0, 385_000, "adaptive", 0.6),
}


OURS = {"dpimagebench_mnist", "laptop_mnist", "league_mnist"}  # settings that the paper does not have


def test_every_preset_is_checked() -> None:
    folder = Path(__file__).resolve().parent.parent / "conf" / "experiment" / "dpgan"
    assert {path.stem for path in folder.glob("*.yaml")} == {name.split()[0] for name in PUBLISHED} | OURS


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_settings_and_fit_their_budget(name: str) -> None:
    dataset, n, spent, B, sigma, T, n_d, threshold = PUBLISHED[name]
    spec = build_spec(compose_config(f"experiment=dpgan/{name}".split()))
    method = spec.method()
    assert isinstance(method, DPGAN)
    assert spec.config.dataset.name == dataset
    assert spec.config.protocol.name == "dpgan_revisited"
    got = (method.batch_size, method.sigma, method.steps, method.n_d, method.threshold)
    assert got == (B, sigma, T, n_d, threshold)
    assert (method.clip_norm, method.lr_d, method.lr_g, method.betas) == (1.0, 2e-4, 2e-4, (0.5, 0.999))
    assert (method.d_d, method.d_g, method.latent_dim) == (128, 128, 128)

    budget, q = spec.budget(), method.sampling_rate(n)
    event = Event(Poisson(q), Sensitivity(1.0, 2.0), 0.0 if sigma is None else sigma, T)
    claimed = method.epsilon_claimed([event], budget.delta)
    assert claimed == pytest.approx(spent, rel=2e-3)
    assert claimed <= budget.epsilon


def test_the_check_config_builds() -> None:
    config = compose_config(["method=dpgan"])
    config.method.update(config.method.check)
    tiny = build_method(config)
    assert (tiny.batch_size, tiny.d_d, tiny.sigma, tiny.steps) == (8, 8, None, 6)  # type: ignore[attr-defined]
