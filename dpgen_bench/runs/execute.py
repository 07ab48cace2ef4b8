"""One config -> one run: train, account, sample, measure; each phase resumable and skipped when it is done."""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.evaluate.protocol import build_metrics
from dpgen_bench.method import Context
from dpgen_bench.privacy.accountants.proven import NotCovered, epsilon
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.warn import warn_of_unused_shares
from dpgen_bench.runs.config import RunSpec, build_spec, check_evaluation, compose_config
from dpgen_bench.runs.diagnostics import draw_norms
from dpgen_bench.runs.epsilon import account_run
from dpgen_bench.runs.failures import PrivateFailure, failures_to_settle, keep_private, settle_failures
from dpgen_bench.runs.kept import extract, kept_steps, kept_steps_measured
from dpgen_bench.runs.measure import measure
from dpgen_bench.runs.overrides import without_local_paths
from dpgen_bench.runs.prepare import (
    expect_same_source,
    inherited_ledger,
    open_data,
    open_ledger,
    parent_checkpoint,
    population_to_record,
    record_population,
    results_of,
)
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.runs.validation import folder_problem
from dpgen_bench.runs.values import unmeasured
from dpgen_bench.training.cost import PeakMemory
from dpgen_bench.training.progress import NoProgress, ProgressBar
from dpgen_bench.training.signals import Preempted, StopSignals
from dpgen_bench.utils.environment import choose_device, describe_environment
from dpgen_bench.utils.files import append_private, write_atomic


class RunFailed(RuntimeError):
    """A run ended in an error; its phase, time and error are in its status.json."""


def execute(config: DictConfig, overrides: Sequence[str] | None = None) -> RunFolder:
    """Make the run that `config` describes, or what is missing of it.

    A finished run is skipped; one that was killed goes on from its last checkpoint; one that failed is tried again.

    Args:
        overrides: the overrides of `dpgen run` from which the config was composed; the run's folder keeps them.

    Raises:
        ValueError: the config cannot be a run, or the run's folder is damaged (nothing is written).
        RunBusy: another process is working on it.
        RunFailed: an error while it ran, kept in the run's folder.
        Preempted: stopped by a signal after a checkpoint.
    """
    spec = build_spec(config)
    if config.runtime.threads is not None:
        torch.set_num_threads(int(config.runtime.threads))
    folder = Store(results_of(spec)).folder(spec.id)
    if problem := folder_problem(folder):
        raise ValueError(
            f"run {spec.id} is damaged: {problem}. Restore {folder.path}, or delete it to make the run again."
        )
    to_note = failures_to_settle(spec, folder) or population_to_record(spec, folder)
    settled = folder.measurements.fully_measured(spec.protocol_record()) and kept_steps_measured(spec, folder)
    if folder.done and folder.trained and settled and not to_note:
        print(f"run {spec.id} ({_title(spec)}) is finished: skipped")
        return folder
    build_metrics(config.protocol)  # a misspelt metric is found now, not after the training
    if not folder.trained:
        inherited_ledger(spec)  # a parent that this run may not have is refused before anything is written
    with folder.locked():
        phase = "prepare"
        context: list[Context] = []
        try:
            with StopSignals(lambda: bool(context) and context[0].in_loop) as signals:
                folder.mark("running", phase)
                _write_config(spec, folder)
                settle_failures(spec, folder)
                record_population(spec, folder)
                if not folder.trained:
                    phase = "train"
                    folder.mark("running", phase)
                    _train(spec, folder, context, lambda: signals.received, overrides)
                phase = "account"
                folder.mark("running", phase)
                account_run(spec, folder)
                phase = "measure"
                folder.mark("running", phase)
                measurement = measure(spec, folder, _device(spec))
                _measure_kept(spec, folder)
                folder.finish()
        except Preempted as stopped:
            folder.mark("preempted", phase, stopped)
            print(f"run {spec.id} ({_title(spec)}) was told to stop; run the same command to go on.")
            raise
        except Exception as error:
            _fail(spec, folder, phase, error)
    missing = unmeasured(measurement)
    but = f", but not measured: {', '.join(missing)} (the same command tries again)" if missing else ""
    print(f"run {spec.id} ({_title(spec)}) finished{but}: {folder.path}")
    return folder


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
        done = bool(folder.measurements.of(spec.protocol_record()))
        measure(spec, folder, choose_device(config.runtime.device), again=done)
        _measure_kept(spec, folder, again=done)
    return folder


def _measure_kept(spec: RunSpec, folder: RunFolder, again: bool = False) -> None:
    """With `runtime.measure_kept`, measure the generator of each kept step as the run's own was."""
    if not spec.config.runtime.get("measure_kept", False):
        return
    for step in kept_steps(spec, folder):
        place = extract(folder, step)
        done = place.measurements.fully_measured(spec.protocol_record())
        print(f"  {spec.id}: step {step:,}" + (" is measured" if done and not again else ""), flush=True)
        measure(spec, place, _device(spec), again=again, cache=folder.path.parent.parent / "cache")


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


def _train(
    spec: RunSpec,
    folder: RunFolder,
    context: list[Context],
    should_stop: Callable[[], int | None],
    overrides: Sequence[str] | None,
) -> None:
    device = _device(spec)
    memory = PeakMemory(device)
    made_by = {} if overrides is None else {"overrides": without_local_paths(overrides)}
    folder.write_json("environment.json", {**describe_environment(device), **made_by})
    ledger = open_ledger(spec, folder)
    expect_same_source(spec, folder, ledger)
    _announce_warnings(spec, ledger)
    data, services = open_data(spec, folder, ledger, device)
    runtime = spec.config.runtime

    def spent() -> str:
        done = [replace(mechanism.event, times=mechanism.executed) for mechanism in data.mechanisms.values()]
        inherited = [entry.event for entry in ledger.entries.values() if entry.inherited_from]
        budget = ledger.budget
        try:
            now = epsilon([*inherited, *done], budget.delta, budget.relation, budget.accountant)
        except NotCovered:  # only with an infinite budget; a display must not end the run
            now = math.inf
        return f"ε spent {now:.3g}"

    ctx = Context(
        spec.seed,
        device,
        scale=spec.scale(),
        services=services,
        folder=folder.path,
        parent=parent_checkpoint(spec),
        due=lambda seconds: seconds >= float(runtime.checkpoint_s),
        keep_steps=tuple(runtime.keep_steps),
        progress=ProgressBar(f"{spec.id} {_title(spec)}", spent) if runtime.progress else NoProgress(),
        should_stop=should_stop,
        memory=memory,
    )
    context.append(ctx)
    failure = None
    try:
        generator = spec.method().fit(data, ctx)
        ledger.refuse_if_invalidated()
    except BaseException as error:
        with contextlib.suppress(Exception):  # a client that does not end in time must not hide why the run stopped
            data.close()
        if ledger.invalidated is None:
            raise
        failure = keep_private(folder, ledger, error)
    if failure is not None:
        raise failure  # out of the `except`, so that the private error is not its context
    data.close()
    if ledger.budget != spec.budget():
        raise ValueError(f"the method changed the ledger's budget to {ledger.budget}; it was {spec.budget()}.")
    warn_of_unused_shares(ledger)
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


def _announce_warnings(spec: RunSpec, ledger: Ledger) -> None:
    """Print the warnings of earlier attempts now, and new ones when they are added to the ledger."""

    def say(warning: str) -> None:
        print(f"run {spec.id}: warning: {warning}", file=sys.stderr)

    for warning in ledger.warnings:
        say(warning)
    ledger.announce = say


def _fail(spec: RunSpec, folder: RunFolder, phase: str, error: Exception) -> NoReturn:
    folder.mark("failed", phase, error)
    private = isinstance(error, PrivateFailure)
    what = str(error) if private else f"{type(error).__name__}: {error}"
    where = ""
    if not private:
        path = folder.path / "private" / "traceback.txt"  # a traceback names folders of this machine
        append_private(path, "".join(traceback.format_exception(error)))
        where = f"The traceback is in {path}; "
    raise RunFailed(
        f"run {spec.id} ({_title(spec)}) failed {folder.failed_during()}: {what}\n"
        f"{where}the same command tries again from the last checkpoint."
    ) from error


def _write_config(spec: RunSpec, folder: RunFolder) -> None:
    write_atomic(folder.path / "config.yaml", OmegaConf.to_yaml(spec.config))
    folder.write_json("identity.json", spec.training)


def _title(spec: RunSpec) -> str:
    c = spec.config
    return f"{c.method.name} {c.dataset.name} ε={budget_text(c.privacy.epsilon)} seed {c.seed}"


def _device(spec: RunSpec) -> torch.device:
    return choose_device(str(spec.config.runtime.device))
