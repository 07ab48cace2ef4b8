"""Power iterations of PyTorch's spectral norm as functions of parameters and buffers, for stacks of networks.

`torch.nn.utils.parametrizations.spectral_norm` updates its singular vectors in place in each forward pass in training
mode, which is not possible under `torch.vmap`. A stack of networks therefore runs in evaluation mode, which does not
change the vectors, and updates them between forward passes with `advance_spectral`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

U, V, WEIGHT = ".0._u", ".0._v", ".original"  # suffixes of PyTorch's names, after the name of the parametrization


@torch.no_grad()
def power_iteration(weight: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One power iteration on matrices W: u' = W v / ||W v||, then v' = W^T u' / ||W^T u'||.

    Args:
        weight: [..., o, i...], with the same leading stack dimensions as u and v; it is flattened to W [o, prod(i...)].
            This is correct for Linear, Embedding and convolutions, but not for transposed convolutions, which PyTorch
            flattens along their inputs.
        u: [..., o], estimates of the left singular vectors of the largest singular values.
        v: [..., prod(i...)], estimates of the right singular vectors.

    Returns:
        (u', v'). The estimate of the singular value, by which evaluation mode divides, is then u'^T W v'.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    matrix = weight.flatten(u.dim()) if weight.dim() > u.dim() else weight
    if matrix.shape != (*u.shape, v.shape[-1]) or u.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            "expected u [..., o] and v [..., prod(i...)] for a weight [..., o, i...], got u "
            f"{list(u.shape)} and v {list(v.shape)} for a weight {list(weight.shape)}: all three need the same stack "
            "dimensions, and the layer must be normalised along its weight's first dimension (not a transposed "
            "convolution)."
        )
    u = F.normalize((matrix @ v.unsqueeze(-1)).squeeze(-1), dim=-1, eps=1e-12)  # PyTorch's eps
    v = F.normalize((u.unsqueeze(-2) @ matrix).squeeze(-2), dim=-1, eps=1e-12)
    return u, v


def advance_spectral(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The buffers after one power iteration for each spectrally normalised weight, as in a training-mode forward pass.

    Args:
        parameters, buffers: Tensors by PyTorch's names, `LAYER.parametrizations.weight.original` and
            `LAYER.parametrizations.weight.0._u`, `._v`: of one network (`named_parameters`, `named_buffers`), or of a
            stack of networks with leading dimensions (`torch.func.stack_module_state`). They are not changed.

    Returns:
        All buffers: new singular vectors, without gradient, and the other tensors as they are.

    Raises:
        ValueError: If the weight of a vector or the other vector is missing, or if shapes do not fit.
    """
    advanced = dict(buffers)
    for name, u in buffers.items():
        if not name.endswith(U):
            continue
        prefix = name.removesuffix(U)
        if prefix + WEIGHT not in parameters or prefix + V not in buffers:
            raise ValueError(
                f"the buffer {name} needs {prefix + WEIGHT} among the parameters and {prefix + V} among the buffers, "
                "one of which is missing: give all parameters and all buffers of the network."
            )
        try:
            advanced[name], advanced[prefix + V] = power_iteration(parameters[prefix + WEIGHT], u, buffers[prefix + V])
        except ValueError as error:
            raise ValueError(f"{prefix}: {error}") from None
    return advanced


def settle_spectral(net: nn.Module, iterations: int = 100) -> nn.Module:
    """Make many power iterations in place, for weights that training did not produce (averages), and return the net."""
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    for _ in range(iterations):
        buffers = advance_spectral(parameters, buffers)
    for name, buffer in net.named_buffers():
        buffer.copy_(buffers[name])
    return net
