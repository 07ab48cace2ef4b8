"""What each verb does with its parsed arguments. The harness is imported late, after usage errors were answered."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from dpgen_bench.cli.account_parser import check_options
from dpgen_bench.config.catalogue import GROUPS, print_catalogue
from dpgen_bench.config.compose import compose_config, expect_composable
from dpgen_bench.config.overrides import parse_override, quote_value
from dpgen_bench.config.runtime import number_of_processes
from dpgen_bench.runs.devices import own_devices
from dpgen_bench.runs.multirun import Multirun, executed_by_launcher, job_of_multirun
from dpgen_bench.store.folders import RunBusy, RunFailed, Store
from dpgen_bench.store.records import has_records, records_alone
from dpgen_bench.tables.names import table_file, table_names
from dpgen_bench.utils.own_folders import own_folders
from dpgen_bench.utils.paths import CONF, RECORDS


class JobFailed(CompactHydraException):
    """Raised for a failed job of a multirun, whose error was printed. Hydra executes the others, then exits with 1.

    Hydra prints its text, and no traceback. The status is 1 also for a job with an invalid config: which jobs a
    multirun has, and whether their names exist, is checked before the first of them starts.
    """


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _run_task(config: DictConfig) -> None:
    try:
        with job_of_multirun() as may_begin:
            if may_begin:
                from dpgen_bench.runs.execute import execute

                # Jobs of a launcher may meet on a GPU; a run of its own may share one, unless it uses several.
                number = number_of_processes(config)
                holds = executed_by_launcher() or number > 1
                with own_devices(str(config.runtime.get("device")) if holds else "cpu", number):
                    execute(config, _overrides_of_job(), _own_folders_of_job())
    except (ValueError, LookupError, FileNotFoundError, RunBusy, RunFailed) as error:
        code = print_error(error)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise JobFailed("the multirun executed its other jobs") from None
        raise SystemExit(code) from None


def _overrides_of_job() -> list[str]:
    """The overrides as they were written; `${...}` in them refers to the run's config and not to Hydra's."""
    return [str(text) for text in OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False) or []]


def _own_folders_of_job() -> list[Path]:
    """The user's folders in which Hydra found yamls, also in another process of a multirun."""
    sources = HydraConfig.get().runtime.config_sources
    places = [Path(source.path) for source in sources if source.schema == "file"]
    return [place for place in places if place.resolve() != CONF]


def run(options: argparse.Namespace) -> int:
    """Execute runs by Hydra, which parses the arguments again."""
    flags = {"--multirun": options.multirun, "--resolve": options.resolve}
    values = {"--cfg": options.cfg, "--package": options.package, "--info": options.info}
    overrides = overrides_of(options)
    expect_composable(overrides, options.multirun)
    sys.argv = [
        "dpgen run",
        *(flag for flag, is_set in flags.items() if is_set),
        *(f"{name}={value}" for name, value in values.items() if value is not None),
        *overrides,
    ]
    if folders := own_folders():
        sys.argv.append(f"hydra.searchpath=[{','.join(quote_value(f'file://{folder}') for folder in folders)}]")
    with Multirun(queued=any(text.startswith("hydra/launcher=") and "slurm" in text for text in options.overrides)):
        _run_task()
    return 0


def overrides_of(options: argparse.Namespace) -> list[str]:
    """The overrides, with the one that `--results` stands for."""
    overrides = list(options.overrides)
    if options.results is not None:
        overrides.append(f"results={quote_value(str(options.results))}")
    return overrides


def runs(options: argparse.Namespace) -> int:
    """List runs, or what they spent together."""
    _expect_folder(options.results)
    if options.delta is not None and not (options.spent and 0.0 < options.delta < 1.0):
        raise ValueError(f"expected --delta in (0, 1) and together with --spent, got {options.delta:g}.")
    if wrong := [text for text in options.filters if not text.partition("=")[2]]:
        raise ValueError(f"expected filters KEY=VALUE, got {wrong[0]!r}; write for example status=failed.")
    from dpgen_bench.outcomes.overview import ordered, overviews, print_runs, select
    from dpgen_bench.outcomes.spent import print_spent

    if options.spent:
        if options.filters or options.sort or options.json or options.reverse:
            raise ValueError("expected --spent without filters, --sort, --reverse and --json: it is a total.")
        print_spent(options.results, options.delta)
        return 0
    shown = ordered(select(overviews(options.results), options.filters), options.sort or "id", options.reverse)
    if options.json:
        print(json.dumps(shown, indent=2, allow_nan=False))
    else:
        print_runs(options.results, shown, options.filters)
    return 0


def rm(options: argparse.Namespace) -> int:
    """Remove runs after asking; see `outcomes.removal`."""
    if not (options.runs or options.failed or options.stale):
        raise ValueError("expected ids of runs, --failed or --stale, got nothing; dpgen runs lists the ids.")
    _expect_folder(options.results)
    from dpgen_bench.outcomes.removal import describe_removal, remove, runs_to_remove

    folders = runs_to_remove(options.results, options.runs, options.failed, options.stale)
    if not folders:
        print("no run to remove")
        return 0
    print("\n".join(describe_removal(options.results, folders)))
    if not options.yes:
        if not sys.stdin.isatty():
            raise ValueError("expected --yes, as there is no terminal to ask on; nothing was removed.")
        if input(f"Remove {len(folders)} {'run' if len(folders) == 1 else 'runs'}? [y/N] ").strip().lower() != "y":
            print("nothing was removed")
            return 0
    failed = 0
    for folder in folders:
        try:
            remove(folder)
        except RunBusy as error:  # it was started after it was listed
            failed = print_error(error)
    return failed


def check(options: argparse.Namespace) -> int:
    """Run the conformance suite on a method."""
    expect_composable(overrides_of(options), multirun=False)
    from dpgen_bench.runs.check import check_configured_method

    return check_configured_method(
        overrides_of(options), options.records, options.data, options.thorough, options.as_configured
    )


def account(options: argparse.Namespace) -> int:
    """Print epsilons of planned mechanisms."""
    if options.overrides:
        expect_composable(overrides_of(options), multirun=False)
    check_options(options, options.overrides)
    from dpgen_bench.runs.account import run_account

    return run_account(options, overrides_of(options) if options.overrides else [])


def audit(options: argparse.Namespace) -> int:
    """Attack a mechanism."""
    from dpgen_bench.audit.command import audit

    return audit(
        options.target,
        options.overrides,
        results=options.results,
        level=options.level,
        trials=options.trials,
        relation=options.relation,
        seed=options.seed,
        as_json=options.json,
    )


def evaluate(options: argparse.Namespace) -> int:
    """Measure the generator of a run again."""
    Store(options.results).find(options.run)  # raises for an unknown run
    from dpgen_bench.outcomes.listing import print_metrics
    from dpgen_bench.runs.execute import evaluate_run

    folder = evaluate_run(options.results, options.run, options.overrides)
    print_metrics(folder)
    return 0


def sample(options: argparse.Namespace) -> int:
    """Write images of a run."""
    Store(options.results).find(options.run)  # raises for an unknown run
    from dpgen_bench.outcomes.sample_command import sample_run

    sample_run(
        options.results,
        options.run,
        options.n,
        options.seed,
        options.out,
        options.labels,
        options.benchmark,
        options.overwrite,
    )
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the generator of a run for a model hub."""
    from dpgen_bench.outcomes.export import export_run

    out = export_run(options.results, options.run, options.out, options.benchmark, options.overwrite, options.license)
    print(f"the generator of run {options.run} was written to {out}; read its README.md before you publish it")
    return 0


def tables(options: argparse.Namespace) -> int:
    """Write tables. With --all, an error in one does not prevent the others."""
    names, scale = _take_scale(options.names)
    if bool(names) == options.all:
        given = " ".join(names) or "neither"
        raise ValueError(f"expected names of tables, or --all, got {given}; tables: {' '.join(table_names())}")
    _expect_folder(options.results, made=options.recorded)
    for name in names:
        table_file(name)  # raises for an unknown name
    from dpgen_bench.report.written import write_table
    from dpgen_bench.tables.expand import scales_to_build
    from dpgen_bench.tables.load import load_table
    from dpgen_bench.tables.rows import has_quick_runs

    for name in names:
        load_table(name)  # raises for an unknown name before anything is written
    failed = 0
    with _source(options.results, options.recorded) as source:
        quick, every = has_quick_runs(source) if options.all else False, names or table_names()
        for number, name in enumerate(every, start=1):
            if options.all:
                print(f"[{number}/{len(every)}] {name}", file=sys.stderr, flush=True)
            try:
                for each in scales_to_build(load_table(name), quick) if options.all else (scale,):
                    write_table(name, options.results, each, options.format, options.all, not options.no_plots, source)
            except Exception as error:  # an error in one of all tables must not prevent the others
                if not options.all:
                    raise
                failed = print_error(error)
    return failed


def _source(results: Path, recorded: bool) -> AbstractContextManager[Path]:
    """The folder whose runs and records are shown: `results`, or one that has its records alone."""
    if recorded and not has_records(results):
        print(f"{results} has no records; those of the bench, {RECORDS}, are shown", file=sys.stderr, flush=True)
    return records_alone(results) if recorded else nullcontext(results)


def _take_scale(arguments: list[str]) -> tuple[list[str], str]:
    """The arguments without scale=..., and that scale, by default "paper"."""
    scales = [argument.split("=", 1)[1] for argument in arguments if argument.startswith("scale=")]
    return [argument for argument in arguments if not argument.startswith("scale=")], scales[-1] if scales else "paper"


def report(options: argparse.Namespace) -> int:
    """Write the report."""
    from dpgen_bench.report.page import build_report

    _expect_folder(options.results, made=options.recorded)
    with _source(options.results, options.recorded) as source:
        print(build_report(source, options.out or options.results / "report.html"))
    return 0


def _expect_folder(results: Path, made: bool = False) -> None:
    """Check that the folder of results exists.

    Args:
        made: whether what is written there makes the folder, because what is read may be elsewhere.

    Raises:
        ValueError: if `results` is not a folder.
    """
    if not (results.is_dir() or (made and not results.exists())):
        raise ValueError(
            f"expected a folder of results, got {results}, which is not a folder; set it with --results or the "
            "environment variable DPGEN_RESULTS, or create it with `dpgen run` or `dpgen sweep`."
        )


def sweep(options: argparse.Namespace) -> int:
    """Execute the missing runs of a table, or list them."""
    arguments, scale = _take_scale(options.arguments)
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    if len(names) != 1:
        raise ValueError(f"expected one table and overrides KEY=VALUE, got {' '.join(names) or 'no table'}.")
    overrides = [argument for argument in arguments if argument != names[0]]
    table_file(names[0])  # raises for an unknown name
    for override in overrides:
        parse_override(override)
    from dpgen_bench.tables.sweeps import launch_sweeps, print_plan

    if options.dry_run:
        print_plan(names[0], options.results, overrides, scale, options.without)
        return 0
    return launch_sweeps(names[0], options.results, overrides, scale, options.without)


def fetch(options: argparse.Namespace) -> int:
    """Download a dataset, or list what is wrong with its files."""
    config = compose_config(overrides_of(options))
    from dpgen_bench.config.building import build_dataset
    from dpgen_bench.data.fetch import describe, fetch

    if options.check and OmegaConf.is_missing(config.dataset, "image_size"):
        config.dataset.image_size = 32  # whether a file can be read does not depend on it
    dataset = build_dataset(config)
    if not options.check:
        print(f"dataset {dataset.name!r} is in {fetch(dataset)}")
        return 0
    if problems := dataset.problems():
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(describe(dataset))
    return 0


def record(options: argparse.Namespace) -> int:
    """Write records of runs, or check those that exist."""
    if not options.runs and not options.check:
        raise ValueError("expected ids of runs, or --check, got neither.")
    _expect_folder(options.results)
    from dpgen_bench.cli.records import check_records, write_records

    if options.check:
        return check_records(options.results, options.runs)
    names, log = options.runs, options.log
    return write_records(names, options.results, options.by, log, options.audit, options.overwrite)


def list_names(options: argparse.Namespace) -> int:
    """List what can be named."""
    print_catalogue(options.groups or GROUPS)
    return 0


VERBS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": run,
    "runs": runs,
    "rm": rm,
    "check": check,
    "account": account,
    "audit": audit,
    "evaluate": evaluate,
    "sample": sample,
    "export": export,
    "tables": tables,
    "sweep": sweep,
    "report": report,
    "fetch": fetch,
    "record": record,
    "list": list_names,
}


def print_error(error: Exception) -> int:
    """Print an error in one line; returns its exit status: 1 if something failed, 2 if the command is invalid."""
    print(f"dpgen: {error}", file=sys.stderr)
    return 1 if isinstance(error, RuntimeError) else 2
