"""What `fit` returns, or how it ends otherwise: a result that the data does not fit is one sentence and status 1."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator, make_net
from dpgen_bench.method import Context
from dpgen_bench.runs.execute import execute
from dpgen_bench.store.folders import RunFailed, RunFolder, Store
from dpgen_bench.training.signals import Preempted
from dpgen_bench.utils.building import instantiate
from tests.run_toys import config
from tests.toys import MeanImage, Painter

HERE = "tests.test_fit_results"


class Enlarging(Painter):
    """A network that makes images of another shape than it was made for."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.pad(super().forward(z, y), (0, 2, 0, 2))


class NoImages(NetGenerator):
    def sample(self, labels: Tensor, seed: int) -> Any:
        return labels.tolist()


class Diverged(Painter):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return super().forward(z, y) * torch.nan


@dataclass
class Returns(MeanImage):
    """After an honest training, `fit` ends in another way."""

    result: str = ""
    steps: int = 1

    def fit(self, data: PrivateData, ctx: Context) -> Any:
        generator = super().fit(data, ctx)
        if self.result == "exits":
            sys.exit(0)
        if self.result == "interrupted":
            raise KeyboardInterrupt
        if self.result == "preempted":
            raise Preempted(143)
        shape = (1, 5, 5) if self.result in ("small", "declares") else data.image_shape
        classes = 2 if self.result == "two classes" else data.num_classes
        net = {"enlarging": Enlarging, "diverged": Diverged}.get(self.result, Painter)
        settings = {"_target_": f"{net.__module__}.{net.__name__}", "num_classes": classes, "image_shape": list(shape)}
        made = make_net(
            {**settings, "image_shape": list(data.image_shape if self.result == "declares" else shape)}, ctx.device
        )
        others = {"none": None, "number": 3, "class": NetGenerator, "honest": generator}
        others["no images"] = NoImages(generator.net, **generator.config())
        return others.get(self.result, NetGenerator(made, settings, 4, classes, shape))


class ExitsInInit(MeanImage):
    def __init__(self) -> None:
        sys.exit(0)


class NoFit:
    pass


class NoArguments:
    def fit(self) -> None:
        pass


def failed_run(tmp_path: Path, *overrides: str, target: str = f"{HERE}.Returns") -> tuple[str, RunFolder]:
    """The first line that a run ends with, and its folder."""
    with pytest.raises(RunFailed) as caught:
        execute(config(tmp_path, *overrides, target=target))
    (folder,) = Store(tmp_path).runs()
    assert folder.status() == "failed"
    assert not folder.trained
    return str(caught.value).splitlines()[0], folder


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("small", r"image_shape=\(1, 8, 8\), as the dataset has, got \(1, 5, 5\); build it for data.image_shape"),
        ("declares", r"image_shape=\(1, 8, 8\), as the dataset has, got \(1, 5, 5\)"),
        ("enlarging", r"images of the shape \(1, 8, 8\), as the dataset has, got \(1, 10, 10\)"),
        ("no images", r"images of the shape \(1, 8, 8\), as the dataset has, got an object of the type list"),
        ("two classes", "num_classes=10, as the dataset has, got 2; pass data.num_classes"),
        ("none", "expected fit to return a generator such as NetGenerator, got None; end Returns.fit with"),
        ("number", "expected fit to return a generator such as NetGenerator, got an object of the type int"),
        ("class", "expected fit to return a generator such as NetGenerator, got an object of the type ABCMeta"),
        ("exits", r"expected fit to return a generator such as NetGenerator, got SystemExit\(0\)"),
    ],
)
def test_a_run_whose_fit_returns_no_generator_of_the_data_fails(tmp_path, result, message):
    line, folder = failed_run(tmp_path, f"method.result={result}")
    assert re.search(message, line), line
    assert "failed during training" in line
    ledger = json.loads((folder.path / "ledger.json").read_text())
    assert ledger["entries"][0]["executed"] == 1  # what was released before is not forgotten


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("NoFit", "expected NoFit to have a method `fit(self, data, ctx)`, got none; define it"),
        ("NoArguments", "expected NoArguments.fit to take the arguments (data, ctx), got fit()"),
    ],
)
def test_a_run_of_a_class_without_a_usable_fit_fails(tmp_path, target, message):
    line, _ = failed_run(tmp_path, target=f"{HERE}.{target}")
    assert message in line


@pytest.mark.parametrize(("result", "end"), [("interrupted", KeyboardInterrupt), ("preempted", Preempted)])
def test_stop_signals_end_a_run_as_before(tmp_path, result, end):
    with pytest.raises(end):
        execute(config(tmp_path, f"method.result={result}", target=f"{HERE}.Returns"))
    (folder,) = Store(tmp_path).runs()
    assert folder.status() == ("preempted" if end is Preempted else "interrupted")


def test_the_diverged_generator_of_a_run_is_kept(tmp_path):
    with pytest.raises(RunFailed, match="expected finite pixels"):
        execute(config(tmp_path, "method.result=diverged", target=f"{HERE}.Returns"))
    (folder,) = Store(tmp_path).runs()
    assert folder.trained


def test_a_class_that_ends_the_process_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"method 'toy' cannot be built: it raises SystemExit\(0\)"):
        execute(config(tmp_path, target=f"{HERE}.ExitsInInit"))


def test_a_metric_that_ends_the_process_fails_the_run(tmp_path):
    settings = config(tmp_path, "method.result=honest", target=f"{HERE}.Returns")
    settings.protocol.metrics = {"exits": {"_target_": f"{HERE}.ExitingMetric"}}
    with pytest.raises(RunFailed, match=r"expected a result, got SystemExit\(0\) of a plugin"):
        execute(settings)


class ExitingMetric:
    def __call__(self, *_: Any) -> float:
        sys.exit(0)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Returns\nresult: none", "TypeError: expected fit to return a generator such as NetGenerator, got None"),
        ("Returns\nresult: two classes", "ValueError: expected the generator that fit returns to have num_classes=10"),
        ("Returns\nresult: exits", "RuntimeError: expected fit to return a generator such as NetGenerator, got System"),
        ("NoFit", "TypeError: expected NoFit to have a method `fit(self, data, ctx)`, got none"),
        ("NoArguments", "TypeError: expected NoArguments.fit to take the arguments (data, ctx), got fit()"),
    ],
)
def test_a_check_of_such_a_method_fails(tmp_path, capsys, monkeypatch, target, message):
    monkeypatch.setenv("DPGEN_RESULTS", str(tmp_path / "results"))
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "own.yaml").write_text(f"name: own\n_target_: {HERE}.{target}\n")
    assert main(["check", "--config-dir", str(tmp_path), "method=own", "dataset=digits"]) == 1
    assert f"FAILED  {message}" in capsys.readouterr().out


def test_the_error_of_a_network_is_shown_without_hydras_wrapper(tmp_path):
    settings = config(tmp_path, target=None)
    settings.method = compose_config(["method=dpgan"]).method
    with pytest.raises(RunFailed) as caught:
        execute(settings)
    line = str(caught.value).splitlines()[0]
    assert "failed during training: ValueError: the DPGAN networks are made for 28x28 or 32x32 images, got 8x8" in line


def test_an_error_that_is_hydras_own_is_raised_as_it_is():
    from hydra.errors import InstantiationException

    with pytest.raises(InstantiationException):
        instantiate({"_target_": 3})
