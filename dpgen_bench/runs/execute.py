"""Executes the run of a config: prepare, train, account, measure; each phase can be resumed and is done only once."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.overrides import split_config_dir, without_local_paths
from dpgen_bench.config.runtime import backend_of, check_runtime, precision_of, state_gib_of
from dpgen_bench.config.spec import RunSpec, build_spec, check_evaluation
from dpgen_bench.evaluate.protocol import build_metrics
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.privacy.held_states import expect_room
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.processes import NotDivisible, Processes
from dpgen_bench.privacy.warn import warn_of_unused_shares
from dpgen_bench.runs.arithmetic import expect_same_arithmetic, record_arithmetic
from dpgen_bench.runs.diagnostics import draw_norms
from dpgen_bench.runs.epsilon import account_run, spent_by
from dpgen_bench.runs.failures import PrivateFailure, failures_to_settle, keep_private, mark_late_error, settle_failures
from dpgen_bench.runs.kept import extract, kept_steps, kept_steps_measured, not_kept, not_reached
from dpgen_bench.runs.measure import measure
from dpgen_bench.runs.prepare import (
    context_of,
    expect_data_of_method,
    expect_same_source,
    inherited_ledger,
    open_data,
    open_ledger,
    population_to_record,
    record_population,
    results_of,
)
from dpgen_bench.runs.processes import (
    expect_divided,
    expect_possible_division,
    processes_of,
    undone_if_not_divisible,
)
from dpgen_bench.runs.remembered import remember
from dpgen_bench.runs.samples import clipping_note
from dpgen_bench.runs.validation import expect_generator, expect_usable
from dpgen_bench.store.checks import plugin_note
from dpgen_bench.store.folders import PHASES, RunFailed, RunFolder, Store
from dpgen_bench.store.values import mean_values, metric_values, to_try_again, unmeasured
from dpgen_bench.training.cost import PeakMemory
from dpgen_bench.training.precision import expect_possible
from dpgen_bench.training.progress import NoProgress, ProgressBar, RecordedProgress
from dpgen_bench.training.signals import Preempted, StopSignals
from dpgen_bench.training.tracker import Tracker
from dpgen_bench.utils import compiled
from dpgen_bench.utils.environment import choose_device, describe_environment, with_earlier
from dpgen_bench.utils.errors import without_paths
from dpgen_bench.utils.files import append_private, write_atomic


def execute(config: DictConfig, overrides: Sequence[str] | None = None, own_folders: Sequence[Path] = ()) -> RunFolder:
    """Execute the run that `config` describes, or the part of it that is missing.

    A finished run is skipped, an interrupted one continues from its last checkpoint, a failed one is tried again.

    Args:
        overrides: the overrides of `dpgen run` that the config was composed from, to be stored in the run's folder.
        own_folders: folders with yamls of the user's own; see `runs.remembered`.

    Returns:
        The folder of the run.

    Raises:
        ValueError: if the config is invalid, or the run's folder exists and cannot be used. Nothing is written then.
        RunBusy: if another process executes this run.
        RunFailed: if an error ended the run; it is stored in the run's folder.
        Preempted: if a signal stopped the run, after a checkpoint.
    """
    spec = build_spec(config)
    if config.runtime.threads is not None:
        torch.set_num_threads(int(config.runtime.threads))
    compiled.use(backend_of(config))
    folder = Store(results_of(spec)).folder(spec.id)
    if folder.removed:
        raise ValueError(
            f"run {spec.id} was removed by `dpgen rm`, and its ledger is kept in {folder.path}, because its releases "
            "spent epsilon; executing it again would spend as much a second time: use another seed for a new run."
        )
    tracker = Tracker(config.get("tracker"), folder.path, _title(spec), _tracked_settings(spec))
    expect_usable(folder)
    # What the operator states now, about failures or the population, is recorded even if the run is finished.
    to_record = failures_to_settle(spec, folder) or population_to_record(spec, folder)
    measured = folder.measurements.fully_measured(spec.protocol_record()) and kept_steps_measured(spec, folder)
    if folder.done and folder.trained and measured and not to_record:
        lacks = f"; {lost}; use another seed, or delete its folder" if (lost := not_kept(spec, folder)) else ""
        print(f"run {spec.id} ({_title(spec)}) is finished: skipped{lacks}")
        return folder
    build_metrics(config.protocol)  # so that a misspelt metric raises now, not after the training
    expect_possible_division(spec, _device(spec))  # raises for devices that this machine lacks
    if not folder.trained:
        expect_data_of_method(spec)
        inherited_ledger(spec)  # raises for an invalid parent run, before anything is written
        expect_same_arithmetic(spec, folder, _device(spec))
        expect_room(state_gib_of(spec.config), _device(spec))
    phase = "prepare"
    context: list[Context] = []
    # At its end StopSignals calls the handler of the launcher, which starts the job again: the run is marked by then,
    # and its lock released.
    with (
        StopSignals(lambda: bool(context) and context[0].in_loop) as signals,
        folder.locked(),
        undone_if_not_divisible(folder),
    ):
        remember(results_of(spec), own_folders, Path.cwd())
        try:
            folder.mark("running", phase)
            _write_config(spec, folder)
            settle_failures(spec, folder)
            record_population(spec, folder)
            if not folder.trained:
                phase = "train"
                folder.mark("running", phase)
                record_arithmetic(spec, folder, _device(spec))
                with processes_of(spec, folder, _device(spec)) as processes:
                    _train(spec, folder, context, lambda: signals.received, overrides, tracker, processes)
            phase = "account"
            folder.mark("running", phase)
            account_run(spec, folder)
            phase = "measure"
            folder.mark("running", phase)
            measurement = measure(spec, folder, _device(spec))
            tracker.summary(mean_values(measurement))
            _measure_kept(spec, folder)
            folder.finish()
        except Preempted as stopped:
            folder.mark("preempted", phase, stopped)
            print(f"run {spec.id} ({_title(spec)}) was stopped by a signal; run the same command to continue.")
            raise
        except NotDivisible:
            raise
        except SystemExit as end:  # of a plugin: the command would end with its status, which may be 0
            text = f"expected a result, got SystemExit({end.code!r}) of a plugin; raise an error in its place."
            _fail(spec, folder, phase, RuntimeError(text))
        except Exception as error:
            _fail(spec, folder, phase, error)
        finally:
            tracker.close()
    missing = to_try_again(measurement)
    exceptions = f", but not measured: {', '.join(missing)} (the same command tries again)" if missing else ""
    print(f"run {spec.id} ({_title(spec)}) finished{exceptions}: {folder.path}")
    return folder


def evaluate_run(results: Path, run: str, overrides: list[str]) -> RunFolder:
    """Measure the generator of a trained run again, by the protocol in `overrides`, else by the run's own.

    An interrupted evaluation is continued. If there is a complete measurement by the protocol, everything is measured
    again, and the earlier measurement stays until the new one is complete and has all of its values. With
    `runtime.measure_kept`, only what the run and its kept steps lack is measured.

    Args:
        run: the run's id or the start of it.
        overrides: settings of the evaluation (`protocol...`, `runtime...`) and the present location of the data
            (`data_root`, `dataset.path`, `dataset.root`). Others are refused.

    Raises:
        LookupError: if no run, or more than one, matches `run`.
        ValueError: if the run has no generator yet, or for another override.
        RunBusy: if another process executes this run.
        RunFailed: if no metric could be measured, or one of the earlier measurement could not be measured again.
    """
    folder = Store(results).find(run)
    expect_generator(folder)
    config = _config_to_measure(folder.config, overrides)
    spec = RunSpec(config, folder.read_json("identity.json"))
    build_metrics(config.protocol)
    if config.runtime.threads is not None:
        torch.set_num_threads(int(config.runtime.threads))
    with folder.locked():
        # With kept steps nothing is measured again: after a kill, it would start from the first of them.
        again = not config.runtime.measure_kept and bool(folder.measurements.of(spec.protocol_record()))
        measurement = measure(spec, folder, choose_device(config.runtime.device), again=again)
        _measure_kept(spec, folder)
    if not metric_values(measurement):
        raise RunFailed(
            f"expected a value of one of the metrics {', '.join(unmeasured(measurement))}, got none; the lines above "
            "have the reasons."
        )
    return folder


def _measure_kept(spec: RunSpec, folder: RunFolder) -> None:
    """With `runtime.measure_kept`, measure the generator of each kept step by the protocol of the run, once."""
    if not spec.config.runtime.get("measure_kept", False):
        return
    for step in kept_steps(spec, folder):
        step_folder = extract(folder, step)
        done = step_folder.measurements.fully_measured(spec.protocol_record())
        print(f"  {spec.id}: step {step:,}" + (" is measured" if done else ""), flush=True)
        measure(spec, step_folder, _device(spec), cache=folder.path.parent.parent / "cache")


def _config_to_measure(config: DictConfig, overrides: list[str]) -> DictConfig:
    """A run's config with the protocol, runtime and location of data that the overrides set.

    Raises:
        ValueError: for overrides of other settings, or of single settings of a protocol without protocol=NAME.
    """
    _, texts = split_config_dir(overrides)
    by_key = {text.lstrip("+~").split("=", 1)[0]: text for text in texts if not text.startswith("-")}
    paths = {key: by_key[key] for key in ("dataset.path", "dataset.root") if key in by_key}
    allowed = ("protocol", "runtime", "data_root")
    if refused := [key for key in by_key if key.split(".")[0] not in allowed and key not in paths]:
        raise ValueError(
            f"expected overrides of protocol, runtime, data_root or dataset.path, got {', '.join(refused)}: a run is "
            "measured as it was trained; train another one with `dpgen run`."
        )
    of_protocol = [key for key in by_key if key.split(".")[0] == "protocol"]
    if of_protocol and "protocol" not in by_key:
        raise ValueError(f"expected protocol=NAME together with {of_protocol[0]}=..., to state which one is changed.")
    composed = compose_config([text for text in overrides if text not in paths.values()])
    if of_protocol:
        config.protocol = composed.protocol
    config.runtime = composed.runtime
    if "root" in config.dataset:  # the data may have moved since the run was trained
        config.dataset.root = composed.data_root
    for key, text in paths.items():
        path = text.split("=", 1)[1]
        quoted = len(path) > 1 and path[0] == path[-1] and path[0] in "'\""  # as Hydra asks for around spaces
        OmegaConf.update(config, key, path[1:-1] if quoted else path)
    OmegaConf.resolve(config)
    check_evaluation(config)
    check_runtime(config)
    return config


def _train(
    spec: RunSpec,
    folder: RunFolder,
    context: list[Context],
    should_stop: Callable[[], int | None],
    overrides: Sequence[str] | None,
    tracker: Tracker,
    processes: Processes | None,
) -> None:
    """Fit the method, and save its generator, ledger, environment and cost in the run's folder.

    Args:
        context: an empty list, to which the context of `fit` is appended, so that signals know if a loop runs.
        should_stop: gives the number of a received signal, or None.
        processes: those that divide the draws of the run; None for this one alone.
    """
    device = _device(spec)
    memory = PeakMemory(device)
    made_by = {} if overrides is None else {"overrides": without_local_paths(overrides)}
    environment = with_earlier(describe_environment(device), folder.read_json("environment.json"))
    folder.write_json("environment.json", {**environment, **made_by})
    _write_dataset(spec, folder)
    records = spec.dataset().load("train")
    compiled.import_compiler()  # after what a missing file or setting refuses, and before what is measured
    ledger = open_ledger(spec, folder, len(records))
    expect_same_source(spec, folder, ledger)
    if note := plugin_note(folder):
        print(f"run {spec.id}: note: {note}", file=sys.stderr)
    _announce_warnings(spec, ledger)
    data, services = open_data(spec, folder, ledger, records, device, processes)
    del records  # from here on, only mechanisms reach them; on a GPU this copy is not needed, either
    runtime = spec.config.runtime

    def spent() -> str:
        """Epsilon of the releases made so far, for the progress bar."""
        now = spent_by(ledger, {name: mechanism.executed for name, mechanism in data.mechanisms.items()})
        return f"ε spent {now:.3g}"

    ctx = context_of(
        spec,
        folder,
        device,
        services,
        due=lambda seconds: seconds >= float(runtime.checkpoint_s),
        keep_steps=tuple(runtime.keep_steps),
        progress=RecordedProgress(
            folder.path / "progress.json",
            ProgressBar(f"{spec.id} {_title(spec)}", spent) if runtime.progress else NoProgress(),
        ),
        should_stop=should_stop,
        memory=memory,
        tracker=tracker,
    )
    context.append(ctx)
    failure = None
    try:
        if processes is not None:  # the others open the data after this process, and read its checkpoint before fit
            processes.wait()
            processes.wait()
        generator = fit_method(spec.method(), data, ctx)
        ledger.refuse_if_invalidated()
        expect_divided(spec, services)
    except BaseException as error:
        with contextlib.suppress(Exception):  # an error while clients are stopped must not hide why the run ended
            data.close()
        mark_late_error(ledger, error)
        if ledger.invalidated is None:
            raise
        failure = keep_private(folder, ledger, error)
    if failure is not None:
        raise failure  # outside of `except`, so that the private error does not become its context
    data.close()
    if ledger.budget != spec.budget():
        raise ValueError(
            f"expected the ledger's budget to be {spec.budget()} after fit, got {ledger.budget}; a method must not "
            "change it."
        )
    warn_of_unused_shares(ledger)
    ctx.close()
    ledger.save()
    if ledger.diagnostics == "unsafe":
        bounds = {name: mechanism.bound.C for name, mechanism in data.mechanisms.items()}
        draw_norms(folder.path / "private" / "diagnostics.jsonl", bounds, folder.path / "private" / "norms.png")
    folder.write_json("training.json", ctx.cost(generator))
    for note in filter(None, (clipping_note(generator), not_reached(spec, folder))):
        print(f"run {spec.id}: note: {note}", file=sys.stderr)
    generator.save(folder.path)


def _announce_warnings(spec: RunSpec, ledger: Ledger) -> None:
    """Print the ledger's warnings now, and new ones as soon as they are added to it."""

    def print_warning(warning: str) -> None:
        print(f"run {spec.id}: warning: {warning}", file=sys.stderr)

    for warning in ledger.warnings:
        print_warning(warning)
    ledger.announce = print_warning


def _fail(spec: RunSpec, folder: RunFolder, phase: str, error: Exception) -> NoReturn:
    """Mark the run as failed, store the traceback in its private folder, and raise RunFailed."""
    unmarked = ""
    try:
        folder.mark("failed", phase, error)
    except OSError as full:
        unmarked = f" (the run could not be marked as failed: {full.strerror})"
    is_private = isinstance(error, PrivateFailure)
    what = str(error) if is_private else f"{type(error).__name__}: {error}"
    where = ""
    if not is_private:
        path = folder.path / "private" / "traceback.txt"  # private because it names folders of this machine
        with contextlib.suppress(OSError):  # a full disk, of which the message says enough
            append_private(path, "".join(traceback.format_exception(error)))
            where = f"The traceback is in {path}; "
    go_on = "" if is_private else "once the cause is removed, the same command continues from the last checkpoint; "
    raise RunFailed(
        f"run {spec.id} ({_title(spec)}) failed during {PHASES[phase]}: {what}{unmarked}\n"
        f"{where}{go_on}with other settings, it is another run."
    ) from error


def _write_config(spec: RunSpec, folder: RunFolder) -> None:
    write_atomic(folder.path / "config.yaml", OmegaConf.to_yaml(spec.config))
    folder.write_json("identity.json", spec.training)


def _write_dataset(spec: RunSpec, folder: RunFolder) -> None:
    """Write dataset.json: what is known of the dataset in public, for uses of the generator without the dataset."""
    dataset = spec.dataset()
    content = {"class_names": list(dataset.class_names), "image_shape": list(dataset.image_shape)}
    folder.write_json("dataset.json", content)


def _title(spec: RunSpec) -> str:
    config = spec.config
    return f"{config.method.name} {config.dataset.name} ε={budget_text(config.privacy.epsilon)} seed {config.seed}"


def _tracked_settings(spec: RunSpec) -> dict[str, Any]:
    """The settings of a run that a tracker shows, without paths of this machine."""
    config, method = spec.config, spec.training["method"]
    names = {"dataset": config.dataset.name, "scale": config.scale.name, "protocol": config.protocol.name}
    privacy = {key: value for key, value in spec.training["privacy"].items() if key != "diagnostics"}
    plain = {key: without_paths(value) if isinstance(value, str) else value for key, value in method.items()}
    return {**names, "seed": spec.seed, "privacy": privacy, "method": plain}


def _device(spec: RunSpec) -> torch.device:
    """The device of a run.

    Raises:
        ValueError: for a device that this machine lacks, that cannot compute in the run's precision, or for which the
            machine cannot compile.
    """
    device = choose_device(str(spec.config.runtime.device))
    expect_possible(precision_of(spec.config), device)
    compiled.expect_compiler(backend_of(spec.config), device)
    return device
