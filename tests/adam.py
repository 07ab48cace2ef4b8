"""The first step of Adam: it moves each parameter by the learning rate, against the sign of its gradient."""

from __future__ import annotations

import torch
from torch import nn


def expect_first_step_of_adam(before: nn.Module, exact: nn.Module, after: nn.Module, lr: float) -> None:
    """Check the gradients of `after` and its distance from `before`.

    Args:
        before: the network before the step.
        exact: a copy of it in float64 that has the gradients of the step.
        after: the network after the step, with the gradients that Adam used.
    """
    gradients = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    stepped, clear = dict(after.named_parameters()), 0
    for name, parameter in before.named_parameters():
        gradient, used = gradients[name], stepped[name].grad
        assert used is not None, name
        assert torch.allclose(used.double(), gradient, rtol=0.0, atol=1e-3 * largest), name
        sure = gradient.abs() > 0.01 * largest  # the sign of others may be decided by rounding
        clear += int(sure.sum())
        moved = (stepped[name] - parameter).detach().double()
        assert torch.allclose(moved[sure], -lr * gradient[sure].sign(), rtol=1e-3), name
    assert clear > 100
