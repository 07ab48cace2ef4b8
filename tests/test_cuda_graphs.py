"""Functions that are replayed as CUDA graphs return what they return without, and their graphs keep nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpgen_bench.nets.sinkhorn_loss import SinkhornLoss
from dpgen_bench.nets.transport import Cost, Transport
from dpgen_bench.utils import compiled, cuda_graphs
from dpgen_bench.utils.cuda_graphs import Replayed
from methods.dp_sinkhorn import DPSinkhorn
from tests import toys
from tests.defaults import build
from tests.dp_sinkhorn_toys import TINY, fit, private


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ y.T).softmax(1), (x.sum() - y.mean()).sqrt()


def pair(rows: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    rng = toys.seeded(seed)
    return torch.rand(4, 3, generator=rng).to(device), torch.rand(rows, 3, generator=rng).to(device)


@pytest.mark.parametrize("backend", ["none", "cudagraphs"])
def test_on_a_cpu_the_function_itself_is_called(backend):
    replayed = Replayed(both)
    with compiled.using(backend):
        got = replayed(*pair(5, 0))
    assert all(torch.equal(*each) for each in zip(got, both(*pair(5, 0)), strict=True))
    assert not replayed._graphs


@pytest.mark.gpu
def test_a_replay_gives_the_same_bits_for_each_shape_and_does_not_change_earlier_results():
    replayed = Replayed(both)
    cases = [pair(rows, seed, "cuda") for seed, rows in enumerate([5, 7, 5, 7, 7, 5])]
    with compiled.using("cudagraphs"):
        got = [replayed(*case) for case in cases]
    for case, results in zip(cases, got, strict=True):
        assert all(torch.equal(*each) for each in zip(results, both(*case), strict=True))
    assert len(replayed._graphs) == 2


@pytest.mark.gpu
def test_a_graph_keeps_neither_arguments_nor_results():
    replayed = Replayed(both)
    with compiled.using("cudagraphs"):
        replayed(*pair(5, 0, "cuda"))
    (graph,) = replayed._graphs.values()
    assert all((each == 0).all() for each in (*graph.arguments, *graph.results))


@pytest.mark.gpu
def test_further_shapes_are_computed_without_a_graph(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_MOST_SHAPES", 1)
    replayed = Replayed(both)
    with compiled.using("cudagraphs"):
        for rows in (5, 7, 5, 7):
            case = pair(rows, rows, "cuda")
            assert all(torch.equal(*each) for each in zip(replayed(*case), both(*case), strict=True))
    assert len(replayed._graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("cost", [Cost(1.0, 1.0), Cost(1.0, 0.0)])
def test_gradients_of_dp_sinkhorns_loss_are_the_same_bits(cost):
    images, labels = toys.records(9, (1, 8, 8))
    images, labels = images.cuda() / 255, labels.cuda()
    loss = SinkhornLoss(Transport(cost), 15.0, 10, (1, 8, 8), 6)

    def gradients() -> list[Tensor]:
        found = []
        for drawn in (9, 5, 0, 9):
            x = loss.points(2.0 * images[:8] - 0.1 * drawn, labels[:8])
            own, value = loss.gradient_without_records(x)
            found += [own, value, loss.gradient(own[:6], x[:6], images[:drawn], labels[:drawn])]
        return found

    expected = gradients()
    with compiled.using("cudagraphs"):
        got = gradients()
    assert len(loss._first._graphs) == 2
    assert all(torch.equal(*each) for each in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_dp_sinkhorn_trains_the_same_generator_with_graphs():
    method = build(DPSinkhorn, **{**TINY, "steps": 6, "batch_size": 4})

    def trained(backend: str) -> Tensor:
        with compiled.using(backend):
            generator, _ = fit(method, private(device=torch.device("cuda")), device="cuda")
        return torch.cat([each.flatten() for each in generator.net.parameters()])

    expected, got = trained("none"), trained("cudagraphs")
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
