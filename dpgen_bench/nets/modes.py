"""Modes of a network within a block: eval mode, and batch normalisation by the statistics of each batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def in_eval_mode(net: nn.Module) -> Iterator[None]:
    """A context in which `net` is in eval mode; afterwards each of its modules has the mode that it had before."""
    training = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        net.train(training[net])  # first, because it may be overridden, and sets the mode of all modules
        for module, mode in training.items():
            module.training = mode


@contextmanager
def batch_statistics(net: nn.Module) -> Iterator[None]:
    """A context in which `net` in eval mode normalises each batch by the batch's own mean and (biased) variance.

    In eval mode, PyTorch's batch normalisation does this if it has no running statistics. They are removed and restored
    afterwards. Unlike in training mode, no forward pass changes them, and all other layers stay in eval mode.

    Raises:
        ValueError: If the net has no BatchNorm layer of PyTorch.
    """
    layers = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    if not layers:
        raise ValueError(
            f"expected a net with batch normalisation, got {type(net).__name__} without a torch BatchNorm layer, for "
            "which batch statistics would change nothing: use a protocol with batch_statistics null."
        )
    running = [(layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer in layers:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, (mean, variance) in zip(layers, running, strict=True):
            layer.running_mean, layer.running_var = mean, variance
