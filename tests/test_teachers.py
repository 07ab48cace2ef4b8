"""What the methods of teachers (PATE-GAN, G-PATE, DataLens) have in common."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from tests.defaults import check_settings, named
from tests.toys import Watcher, records


def first_release(name: str, stack: int) -> Tensor:
    """The exact value of the first release of a fit with the settings of `check:`, without noise."""
    images, labels = records()
    watcher, ledger = Watcher(), Ledger(Budget(math.inf, 1e-5, "replace_one", "pld"), len(labels))
    data = PrivateData(images / 255.0, labels, 10, Services(ledger, Key.seeded("test"), observer=watcher))
    named(name, **{**check_settings(name), "stack": stack}).fit(data, Context(3, services=data._services))
    return watcher.releases[0][1]


@pytest.mark.parametrize("name", ["pate_gan", "g_pate", "datalens"])
def test_answers_do_not_depend_on_how_many_teachers_are_trained_together(name: str) -> None:
    """First weights and random numbers of a teacher are its own; only sums of floating-point numbers may differ."""
    whole = first_release(name, 3)
    assert whole.abs().sum() > 0
    for stack in (1, 2):
        assert torch.allclose(first_release(name, stack), whole, atol=1e-4)
