"""A training step waits for an accelerator as rarely as it can; `stalls` counts on a CPU where it would wait."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.stalls import counted, stalls_of_last_step


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_what_waits_for_an_accelerator_is_counted(reads):
    with counted() as stalls:
        reads(torch.ones(3))
    assert stalls.total() == 1


def test_what_does_not_wait_is_not_counted():
    weight = torch.ones(3, requires_grad=True)
    adam = torch.optim.Adam([weight])
    with counted() as stalls:
        weight.sum().backward()
        adam.step()
        F.one_hot(torch.arange(3), 4)
        torch.where(weight > 0, weight, 0.0)
        weight[torch.tensor([0, 2])]
    assert stalls.total() == 0


# What each step of a method reads, at most this often.
# DPGAN: the accuracy on fakes, which drives the adaptive frequency. DP-Sinkhorn: the extents of two transport problems,
# one of which is solved outside the release because it has no records. GS-WGAN keeps the state of critics on the host.
# DP-NTK: how many generated images each class has.
READINGS = {
    "dpgan": {"bookkeeping.py": 1, "dpgan.py": 1},
    "dp_sinkhorn": {"transport.py": 2},
    "gs_wgan": {"stack.py": 1, "state_file.py": 1},
    "dp_merf": {},
    "dp_hp": {},
    "dp_ntk": {"ntk_features.py": 2},
}


@pytest.mark.parametrize(
    "method",
    [name if name in ("dpgan", "dp_sinkhorn") else pytest.param(name, marks=pytest.mark.slow) for name in READINGS],
)
def test_a_training_step_waits_for_nothing_but_what_it_must_read(method):
    places = stalls_of_last_step(method)
    by_file = Counter()
    for place, count in places.items():
        by_file[place.split(":")[0]] += count
    assert by_file <= Counter(READINGS[method]), places
