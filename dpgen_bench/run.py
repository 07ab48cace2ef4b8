"""One config -> one run: train, account, sample, measure; each phase resumable and skipped when it is done."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.account import claimed_epsilon, conditional_epsilon, epsilon_table
from dpgen_bench.cost import PeakMemory
from dpgen_bench.data.private import PrivateData
from dpgen_bench.environment import choose_device, describe_environment
from dpgen_bench.evaluate.protocol import build_metrics, measure
from dpgen_bench.files import write_atomic
from dpgen_bench.method import Context, Method, Preempted
from dpgen_bench.privacy.accountants import NotCovered, epsilon
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Journal, Observer
from dpgen_bench.privacy.noise import Key
from dpgen_bench.privacy.state import StatePlace
from dpgen_bench.progress import Shown, Silent
from dpgen_bench.results.diagnostics import draw_norms
from dpgen_bench.results.figures import unmeasured
from dpgen_bench.results.store import RunFolder, Store
from dpgen_bench.results.trajectory import extract, kept_steps, settled_steps
from dpgen_bench.signals import StopSignals
from dpgen_bench.specify import RunSpec, check_evaluation, compose_config, specify


class RunFailed(RuntimeError):
    """A run ended in an error; its phase, time and traceback are in its status.json."""


def execute(config: DictConfig) -> RunFolder:
    """Make the run that `config` describes, or what is missing of it.

    A finished run is skipped; one that was killed goes on from its last checkpoint; one that failed is tried again.

    Raises:
        ValueError: the config cannot be a run (nothing is written).
        RunBusy: another process is working on it.
        RunFailed: an error while it ran, kept in the run's folder.
        Preempted: stopped by a signal after a checkpoint.
    """
    spec = specify(config)
    if config.runtime.threads is not None:
        torch.set_num_threads(int(config.runtime.threads))
    folder = Store(_root(config)).folder(spec.id)
    settled = folder.reports.settled(spec.protocol_record()) and settled_steps(spec, folder)
    if folder.done and folder.trained and settled:
        print(f"run {spec.id} ({_title(spec)}) is finished: skipped")
        return folder
    build_metrics(config.protocol)  # a misspelt metric is found now, not after the training
    with folder.locked():
        phase = "prepare"
        context: list[Context] = []
        try:
            with StopSignals(lambda: bool(context) and context[0].in_loop) as signals:
                folder.mark("running", phase)
                _write_config(spec, folder)
                if not folder.trained:
                    phase = "train"
                    folder.mark("running", phase)
                    _train(spec, folder, context, lambda: signals.received)
                phase = "account"
                folder.mark("running", phase)
                _account(spec, folder)
                phase = "measure"
                folder.mark("running", phase)
                report = measure(spec, folder, _device(spec))
                _measure_kept(spec, folder)
                folder.finish()
        except Preempted as stopped:
            folder.mark("preempted", phase, stopped)
            print(f"run {spec.id} ({_title(spec)}) was told to stop; run the same command to go on.")
            raise
        except Exception as error:
            _fail(spec, folder, phase, error)
    missing = unmeasured(report)
    but = f", but not measured: {', '.join(missing)} (the same command tries again)" if missing else ""
    print(f"run {spec.id} ({_title(spec)}) finished{but}: {folder.path}")
    return folder


def plan(overrides: list[str]) -> tuple[list[Event], Budget]:
    """The allowances that the run of these overrides would ask for before its first release, and its budget.

    Nothing is released: `fit` is stopped where it would first touch a record.
    """
    spec = specify(compose_config(overrides))
    dataset = spec.dataset()
    records = dataset.load("train")
    ledger = _new_ledger(spec, len(records))
    # No record is handed over: the data are empty, only their number is known, and the first release ends the plan.
    data = PrivateData(
        records.images[:0],
        records.labels[:0],
        dataset.num_classes,
        ledger,
        Key.seeded("plan"),
        public_n=len(records),
        clients=None if records.clients is None else records.clients[:0].numpy(),
        num_clients=dataset.num_clients,
        observer=_Planned(),
    )
    with contextlib.suppress(_PlanMade):
        spec.method().fit(data, Context(spec.seed, "cpu", scale=spec.scale(), data=data))
    return ledger.events, spec.budget()


def evaluate_run(results: Path, run: str, overrides: list[str]) -> RunFolder:
    """Measure the generator of a finished run again, by the protocol in `overrides`, else by the run's own.

    An evaluation that was interrupted goes on; after a complete one everything is measured anew, and the old report
    stays until the new one is complete. Overrides may say how to measure (`protocol...`, `runtime...`) and where the
    data lie now (`data_root`, `dataset.path`), nothing else.

    Raises:
        LookupError: no such run. ValueError: it has no generator yet, or an override is not of that kind.
    """
    folder = Store(results).find(run)
    if not folder.trained:
        raise ValueError(f"run {folder.id} has no generator yet ({folder.status()}); finish it with `dpgen run`.")
    config = _config_to_measure(folder.config, overrides)
    spec = RunSpec(config, folder.read_json("identity.json"))
    build_metrics(config.protocol)
    if config.runtime.threads is not None:
        torch.set_num_threads(int(config.runtime.threads))
    with folder.locked():
        done = bool(folder.reports.of(spec.protocol_record()))
        measure(spec, folder, choose_device(config.runtime.device), anew=done)
        _measure_kept(spec, folder, anew=done)
    return folder


def _measure_kept(spec: RunSpec, folder: RunFolder, anew: bool = False) -> None:
    """With `runtime.measure_kept`, measure the generator of each kept step as the run's own was."""
    if not spec.config.runtime.get("measure_kept", False):
        return
    for step in kept_steps(spec, folder):
        place = extract(folder, step)
        done = place.reports.settled(spec.protocol_record())
        print(f"  {spec.id}: step {step:,}" + (" is measured" if done and not anew else ""), flush=True)
        measure(spec, place, _device(spec), anew=anew, cache=folder.path.parent.parent / "cache")


def _config_to_measure(config: DictConfig, overrides: list[str]) -> DictConfig:
    """A run's config with another protocol, runtime and place of its data."""
    words = [
        w for w, before in zip(overrides, [None, *overrides], strict=False) if before not in ("--config-dir", "-cd")
    ]
    named = {word.lstrip("+~").split("=", 1)[0]: word for word in words if not word.startswith("-")}
    paths = {key: named[key] for key in ("dataset.path", "dataset.root") if key in named}
    allowed = ("protocol", "runtime", "data_root")
    if strange := [key for key in named if key.split(".")[0] not in allowed and key not in paths]:
        raise ValueError(
            f"expected overrides of protocol, runtime, data_root or dataset.path, got {', '.join(strange)}: a run is "
            "measured as it was trained; `dpgen run` trains another."
        )
    of_protocol = [key for key in named if key.split(".")[0] == "protocol"]
    if of_protocol and "protocol" not in named:
        raise ValueError(f"expected protocol=NAME beside {of_protocol[0]}=..., so that it is plain what is changed.")
    chosen = compose_config([word for word in overrides if word not in paths.values()])
    if of_protocol:
        config.protocol = chosen.protocol
    config.runtime = chosen.runtime
    if "root" in config.dataset:  # data may lie elsewhere than where the run was trained
        config.dataset.root = chosen.data_root
    for key, word in paths.items():
        OmegaConf.update(config, key, word.split("=", 1)[1])
    OmegaConf.resolve(config)
    check_evaluation(config)
    return config


class _PlanMade(Exception):
    pass


class _Planned(Observer):
    """Ends a plan: nothing of the first release comes back to the method."""

    def release(self, *_: Any) -> NoReturn:
        raise _PlanMade

    def before_records(self) -> NoReturn:
        raise _PlanMade


def _train(spec: RunSpec, folder: RunFolder, context: list[Context], should_stop: Callable[[], int | None]) -> None:
    device = _device(spec)
    memory = PeakMemory(device)
    folder.write_json("environment.json", describe_environment(device))
    ledger = _ledger(spec, folder)
    data = _open_data(spec, folder, ledger, device)
    runtime = spec.config.runtime

    def spent() -> float:
        done = [replace(mechanism.event, times=mechanism.executed) for mechanism in data.mechanisms.values()]
        inherited = [entry.event for entry in ledger.entries.values() if entry.inherited_from]
        budget = ledger.budget
        try:
            return epsilon([*inherited, *done], budget.delta, budget.relation, budget.accountant)
        except NotCovered:  # only with an infinite budget; a display must not end the run
            return math.inf

    ctx = Context(
        spec.seed,
        device,
        scale=spec.scale(),
        data=data,
        folder=folder.path,
        parent=_parent_checkpoint(spec),
        checkpoint_s=float(runtime.checkpoint_s),
        keep_steps=tuple(runtime.keep_steps),
        progress=Shown(f"{spec.id} {_title(spec)}", spent) if runtime.progress else Silent(),
        should_stop=should_stop,
        save_ledger=ledger.save,
        memory=memory,
    )
    context.append(ctx)
    try:
        generator = spec.method().fit(data, ctx)
    except BaseException:
        with contextlib.suppress(Exception):  # a client that does not end in time must not hide why the run stopped
            data.close()
        raise
    data.close()
    ledger.refuse_if_spoiled()
    if ledger.budget != spec.budget():
        raise ValueError(f"the method changed the ledger's budget to {ledger.budget}; it was {spec.budget()}.")
    ctx.close()
    ledger.save()
    errors = folder.path / "private" / "federation" / "errors.txt"
    if errors.exists():
        print(f"run {spec.id}: programs of clients failed, and answered zeros instead; the errors are in {errors}")
    if ledger.diagnostics == "unsafe":
        bounds = {name: mechanism.bound.C for name, mechanism in data.mechanisms.items()}
        draw_norms(folder.path / "private" / "diagnostics.jsonl", bounds, folder.path / "private" / "norms.png")
    folder.write_json("training.json", ctx.cost(generator))
    generator.save(folder.path)


def _account(spec: RunSpec, folder: RunFolder) -> None:
    """Write the privacy figures into the ledger: proven by the budget's accountant, claimed, conditional, the table.

    Where the budget's accountant does not cover what was released (only an infinite budget lets that happen), or the
    ledger holds doubts, "proven" is "inf" and "reason" says why. "proven" is against outsiders, who see what the run
    releases; where the unit is the client, "server" has the figure against the server.
    """
    ledger = Ledger.load(folder.path / "ledger.json")
    if ledger.epsilon is not None:
        return
    budget, events = ledger.budget, ledger.events
    method: Method = spec.method()
    proven, why = _proven(ledger, events)
    figures: dict[str, Any] = {"proven": proven, **why}
    if ledger.unit == "client":
        seen = ledger.events_seen_by_server()
        theirs, why = ("inf", {"reason": TRUSTED}) if seen is None else _proven(ledger, seen)
        figures["server"] = {"epsilon": theirs, **why}
    cache = _root(spec.config) / "cache" / "epsilon.json"
    ledger.epsilon = {
        **figures,
        "claimed": _tried(lambda: claimed_epsilon(method, events, budget.delta)),
        "conditional": _tried(lambda: conditional_epsilon(method, events, budget.delta)),
        "delta": budget.delta,
        "relation": budget.relation,
        "accountant": budget.accountant,
        "table": epsilon_table(events, budget.delta, float(spec.config.runtime.account_s), cache=cache),
    }
    ledger.save()


TRUSTED = "the server is trusted: it adds the noise itself, to what it has seen"


def _proven(ledger: Ledger, events: Sequence[Event]) -> tuple[float | str | None, dict[str, str]]:
    """Epsilon of the events, or "inf" and {"reason": in words}."""
    budget = ledger.budget
    if ledger.doubts:
        return "inf", {"reason": "; ".join(ledger.doubts)}
    try:
        return _word(epsilon(events, budget.delta, budget.relation, budget.accountant)), {}
    except NotCovered as failure:
        return "inf", {"reason": str(failure)}


def _tried(figure: Callable[[], Any]) -> Any:
    """The figure, or how it failed: it is an ornament, for which a run must not be lost."""
    try:
        return figure()
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _ledger(spec: RunSpec, folder: RunFolder) -> Ledger:
    """The run's ledger: the one on disk when the run is resumed, else a new one with what its parent spent."""
    path = folder.path / "ledger.json"
    if path.exists():
        return Ledger.load(path)
    ledger = _new_ledger(spec, len(spec.dataset().load("train")))
    ledger.path = path
    ledger.save()
    return ledger


def _new_ledger(spec: RunSpec, records: int) -> Ledger:
    ledger = spec.new_ledger(records)
    if spec.config.restart:
        parent = _parent(spec)
        theirs, ours = parent.read_json("identity.json")["dataset"], spec.training["dataset"]
        if theirs != ours:
            raise ValueError(
                f"restart.run={parent.id} was trained on {theirs}; this run is on {ours}. A restart must use its "
                "parent's data, because it inherits the parent's ledger."
            )
        ledger.inherit(Ledger.load(parent.path / "ledger.json"), parent.id)
    return ledger


def _open_data(spec: RunSpec, folder: RunFolder, ledger: Ledger, device: torch.device) -> PrivateData:
    dataset = spec.dataset()
    records = dataset.load("train")
    if dataset.unaccounted is not None:
        ledger.doubt(dataset.unaccounted)
    private = folder.path / "private"
    return PrivateData(
        records.images,
        records.labels,
        dataset.num_classes,
        ledger,
        _key(spec, folder, ledger),
        clients=None if records.clients is None else records.clients.numpy(),
        num_clients=dataset.num_clients,
        federation=spec.federation(),
        private_folder=private / "federation",
        device=device,
        journal=Journal(private / "journal"),
        diagnostics=private / "diagnostics.jsonl" if ledger.diagnostics == "unsafe" else None,
        state_place=StatePlace(
            folder=private / "state",
            cache=_root(spec.config) / "cache" / "private_state",
            identity={key: spec.training[key] for key in ("dataset", "seed", "source", "training_version")},
        ),
    )


def _key(spec: RunSpec, folder: RunFolder, ledger: Ledger) -> Key:
    """Root of coins and noise: the run id when seeded; from the operating system, kept until DONE, for release."""
    if spec.config.privacy.noise == "seeded":
        return Key.seeded(f"run:{spec.id}")
    path = folder.path / "private" / "noise.key"
    if not path.exists():
        if any(entry.inherited_from is None for entry in ledger.entries.values()):
            raise ValueError(
                f"run {spec.id} made releases with a noise key that is gone; training it again would spend its epsilon "
                "a second time. Restore its folder, or take another seed for a new run with a ledger of its own."
            )
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, Key.from_os().secret)  # mkstemp's mode: readable by its owner only
    return Key(path.read_bytes())


def _parent(spec: RunSpec) -> RunFolder:
    return Store(_root(spec.config)).find(str(spec.config.restart.run))


def _parent_checkpoint(spec: RunSpec) -> Path | None:
    if not spec.config.restart:
        return None
    parent, name = _parent(spec), spec.config.restart.get("checkpoint", "last")
    path = parent.path / "checkpoints" / f"{name}.pt"
    if not path.exists():
        there = sorted(p.stem for p in path.parent.glob("*.pt"))
        raise ValueError(f"expected the checkpoint {path}, found {there}; runtime.keep_steps=[...] keeps more of them.")
    return path


def _fail(spec: RunSpec, folder: RunFolder, phase: str, error: Exception) -> NoReturn:
    folder.mark("failed", phase, error)
    raise RunFailed(
        f"run {spec.id} ({_title(spec)}) failed while it was to {phase}: {type(error).__name__}: {error}\n"
        f"The traceback is in {folder.path / 'status.json'}; the same command tries again from the last checkpoint."
    ) from error


def _write_config(spec: RunSpec, folder: RunFolder) -> None:
    write_atomic(folder.path / "config.yaml", OmegaConf.to_yaml(spec.config))
    folder.write_json("identity.json", spec.training)


def _title(spec: RunSpec) -> str:
    c = spec.config
    return f"{c.method.name} {c.dataset.name} ε={float(c.privacy.epsilon):g} seed {c.seed}"


def _device(spec: RunSpec) -> torch.device:
    return choose_device(str(spec.config.runtime.device))


def _root(config: DictConfig) -> Path:
    return Path(str(config.results))


def _word(value: float | None) -> float | str | None:
    return "inf" if value is not None and math.isinf(value) else value
