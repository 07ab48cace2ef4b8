"""Private attributes of harness objects: closed to plugins by every route that asks the object, open to the harness."""

from __future__ import annotations

import copy
import inspect
import operator
import pickle
from typing import Any

import pytest
import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.noise import Key
from dpgen_bench.privacy.sampling import Full
from dpgen_bench.testing import ClosedDoor
from dpgen_bench.testing.doors import CLOSED, closed_doors
from tests.toys import records


@pytest.fixture
def data() -> PrivateData:
    return PrivateData(*records(), 10, Ledger(Budget(10.0), 12), Key.seeded("test"))


ROUTES: dict[str, Any] = {
    "name": lambda thing: thing._key,
    "getattr": lambda thing: getattr(thing, "_key"),  # noqa: B009
    "hasattr": lambda thing: hasattr(thing, "_key"),
    "attrgetter": operator.attrgetter("_key"),
    "vars": vars,
    "dict": lambda thing: thing.__dict__,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "getmembers": inspect.getmembers,
    "set": lambda thing: setattr(thing, "_key", None),
    "delete": lambda thing: delattr(thing, "_key"),
    "class": lambda thing: setattr(thing, "__class__", type("Open", (PrivateData,), {})),
    "mangled": lambda thing: thing._PrivateData__images,
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_no_route_that_asks_the_object_leads_in(route, data):
    with (
        closed_doors(object()),
        pytest.raises(ClosedDoor, match="names with a leading underscore belong to the harness"),
    ):
        route(data)
    assert data._key is not None  # open again, and as it was


def test_the_harness_and_public_names_work_behind_closed_doors(data):
    with closed_doors(object()):
        release = data.mechanism("sum", sample=Full(), bound=PerRecord(C=1.0, shape=(1,)), times=1)
        assert float(release(lambda x, y: torch.ones(len(x), 1))) != 0.0
        assert (data.n, release.executed, data.mechanisms["sum"].std) == (12, 1, release.std)
        assert repr(data)
        assert data.budget.epsilon == 10.0


def test_classes_are_as_before_also_after_an_error():
    before = {cls: dict(vars(cls)) for cls in CLOSED}
    with pytest.raises(RuntimeError, match="boom"), closed_doors(object()):
        raise RuntimeError("boom")
    assert {cls: dict(vars(cls)) for cls in CLOSED} == before
