"""The command line: `dpgen VERB`, and after the verb Hydra overrides."""

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
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONF = str(Path(__file__).resolve().parent.parent / "conf")

USAGE = """dpgen VERB [OVERRIDES]

  run [-m] [OVERRIDES]       make a run (with -m: a Hydra multirun), e.g. dpgen run method=dpgan privacy.epsilon=10
  runs [--results DIR]       list runs: status, epsilon, headline metrics
  runs --spent [--delta D]   what all runs with privacy.noise=os on the same data spend together
  check method=NAME [--records N] [--data] [--thorough]
                             put one method through the conformance suite, on made-up or the dataset's own records
  account [...]              epsilon by RDP, PRV and PLD under both relations (dpgen account --help)
  evaluate RUN [protocol=P]  measure an existing generator again, without training
  sample RUN --n N --out F   draw images from a finished generator
  tables NAME... | --all [scale=quick] [--format md,tex,csv,html] [--overwrite]
                             tables, a paper's with the distance to each printed figure, into results/tables/
  sweep NAME [scale=quick] [--dry-run] [OVERRIDES]
                             launch the runs that a table lacks, or only list them with their steps
  report [--overwrite]       everything under results/ in one HTML file, which needs no server and no network
  fetch dataset=NAME         download a dataset into data_root
"""


@hydra.main(config_path=CONF, config_name="config", version_base="1.3")
def _run_task(config: DictConfig) -> None:
    from dpgen_bench.runs.execute import RunFailed, execute
    from dpgen_bench.runs.store import RunBusy

    try:
        execute(config, list(HydraConfig.get().overrides.task))
    except (ValueError, LookupError, FileNotFoundError, RunBusy, RunFailed) as error:
        code = _complain(error)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # Hydra makes the other jobs, then ends with a status that is not 0
        raise SystemExit(code) from None


def _run(argv: list[str]) -> int:
    sys.argv = ["dpgen run", *argv]
    _run_task()
    return 0


def _runs(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("dpgen runs", allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=_results())
    parser.add_argument(
        "--spent", action="store_true", help="what all runs with privacy.noise=os spend together of each population"
    )
    parser.add_argument("--delta", type=float, help="with --spent: of the totals; the smallest of the runs if not said")
    from dpgen_bench.runs.listing import print_runs
    from dpgen_bench.runs.spent import print_spent

    given = parser.parse_args(argv)
    _expect_folder(given.results)
    if given.delta is not None and not (given.spent and 0.0 < given.delta < 1.0):
        raise ValueError(f"expected --delta in (0, 1) and together with --spent, got {given.delta:g}.")
    if given.spent:
        print_spent(given.results, given.delta)
    else:
        print_runs(given.results)
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
    parser.epilog = "then overrides: protocol=NAME, protocol.repeats=5, runtime.device=..., --config-dir DIR"
    given, overrides = parser.parse_known_args(argv)
    folder = evaluate_run(given.results, given.run, overrides)
    print_metrics(folder)
    return 0


def _sample(argv: list[str]) -> int:
    from dpgen_bench.runs.release import sample_run

    parser = argparse.ArgumentParser("dpgen sample")
    parser.add_argument("run", help="a run id or the start of one")
    parser.add_argument("--n", type=int, required=True, help="number of images")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a .npz file, or a folder for PNG files")
    parser.add_argument("--labels", choices=("balanced", "uniform"), default="balanced")
    parser.add_argument("--benchmark", action="store_true", help="allow a run whose noise is seeded, hence not private")
    parser.add_argument("--results", type=Path, default=_results())
    given = parser.parse_args(argv)
    sample_run(given.results, given.run, given.n, given.seed, given.out, given.labels, given.benchmark)
    return 0


def _tables(argv: list[str]) -> int:
    from dpgen_bench.report.written import OF_NO_RUN, write_table
    from dpgen_bench.tables.formats import FORMATS
    from dpgen_bench.tables.rows import has_quick_runs, load_table, scales_to_build, table_names

    parser = argparse.ArgumentParser("dpgen tables", allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="tables in conf/table/, and scale=quick for their quick runs")
    parser.add_argument("--all", action="store_true", help="every table, and what was measured of each at scale quick")
    parser.add_argument("--format", default="md,csv", help=f"which files to write: {','.join(FORMATS)}")
    parser.add_argument("--results", type=Path, default=_results())
    parser.add_argument("--overwrite", action="store_true", help=f"also files with {OF_NO_RUN}")
    given = parser.parse_intermixed_args(argv)
    names, scale = _take_scale(given.names)
    if bool(names) == given.all:
        raise ValueError(
            f"expected names of tables, or --all, got {' '.join(argv) or 'neither'}; tables: {' '.join(table_names())}"
        )
    _expect_folder(given.results)
    formats = given.format.split(",")
    if not given.all:
        for name in names:
            load_table(name)  # a name that is none before anything is built
        for name in names:
            write_table(name, given.results, scale, formats, given.overwrite)
        return 0
    quick, all_names, failed = has_quick_runs(given.results), table_names(), 0
    for number, name in enumerate(all_names, start=1):
        print(f"[{number}/{len(all_names)}] {name}", file=sys.stderr, flush=True)
        try:
            for each in scales_to_build(load_table(name), quick):
                write_table(name, given.results, each, formats, given.overwrite, quiet=True)
        except Exception as error:  # one table must not cost the others
            failed = _complain(error)
    return failed


def _take_scale(words: list[str]) -> tuple[list[str], str]:
    """The words without scale=..., and that scale; "paper" where none says."""
    scales = [word.split("=", 1)[1] for word in words if word.startswith("scale=")]
    return [word for word in words if not word.startswith("scale=")], scales[-1] if scales else "paper"


def _report(argv: list[str]) -> int:
    from dpgen_bench.report.page import build_report
    from dpgen_bench.runs.store import Store

    parser = argparse.ArgumentParser("dpgen report")
    parser.add_argument("--results", type=Path, default=_results())
    parser.add_argument("--out", type=Path, help="the file to write; report.html in the results if not said")
    parser.add_argument("--overwrite", action="store_true", help="also a report of runs, where there is no run now")
    given = parser.parse_args(argv)
    _expect_folder(given.results)
    path = given.out or given.results / "report.html"
    here = {folder.id for folder in Store(given.results).runs()}
    if not given.overwrite and (gone := _runs_shown(path) - here):
        print(
            f"dpgen: kept {path}: it shows {len(gone)} runs that are not in {given.results / 'runs'} ({min(gone)}, "
            "...); --overwrite to replace it, --out to write another",
            file=sys.stderr,
        )
        return 0
    print(build_report(given.results, given.out))
    return 0


def _runs_shown(path: Path) -> set[str]:
    """Folders of the runs with figures that the report in a file shows; none where there is no report of ours."""
    if not path.is_file():
        return set()
    text = path.read_text(errors="replace")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    try:
        shown = json.loads(found[1])["runs"] if found else []
        return {run["folder"] for run in shown if run["state"] in ("finished", "damaged", "duplicate")}
    except (ValueError, KeyError, TypeError):
        return set()


def _expect_folder(results: Path) -> None:
    """
    Raises:
        ValueError: if `results` is no folder.
    """
    if not results.is_dir():
        raise ValueError(
            f"expected a folder of results, got {results}, which is none; --results or the environment's DPGEN_RESULTS "
            "say where it is, and `dpgen run` or `dpgen sweep` make one."
        )


def _sweep(argv: list[str]) -> int:
    from dpgen_bench.tables.sweeps import launch_sweeps, print_plan

    parser = argparse.ArgumentParser("dpgen sweep", allow_abbrev=False)
    parser.add_argument("words", nargs="*", metavar="NAME [KEY=VALUE ...]", help="a table in conf/table/; overrides")
    parser.add_argument("--dry-run", action="store_true", help="list the missing runs with their steps, and stop")
    parser.add_argument("--results", type=Path, default=_results())
    parser.epilog = "overrides: scale=quick, and for every run hydra/launcher=joblib, runtime.device=..."
    given = parser.parse_intermixed_args(argv)
    words, scale = _take_scale(given.words)
    names = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(names) != 1:
        raise ValueError(f"expected one table and overrides KEY=VALUE, got {' '.join(names) or 'no table'}.")
    overrides = [word for word in words if word != names[0]]
    if given.dry_run:
        print_plan(names[0], given.results, overrides, scale)
        return 0
    return launch_sweeps(names[0], given.results, overrides, scale)


def _fetch(argv: list[str]) -> int:
    from dpgen_bench.data.fetch import fetch
    from dpgen_bench.runs.config import build_dataset, compose_config

    fetch(build_dataset(compose_config(argv)))
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
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status (2: bad input, 1: a run failed)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        print(f"dpgen: expected one of {' '.join(VERBS)}, got {verb!r}; dpgen --help tells more.", file=sys.stderr)
        return 2
    # A method of one's own may lie beside where one works, not only where Python was installed.
    sys.path.insert(0, str(Path.cwd()))
    if verb == "run":
        return _run(rest)
    try:
        return VERBS[verb](rest)
    except (ValueError, LookupError, FileNotFoundError, RuntimeError, HydraException, OmegaConfBaseException) as error:
        return _complain(error)


def _complain(error: Exception) -> int:
    from dpgen_bench.runs.execute import RunFailed

    print(f"dpgen: {error}", file=sys.stderr)
    return 1 if isinstance(error, RunFailed) else 2


def _results() -> Path:
    import os

    return Path(os.environ.get("DPGEN_RESULTS", "results"))


if __name__ == "__main__":
    sys.exit(main())
