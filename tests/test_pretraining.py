"""First stages (`init=`): where networks start, what is spent, ids of runs, conformance, and cheating first stages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

from dpgen_bench.cli import main
from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.outcomes.listing import setting_of
from dpgen_bench.pretraining.pretrained import Pretrained
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.services import Services
from dpgen_bench.runs.plan import plan
from dpgen_bench.tables.lines import Line
from dpgen_bench.tables.naming import method_of
from dpgen_bench.tables.rows import TableRow, differing_settings
from dpgen_bench.testing import check_method
from dpgen_bench.testing.bench import random_images
from dpgen_bench.testing.errors import ConformanceError, PrivateAccess

SHAPE = (1, 8, 8)
SMALL = ["dataset=digits", "method=dp_merf", "method.features=20", "method.steps=2", "method.pretraining.steps=3"]


def pretrained(init: str, *overrides: str) -> Pretrained:
    small = {"gauss": ["init.dim=4"], "central_images": ["init.batches=2"]}[init]
    method = build_method(compose_config([*SMALL, f"init={init}", "init.images=50", *small, *overrides]))
    assert isinstance(method, Pretrained)
    return method


def fit(method: Any, eps: float = 10.0, n: int = 60) -> tuple[NetGenerator, Ledger]:
    images, labels = random_images(SHAPE, n, 10, seed=1)
    ledger = Ledger(Budget(eps, 1e-5, "replace_one", "pld"), n)
    services = Services(ledger, Key.seeded("test"))
    generator = method.fit(PrivateData(images, labels, 10, services), Context(0, services=services))
    return generator, ledger


@pytest.mark.parametrize("init", ["gauss", "central_images"])
def test_the_fit_to_records_starts_from_the_networks_of_the_pretraining(init: str) -> None:
    """With a learning rate of almost 0 on the records, the generator is that of a fit to the first stage's images."""
    still = pretrained(init, "method.lr=1e-30", "+method.pretraining.lr=0.01")
    released: list[Any] = []
    request = still.stage.request

    def keep(data: PrivateData, ctx: Context) -> Callable[[], tuple[Tensor, Tensor]]:
        draw = request(data, ctx)

        def kept() -> tuple[Tensor, Tensor]:
            released.append((draw(), ctx.generator.get_state(), torch.get_rng_state()))
            return released[-1][0]

        return kept

    still.stage.request = keep  # type: ignore[method-assign]
    got, _ = fit(still)
    (images, labels), own, everywhere = released[0]
    services = Services(Ledger(Budget(math.inf, 1e-5, "replace_one", "pld"), len(labels)), Key.seeded("pretraining:0"))
    ctx = Context(0, services=services)
    ctx.generator.set_state(own)
    torch.set_rng_state(everywhere)
    expected = still.pretraining.fit(PrivateData(images, labels, 10, services), ctx)
    assert isinstance(expected, NetGenerator)
    for own_value, value in zip(got.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(own_value, value, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("init", ["gauss", "central_images"])
def test_one_ledger_has_both_stages_within_the_budget(init: str, relation: str) -> None:
    overrides = [*SMALL, f"init={init}", f"privacy.relation={relation}", "privacy.epsilon=10", "privacy.accountant=pld"]
    ledger = plan(overrides)
    own = [name for name in ledger.entries if name.startswith("init_")]
    assert own
    assert list(ledger.entries) == [*own, "mean_embedding"]  # those of the first stage are requested first
    proven = epsilon(ledger.events, 1e-5, ledger.budget.relation, "pld")
    assert 9.5 < proven <= 10.0
    first = epsilon([ledger.entries[name].event for name in own], 1e-5, ledger.budget.relation, "pld")
    assert first < 6.0


def test_a_first_stage_with_clusters_makes_three_more_releases_within_the_same_share() -> None:
    one, two = (plan([*SMALL, "init=gauss", "privacy.epsilon=1", f"init.clusters={K}"]) for K in (1, 2))
    assert set(two.entries) - set(one.entries) == {"init_clusters"}
    assert two.entries["init_clusters"].event.times == 3
    assert epsilon(two.events, 1e-5, "add_remove", "pld") == pytest.approx(1.0, rel=0.02)
    assert two.entries["mean_embedding"].event.std == pytest.approx(one.entries["mean_embedding"].event.std, rel=1e-3)


def test_a_larger_share_means_less_noise_in_the_first_stage_and_more_in_the_method() -> None:
    small, large = (plan([*SMALL, "init=gauss", "privacy.epsilon=1", f"init.share={share}"]) for share in (0.1, 0.5))
    assert all(
        large.entries[name].event.std < small.entries[name].event.std for name in small.entries if "init" in name
    )
    assert large.entries["mean_embedding"].event.std > small.entries["mean_embedding"].event.std


def test_ids_change_with_the_first_stage_and_the_pretraining_and_without_one_they_do_not() -> None:
    def training(*overrides: str) -> dict[str, Any]:
        return build_spec(compose_config([*SMALL, *overrides])).training

    plain = training()
    assert "init" not in plain
    assert "pretraining" not in plain["method"]
    assert training("method.pretraining.steps=7") == plain
    old = compose_config(SMALL)  # the config of a run from before first stages existed
    OmegaConf.set_struct(old, False)
    del old["init"], old.method["pretraining"]
    assert build_spec(old).training == plain
    others = ["init.share=0.2"], ["method.pretraining.steps=7"], ["init.dim=3"]
    ids = [str(training("init=gauss", *each)) for each in ([], *others)]
    assert len({str(plain), *ids}) == 5


def test_tables_name_the_first_stage() -> None:
    plain, gauss = (build_spec(compose_config([*SMALL, f"init={init}"])) for init in ("none", "gauss"))
    assert differing_settings(plain, gauss) == ["init"]
    assert (setting_of(plain.config, "init"), setting_of(gauss.config, "init")) == ("none", "gauss")
    assert (setting_of(plain.config, "init.share"), setting_of(gauss.config, "init.share")) == ("–", "0.3")
    names = [method_of(Line({}, {}, {}, TableRow((spec,), ()), None)) for spec in (plain, gauss)]
    assert names == ["DP-MERF", "DP-MERF, init=gauss"]


def test_without_noise_and_movements_central_images_are_the_halved_class_means() -> None:
    still = ["init.rotation=0", "init.shift=0", "init.zoom=0", "init.rate=1.0", "init.radius=100"]
    stage = pretrained("central_images", *still).stage
    images, labels = random_images(SHAPE, 400, 10, seed=3)
    labels = torch.arange(400) % 10
    services = Services(Ledger(Budget(math.inf, 1e-5, "replace_one", "pld"), 400), Key.seeded("test"))
    drawn, drawn_labels = stage.request(PrivateData(images, labels, 10, services), Context(0, services=services))()
    for c in range(10):
        halved = nn.functional.avg_pool2d(images[labels == c].mean(dim=0), 2)
        expected = nn.functional.interpolate(halved[None], size=(8, 8), mode="bilinear", align_corners=False)[0]
        torch.testing.assert_close(drawn[drawn_labels == c][0] / 255.0, expected, atol=0.004, rtol=0.0)


def test_no_epsilon_is_claimed_and_methods_that_cannot_be_pretrained_say_so() -> None:
    assert not hasattr(build_spec(compose_config(["method=dpgan", "init=gauss"])).method(), "epsilon_claimed")
    with pytest.raises(ValueError, match=r"can be pretrained, got 'dp_gauss': it trains no network; use init=none"):
        build_spec(compose_config(["method=dp_gauss", "init=gauss"]))
    with pytest.raises(ValueError, match=r"yaml of the method 'dpgan' to have `pretraining`.*got None; use init=none"):
        build_spec(compose_config(["method=dpgan", "init=gauss", "~method.pretraining"]))
    with pytest.raises(ValueError, match="nothing can be pretrained"):
        fit(build_method(compose_config(["method=uniform_noise", "init=gauss", "init.dim=4", "method.pretraining={}"])))


def test_every_method_has_settings_of_its_pretraining_or_says_why_it_has_none() -> None:
    for path in (Path(__file__).parents[1] / "conf" / "method").glob("*.yaml"):
        stated = yaml.safe_load(path.read_text())["pretraining"]
        assert isinstance(stated, dict) or len(stated.split()) > 3, path


def test_a_first_stage_and_a_parent_run_exclude_each_other(tmp_path: Path) -> None:
    services = Services(Ledger(Budget(1.0, 1e-5, "replace_one", "pld"), 60), Key.seeded("test"))
    data = PrivateData(*random_images(SHAPE, 60, 10, seed=1), 10, services)
    with pytest.raises(ValueError, match="expected restart=null with a first stage"):
        pretrained("gauss").fit(data, Context(0, services=services, parent=tmp_path / "last.pt"))


@dataclass
class OneStep:
    """One step of a generator towards the noisy mean image."""

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        release = data.mechanism("mean", sample=Full(), bound=PerRecord(C=1.0, shape=data.image_shape), times=1)
        generator = NetGenerator.build(CodeGenerator, data, ctx.device, latent_dim=2)
        sgd = torch.optim.SGD(generator.net.parameters(), 0.01)
        for _ in ctx.steps(1, net=generator.net):
            target = release(lambda x, y: x) / data.n
            z, y = ctx.latents(generator, 4)
            (generator.net(z, y) - target).square().sum().backward()
            sgd.step()
        return generator


@dataclass
class Peeking:
    """A first stage that draws records themselves."""

    share: float = 0.3

    def request(self, data: PrivateData, ctx: Context) -> Callable[[], tuple[Tensor, Tensor]]:
        release = data.mechanism(
            "init_x", sample=Full(), bound=PerRecord(C=1.0, shape=data.image_shape), times=1, share=self.share
        )
        return lambda: self.draw(data, release)

    def draw(self, data: PrivateData, release: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        release(lambda x, y: x)
        return (data._PrivateData__images * 255).round().to(torch.uint8), data._PrivateData__labels  # type: ignore[attr-defined, no-any-return]


class Keeping(Peeking):
    """A first stage that keeps what it sees inside of its release."""

    def draw(self, data: PrivateData, release: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []

        def rows(x: Tensor, y: Tensor) -> Tensor:
            kept.append(x.detach().clone())
            return x

        release(rows)
        images = kept[-1].nan_to_num().clamp(0.0, 1.0)
        return (images * 255).round().to(torch.uint8), torch.arange(len(images)) % data.num_classes


@pytest.mark.parametrize(("stage", "error"), [(Peeking, PrivateAccess), (Keeping, ConformanceError)])
def test_a_first_stage_that_looks_at_the_records_is_caught(stage: type[Peeking], error: type[Exception]) -> None:
    with pytest.raises(error):
        check_method(lambda: Pretrained(OneStep(), stage(), OneStep()), image_shape=SHAPE, records=24)


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("init", ["gauss", "central_images"])
@pytest.mark.parametrize("method", ["dpgan", "dpdm", "dp_sinkhorn", "gs_wgan", "dp_merf", "dp_ntk", "dp_cgan", "psg"])
def test_methods_with_a_first_stage_conform(
    method: str, init: str, relation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["check", f"method={method}", f"init={init}", f"privacy.relation={relation}"])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("init", "relation", "overrides"),
    [
        ("gauss", "replace_one", []),
        pytest.param("gauss", "replace_one", ["init.clusters=2"], marks=pytest.mark.slow),
        pytest.param("central_images", "add_remove", [], marks=pytest.mark.slow),
    ],
)
def test_a_small_method_with_a_first_stage_conforms(init: str, relation: Any, overrides: list[str]) -> None:
    budget = Budget(10.0, 1e-5, relation, "pld")
    check_method(lambda: pretrained(init, *overrides), image_shape=SHAPE, records=24, budget=budget)
