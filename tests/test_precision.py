"""Lower precision is for networks outside of private functions, and for Inception if a protocol says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.evaluate.features import InceptionFeatures
from dpgen_bench.evaluate.fidelity import Fid
from dpgen_bench.evaluate.metric import NotMeasured
from dpgen_bench.method import Context
from dpgen_bench.privacy import bounds, state
from dpgen_bench.training.precision import networks_in, private_computation
from tests.scaling.fits import fit

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


# Runs


def id_of(*overrides: str) -> str:
    return build_spec(compose_config(["method=dp_merf", *overrides])).id


def test_a_precision_other_than_fp32_is_part_of_the_identity():
    older = compose_config(["method=dp_merf"])
    OmegaConf.set_struct(older, False)
    del older.runtime["precision"]
    ids = [build_spec(older).id, id_of(), id_of("runtime.precision=fp32")]
    assert len(set(ids)) == 1
    assert len({ids[0], id_of("runtime.precision=bf16"), id_of("runtime.precision=tf32")}) == 3


@pytest.mark.parametrize("precision", ["fp16", "16", "null"])
def test_an_unknown_precision_is_refused(precision):
    with pytest.raises(ValueError, match=r"runtime\.precision"):
        id_of(f"runtime.precision={precision}")


def test_tf32_needs_a_gpu():
    with pytest.raises(ValueError, match=r"expected a GPU for runtime\.precision=tf32"):
        Context(precision="tf32")


# Networks


class Watch(TorchDispatchMode):
    """Counts operations that return bfloat16, by whether a private function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.private, self.public, self.inside = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.bfloat16:
            if self.inside:
                self.private += 1
            else:
                self.public += 1
        return result


@pytest.fixture
def watch(monkeypatch):
    """A `Watch` that is told when a mechanism or a private state calls a method's function."""
    mode = Watch()

    def telling(function):
        def told(*args, **kwargs):
            mode.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                mode.inside = False

        return told

    for bound in (bounds.PerRecordGradient, bounds.PerRow, bounds.PerRecord):
        monkeypatch.setattr(bound, "value", telling(bound.value))
    monkeypatch.setattr(state.PrivateState, "_make_group", telling(state.PrivateState._make_group))
    return mode


FITS = {
    "dpgan": "privacy.epsilon=null method.sigma=1 method.batch_size=4 method.d_d=4 method.d_g=4 method.n_d=1",
    "dp_sinkhorn": "privacy.epsilon=null method.sigma=1 method.batch_size=4 method.width=4",
    "gs_wgan": "privacy.epsilon=null method.sigma=1 method.shards=2 method.batch_size=4 method.n_critic=1 "
    "method.warm_start=1 method.generator=dcgan method.width=4 method.critic_width=2",
    "dp_merf": "privacy.epsilon=inf method.features=20 method.batch_size=4",
    "fedavg_gan": "privacy.epsilon=null method.sigma=1 method.selection=fixed method.clients_per_round=2 "
    "method.local_steps=1 method.g_steps=1 method.batch_size=4 method.width=0.02",
}


@pytest.mark.parametrize("method", FITS)
def test_private_functions_compute_in_float32_and_networks_outside_in_bfloat16(method, watch):
    with watch:
        fit(method, [*FITS[method].split(), "method.steps=2"], records=16, precision="bf16")
    assert watch.private == 0
    assert watch.public > 0


def test_a_private_function_that_ran_under_autocast_would_be_noticed(watch, monkeypatch):
    forgetful = type("Forgetful", (), {"depth": property(lambda self: 0, lambda self, value: None)})
    monkeypatch.setattr("dpgen_bench.training.precision._private", forgetful())
    with watch:
        fit("gs_wgan", [*FITS["gs_wgan"].split(), "method.steps=2"], records=16, precision="bf16")
    assert watch.private > 0


def test_autocast_of_a_method_ends_at_its_mechanisms():
    with torch.autocast("cpu", torch.bfloat16), private_computation():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_networks_return_float32_rounded_by_bfloat16_until_the_block_ends():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), torch.randn(5, 8)
    exact = net(x)
    with networks_in("bf16", CPU, [net]):
        rounded = net(x)
        with private_computation():
            private = net(x)
        rounded.sum().backward()
        with pytest.raises(RuntimeError):
            net(torch.randn(5, 9))
        assert not torch.is_autocast_enabled("cpu")
    assert rounded.dtype == torch.float32
    assert net[0].weight.grad.dtype == torch.float32
    assert 1e-4 < (rounded - exact).abs().max() < 0.1
    assert torch.equal(private, exact)
    assert torch.equal(net(x), exact)


# Inception


def test_a_protocol_states_the_precision_of_inception():
    assert Fid().precision == "fp32"
    with pytest.raises(ValueError, match="as the precision of Inception features"):
        Fid(precision="fp16")  # type: ignore[arg-type]


def test_the_page_has_the_measured_fids():
    measured = json.loads((ROOT / "results" / "bench" / "precision.json").read_text())["cpu"]["fid"]
    page = (ROOT / "docs" / "protocols.md").read_text()
    for samples, real in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
        value = measured[f"samples {samples}, real {real}"]
        assert f"| `{samples}` | `{real}` | {value:.2f} |" in page
    assert f"in the other is {measured['real bf16, real fp32']}, which" in page


def test_features_in_bfloat16_are_close_and_have_a_cache_of_their_own():
    try:
        exact, rounded = InceptionFeatures(dim=64), InceptionFeatures(dim=64, precision="bf16")
    except NotMeasured as missing:
        pytest.skip(str(missing))
    assert exact.version != rounded.version
    images = torch.randint(0, 256, (1, 1, 28, 28), dtype=torch.uint8)
    a, b = exact(images), rounded(images)
    assert b.dtype == np.float32
    assert 1e-5 < np.linalg.norm(a - b) / np.linalg.norm(a) < 0.03
