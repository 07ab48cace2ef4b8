"""Recording a module's forward pass, and refusing modules whose gradients cannot be split by record.

Both back ends compute a record's gradient in a layer's parameters from that layer's input and from the gradient of the
loss in that layer's output. This is correct only if each parameter enters the loss through the recorded calls only, and
if row i of every layer belongs to record i.
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
    """One call of a layer: its input, and the position of its output in the autograd graph.

    The edge is recorded when the layer returns, so that the gradient is that of the layer's own output even if an
    in-place activation overwrites the tensor later.

    Attributes:
        name, layer: the layer.
        input: its input.
        version: of the input, which PyTorch counts up when it is overwritten.
        edge: of the output in the autograd graph.
        shape: of the output.
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
            ValueError: if it was overwritten after the call.
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
            # `prepend`, because a hook of the user could replace the output.
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
            value = args[0] if args else kwargs.get("input")
            if not isinstance(value, Tensor):
                raise ValueError(f"expected layer {name!r} to be called with a tensor, got {type(value).__name__}.")
            edge = get_gradient_edge(output)
            self.calls.append(Call(name, layer, value, value._version, edge, tuple(output.shape)))

        return record

    def refuse_use_outside_layers(self, losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Check that parameters enter `losses` through the recorded calls only.

        Raises:
            ValueError: if a parameter is used outside its layer's forward (read as `layer.weight`, or through the
                second derivative of a gradient penalty), which no back end covers.
        """
        # Search the graph backwards from the losses and from every recorded input, up to the recorded outputs.
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
                    "computed from the layer's input and output; use it through its layer only."
                )
            open_nodes += [following for following, _ in node.next_functions]


def own_trainable(layer: nn.Module) -> list[str]:
    """Names of the trainable parameters that `layer` itself (not a child) holds."""
    return [name for name, parameter in layer.named_parameters(recurse=False) if parameter.requires_grad]


def refuse_row_coupling(module: nn.Module) -> None:
    """Check that no layer of `module` mixes the rows of a batch or keeps statistics of them.

    Raises:
        ValueError: if a layer does.
    """
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
    """Check that each layer uses its parameters directly, and not functions of other parameters.

    Args:
        module: its layers are checked.
        trainable: names of the trainable parameters.
        also_shared: whether trainable parameters with two names are refused, too.

    Raises:
        ValueError: if a layer computes its weights from other parameters, or, with `also_shared`, if layers share one.
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
    # Parameters that occur in two layers.
    first: dict[int, str] = {}
    trainable_names = set(trainable)
    named = [
        (f"{name}.{key}".lstrip("."), p)
        for name, layer in module.named_modules()
        for key, p in layer._parameters.items()
    ]
    for name, parameter in named:
        if parameter is None:
            continue
        other = first.setdefault(id(parameter), name)
        if other != name and {other, name} & trainable_names:
            raise ValueError(
                f"parameter {name!r} is shared with {other!r}: its gradient is a sum over two layers, which "
                "backend='bookkeeping' does not cover; use backend='opacus'."
            )
