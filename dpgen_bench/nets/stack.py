"""Several networks of one architecture trained side by side, as one batched network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from dpgen_bench.nets.spectral import advance_spectral

ADAM = ("exp_avg", "exp_avg_sq")


class Stack:
    """G networks, each with its own parameters, spectral vectors and Adam moments, in tensors [G, ...].

    A forward pass is one `torch.vmap` over the stack, a training step one Adam on the stacked tensors. Adam acts entry
    by entry, so both equal G separate networks up to rounding. Networks run in evaluation mode: what training mode
    would change, the spectral vectors, is moved by `power_iteration`.

    Args:
        template: a module of the architecture, pure in evaluation mode; its own numbers are not used.
        tensors: as `initial` or `tensors` gives them; without Adam's moments, Adam starts anew.
        lr, betas: of Adam.
    """

    def __init__(
        self, template: nn.Module, tensors: dict[str, Tensor], *, lr: float, betas: tuple[float, float]
    ) -> None:
        self.template = template.eval()
        names = [name for name, _ in template.named_parameters()]
        self.parameters = {name: tensors[name].detach().clone().requires_grad_() for name in names}
        self.buffers = {name: tensors[name].detach().clone() for name, _ in template.named_buffers()}
        self.adam = torch.optim.Adam(self.parameters.values(), lr, betas)
        for name, parameter in self.parameters.items() if "step" in tensors else ():
            moments = {key: tensors[f"{key}.{name}"].detach().clone() for key in ADAM}
            self.adam.state[parameter] = {"step": tensors["step"].flatten()[0].cpu().clone(), **moments}

    @staticmethod
    def initial(make: Callable[[], nn.Module], rngs: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """Tensors of one fresh network for each generator, initialised from it; PyTorch's own are untouched."""
        nets = []
        for rng in rngs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(torch.randint(2**62, (), generator=rng)))
                nets.append(make())
        parameters, buffers = stack_module_state(nets)
        return {name: value.detach() for name, value in {**parameters, **buffers}.items()}

    def tensors(self, *, adam: bool) -> dict[str, Tensor]:
        """What the stack is, [G, ...] by name: parameters, buffers, and Adam's moments and steps if asked."""
        tensors = {**self.parameters, **self.buffers}
        for name, parameter in self.parameters.items() if adam else ():
            state = self.adam.state[parameter]
            tensors.update({f"{key}.{name}": state[key] for key in ADAM})
            tensors["step"] = state["step"].to(parameter.device).expand(len(parameter))
        return {name: value.detach().clone() for name, value in tensors.items()}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The networks' outputs [G, ...] for inputs [G, ...], one slice for each network."""

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *slices: Tensor) -> Tensor:
            output: Tensor = functional_call(self.template, (parameters, buffers), slices)
            return output

        return torch.vmap(one)(self.parameters, self.buffers, *inputs)

    def power_iteration(self) -> None:
        """One power iteration for each spectrally normalised layer, as a forward pass in training mode makes it."""
        self.buffers = advance_spectral(self.parameters, self.buffers)

    def descend(self, losses: Tensor) -> None:
        """One step of Adam for each network on its own of the losses [G]."""
        # Networks share nothing, so the gradient of the sum is, in each network's slice, that of its own loss.
        gradients = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        self.adam.step()
