"""Sums of per-record gradients in which each parameter tensor is clipped on its own, as some released code does.

The clipped gradient of a record then consists of R tensors of norm at most C, so its norm is at most C sqrt(R) and not
C. docs/accounting.md, "Sensitivities of the bounds", proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from dpgen_bench.privacy.gradients import Backend, clipped_gradient_sum


def trainable(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameter tensors of a module that are trained."""
    return tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def sum_clipped_per_tensor(
    module: nn.Module,
    loss_fn: Callable[..., Tensor],
    rows: tuple[Tensor, ...],
    max_norm: float,
    *,
    microbatch: int | None = None,
    backend: Backend = "bookkeeping",
    copies: int = 1,
    mask: Tensor | None = None,
    padded: bool = False,
) -> dict[str, Tensor]:
    """For each trainable tensor, the sum over records of their gradients in it, each clipped to max_norm.

    The arguments are those of `clipped_gradient_sum`, which is called once for each tensor while all others are frozen.

    Guarantees: in each tensor a record adds a gradient of norm at most max_norm, as in `clipped_gradient_sum`.

    Raises:
        ValueError: as `clipped_gradient_sum`, also for a loss that does not depend on one of the tensors.
    """
    sums: dict[str, Tensor] = {}
    for name in trainable(module):
        with _only(module, name):
            part = clipped_gradient_sum(
                module,
                loss_fn,
                rows,
                max_norm,
                mask=mask,
                microbatch=microbatch,
                backend=backend,
                copies=copies,
                padded=padded,
            )
        sums |= part.gradients
    return sums


@contextmanager
def _only(module: nn.Module, name: str) -> Iterator[None]:
    """Freeze all parameters but one."""
    frozen = [p for other, p in module.named_parameters() if other != name and p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
