"""Generators of intermediate training steps: extracted from kept checkpoints, with their epsilon and measurements.

The generator of step t is in the folder steps/t of its run, which has the same files as a run: generator, samples and
metrics/. It may be released whenever the run's own generator may, because it depends on a part of the same releases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.config.spec import RunSpec
from dpgen_bench.generator import Generator, NetGenerator
from dpgen_bench.nets.spectral import settle_spectral
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.runs.epsilon import spent_by
from dpgen_bench.store.folders import ReadableRun, RunFolder
from dpgen_bench.store.measurements import Measurement, Protocol
from dpgen_bench.training.checkpoint import Checkpoint, PhaseState, load_checkpoint
from dpgen_bench.utils.json_numbers import to_json


@dataclass(frozen=True)
class Point:
    """The measurement of one kept step.

    Args:
        step: the training step.
        epsilon: the proven epsilon of the releases up to this step; inf if nothing is proven.
        measurement: by one protocol.
    """

    step: int
    epsilon: float
    measurement: Measurement


def trajectory(folder: ReadableRun, protocol: Protocol) -> list[Point]:
    """The kept steps that have a measurement by this protocol, sorted by step; the last point is the run itself."""
    points = []
    for step in folder.steps():
        step_folder = folder.at_step(step)
        measurement = step_folder.measurements.assembled(protocol)
        if measurement:
            points.append(Point(step, _number(step_folder.read_json("step.json").get("epsilon")), measurement))
    final = folder.read_json("training.json").get("steps", {}).get("train")
    measurement = folder.measurements.assembled(protocol)
    if final and measurement and all(point.step != final for point in points):
        proven = (folder.read_json("ledger.json").get("epsilon") or {}).get("proven")
        points.append(Point(int(final), _number(proven), measurement))
    return sorted(points, key=lambda point: point.step)


def kept_steps(spec: RunSpec, folder: RunFolder) -> list[int]:
    """The steps of `runtime.keep_steps` that have a checkpoint, sorted; if it is empty, all steps that have one."""
    names = [path.stem.removeprefix("step-") for path in (folder.path / "checkpoints").glob("step-*.pt")]
    available = sorted(int(name) for name in names if name.isdigit())
    configured = _configured(spec)
    return [step for step in available if step in configured or not configured]


def not_kept(spec: RunSpec, run: ReadableRun) -> str:
    """`step 5, 10 not kept` for steps of `runtime.keep_steps` that a trained run did not keep; "" if it kept all.

    They are never made, since a trained run is not trained again. Steps after its last one do not count.
    """
    kept = {*run.steps(), *(kept_steps(spec, run) if isinstance(run, RunFolder) else ())}
    last = _last_step(run)
    steps = sorted(step for step in _configured(spec) - kept if step <= last)
    return f"step {', '.join(map(str, steps))} not kept" if steps else ""


def not_reached(spec: RunSpec, run: ReadableRun) -> str:
    """A sentence on the steps of `runtime.keep_steps` after the last one of a trained run; "" if there are none."""
    last = _last_step(run)
    steps = sorted(step for step in _configured(spec) if step > last)
    listed = ", ".join(map(str, steps))
    return f"runtime.keep_steps names step {listed}, but training has {last:,} steps; not kept." if steps else ""


def _configured(spec: RunSpec) -> set[int]:
    """The steps of `runtime.keep_steps`."""
    return {int(step) for step in spec.config.runtime.keep_steps}


def _last_step(run: ReadableRun) -> int:
    """The number of training steps of a trained run; 0 for a method without them."""
    return int(run.read_json("training.json").get("steps", {}).get("train", 0))


def kept_steps_measured(spec: RunSpec, folder: RunFolder) -> bool:
    """Whether every kept step is fully measured by the config's protocol; true if `runtime.measure_kept` is false."""
    if not spec.config.runtime.get("measure_kept", False):
        return True
    protocol = spec.protocol_record()
    folders = [folder.at_step(step) for step in kept_steps(spec, folder)]
    return all(step_folder.measurements.fully_measured(protocol) for step_folder in folders)


def extract(folder: RunFolder, step: int) -> RunFolder:
    """Write the generator of one kept step: the released network with the weights of that step's checkpoint.

    A checkpoint may hold several networks. The released one is the network of the last checkpoint that equals the run's
    generator.

    Returns:
        The folder of the step.

    Raises:
        ValueError: if a checkpoint is missing or corrupt, or none of its networks is the released one.
    """
    step_folder = folder.at_step(step)
    if (step_folder.path / "step.json").exists():
        return step_folder
    last = _phase(load_checkpoint(folder.path / "checkpoints" / "last.pt"), "last", folder)
    kept = _phase(load_checkpoint(folder.path / "checkpoints" / f"step-{step}.pt"), f"step-{step}", folder)
    generator = Generator.load(folder.path)
    if not isinstance(generator, NetGenerator):
        raise ValueError(f"expected run {folder.id} to have released a network, got a {type(generator).__name__}.")
    name, prefix = _released(last.stateful, generator.net, folder)
    net = _with_weights(generator.net, last.stateful[name], prefix)
    # The run may have released the network with settled spectral vectors; then the step's network is settled, too.
    is_settled = not _same(net.state_dict(), generator.state())
    if is_settled and not _same(_settle(net).state_dict(), generator.state()):
        raise ValueError(
            f"expected run {folder.id} to have released the network {name!r} of its last checkpoint unchanged, got "
            "other running statistics: its method changes them after training in an unknown way, so that kept steps "
            "cannot be measured."
        )
    net = _with_weights(generator.net, kept.stateful[name], prefix)
    step_folder.path.mkdir(parents=True, exist_ok=True)
    NetGenerator(_settle(net) if is_settled else net, **generator.config()).save(step_folder.path)
    spent = spent_by(Ledger.load(folder.path / "ledger.json"), kept.executed)
    step_folder.write_json("step.json", {"step": step, "epsilon": to_json(spent)})
    return step_folder


def _phase(checkpoint: Checkpoint | None, name: str, folder: RunFolder) -> PhaseState:
    """The state of the phase that was running at a checkpoint."""
    if checkpoint is None:
        raise ValueError(
            f"expected the checkpoint {name} of run {folder.id}, found none; runtime.keep_steps=[...] keeps them "
            "during training, and a finished run is not trained again: use another seed, or delete its folder."
        )
    return checkpoint.phases[checkpoint.current]


def _released(stateful: Mapping[str, Any], net: nn.Module, folder: RunFolder) -> tuple[str, str]:
    """Name of the state with the released parameters, and the prefix of their names in it, such as `module.`."""
    parameters = dict(net.named_parameters())
    first = next(iter(parameters))
    for name, state in stateful.items():
        prefixes = [key[: -len(first)] for key in state if key == first or str(key).endswith(f".{first}")]
        for prefix in prefixes:
            if _same({key: state.get(prefix + key) for key in parameters}, parameters):
                return name, prefix
    raise ValueError(
        f"expected one of the states {sorted(stateful)} in run {folder.id}'s last checkpoint to equal the released "
        "network, found none: its method must pass the network that it releases to ctx.steps(...)."
    )


def _with_weights(net: nn.Module, state: Mapping[str, Any], prefix: str) -> nn.Module:
    """A copy of the network with the parameters and buffers of the state."""
    copied = copy.deepcopy(net)
    copied.load_state_dict({key: state[prefix + key] for key in copied.state_dict()})
    return copied


def _settle(net: nn.Module) -> nn.Module:
    """The network with spectral vectors recomputed from its weights, as GS-WGAN releases its averaged weights."""
    with torch.no_grad():
        return settle_spectral(net)


def _same(one: Mapping[str, Any], other: Mapping[str, Tensor]) -> bool:
    return all(
        isinstance(one[key], Tensor) and torch.equal(one[key].cpu(), value.cpu()) for key, value in other.items()
    )


def _number(value: Any) -> float:
    """A stored epsilon as a float; infinity if it is missing."""
    return math.inf if value is None else float(value)
