"""A training step waits for an accelerator as rarely as it can; `stalls` counts on a CPU where it would wait."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.upload import upload
from tests.stalls import ACCELERATOR, counted, stalls_of_a_fit, stalls_of_a_step


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
        lambda x: x.to(torch.device("cpu")),
        lambda x: x.unique_consecutive(),
        lambda x: torch.unique(x.diag(), dim=0),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: torch.allclose(x, x),
        lambda x: x.multinomial(2),
        lambda x: torch.linalg.inv(x.diag()),
        lambda x: torch.linalg.cholesky(x.diag()),
        lambda x: torch.linalg.solve(x.diag(), x),
        lambda x: torch.linalg.svd(x.diag()),
        lambda x: torch.linalg.eigh(x.diag()),
        lambda x: torch.linalg.pinv(x.diag()),
        lambda x: x.histc(),
        lambda x: x.tensor_split(torch.ones(1, device=x.device).long()),
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: torch.as_tensor(np.ones(3), device=x.device),
        lambda x: torch.from_numpy(np.ones(3)).to(x.device),
        lambda x: torch.randn(3, generator=torch.Generator()).to(x),
        lambda x: (torch.arange(3) + 1).to(x.device),
        lambda x: torch.nn.Linear(3, 1, bias=False).to(x.device),
        lambda x: torch.empty(3).copy_(x),
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[[0, 2]],
        lambda x: torch.tensor([x[0]]),
        lambda x: torch.as_tensor([x[0]]),
        lambda x: x.new_tensor([1.0, 2.0]),
        lambda x: x.new_tensor(torch.ones(2)),
        lambda x: x.type("torch.FloatTensor"),
        lambda x: x.type(torch.DoubleTensor),
        lambda x: repr(x),
        lambda x: f"{x}",
        lambda x: torch.save(x, io.BytesIO()),
        lambda x: pickle.dumps(x),
        lambda x: F.one_hot(x.long()),
    ],
)
def test_what_waits_for_an_accelerator_is_counted(reads):
    with counted() as stalls:
        reads(torch.ones(3, device=ACCELERATOR))
    assert stalls.total() == 1


def test_each_tensor_in_a_list_is_read():
    with counted() as stalls:
        x = torch.ones(3, device=ACCELERATOR)
        torch.tensor([x[0], [x[1]][0], 1.0])
        assert stalls.total() == 2
        torch.tensor([x[0], 1.0], device=x.device)  # and the list is copied
    assert stalls.total() == 4


def test_only_what_the_arguments_of_the_log_read_is_counted_apart():
    ctx = SimpleNamespace(log=lambda **values: None)
    with counted() as stalls:
        x = torch.ones(3, device=ACCELERATOR)
        ctx.log(loss=float(x[0])) if bool(x.any()) else None
        ctx.log(
            loss=float(x[0]),
            other=x.sum().item(),
        )
        F.one_hot(x.long()[: int(x[0])], 4)
    assert (stalls.logged.total(), stalls.places.total()) == (3, 2)


def test_a_reading_in_the_closure_of_an_optimiser_is_counted():
    counts = []
    for loss in (lambda x: x.sum(), lambda x: x.sum().item()):
        with counted() as stalls:
            x = torch.ones(3, device=ACCELERATOR)
            torch.optim.SGD([x]).step(lambda: loss(x))  # noqa: B023
        counts.append(stalls.total())
    assert counts == [0, 1]


def test_what_does_not_wait_is_not_counted():
    weight = torch.ones(3, requires_grad=True)
    adam = torch.optim.Adam([weight])
    with counted() as stalls:
        weight.sum().backward()
        adam.step()
        F.one_hot(torch.arange(3), 4)
        torch.where(weight > 0, weight, 0.0)
        weight[torch.arange(2, device=weight.device)]
        weight.to(weight.device, torch.float64)
        torch.linalg.inv_ex(torch.eye(3, device=weight.device))
        upload(torch.from_numpy(np.ones(3)), weight.device) * weight
        (torch.ones(3) * 2).sum().item()  # all of it on the host
        repr(torch.ones(3))
        weight.detach().clone().type(torch.float64)
        weight.new_zeros(3)
        copy.deepcopy(weight.detach())
        torch.repeat_interleave(weight, torch.ones(3).long(), output_size=3)
    assert stalls.total() == 0


# What each step of a method reads with padded draws, at most this often; every other method reads nothing.
# DPGAN: the accuracy on fakes, which drives the adaptive frequency. DP-NTK: how many generated images each class has.
# Methods with private state (GS-WGAN, DataLens, G-PATE, PATE-GAN) keep it on the host, by copies that go on meanwhile.
# A step of Sim-PE is a whole iteration on all records, each class apart, whose candidates are drawn on the host. A step
# of a federation is a round of all its clients: each puts its networks on the device, and messages are bytes on the
# host.
READINGS: dict[str, dict[str, int]] = {
    "dpgan": {"dpgan.py": 1},
    "dp_cgan": {},
    "dpdm": {},
    "psg": {},
    "dp_sinkhorn": {},
    "gs_wgan": {},
    "datalens": {},
    "g_pate": {},
    "pate_gan": {},
    "dp_gauss": {},
    "sim_pe": {"sim_pe.py": 27, "glyphs.py": 4},
    "fed_gs_wgan": {
        "generator.py": 19,
        "client.py": 3,
        "client_mechanism.py": 2,
        "messages.py": 3,
        "wasserstein.py": 2,
    },
    "fedavg_gan": {
        "generator.py": 120,
        "client.py": 12,
        "client_mechanism.py": 3,
        "messages.py": 12,
        "private.py": 4,
        "data.py": 4,
    },
    "dp_merf": {},
    "dp_hp": {},
    "dp_ntk": {"ntk_features.py": 1},
}
# Methods that write a row of the log in each step, with what it reads. Others write one in every 10th to 100th step.
LOGGED = {"dpdm": 1, "psg": 1}
FAST = ("dpgan", "dp_sinkhorn")


@pytest.mark.parametrize(
    "method", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in READINGS]
)
def test_a_training_step_waits_for_nothing_but_what_it_must_read(method):
    places = stalls_of_a_step(method)
    by_file = Counter()
    for place, count in places.items():
        by_file["log" if place.startswith("log of ") else place.split(":")[0]] += count
    assert LOGGED.get(method, 0) <= by_file.pop("log", 0) <= LOGGED.get(method, 2), places
    assert by_file <= Counter(READINGS[method]), places


@pytest.mark.parametrize("method", ["dpgan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpdm", "psg"))])
def test_noise_for_release_waits_for_nothing(method):
    assert stalls_of_a_step(method, mode="os") <= stalls_of_a_step(method)
    on_host = stalls_of_a_step(method, mode="os", on_host=True)
    assert any(place.startswith("noise.py") for place in on_host), on_host


@pytest.mark.slow
def test_without_padding_the_size_of_a_draw_is_read():
    places = stalls_of_a_step("dpgan", padded=False)
    assert any(place.startswith("bookkeeping.py") for place in places), places


@pytest.mark.parametrize(
    ("draws", "number"),
    [
        (lambda x: torch.nn.init.uniform_(x), 1),
        (lambda x: F.dropout(x), 1),
        (lambda x: torch.rand(3, device=x.device), 1),
        (lambda x: torch.randn_like(x) + x.bernoulli(0.5), 2),
        (lambda x: torch.rand(3).to(x.device) * x, 0),
        (lambda x: torch.rand(3, generator=torch.Generator()), 0),
        (lambda x: x.normal_(generator=torch.Generator()), 0),
    ],
)
def test_what_draws_from_the_generator_of_an_accelerator_is_found(draws, number):
    with counted() as stalls:
        draws(torch.ones(3, device=ACCELERATOR))
    assert stalls.drawn.total() == number


@pytest.mark.parametrize(
    "method", [name if name in ("psg", "g_pate") else pytest.param(name, marks=pytest.mark.slow) for name in READINGS]
)
def test_no_fit_draws_from_the_generator_of_an_accelerator(method):
    """Its numbers are not those of a CPU, so that a run would train another generator there."""
    stalls, _ = stalls_of_a_fit(method)
    assert not stalls.drawn


def test_every_method_with_steps_that_see_records_has_an_entry():
    """The methods of the set have no loop, because they make no release."""
    others = {"public_fonts", "real_data", "uniform_noise"}
    assert READINGS.keys() | others == {path.stem for path in (CONF / "method").glob("*.yaml")}
