"""What one forward pass did with a module's parameters, and refusals for what cannot be split by record.

Both back ends rest on the same fact: a record's gradient in a layer's parameters is a function of that layer's
input and of the gradient of the loss in that layer's output. It holds only if each parameter enters the loss
through the recorded calls and nowhere else, and only if row i of every layer belongs to record i.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


@dataclass(frozen=True)
class Call:
    """One call of a layer: its input, and where its output sits in the autograd graph.

    The edge is taken as the layer returns, so an in-place activation that later overwrites the output tensor
    does not change which gradient is asked for.
    """

    name: str
    layer: nn.Module
    input: Tensor
    version: int
    edge: GradientEdge
    shape: tuple[int, ...]

    def intact_input(self) -> Tensor:
        """The input [b, ...], detached.

        Raises:
            ValueError: if it was overwritten after the layer read it.
        """
        if self.input._version != self.version:
            raise ValueError(
                f"the input of layer {self.name!r} was changed in place after the layer had read it, so its gradient "
                "can no longer be computed; use an out-of-place operation there."
            )
        return self.input.detach()


class Recorder:
    """Records every differentiable call of `layers` (name -> layer) while the context is open."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self.calls: list[Call] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Recorder:
        for name, layer in self.layers.items():
            # prepend: a hook of the user's must not replace the output before it is seen here.
            handle = layer.register_forward_hook(self._hook(name), prepend=True, with_kwargs=True)
            self._handles.append(handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, name: str) -> Any:
        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return
            given = args[0] if args else kwargs.get("input")
            if not isinstance(given, Tensor):
                raise ValueError(f"expected layer {name!r} to be called with a tensor, got {type(given).__name__}.")
            edge = get_gradient_edge(output)
            self.calls.append(Call(name, layer, given, given._version, edge, tuple(output.shape)))

        return record

    def refuse_use_outside_layers(self, losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Walk the graph of `losses` from its end, and again from every recorded input, stopping at recorded outputs.

        Raises:
            ValueError: if this meets a parameter: it is then used outside its layer's forward (read as
                `layer.weight`, or through a gradient penalty's second derivative), which no back end can see.
        """
        names = {id(parameter): name for name, parameter in parameters.items()}
        outputs = {call.edge.node for call in self.calls}
        open_nodes: list[Node | None] = [losses.grad_fn]
        open_nodes += [call.input.grad_fn for call in self.calls]
        seen: set[Node] = set(outputs)
        while open_nodes:
            node = open_nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            owner = getattr(node, "variable", None)
            if owner is not None and id(owner) in names:
                raise ValueError(
                    f"parameter {names[id(owner)]!r} enters the loss outside its own layer's forward (read directly, "
                    "or through a second derivative such as a gradient penalty), so its per-record gradient cannot be "
                    "told from the layer's input and output; let it act through its layer alone."
                )
            open_nodes += [following for following, _ in node.next_functions]


def own_trainable(layer: nn.Module) -> list[str]:
    """Names of the trainable parameters that `layer` itself (not a child) holds."""
    return [name for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]


def refuse_row_coupling(module: nn.Module) -> None:
    """Raise ValueError if a layer of `module` mixes the rows of a batch (or keeps statistics of them)."""
    for name, layer in module.named_modules():
        mixes = isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
        keeps = isinstance(layer, _InstanceNorm) and layer.track_running_stats and layer.training
        if mixes or keeps:
            raise ValueError(
                f"layer {name!r} ({type(layer).__name__}) makes one row depend on the other rows of the batch, so "
                "there is no per-record gradient to clip; use GroupNorm or InstanceNorm without running statistics, "
                "or put the layer in eval mode."
            )


def refuse_hidden_weights(module: nn.Module, trainable: Iterable[str], also_shared: bool) -> None:
    """Raise ValueError for parameters that reach their layer through a function of them, or (on request) twice.

    Args:
        trainable: names of the trainable parameters.
        also_shared: refuse a parameter that is known under two names, too.
    """
    for name, layer in module.named_modules():
        if torch.nn.utils.parametrize.is_parametrized(layer) or any(
            key.endswith(("_orig", "_g", "_v")) and key.rsplit("_", 1)[0] not in layer._parameters
            for key in layer._parameters
        ):
            raise ValueError(
                f"the weights of layer {name!r} ({type(layer).__name__}) are computed from other parameters "
                "(parametrization, spectral or weight norm), which no back end for per-record gradients covers; "
                "remove it, or freeze those parameters."
            )
    if not also_shared:
        return
    first: dict[int, str] = {}
    wanted = set(trainable)
    own = [
        (f"{name}.{key}".lstrip("."), p)
        for name, layer in module.named_modules()
        for key, p in layer._parameters.items()
    ]
    for name, parameter in own:
        if parameter is None:
            continue
        other = first.setdefault(id(parameter), name)
        if other != name and {other, name} & wanted:
            raise ValueError(
                f"parameter {name!r} is shared with {other!r}: its gradient is a sum over two layers, which "
                "backend='bookkeeping' does not cover; use backend='opacus'."
            )
