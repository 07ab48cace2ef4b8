"""Gradients whose tensors are clipped one by one: the sum, its sensitivity, and what the released noise then proves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.bounds import Batch, PerRecordGradient
from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.gradients.per_tensor import sum_clipped_per_tensor
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.sampling import Poisson
from tests.gradient_cases import both


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def losses(module: nn.Module, scale: float = 1.0):
    return lambda x, y: scale * (module(x.flatten(1)).squeeze(1) - y).square()


def records(b: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(b, 1, 1, 5), torch.arange(b)


def value(bound: PerRecordGradient, images: Tensor, labels: Tensor, fn) -> dict[str, Tensor]:
    batch = Batch(images, labels, torch.arange(len(labels)), Key.seeded("per tensor"))
    return bound.value(fn, batch, None)


@both
@pytest.mark.parametrize("frozen", [(), ("0.weight",), ("2.bias", "0.bias")])
def test_each_tensor_of_each_record_is_clipped_on_its_own(backend: str, frozen: tuple[str, ...]) -> None:
    """Against the clipped gradients of single records by autograd."""
    module, C = net(), 2.0
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    images, labels = records(9)
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters() if p.requires_grad}
    clipped = 0
    for i in range(9):
        loss = losses(module)(images[i : i + 1], labels[i : i + 1]).sum()
        for name, gradient in zip(expected, torch.autograd.grad(loss, [*filter_trainable(module)]), strict=True):
            expected[name] += gradient * min(1.0, C / float(gradient.norm()))
            clipped += float(gradient.norm()) > C
    assert 0 < clipped < 9 * len(expected), "some gradients are clipped and others are not"
    got = sum_clipped_per_tensor(module, losses(module), (images, labels), C, backend=backend, microbatch=4)
    assert got.keys() == expected.keys()
    for name, total in expected.items():
        assert torch.allclose(got[name], total, rtol=1e-4, atol=1e-6), name
    assert [p.requires_grad for _, p in module.named_parameters()] == [
        name not in frozen for name, _ in module.named_parameters()
    ]


def filter_trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def norm(sums: dict[str, Tensor]) -> float:
    return float(torch.cat([part.double().flatten() for part in sums.values()]).norm())


def test_one_record_reaches_the_sensitivity_and_no_record_exceeds_it() -> None:
    module, C = net(), 0.7
    bound = PerRecordGradient(C=C, module=module, clip="per_tensor")
    assert bound.sensitivity == Sensitivity(C * 2.0, C * 4.0)  # four tensors
    assert bound.describe()["tensors"] == 4
    images, labels = records(30)
    for scale in (1e-3, 1.0, 1e4):
        norms = [
            norm(value(bound, images[i : i + 1], labels[i : i + 1], losses(module, scale))) for i in range(len(labels))
        ]
        assert max(norms) <= bound.sensitivity.add_remove
        if scale == 1e4:
            assert min(norms) == pytest.approx(bound.sensitivity.add_remove, rel=1e-4)
            assert min(norms) > 1.9 * PerRecordGradient(C=C, module=module).sensitivity.add_remove
    # Records whose gradients have opposite directions: +loss and -loss.
    plus, minus = (value(bound, images[:1], labels[:1], losses(module, scale)) for scale in (1e4, -1e4))
    moved = norm({name: plus[name] - minus[name] for name in plus})
    assert moved == pytest.approx(bound.sensitivity.replace_one, rel=1e-4)


def test_a_joint_clip_is_the_default_and_has_no_number_of_tensors() -> None:
    bound = PerRecordGradient(C=1.1, module=net())
    assert bound.sensitivity == Sensitivity(1.1, 2.2)
    assert "tensors" not in bound.describe()


def test_without_clipping_both_clips_are_the_plain_sum() -> None:
    module = net()
    images, labels = records(5)
    sums = [
        value(PerRecordGradient(C=math.inf, module=module, clip=clip), images, labels, losses(module))
        for clip in ("joint", "per_tensor")
    ]
    assert all(torch.allclose(sums[0][name], sums[1][name], rtol=1e-5) for name in sums[0])


def test_the_tensors_of_a_bound_do_not_change() -> None:
    """With a fifth tensor, a record could add more than was approved."""
    module = net()
    module[0].bias.requires_grad_(False)
    bound = PerRecordGradient(C=1.0, module=module, clip="per_tensor")
    bound.check_public(None)
    module[0].bias.requires_grad_(True)
    assert bound.sensitivity.add_remove == math.sqrt(3)
    with pytest.raises(ValueError, match=r"expected the 3 trainable parameters for which .* got 4"):
        bound.check_public(None)


def test_an_unknown_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="expected clip 'joint' or 'per_tensor', got 'flat'"):
        PerRecordGradient(C=1.0, module=net(), clip="flat")  # type: ignore[arg-type]


def test_what_the_noise_of_dp_cgans_authors_proves() -> None:
    """baselines: 9.62 with a joint clip of C, and 58.98 with a clip of each of the four tensors (sigma 1.12)."""
    proven = []
    for clip in ("joint", "per_tensor"):
        bound = PerRecordGradient(C=1.1, module=net(), clip=clip)
        event = Event(Poisson(0.01), bound.sensitivity, 1.12 * 1.1, 30304)
        proven.append(epsilon([event], 1e-5, "add_remove", "pld"))
    assert proven == [pytest.approx(9.62, abs=0.01), pytest.approx(58.98, abs=0.02)]
