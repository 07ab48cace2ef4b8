"""Tests of a method's part in a run's id, and that a run is not resumed with another source of its method."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.identity import is_stale, method_version, resolved_arguments, source_fingerprint
from dpgen_bench.config.spec import build_spec
from dpgen_bench.federation.client import Program
from dpgen_bench.method import Context
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.runs import prepare


@dataclass
class Stated:
    version = 3
    a: int = 1
    b: int = 2


class Derived(Stated):
    pass


@dataclass
class Extended(Stated):
    added = ("c",)
    c: int = 5


@dataclass
class Fast(Stated):
    speed = (("b", 2),)


@dataclass
class Exchanging:
    a: int | None = None
    b: int | None = None

    def __post_init__(self) -> None:
        self.a, self.b = None, self.a


def test_a_run_is_stale_only_if_its_class_has_another_version(caplog, capfd, tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(tmp_path)
    here, unknown = f"{__name__}.Stated", ("no_such_plugin.M", f"{__name__}.Missing", "broken_plugin.M", "math.pi")
    for target, version, expected in ((here, 3, False), (here, 2, True), *((target, 3, None) for target in unknown)):
        config = OmegaConf.create({"method": {"_target_": target}})
        assert is_stale(config, {"version": version}) is expected, target
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")


def test_a_subclass_does_not_inherit_the_version():
    assert method_version(Stated) == 3
    assert method_version(Derived) == source_fingerprint(Derived)


FILES = {
    "plugin_a/__init__.py": "",
    "plugin_a/method.py": "from plugin_b.base import Base\nimport plugin_helper\nfrom .loss import loss\n"
    "class M(Base):\n    pass\n",
    "plugin_a/loss.py": "def loss():\n    from plugin_a import late\n    return late\n",
    "plugin_a/late.py": "x = 1\n",
    "plugin_a/unused.py": "x = 1\n",
    "plugin_helper.py": "import json\nimport numpy.linalg\nx = 1\n",
    "plugin_b/__init__.py": "",
    "plugin_b/base.py": "class Base:\n    pass\n",
}


@pytest.mark.parametrize(
    ("file", "text", "changes"),
    [
        ("plugin_a/method.py", FILES["plugin_a/method.py"] + "# a comment\n", False),
        ("plugin_a/unused.py", "x = 2\n", False),
        ("plugin_a/loss.py", FILES["plugin_a/loss.py"].replace("return late", "return -late"), True),
        ("plugin_a/late.py", "x = 2\n", True),
        ("plugin_helper.py", "x = 2\n", True),
        ("plugin_b/base.py", "class Base:\n    x = 2\n", True),
    ],
)
def test_the_source_of_a_method_is_what_defines_it(file, text, changes, tmp_path, monkeypatch):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    cls = importlib.import_module("plugin_a.method").M
    try:
        before = source_fingerprint(cls)
        (tmp_path / file).write_text(text)
        assert (source_fingerprint(cls) != before) == changes
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("plugin_a", "plugin_b", "plugin_helper")]:
            del sys.modules[name]


def test_the_source_of_a_method_is_the_same_in_every_python(tmp_path, monkeypatch):
    """The value is of Python 3.11 and of 3.12, whose syntax trees have one more field."""
    source = "class M:\n    def fit(self, x: int = 1, *more):\n        return f'{x}' or None\n"
    (tmp_path / "plugin_c.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert source_fingerprint(importlib.import_module("plugin_c").M) == "ca11bbaff07a1821"
    finally:
        del sys.modules["plugin_c"]


@pytest.mark.parametrize("version", [0, "2", 1.0, True])
def test_invalid_versions_are_refused(version):
    with pytest.raises(ValueError, match="version to be an integer >= 1"):
        method_version(type("Invalid", (), {"version": version}))


def test_stating_a_default_changes_nothing():
    short, whole = (OmegaConf.create({"_target_": "x", **more}) for more in ({}, {"a": 1, "b": 2, "check": {"a": 9}}))
    assert resolved_arguments(Stated, short) == resolved_arguments(Stated, whole)


def test_an_option_that_was_added_changes_nothing_at_its_default():
    def resolved(cls: type, **more: int) -> dict[str, object]:
        return resolved_arguments(cls, OmegaConf.create({"_target_": "x", **more}))

    assert resolved(Extended) == resolved(Extended, c=5) == resolved(Stated)
    assert resolved(Extended, c=6) == {**resolved(Stated), "c": 6}


def test_a_setting_of_speed_alone_has_one_value_in_the_identity():
    def resolved(cls: type, **more: int) -> dict[str, object]:
        return resolved_arguments(cls, OmegaConf.create({"_target_": "x", **more}))

    assert resolved(Fast, b=50) == resolved(Fast) == resolved(Stated, b=2) != resolved(Stated, b=50)
    assert resolved(Fast, a=7) != resolved(Fast)


def test_the_stack_of_gs_wgan_is_no_part_of_a_runs_id():
    ids = [
        build_spec(compose_config(["experiment=gs_wgan/mnist", *overrides])).id
        for overrides in ([], ["method.stack=1"], ["method.stack=50"])
    ]
    assert len(set(ids)) == 1
    assert ids[0] != build_spec(compose_config(["experiment=gs_wgan/mnist", "method.shards=999"])).id


def test_arguments_are_distinguished_even_if_the_class_maps_them_to_the_same_attributes():
    one, other = (OmegaConf.create({"_target_": "x", "a": a}) for a in (1, 2))
    assert resolved_arguments(Exchanging, one) != resolved_arguments(Exchanging, other)


def test_a_run_with_releases_is_not_resumed_with_another_source(tmp_path, monkeypatch):
    spec = build_spec(compose_config(["method=dp_merf", "dataset=digits", f"results={tmp_path}"]))
    folder = SimpleNamespace(path=tmp_path)
    ledger = Ledger(Budget(10.0), 8)
    prepare.expect_same_source(spec, folder, ledger)
    monkeypatch.setattr(prepare, "source_fingerprint", lambda cls: "another")
    prepare.expect_same_source(spec, folder, ledger)  # nothing was released yet
    ledger.approve(Entry("sum", {"kind": "PerRecord", "C": 1.0}, Event(Full(), Sensitivity(1.0, 2.0), 9.0, 2)))
    ledger.record_executed("sum", 1)
    prepare.expect_same_source(spec, folder, ledger)
    monkeypatch.setattr(prepare, "source_fingerprint", lambda cls: "a third")
    with pytest.raises(ValueError, match="expected the source of the method"):
        prepare.expect_same_source(spec, folder, ledger)


class StoresOperand:
    def __eq__(self, other: object) -> bool:
        self.operand = other
        return True

    __hash__ = None  # type: ignore[assignment]


def test_the_seconds_of_a_context_cannot_be_written_through_a_comparison():
    context, stores_operand = Context(), StoresOperand()
    assert context.seconds == stores_operand
    stores_operand.operand["leak"] = 1.0
    assert "leak" not in context.seconds


def test_the_identity_of_a_program_runs_no_code_of_its_fields():
    class Spy:
        def __deepcopy__(self, memo: dict[int, object]) -> Spy:
            raise AssertionError("copied")

    @dataclass
    class Example(Program):
        x: object

    spy = Spy()
    assert Example(spy).identity() == {"x": spy}


def test_a_keys_secret_is_not_printed():
    assert "secret" not in repr(Key.seeded("x"))


@pytest.mark.parametrize("override", ["privacy.epsilon=true", "privacy.delta=true"])
def test_a_budget_is_not_a_boolean(override):
    with pytest.raises(ValueError, match="expected numbers for privacy"):
        build_spec(compose_config(["method=dp_merf", "dataset=digits", override]))
