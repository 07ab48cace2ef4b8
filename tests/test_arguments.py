"""Tests that values of a config are checked against the types of a dataclass's fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.utils.validation import check_types


@dataclass
class Settings:
    lr: float = 0.1
    steps: int | None = None
    n_d: int | Literal["adaptive"] = 1
    kind: Literal["a", "b"] = "a"
    name: str = "x"
    on: bool = False
    betas: tuple[float, float] = (0.5, 0.9)
    sizes: Sequence[int] = ()
    widths: tuple[int, ...] = ()
    other: Any = None
    net: Sequence[Any] | None = None


GOOD = [
    {"lr": 1},
    {"lr": math.inf},
    {"steps": None},
    {"steps": 3},
    {"n_d": "adaptive"},
    {"n_d": 5},
    {"kind": "b"},
    {"on": True},
    {"betas": [0, 0.9]},
    {"sizes": []},
    {"sizes": [1, 2]},
    {"widths": [1, 2, 3]},
    {"other": object()},
    {"net": None},
    {"unknown": "any value"},  # not checked here; the class refuses it
]
BAD = [
    ({"lr": "fast"}, "method.lr: expected a number, got 'fast'"),
    ({"lr": True}, "method.lr: expected a number, got True"),
    ({"lr": None}, "method.lr: expected a number, got None"),
    ({"lr": float("nan")}, "method.lr: expected a number in .*, got nan"),
    ({"lr": [1.0]}, "method.lr"),
    ({"steps": 2.5}, "method.steps: expected an integer or null, got 2.5"),
    ({"n_d": "often"}, "method.n_d: expected an integer or 'adaptive', got 'often'"),
    ({"kind": "c"}, "method.kind: expected 'a' or 'b', got 'c'"),
    ({"name": 3}, "method.name: expected a string, got 3"),
    ({"on": 1}, "method.on: expected true or false, got 1"),
    ({"betas": 0.9}, "method.betas: expected a list of 2: a number, a number, got 0.9"),
    ({"betas": [0.9]}, r"method.betas: expected a list of 2: .* got \[0.9\]"),
    ({"betas": [0.9, "x"]}, "method.betas"),
    ({"sizes": ["x"]}, "method.sizes: expected a list, each item an integer"),
    ({"widths": [1, None]}, "method.widths: expected a list, each item an integer"),
]


@pytest.mark.parametrize("arguments", GOOD)
def test_values_of_the_declared_type_pass(arguments: dict[str, Any]) -> None:
    check_types(Settings, arguments, "method")


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_values_of_another_type_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_types(Settings, arguments, "method")


def test_a_class_without_fields_is_not_checked() -> None:
    check_types(dict, {"lr": "fast"}, "method")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset=npz"], "expected a value of dataset.path, got none.*write dataset.path=FILE.npz"),
        (["dataset=npz", "+dataset.other=${dataset.path}"], "expected a value of dataset.path, got none"),
        (["dataset=image_folder"], "of dataset.path and of dataset.image_size.*path=FOLDER dataset.image_size=32"),
        (["dataset=torchvision"], "expected a value of dataset.name, got none.*write dataset.name=KMNIST"),
        (["+method.nothing='???'"], "expected a value of method.nothing, .*write method.nothing=VALUE"),
        (["protocol.repeats='???'"], "expected a value of protocol.repeats, .*write protocol.repeats=VALUE"),
    ],
)
def test_a_value_that_a_yaml_leaves_open_must_be_set(overrides: list[str], message: str) -> None:
    config = compose_config(["method=dp_merf", *overrides])
    with pytest.raises(ValueError, match=message):
        build_spec(config)


def test_a_dataset_alone_must_have_its_open_values_set() -> None:
    with pytest.raises(ValueError, match=r"a value of dataset\.path, got none.*write dataset\.path=FILE\.npz"):
        build_dataset(compose_config(["dataset=npz"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "+method.stepps=1",
            r"method.stepps: .*method 'dp_merf' \(.*steps.*did you mean 'steps'\?\); correct the name",
        ),
        ("+dataset.sed=1", r"dataset.sed: expected a setting of the dataset 'digits' \(.*got 'sed'"),
    ],
)
def test_a_setting_that_a_class_does_not_have_is_refused_with_those_it_has(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_spec(compose_config(["method=dp_merf", override]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("method.lr=fast", "method.lr: expected a number"),
        ("method.activation=swish", "method.activation: expected 'relu' or 'leaky_relu'"),
        ("method.betas=0.9", "method.betas: expected a list of 2"),
        ("method.steps=1.5", "method.steps: expected an integer or null"),
    ],
)
def test_the_values_of_a_run_are_checked_when_its_config_is_resolved(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_spec(compose_config(["method=dp_sinkhorn", override]))
