"""A run along its way: the generator at each step that was kept, what had been spent by then, and how good it was.

A generator kept at step t lies under steps/t of its run's folder, like a run's own: generator, samples, metrics/. It
may be released whenever the run's own may: it is made of the same releases, and fewer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.nets.spectral import settle_spectral
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.config import RunSpec
from dpgen_bench.runs.measurements import Measurement, Protocol
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.training.checkpoint import Checkpoint, PhaseState, load_checkpoint


@dataclass(frozen=True)
class Point:
    """One kept step. `epsilon`: proven for the releases until then, inf where nothing is; `report`: of one protocol."""

    step: int
    epsilon: float
    measurement: Measurement


def trajectory(folder: RunFolder, wanted: Protocol) -> list[Point]:
    """The kept steps that were measured by exactly this protocol, in their order, and at the end the run itself."""
    points = []
    for step in measured_steps(folder):
        measurement = kept(folder, step).measurements.assembled(wanted)
        if measurement:
            points.append(Point(step, _number(kept(folder, step).read_json("step.json").get("epsilon")), measurement))
    final = folder.read_json("training.json").get("steps", {}).get("train")
    measurement = folder.measurements.assembled(wanted)
    if final and measurement and all(point.step != final for point in points):
        proven = (folder.read_json("ledger.json").get("epsilon") or {}).get("proven")
        points.append(Point(int(final), _number(proven), measurement))
    return sorted(points, key=lambda point: point.step)


def kept(folder: RunFolder, step: int) -> RunFolder:
    """The place of one kept step."""
    return RunFolder(folder.path / "steps" / str(step))


def measured_steps(folder: RunFolder) -> list[int]:
    places = (folder.path / "steps").glob("*/step.json")
    return sorted(int(path.parent.name) for path in places if path.parent.name.isdigit())


def kept_steps(spec: RunSpec, folder: RunFolder) -> list[int]:
    """The steps of `runtime.keep_steps` that have a checkpoint, in order; where it names none, all that have one."""
    there = sorted(
        int(path.stem[5:]) for path in (folder.path / "checkpoints").glob("step-*.pt") if path.stem[5:].isdigit()
    )
    wanted = {int(step) for step in spec.config.runtime.keep_steps}
    return [step for step in there if step in wanted or not wanted]


def kept_steps_measured(spec: RunSpec, folder: RunFolder) -> bool:
    """Whether every kept step that the config wants measured has a settled report of its protocol."""
    if not spec.config.runtime.get("measure_kept", False):
        return True
    record = spec.protocol_record()
    return all(kept(folder, step).measurements.fully_measured(record) for step in kept_steps(spec, folder))


def extract(folder: RunFolder, step: int) -> RunFolder:
    """Make the generator of one kept step from its checkpoint: the released network, with the weights that it had then.

    Which of the checkpoint's networks that is, the last checkpoint tells: the one that equals what was released.

    Raises:
        ValueError: if the checkpoint is missing or damaged, or no network in it is the released one.
    """
    place = kept(folder, step)
    if (place.path / "step.json").exists():
        return place
    last = _phase(load_checkpoint(folder.path / "checkpoints" / "last.pt"), "last", folder)
    then = _phase(load_checkpoint(folder.path / "checkpoints" / f"step-{step}.pt"), f"step-{step}", folder)
    generator = Generator.load(folder.path)
    if not isinstance(generator, NetGenerator):
        raise ValueError(f"expected run {folder.id} to have released a network, got a {type(generator).__name__}.")
    name, prefix = _released(last.stateful, generator.net, folder)
    net = _with_weights(generator.net, last.stateful[name], prefix)
    settled = not _same(net.state_dict(), generator.state())
    if settled and not _same(_settle(net).state_dict(), generator.state()):
        raise ValueError(
            f"expected run {folder.id} to have released the network {name!r} of its last checkpoint as it is, found "
            "other running statistics: what its method does to them after training is not known, and kept steps cannot "
            "be measured."
        )
    net = _with_weights(generator.net, then.stateful[name], prefix)
    place.path.mkdir(parents=True, exist_ok=True)
    NetGenerator(_settle(net) if settled else net, **generator.config()).save(place.path)
    place.write_json("step.json", {"step": step, "epsilon": _spent(folder, then.executed)})
    return place


def _phase(checkpoint: Checkpoint | None, name: str, folder: RunFolder) -> PhaseState:
    if checkpoint is None:
        raise ValueError(
            f"expected the checkpoint {name} of run {folder.id}, found none; runtime.keep_steps=[...] keeps them while "
            "a run is trained, and a finished run is not trained again: take another seed, or delete its folder."
        )
    return checkpoint.phases[checkpoint.current]


def _released(stateful: Mapping[str, Any], net: nn.Module, folder: RunFolder) -> tuple[str, str]:
    """Name of the state that holds the released parameters, and what stands before their names in it (`module.`)."""
    parameters = dict(net.named_parameters())
    first = next(iter(parameters))
    for name, state in stateful.items():
        prefixes = [key[: -len(first)] for key in state if key == first or str(key).endswith(f".{first}")]
        for prefix in prefixes:
            if _same({key: state.get(prefix + key) for key in parameters}, parameters):
                return name, prefix
    raise ValueError(
        f"expected among the states {sorted(stateful)} of run {folder.id}'s last checkpoint the network that was "
        "released, found none equal to it: its method must hand to ctx.steps(...) the network that it releases."
    )


def _with_weights(net: nn.Module, state: Mapping[str, Any], prefix: str) -> nn.Module:
    """A copy of the net with the parameters and buffers of that state."""
    copied = copy.deepcopy(net)
    copied.load_state_dict({key: state[prefix + key] for key in copied.state_dict()})
    return copied


def _settle(net: nn.Module) -> nn.Module:
    """What GS-WGAN's averages need before release: spectral vectors that belong to the averaged weights."""
    with torch.no_grad():
        return settle_spectral(net)


def _same(one: Mapping[str, Any], other: Mapping[str, Tensor]) -> bool:
    return all(
        isinstance(one[key], Tensor) and torch.equal(one[key].cpu(), value.cpu()) for key, value in other.items()
    )


def _spent(folder: RunFolder, executed: Mapping[str, int]) -> float | str:
    """Proven epsilon of the releases made by then, "inf" where nothing is proven.

    It stands beside the figures of that step and lowers no one's epsilon: the run as a whole was approved in full.
    """
    ledger = Ledger.load(folder.path / "ledger.json")
    if ledger.unproven:
        return "inf"
    inherited = [entry.event for entry in ledger.entries.values() if entry.inherited_from]
    own = [
        replace(entry.event, times=executed[name])
        for name, entry in ledger.entries.items()
        if not entry.inherited_from and executed.get(name)
    ]
    budget = ledger.budget
    try:
        spent = epsilon([*inherited, *own], budget.delta, budget.relation, budget.accountant)
    except NotCovered:
        return "inf"
    return "inf" if math.isinf(spent) else spent


def _number(value: Any) -> float:
    return math.inf if value is None else float(value)
