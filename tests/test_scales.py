"""Tests of scale=quick: every method is made smaller by a few lines of yaml, which explicit settings override."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpgen_bench import run
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.utils.paths import CONF

ROOT = Path(__file__).parent.parent
QUICK = CONF / "scale" / "quick"
UNTRAINED = {"real_data", "public_fonts", "uniform_noise"}
METHODS = sorted({path.stem for path in (CONF / "method").glob("*.yaml")} - UNTRAINED)


def overrides(method: str) -> list[str]:
    is_federated = method.startswith("fed")
    return [f"method={method}", f"dataset={'clients_digits' if is_federated else 'digits'}"]


def spec(*texts: str) -> RunSpec:
    return build_spec(compose_config(list(texts)))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_smaller_at_scale_quick(method):
    smaller = OmegaConf.to_container(OmegaConf.load(QUICK / f"{method}.yaml"))
    quick, paper = (spec(*overrides(method), f"scale={scale}") for scale in ("quick", "paper"))
    assert quick.id != paper.id
    assert quick.scale().max_steps == 300
    assert smaller == {key: quick.training["method"][key] for key in smaller}
    assert smaller.keys() == {
        key for key, value in quick.training["method"].items() if value != paper.training["method"][key]
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_at_scale_quick(method, tmp_path):
    relation = "replace_one" if "gs_wgan" in method else "add_remove"
    fast = ["scale.max_steps=2", "runtime.account_s=1", "runtime.progress=false", "~protocol.metrics.mlp"]
    folder = run(*overrides(method), "scale=quick", f"privacy.relation={relation}", f"results={tmp_path}", *fast)
    assert folder.read_json("ledger.json")["epsilon"]["proven"] <= 10.0
    assert folder.measurements.all()


@pytest.mark.parametrize("method", METHODS)
def test_a_stated_setting_is_the_same_at_every_scale(method):
    [key, *_] = OmegaConf.load(QUICK / f"{method}.yaml")
    stated = spec(*overrides(method)).training["method"][key]  # the default, which must count as stated, too
    text = f"method.{key}={'null' if stated is None else stated}"
    assert spec(*overrides(method), "scale=quick", text).training["method"][key] == stated


def test_a_presets_settings_are_the_same_at_every_scale():
    method = spec("experiment=gs_wgan/mnist", "scale=quick").training["method"]
    assert (method["shards"], method["warm_start"], method["generator"]) == (1000, 2000, "resnet")
    assert method["critic_width"] == 16  # not in the preset


def test_the_other_scales_change_no_setting():
    assert [path for path in QUICK.parent.iterdir() if path.is_dir()] == [QUICK]
    of_scales = [spec("method=dpgan", f"scale={scale}").training["method"] for scale in ("paper", "reduced", "demo")]
    assert of_scales[0] == of_scales[1] == of_scales[2]


def test_a_plugin_has_its_own_settings_for_a_scale_or_none(tmp_path: Path):
    for name, text in {"method/own": "C: 10.0", "method/other": "C: 10.0", "scale/quick/own": "C: 1.0"}.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        head = f"name: {path.stem}\n_target_: tests.toys.MeanImage\n" if name.startswith("method") else ""
        path.write_text(f"{head}{text}\n")
    place = ["--config-dir", str(tmp_path), "dataset=digits", "scale=quick"]
    clips = [compose_config([*place, f"method={name}", *more]).method.C for name, *more in (("own",), ("other",))]
    assert clips == [1.0, 10.0]
    assert compose_config([*place, "method=own", "method.C=3.0"]).method.C == 3.0


def test_the_page_states_the_settings_of_each_method():
    rows = dict(re.findall(r"^\| `(\w+)` \| (`\w+=.*) \|$", (ROOT / "docs" / "scales.md").read_text(), re.MULTILINE))
    assert {method: re.findall(r"`(\w+)=([\w.\[\]]+)`", text) for method, text in rows.items()} == {
        path.stem: [(key, "null" if value is None else str(value)) for key, value in OmegaConf.load(path).items()]
        for path in QUICK.glob("*.yaml")
    }
