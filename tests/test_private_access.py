"""Private attributes of harness objects are refused to plugins by every route, and not to the harness."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import dpgen_bench.method
from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing import PrivateAccess
from dpgen_bench.testing.private_access import GUARDED, private_access_refused
from tests.client_toys import Toy, ask_one
from tests.client_toys import data as client_data
from tests.toys import records


@pytest.fixture
def data() -> PrivateData:
    return PrivateData(*records(), 10, Services(Ledger(Budget(10.0), 12), Key.seeded("test")))


ROUTES: dict[str, Any] = {
    "name": lambda thing: thing._services,
    "getattr": lambda thing: getattr(thing, "_services"),  # noqa: B009
    "hasattr": lambda thing: hasattr(thing, "_services"),
    "attrgetter": operator.attrgetter("_services"),
    "vars": vars,
    "dict": lambda thing: thing.__dict__,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "getmembers": inspect.getmembers,
    "set": lambda thing: setattr(thing, "_services", None),
    "delete": lambda thing: delattr(thing, "_services"),
    "class": lambda thing: setattr(thing, "__class__", type("Open", (PrivateData,), {})),
    "mangled": lambda thing: thing._PrivateData__images,
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_every_route_to_a_private_attribute_is_refused(route, data):
    with (
        private_access_refused(object()),
        pytest.raises(PrivateAccess, match="names with a leading underscore, and keys, are private to the harness"),
    ):
        route(data)
    assert data._services.key is not None  # access works again, and nothing was changed


def test_a_client_program_that_holds_harness_objects_is_not_pickled(tmp_path):
    """The harness pickles programs and all objects in them: here the innermost frame is the harness's."""
    held = client_data(tmp_path=tmp_path)
    with private_access_refused(object()) as errors, contextlib.suppress(ValueError):
        ask_one(held, program=Toy(wrong=held))
    assert errors
    assert "__reduce_ex__" in str(errors[0])


EXECUTED: dict[str, Any] = {}
exec("def route(thing): return thing._services", EXECUTED)
CLAIMED: dict[str, Any] = {"__name__": "dpgen_bench.method"}
exec(compile("def route(thing): return thing._services", "<frozen os>", "exec"), CLAIMED)


@pytest.mark.parametrize("route", [EXECUTED["route"], CLAIMED["route"]], ids=["exec", "claimed"])
def test_executed_code_counts_as_the_plugins_under_any_name(route, data):
    with private_access_refused(object()), pytest.raises(PrivateAccess):
        route(data)


def test_executed_code_in_the_namespace_of_the_harness_is_the_plugins(data, monkeypatch):
    monkeypatch.setattr(dpgen_bench.method, "route", None, raising=False)
    exec("def route(thing): return thing._services", vars(dpgen_bench.method))
    with private_access_refused(object()), pytest.raises(PrivateAccess):
        dpgen_bench.method.route(data)  # type: ignore[attr-defined]


def private_method_of_the_class(data: PrivateData) -> Any:
    return getattr(type(data), "_PrivateData" + "__batch")(data, np.arange(3), None)


def test_private_functions_of_the_classes_are_refused(data):
    assert len(private_method_of_the_class(data).images) == 3
    with private_access_refused(object()), pytest.raises(PrivateAccess, match="'_PrivateData__batch' of PrivateData"):
        private_method_of_the_class(data)
    assert len(private_method_of_the_class(data).images) == 3


KEYS: dict[str, Any] = {
    "seeded": lambda data: Key.seeded("conformance:0"),
    "from_os": lambda data: Key.from_os(),
    "made": lambda data: Key(bytes(32), "seeded"),
    "rng": lambda data: RecordRng(KEY, torch.arange(3))._ids,
}
KEY = Key.seeded("given")


@pytest.mark.parametrize("route", KEYS.values(), ids=KEYS)
def test_making_keys_and_their_private_attributes_are_refused(route, data):
    route(data)
    with private_access_refused(object()), pytest.raises(PrivateAccess):
        route(data)


def test_record_rng_works_while_private_access_is_refused(data):
    with private_access_refused(object()):
        assert RecordRng(KEY, torch.arange(3)).normal(2).shape == (3, 2)


def test_the_harness_and_public_names_work_while_private_access_is_refused(data):
    with private_access_refused(object()):
        release = data.mechanism("sum", sample=Full(), bound=PerRecord(C=1.0, shape=(1,)), times=1)
        assert float(release(lambda x, y: torch.ones(len(x), 1))) != 0.0
        assert (data.n, release.executed, data.mechanisms["sum"].std) == (12, 1, release.std)
        assert repr(data)
        assert data.budget.epsilon == 10.0


def test_classes_are_unchanged_after_an_error():
    before = {cls: dict(vars(cls)) for cls in GUARDED}
    with pytest.raises(RuntimeError, match="boom"), private_access_refused(object()):
        raise RuntimeError("boom")
    assert {cls: dict(vars(cls)) for cls in GUARDED} == before
