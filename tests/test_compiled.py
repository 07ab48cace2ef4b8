"""Compiled releases and steps equal those that are not compiled, up to rounding."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from dpgen_bench.data.private import PrivateData
from dpgen_bench.nets.stack import Stack
from dpgen_bench.nets.wasserstein import CriticTraining
from dpgen_bench.nets.wgan import ProjectionCritic
from dpgen_bench.privacy.batch import Batch
from dpgen_bench.privacy.bounds import PerRecordGradient
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.gradients import layers
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.padding import Padding
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.utils import compiled
from dpgen_bench.utils.compiled import Compiled
from tests import toys

inductor = pytest.param(
    "inductor",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"),
    ],
)

cudagraphs = pytest.param("cudagraphs", marks=pytest.mark.gpu)


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(1, 2, 3, stride=2), nn.Linear(18, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(x)).flatten(1))


def releases(backend: str, *, pure: bool = True, new_functions: bool = False) -> tuple[list[Tensor], PerRecordGradient]:
    """Three releases, between which the network moves."""
    net = SmallNet()
    images, labels = toys.records(40, (1, 8, 8))
    public = (torch.rand(3, 1, 8, 8, generator=toys.seeded(1)), torch.arange(3))

    def losses(x: Tensor, y: Tensor, mask: Tensor, rng: RecordRng) -> Tensor:
        noisy = x + 0.1 * rng.normal((1, 8, 8)) + 0.01 * rng.uniform()[:, None, None, None]
        target = torch.where(mask, 9 - y, y)
        return -(F.one_hot(target, 10) * net(noisy).log_softmax(1)).sum(1)

    bound = PerRecordGradient(C=0.1, module=net, public_rows=3, copies=2, microbatch=8, pure=pure)
    services = Services(Ledger(Budget(math.inf), 40), Key.seeded("c"), padded=True)
    release = PrivateData(images, labels, 10, services).mechanism(
        "m", sample=Poisson(0.3), bound=bound, times=3, std=1e-3
    )
    values = []
    with compiled.using(backend):
        for _ in range(3):
            fn = (lambda x, y, mask, rng: losses(x, y, mask, rng)) if new_functions else losses
            gradient = release(fn, public=public)
            values.append(torch.cat([part.flatten() for part in gradient.values()]))
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter -= gradient[name]
    return values, bound


@pytest.mark.parametrize("backend", ["graph", inductor])
def test_a_compiled_release_is_equal_up_to_rounding_and_keeps_nothing_of_another_one(backend):
    expected, _ = releases("none")
    values, bound = releases(backend)
    for a, b in zip(expected, values, strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=1e-6)
    (graph,) = bound._compiled._graphs.values()
    assert graph.recorded == 1  # all pieces of all draws have one shape


def test_only_functions_that_a_method_states_to_be_pure_are_compiled():
    _, bound = releases("graph", pure=False)
    assert not bound._compiled._graphs


def test_a_device_that_computes_float64_slowly_compiles_no_release(monkeypatch):
    """Its clipped sums branch on values, which would raise in a recording, and an error in a release marks the run."""
    expected, _ = releases("none")
    for module in ("compiled_sums", "gradients.bookkeeping"):
        monkeypatch.setattr(f"dpgen_bench.privacy.{module}.fast_in_float64", lambda device: False)
    values, bound = releases("graph")
    assert not bound._compiled._graphs
    assert all(torch.allclose(a, b, rtol=0.0, atol=1e-6) for a, b in zip(expected, values, strict=True))


def test_a_method_with_a_new_function_in_each_release_is_not_recorded_again_and_again():
    expected, _ = releases("none")
    values, bound = releases("graph", new_functions=True)
    assert len(bound._compiled._graphs) == 2
    for a, b in zip(expected, values, strict=True):
        assert torch.allclose(a, b, rtol=0.0, atol=1e-6)


def test_a_function_that_reads_another_tensor_or_branches_on_values_is_refused():
    other = torch.ones(3)
    x = torch.arange(3.0)
    with compiled.using("graph"):
        with pytest.raises(Exception, match="FakeTensor"):
            Compiled(lambda x: x + other)(x)
        with pytest.raises(Exception, match=r"[Dd]ata.?dependent|aten._local_scalar_dense"):
            Compiled(lambda x: x if x.sum() > 0 else -x)(x)
        double = Compiled(lambda x: 2.0 * x)
        assert torch.equal(double(x), 2.0 * x)
        assert torch.equal(double(x + 1.0), 2.0 * x + 2.0)
        assert double.recorded == 1
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
        assert double.recorded == 2


@pytest.mark.parametrize("backend", ["graph", inductor])
def test_records_of_a_compiled_sum_are_within_the_bound_and_those_that_are_not_finite_add_zero(monkeypatch, backend):
    """With norms from Gram matrices of pixels in the first layer, and of patches in the second."""
    monkeypatch.setattr(layers, "_COST_OF_A_KEPT_NUMBER", 10**9)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 4, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 1, 3))
    images, labels = torch.randn(8, 2, 8, 8, generator=toys.seeded(1)), torch.arange(8) % 2
    images[4], images[5, 0, 0, 0], images[6], images[7] = math.nan, math.inf, 1e30, 1e4 * images[7]

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return 100.0 * (net(x).flatten(1) - y[:, None]).square().sum(1)

    bound = PerRecordGradient(C=0.1, module=net, pure=True)

    def released(real: Tensor, backend: str) -> Tensor:
        batch = Batch(images, labels, torch.arange(8), Key.seeded("c"), real=real, padding=Padding(8, 1))
        with compiled.using(backend):
            return torch.cat([part.flatten() for part in bound.value(losses, batch, None).values()]).double()

    rows = torch.eye(8, dtype=torch.bool)
    singles = torch.stack([released(row, backend) for row in rows])
    norms = singles.norm(dim=1)
    assert (norms <= 0.1).all()
    assert (norms[[0, 1, 2, 3, 7]] > 0.09999).all()
    assert (singles[[4, 5]] == 0.0).all()
    every = torch.ones(8, dtype=torch.bool)
    assert torch.allclose(released(every, backend), singles.sum(0), rtol=0.0, atol=1e-6)
    for real in (every, *rows):
        assert torch.allclose(released(real, backend), released(real, "none"), rtol=0.0, atol=1e-6)
    (graph,) = bound._compiled._graphs.values()
    assert graph.recorded == 1


@pytest.mark.parametrize("backend", ["graph", inductor])
def test_a_compiled_step_of_a_stack_of_critics_is_equal_up_to_rounding(backend):
    """With the gradient penalty, which differentiates twice, and a new stack of the same template for each step."""
    training = CriticTraining(batch_size=3)

    def make() -> nn.Module:
        return ProjectionCritic((1, 28, 28), 10, width=4)

    def trained(name: str) -> dict[str, Tensor]:
        template, rng = make(), toys.seeded(4)
        tensors = Stack.initial(make, [toys.seeded(i) for i in range(2)])
        with compiled.using(name):
            for _ in range(2):
                stack = training.stack(template, tensors)
                real, fake = (torch.rand(2, 3, 1, 28, 28, generator=rng) for _ in range(2))
                labels = torch.randint(10, (2, 3), generator=rng)
                training.update(stack, real, fake, labels, torch.rand(2, 3, 1, 1, 1, generator=rng))
                tensors = stack.tensors(adam=True)
        if name != "none":
            (graph,) = template.graphs_of_stacks.values()
            assert graph.recorded == 1
        return tensors

    expected, got = trained("none"), trained(backend)
    for name, value in expected.items():
        assert torch.allclose(value, got[name], rtol=1e-3, atol=2e-5), name


def test_a_machine_that_cannot_compile_is_named_before_anything_is_computed(monkeypatch):
    def no_compiler(device_type=None):
        raise InvalidCxxCompiler

    compiled.expect_compiler("none", torch.device("cpu"))
    compiled.expect_compiler("cudagraphs", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"expected a GPU for runtime.compile=cudagraphs, got the device cpu"):
        compiled.expect_compiler("cudagraphs", torch.device("cpu"))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)
    compiled.expect_compiler("inductor", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"expected a C\+\+ compiler for runtime.compile=inductor on a CPU, got none"):
        compiled.expect_compiler("inductor", torch.device("cpu"))
