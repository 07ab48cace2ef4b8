"""Several networks of one architecture, trained together as one batched network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from dpgen_bench.nets.spectral import advance_spectral
from dpgen_bench.utils.compiled import Compiled, backend

ADAM = ("exp_avg", "exp_avg_sq")


def _contiguous_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class Stack:
    """G networks, each with its own parameters, spectral vectors and Adam moments, in tensors [G, ...].

    A forward pass is one `torch.vmap` over the stack, and a training step is one step of Adam on the stacked tensors.
    Adam acts on each entry separately, so the results equal those of G separate networks up to rounding. Networks run
    in evaluation mode, and `power_iteration` updates the spectral vectors, as training mode would.

    Args:
        template: A module of the architecture, which is a pure function in evaluation mode; its weights are not used.
        tensors: What `initial` or `tensors` returned. Without Adam's moments, Adam starts from zero moments.
        lr, betas: Settings of Adam.
    """

    def __init__(
        self, template: nn.Module, tensors: dict[str, Tensor], *, lr: float, betas: tuple[float, float]
    ) -> None:
        self.template = template.eval()
        names = [name for name, _ in template.named_parameters()]
        self.parameters = {name: _contiguous_copy(tensors[name]).requires_grad_() for name in names}
        self.buffers = {name: tensors[name].detach().clone() for name, _ in template.named_buffers()}
        # `fused` updates all entries in one pass, in the order in which they lie in memory. Parameters, moments and
        # gradients must be contiguous, because it does not look at strides. On a GPU it would need the steps there.
        fused = all(parameter.device.type == "cpu" for parameter in self.parameters.values())
        self.adam = torch.optim.Adam(self.parameters.values(), lr, betas, fused=fused)
        if "step" in tensors:
            step = tensors["step"].flatten()[0]
            for name, parameter in self.parameters.items():
                moments = {key: _contiguous_copy(tensors[f"{key}.{name}"]) for key in ADAM}
                self.adam.state[parameter] = {"step": step.clone(), **moments}

    @staticmethod
    def initial(make: Callable[[], nn.Module], rngs: Sequence[torch.Generator]) -> dict[str, Tensor]:
        """Tensors of one new network for each generator in `rngs`, from which it is initialised.

        PyTorch's global generators are not changed.
        """
        nets = []
        for rng in rngs:
            with torch.random.fork_rng(devices=[]):
                # torch.manual_seed would also seed the generators of GPUs, which are not restored.
                torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
                nets.append(make())
        parameters, buffers = stack_module_state(nets)
        return {name: value.detach() for name, value in {**parameters, **buffers}.items()}

    def tensors(self, *, adam: bool) -> dict[str, Tensor]:
        """The state of the stack, [G, ...] by name: parameters, buffers and, if `adam`, Adam's moments and steps.

        They are the stack's own tensors, which further steps change.
        The numbers of steps are on the host, where Adam keeps them, and so are those of stored states.
        """
        tensors = {**self.parameters, **self.buffers}
        if adam:
            states = {name: self.adam.state[parameter] for name, parameter in self.parameters.items()}
            tensors.update({f"{key}.{name}": state[key] for name, state in states.items() for key in ADAM})
            parameter = next(iter(self.parameters.values()))  # all have made the same number of steps
            tensors["step"] = self.adam.state[parameter]["step"].expand(len(parameter))
        return {name: value.detach() for name, value in tensors.items()}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The networks' outputs [G, ...] for inputs [G, ...], one slice for each network."""

        return self._forward(self.parameters, self.buffers, *inputs)

    def on_same(self, *inputs: Tensor) -> Tensor:
        """The networks' outputs [G, ...] for inputs that all of them share.

        They equal those for G copies up to rounding, but what no parameter enters is computed once.
        """
        return self._forward(self.parameters, self.buffers, *inputs, each=None)

    def gradients_on_same(self, score: Callable[[Tensor], Tensor], x: Tensor, *inputs: Tensor) -> Tensor:
        """The gradients [G, ...] of each network's scalar score(output) in x, where all networks share the inputs."""

        def of_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            return score(functional_call(self.template, (parameters, buffers), (x, *inputs)))

        weights = {name: parameter.detach() for name, parameter in self.parameters.items()}
        gradients: Tensor = torch.vmap(torch.func.grad(of_one, argnums=2), (0, 0, None))(weights, self.buffers, x)
        return gradients

    def _forward(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor, each: int | None = 0
    ) -> Tensor:
        """The networks' outputs; `each` is the dimension of the inputs along the stack, None if they are shared."""

        def forward_one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *slices: Tensor) -> Tensor:
            output: Tensor = functional_call(self.template, (parameters, buffers), slices)
            return output

        in_dims = (0, 0, *(each for _ in inputs))
        return torch.vmap(forward_one, in_dims)(parameters, buffers, *inputs)

    def power_iteration(self) -> None:
        """One power iteration for each spectrally normalised layer, as in a forward pass in training mode."""
        self.buffers = advance_spectral(self.parameters, self.buffers)

    def descend(self, losses: Tensor) -> None:
        """One step of Adam for each network, with the gradient of its entry of the losses [G]."""
        # Networks share no parameters, so each slice of the sum's gradient is the gradient of that network's loss.
        self._step(torch.autograd.grad(losses.sum(), list(self.parameters.values())))

    def descend_on(self, loss: Callable[..., Tensor], *inputs: Tensor) -> None:
        """`descend` on the losses loss(networks, *inputs) [G], as a compiled graph if the process compiles steps.

        Args:
            loss: a hashable function of its arguments alone, which calls `networks` as it would call the stack.
        """
        if backend() == "none":
            self.descend(loss(self, *inputs))
            return

        def gradients(parameters: dict[str, Tensor], buffers: dict[str, Tensor], *inputs: Tensor) -> Sequence[Tensor]:
            losses = loss(partial(self._forward, parameters, buffers), *inputs)
            return torch.autograd.grad(losses.sum(), list(parameters.values()))

        # All stacks of one template share the graph, because each release may make a new one.
        graphs: dict[Callable[..., Tensor], Compiled] = self.template.__dict__.setdefault("graphs_of_stacks", {})
        if loss not in graphs:
            graphs[loss] = Compiled(gradients)
        self._step(graphs[loss](self.parameters, self.buffers, *inputs))

    def _step(self, gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient.contiguous()
        self.adam.step()
