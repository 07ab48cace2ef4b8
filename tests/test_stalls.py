"""A training step waits for an accelerator as rarely as it can; `stalls` counts on a CPU where it would wait."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from dpgen_bench.runs.config import CONF
from tests.stalls import counted, stalls_of_last_step


@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.to(device="cpu"),
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


# What each step of a method reads with padded draws, at most this often; every other method reads nothing.
# DPGAN: the accuracy on fakes, which drives the adaptive frequency. DP-NTK: how many generated images each class has.
# Methods with private state (GS-WGAN, DataLens, G-PATE, PATE-GAN) keep it on the host, by copies that go on meanwhile.
# Messages of a federation are bytes on the host. A step of Sim-PE is a whole iteration on all records.
READINGS = {
    "dpgan": {"dpgan.py": 1},
    "dp_cgan": {},
    "dpdm": {},
    "psg": {},
    "dp_sinkhorn": {},
    "gs_wgan": {},
    "datalens": {},
    "g_pate": {},
    "pate_gan": {},
    "sim_pe": {"sim_pe.py": 24},
    "dp_merf": {},
    "dp_hp": {},
    "dp_ntk": {"ntk_features.py": 1},
}
FAST = ("dpgan", "dp_sinkhorn")


@pytest.mark.parametrize(
    "method", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in READINGS]
)
def test_a_training_step_waits_for_nothing_but_what_it_must_read(method):
    places = stalls_of_last_step(method)
    by_file = Counter()
    for place, count in places.items():
        by_file[place.split(":")[0]] += count
    assert by_file <= Counter(READINGS[method]), places


@pytest.mark.parametrize("method", ["dpgan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpdm", "psg"))])
def test_noise_for_release_waits_for_nothing(method):
    assert stalls_of_last_step(method, mode="os") <= stalls_of_last_step(method)
    on_host = stalls_of_last_step(method, mode="os", on_host=True)
    assert any(place.startswith("noise.py") for place in on_host), on_host


@pytest.mark.slow
def test_without_padding_the_size_of_a_draw_is_read():
    places = stalls_of_last_step("dpgan", padded=False)
    assert any(place.startswith("bookkeeping.py") for place in places), places


def test_every_method_with_steps_that_see_records_has_an_entry():
    """Federations send bytes in each round; the others in the set have no loop."""
    others = {"dp_gauss", "public_fonts", "real_data", "uniform_noise", "fedavg_gan", "fed_gs_wgan"}
    assert READINGS.keys() | others == {path.stem for path in (CONF / "method").glob("*.yaml")}
