"""The command line, `dpgen VERB`: parses arguments and calls the function of the verb."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpgen_bench import __version__
from dpgen_bench.utils.validation import closest

CONF = str(Path(__file__).resolve().parent.parent / "conf")

USAGE = """dpgen VERB [OVERRIDES]

  run [-m] [OVERRIDES]       train and measure (-m: a Hydra multirun), e.g. dpgen run method=dpgan privacy.epsilon=10
  runs [--results DIR]       list runs: status, epsilons, main metrics
  runs --spent [--delta D]   the epsilon that all runs with privacy.noise=os on the same data spend together
  check method=NAME [--records N] [--data] [--thorough]
                             run the conformance suite on a method, with made-up or the dataset's own records
  account [...]              epsilon by RDP, PRV and PLD under both relations (dpgen account --help)
  evaluate RUN [protocol=P]  measure the generator of a run again, without training
  sample RUN --n N --out F   draw images from the generator of a finished run
  tables NAME... | --all [scale=quick] [--format md,tex,csv,html] [--overwrite]
                             write tables to results/tables/; a paper's with the difference from each published value
  sweep NAME [scale=quick] [--dry-run] [OVERRIDES]
                             execute the runs that a table lacks, or only list them with their steps
  report [--overwrite]       write all results to one HTML file, which needs no server and no network
  fetch dataset=NAME         download a dataset into data_root
  fetch --check dataset=...  list all unreadable files of a dataset, your own images included
  list [methods|datasets|protocols|experiments|tables] [--config-dir DIR]
                             what can be named, with one line each

dpgen --version prints the version; dpgen VERB --help describes a verb.
"""


@hydra.main(config_path=CONF, config_name="config", version_base="1.3")
def _run_task(config: DictConfig) -> None:
    from dpgen_bench.runs.execute import RunFailed, execute
    from dpgen_bench.runs.store import RunBusy

    try:
        execute(config, list(HydraConfig.get().overrides.task))
    except (ValueError, LookupError, FileNotFoundError, RunBusy, RunFailed) as error:
        code = _print_error(error)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # Hydra executes the other jobs, then exits with a status other than 0
        raise SystemExit(code) from None


def _run(argv: list[str]) -> int:
    sys.argv = ["dpgen run", *argv]
    _run_task()
    return 0


def _runs(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("dpgen runs", allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=_results())
    parser.add_argument(
        "--spent", action="store_true", help="list the epsilon that all runs with privacy.noise=os spend together"
    )
    parser.add_argument(
        "--delta", type=float, help="with --spent: delta of the totals (default: the smallest of the runs)"
    )
    from dpgen_bench.runs.listing import print_runs
    from dpgen_bench.runs.spent import print_spent

    options = parser.parse_args(argv)
    _expect_folder(options.results)
    if options.delta is not None and not (options.spent and 0.0 < options.delta < 1.0):
        raise ValueError(f"expected --delta in (0, 1) and together with --spent, got {options.delta:g}.")
    if options.spent:
        print_spent(options.results, options.delta)
    else:
        print_runs(options.results)
    return 0


def _check(argv: list[str]) -> int:
    from dpgen_bench.runs.check import check_configured_method

    return check_configured_method(argv)


def _account(argv: list[str]) -> int:
    from dpgen_bench.runs.account import main as account

    return account(argv)


def _evaluate(argv: list[str]) -> int:
    from dpgen_bench.runs.execute import evaluate_run
    from dpgen_bench.runs.listing import print_metrics

    parser = argparse.ArgumentParser("dpgen evaluate", allow_abbrev=False)
    parser.add_argument("run", help="a run id or the start of one")
    parser.add_argument("--results", type=Path, default=_results())
    parser.epilog = "followed by overrides: protocol=NAME, protocol.repeats=5, runtime.device=..., --config-dir DIR"
    options, overrides = parser.parse_known_args(argv)
    folder = evaluate_run(options.results, options.run, overrides)
    print_metrics(folder)
    return 0


def _sample(argv: list[str]) -> int:
    from dpgen_bench.runs.release import sample_run
    from dpgen_bench.runs.sample_files import FORMATS

    parser = argparse.ArgumentParser("dpgen sample")
    parser.add_argument("run", help="a run id or the start of one")
    parser.add_argument("--n", type=int, required=True, help="number of images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help=FORMATS)
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    parser.add_argument("--labels", choices=("balanced", "uniform"), default="balanced")
    parser.add_argument(
        "--benchmark", action="store_true", help="allow a run that is not private, such as one with seeded noise"
    )
    parser.add_argument("--results", type=Path, default=_results())
    options = parser.parse_args(argv)
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


def _tables(argv: list[str]) -> int:
    from dpgen_bench.report.written import OF_NO_RUN, write_table
    from dpgen_bench.tables.formats import FORMATS
    from dpgen_bench.tables.rows import has_quick_runs, load_table, scales_to_build, table_names

    parser = argparse.ArgumentParser("dpgen tables", allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="names of tables in conf/table/; scale=quick for their quick runs")
    parser.add_argument(
        "--all", action="store_true", help="every table, at scale quick, too, if runs of that scale were measured"
    )
    parser.add_argument("--format", default="md,csv", help=f"formats of the files to write: {','.join(FORMATS)}")
    parser.add_argument("--results", type=Path, default=_results())
    parser.add_argument("--overwrite", action="store_true", help=f"also overwrite files with {OF_NO_RUN}")
    options = parser.parse_intermixed_args(argv)
    names, scale = _take_scale(options.names)
    if bool(names) == options.all:
        raise ValueError(
            f"expected names of tables, or --all, got {' '.join(argv) or 'neither'}; tables: {' '.join(table_names())}"
        )
    _expect_folder(options.results)
    formats = options.format.split(",")
    if not options.all:
        for name in names:
            load_table(name)  # raises for an unknown name before anything is written
        for name in names:
            write_table(name, options.results, scale, formats, options.overwrite)
        return 0
    quick, all_names, failed = has_quick_runs(options.results), table_names(), 0
    for number, name in enumerate(all_names, start=1):
        print(f"[{number}/{len(all_names)}] {name}", file=sys.stderr, flush=True)
        try:
            for each in scales_to_build(load_table(name), quick):
                write_table(name, options.results, each, formats, options.overwrite, quiet=True)
        except Exception as error:  # an error in one table must not prevent the others
            failed = _print_error(error)
    return failed


def _take_scale(arguments: list[str]) -> tuple[list[str], str]:
    """The arguments without scale=..., and that scale, by default "paper"."""
    scales = [argument.split("=", 1)[1] for argument in arguments if argument.startswith("scale=")]
    return [argument for argument in arguments if not argument.startswith("scale=")], scales[-1] if scales else "paper"


def _report(argv: list[str]) -> int:
    from dpgen_bench.report.page import build_report
    from dpgen_bench.runs.store import Store

    parser = argparse.ArgumentParser("dpgen report")
    parser.add_argument("--results", type=Path, default=_results())
    parser.add_argument("--out", type=Path, help="the file to write (default: report.html in the folder of results)")
    parser.add_argument("--overwrite", action="store_true", help="also overwrite a report of runs that are missing now")
    options = parser.parse_args(argv)
    _expect_folder(options.results)
    path = options.out or options.results / "report.html"
    existing = {folder.id for folder in Store(options.results).runs()}
    if not options.overwrite and (missing := _runs_shown(path) - existing):
        print(
            f"dpgen: kept {path}: it shows {len(missing)} runs that are not in {options.results / 'runs'} "
            f"({min(missing)}, ...); use --overwrite to replace it, or --out to write another file",
            file=sys.stderr,
        )
        return 0
    print(build_report(options.results, options.out))
    return 0


def _runs_shown(path: Path) -> set[str]:
    """Folders of the runs with values that an existing report shows; none if the file is missing or no report."""
    if not path.is_file():
        return set()
    text = path.read_text(errors="replace")
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    try:
        shown = json.loads(match[1])["runs"] if match else []
        return {run["folder"] for run in shown if run["state"] in ("finished", "damaged", "duplicate")}
    except (ValueError, KeyError, TypeError):
        return set()


def _expect_folder(results: Path) -> None:
    """Check that the folder of results exists.

    Raises:
        ValueError: if `results` is not a folder.
    """
    if not results.is_dir():
        raise ValueError(
            f"expected a folder of results, got {results}, which is not a folder; set it with --results or the "
            "environment variable DPGEN_RESULTS, or create it with `dpgen run` or `dpgen sweep`."
        )


def _sweep(argv: list[str]) -> int:
    from dpgen_bench.tables.sweeps import launch_sweeps, print_plan

    parser = argparse.ArgumentParser("dpgen sweep", allow_abbrev=False)
    parser.add_argument(
        "arguments", nargs="*", metavar="NAME [KEY=VALUE ...]", help="a table in conf/table/; overrides"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the missing runs with their steps")
    parser.add_argument("--results", type=Path, default=_results())
    parser.epilog = "overrides: scale=quick, and for every run hydra/launcher=joblib, runtime.device=..."
    options = parser.parse_intermixed_args(argv)
    arguments, scale = _take_scale(options.arguments)
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    if len(names) != 1:
        raise ValueError(f"expected one table and overrides KEY=VALUE, got {' '.join(names) or 'no table'}.")
    overrides = [argument for argument in arguments if argument != names[0]]
    if options.dry_run:
        print_plan(names[0], options.results, overrides, scale)
        return 0
    return launch_sweeps(names[0], options.results, overrides, scale)


def _fetch(argv: list[str]) -> int:
    from dpgen_bench.data.fetch import describe, fetch
    from dpgen_bench.runs.config import build_dataset, compose_config

    parser = argparse.ArgumentParser("dpgen fetch", allow_abbrev=False)
    parser.add_argument(
        "--check", action="store_true", help="only list what is wrong with the files, every file at once"
    )
    parser.epilog = "followed by overrides: dataset=NAME, dataset.path=DIR, data_root=DIR, --config-dir DIR"
    options, overrides = parser.parse_known_args(argv)
    config = compose_config(overrides)
    if options.check and OmegaConf.is_missing(config.dataset, "image_size"):
        config.dataset.image_size = 32  # whether a file can be read does not depend on it
    dataset = build_dataset(config)
    if not options.check:
        fetch(dataset)
        return 0
    if problems := dataset.problems():
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(describe(dataset))
    return 0


def _list(argv: list[str]) -> int:
    from dpgen_bench.runs.catalogue import GROUPS, print_catalogue

    parser = argparse.ArgumentParser("dpgen list", allow_abbrev=False)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)} (default: all of them)")
    parser.add_argument("--config-dir", type=Path, help="a folder with yamls of your own")
    options = parser.parse_args(argv)
    print_catalogue(options.groups or GROUPS, options.config_dir)
    return 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "run": _run,
    "runs": _runs,
    "check": _check,
    "account": _account,
    "evaluate": _evaluate,
    "sample": _sample,
    "tables": _tables,
    "report": _report,
    "sweep": _sweep,
    "fetch": _fetch,
    "list": _list,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (0: success, 1: a run failed, 2: invalid input)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments == ["--version"]:
        print(f"dpgen_bench {__version__}")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        close = closest(verb, VERBS)
        meant = f" Did you mean {close}?" if close else ""
        print(f"dpgen: expected one of {' '.join(VERBS)}, got {verb!r}.{meant} See dpgen --help.", file=sys.stderr)
        return 2
    # So that a method's file in the working directory can be imported.
    sys.path.insert(0, str(Path.cwd()))
    if verb == "run":
        return _run(rest)
    try:
        return VERBS[verb](rest)
    except (ValueError, LookupError, FileNotFoundError, RuntimeError, HydraException, OmegaConfBaseException) as error:
        return _print_error(error)


def _print_error(error: Exception) -> int:
    """Print an error; returns the exit status for it."""
    from dpgen_bench.runs.execute import RunFailed

    print(f"dpgen: {error}", file=sys.stderr)
    return 1 if isinstance(error, RunFailed) else 2


def _results() -> Path:
    """The default folder of results."""
    import os

    return Path(os.environ.get("DPGEN_RESULTS", "results"))


if __name__ == "__main__":
    sys.exit(main())
