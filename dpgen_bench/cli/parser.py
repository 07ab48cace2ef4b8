"""The arguments of each verb: what its options mean, its help with two examples, and errors with suggestions.

Nothing here imports PyTorch, so that help, completion and usage errors are fast.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from dpgen_bench import __version__
from dpgen_bench.cli import values
from dpgen_bench.cli.account_parser import add_account
from dpgen_bench.cli.arguments import Parser
from dpgen_bench.cli.audit_parser import add_audit
from dpgen_bench.cli.completion import completer
from dpgen_bench.cli.values import default_results
from dpgen_bench.tables.spec import FORMATS

DESCRIPTION = "A benchmark of differentially private image generators."
EPILOG = """\
dpgen VERB --help describes the options of a verb. KEY=VALUE are overrides of the config: dpgen list shows what can
be named, and dpgen run --cfg job shows all settings. Exit status: 0 success, 1 a run failed, 2 invalid command.

Tab completion, for this shell (put the line into ~/.bashrc for all):
  eval "$(register-python-argcomplete dpgen)"
"""


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of `dpgen`, and the parsers of its verbs by name."""
    parser = Parser(prog="dpgen", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"dpgen_bench {__version__}", help="print the version")
    choices = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    verbs: dict[str, Parser] = {}

    def add(name: str, summary: str, arguments: str, details: str, examples: Sequence[str]) -> Parser:
        lines = "\n".join(f"  {example}" for example in examples)
        verbs[name] = choices.add_parser(
            name,
            help=summary,
            usage=f"dpgen {name} {arguments}".rstrip(),
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}".rstrip(),
            epilog=f"examples:\n{lines}",
        )
        return verbs[name]

    first, then = (_run, _runs, _rm, _check, _account, _audit, _evaluate), (_sample, _export, _tables, _sweep, _report)
    for describe in (*first, *then, _record, _fetch, _list):
        describe(add)
    return parser, verbs


Add = Callable[[str, str, str, str, Sequence[str]], Parser]


def _run(add: Add) -> None:
    parser = add(
        "run",
        "train a generator, account for its privacy and measure it",
        "[-m] [OVERRIDES] [options]",
        "A finished run is skipped, an interrupted one continues, and a failed one is tried again.",
        (
            "dpgen run method=dp_merf dataset=mnist privacy.epsilon=10 seed=0",
            "dpgen run -m method=dp_merf,dpgan dataset=digits seed=0,1,2 hydra/launcher=joblib",
        ),
    )
    _overrides(parser)
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="one run for each combination of values that commas separate"
    )
    parser.add_argument(
        "-c", "--cfg", choices=("job", "hydra", "all"), help="print the config of the run instead of executing it"
    )
    parser.add_argument("--resolve", action="store_true", help="with --cfg: replace interpolations by their values")
    parser.add_argument("-p", "--package", help="with --cfg: only this part of the config, such as method")
    parser.add_argument("-i", "--info", nargs="?", const="all", help="print what Hydra knows about the config")
    _folders(parser)


def _runs(add: Add) -> None:
    parser = add(
        "runs",
        "list runs with their status, date, duration, epsilons and main metrics",
        "[FILTERS] [options]",
        "A filter is KEY=VALUE, where commas separate several values and * stands for any text. Keys are those of\n"
        "--json, protocol, and settings such as privacy.epsilon.",
        ("dpgen runs method=dpgan status=failed,interrupted --sort date", "dpgen runs --spent --delta 1e-6"),
    )
    _complete(parser.add_argument("filters", nargs="*", metavar="FILTER", help="KEY=VALUE of runs to list"), "filters")
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="date, duration, status, method, ... or a metric such as fid (default: id)",
    )
    parser.add_argument("--reverse", action="store_true", help="list in the reverse order")
    parser.add_argument("--json", action="store_true", help="print a list of objects, whose keys docs/commands.md has")
    parser.add_argument(
        "--spent", action="store_true", help="list the epsilon that all runs with privacy.noise=os spend together"
    )
    parser.add_argument(
        "--delta", type=values.number, help="with --spent: delta of the totals (default: the smallest of the runs)"
    )
    _folders(parser, default_results())


def _rm(add: Add) -> None:
    parser = add(
        "rm",
        "remove runs, after listing them and asking",
        "RUN... | --failed | --stale [options]",
        "Of a run with privacy.noise=os the ledger is kept, so that dpgen runs --spent still counts it.",
        ("dpgen rm 3f2a 51bc", "dpgen rm --failed --yes"),
    )
    help_text = "the id of a run, or the start of it"
    _complete(parser.add_argument("runs", nargs="*", metavar="RUN", help=help_text), "runs")
    parser.add_argument("--failed", action="store_true", help="remove all failed runs")
    parser.add_argument("--stale", action="store_true", help="remove all runs whose method has changed since")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    _folders(parser, default_results())


def _check(add: Add) -> None:
    parser = add(
        "check",
        "run the conformance suite on a method",
        "method=NAME [OVERRIDES] [options]",
        "Without --data the records are made up. The `check` settings of the method's yaml make it small.",
        (
            "dpgen check method=dpgan",
            "dpgen check --config-dir my_conf method=mean_image dataset=digits --data --records 200 --thorough",
        ),
    )
    _overrides(parser)
    parser.add_argument(
        "--records",
        type=values.integer,
        metavar="N",
        help="number of records; by default 48 made-up ones, or all of --data",
    )
    parser.add_argument("--data", action="store_true", help="use real training records of the configured dataset")
    parser.add_argument(
        "--thorough", action="store_true", help="try every neighbouring dataset, more releases, more interruptions"
    )
    parser.add_argument("--as-configured", action="store_true", help="ignore the `check` settings of the yaml")
    _folders(parser)


def _account(add: Add) -> None:
    parser = add_account(add)
    assert isinstance(parser, Parser)
    _overrides(parser)
    _folders(parser)


def _audit(add: Add) -> None:
    parser = add_audit(add)
    assert isinstance(parser, Parser)
    _overrides(parser)
    _folders(parser, default_results())


def _evaluate(add: Add) -> None:
    parser = add(
        "evaluate",
        "measure the generator of a run again, without training",
        "RUN [OVERRIDES] [options]",
        "Overrides are those of protocol, runtime, data_root, dataset.path and dataset.root.",
        (
            "dpgen evaluate 3f2a protocol=standard_2k",
            "dpgen evaluate 3f2a protocol=standard protocol.repeats=5 runtime.workers=4",
        ),
    )
    _run_id(parser)
    _overrides(parser)
    _folders(parser, default_results())


def _sample(add: Add) -> None:
    parser = add(
        "sample",
        "draw images from the generator of a finished run",
        "RUN --n N --out PATH [options]",
        "Runs that must not be released, such as those with seeded noise, are refused without --benchmark.",
        (
            "dpgen sample 3f2a --n 1000 --out images.npz",
            "dpgen sample 3f2a --n 100 --seed 1 --labels uniform --out folder --benchmark",
        ),
    )
    _run_id(parser)
    parser.add_argument("--n", type=values.integer, required=True, help="number of images")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="a .npz, .zip or .parquet file, or a folder, which gets a folder of PNGs for each class",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    parser.add_argument("--seed", type=values.integer, default=0, help="seed of latents and uniform labels (default 0)")
    parser.add_argument(
        "--labels", choices=("balanced", "uniform"), default="balanced", help="how labels are drawn (default balanced)"
    )
    parser.add_argument("--benchmark", action="store_true", help="allow a run that must not be released as private")
    _folders(parser, default_results())


def _export(add: Add) -> None:
    parser = add(
        "export",
        "write the generator of a finished run as a folder for a model hub",
        "RUN DIR [options]",
        "The folder has weights, config, a model card with the ledger, and samples. Runs that must not be released, "
        "such as those with seeded noise, are refused without --benchmark.",
        (
            "dpgen export 3f2a my_model --license cc-by-4.0",
            "dpgen export 3f2a my_model --benchmark --overwrite",
        ),
    )
    parser.add_argument("run", metavar="RUN", help="the id of a run, the start of it, or the run's folder")
    parser.add_argument("out", type=Path, metavar="DIR", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace DIR if it is an earlier export")
    parser.add_argument("--benchmark", action="store_true", help="allow a run that must not be released as private")
    parser.add_argument(
        "--license", default="other", metavar="ID", help="the hub's name of the license of the weights (default other)"
    )
    _folders(parser, default_results())


def _tables(add: Add) -> None:
    parser = add(
        "tables",
        "write tables to the folder of results, with the difference from each published value",
        "NAME... | --all [scale=quick] [options]",
        "",
        ("dpgen tables league_mnist", "dpgen tables dp_sinkhorn_table1 scale=quick --format md,tex"),
    )
    help_text = "names of tables; scale=quick for their quick runs"
    _complete(parser.add_argument("names", nargs="*", metavar="NAME", help=help_text), "tables")
    parser.add_argument(
        "--all", action="store_true", help="every table, at scale quick, too, if runs of that scale were measured"
    )
    _complete(
        parser.add_argument(
            "--format",
            type=values.formats,
            default=["md", "csv"],
            metavar="FORMATS",
            help=f"formats of the files, separated by commas: {', '.join(FORMATS)} (default md,csv)",
        ),
        "formats",
    )
    parser.add_argument(
        "--recorded",
        action="store_true",
        help="from records alone, without the runs on this machine",
    )
    parser.add_argument("--no-plots", action="store_true", help="write the tables without their plots")
    _folders(parser, default_results())


def _sweep(add: Add) -> None:
    parser = add(
        "sweep",
        "execute the runs that a table lacks",
        "NAME [scale=quick|reduced] [--dry-run] [OVERRIDES] [options]",
        "Overrides say how runs are executed and not which ones: runtime, hydra, federation, data_root and tracker.",
        (
            "dpgen sweep league_mnist --dry-run",
            "dpgen sweep dp_merf scale=quick hydra/launcher=joblib",
            "dpgen sweep dpgan_table2 scale=reduced --dry-run",
            "dpgen sweep gs_wgan_tablea1 --without fid,inception_score",
        ),
    )
    help_text = (
        "the name of a table, scale=quick for its quick runs, scale=reduced for those that stand in for a paper's own, "
        "and overrides for every run"
    )
    argument = parser.add_argument("arguments", nargs="*", metavar="NAME [KEY=VALUE ...]", help=help_text)
    _complete(argument, "sweep")
    parser.add_argument("--dry-run", action="store_true", help="only list the missing runs with their steps")
    help_text = (
        "metrics that are not measured now, separated by commas, such as fid,inception_score, which take hours on a CPU"
    )
    parser.add_argument("--without", type=values.names, default=[], metavar="METRICS", help=help_text)
    _folders(parser, default_results())


def _report(add: Add) -> None:
    parser = add(
        "report",
        "write all results to one HTML file, which needs no server and no network",
        "[options]",
        "",
        ("dpgen report", "dpgen report --results other_results --out other.html"),
    )
    parser.add_argument("--recorded", action="store_true", help="from records alone, without the runs on this machine")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file to write (default: report.html in the folder of results)"
    )
    _folders(parser, default_results())


def _fetch(add: Add) -> None:
    parser = add(
        "fetch",
        "download a dataset into data_root",
        "dataset=NAME [OVERRIDES] [options]",
        "A dataset is downloaded completely or not at all. One that can be read is not downloaded again.",
        ("dpgen fetch dataset=mnist", "dpgen fetch --check dataset=image_folder dataset.path=my_images"),
    )
    _overrides(parser)
    parser.add_argument(
        "--check", action="store_true", help="only list what is wrong with the files, every file at once"
    )
    _folders(parser)


def _record(add: Add) -> None:
    parser = add(
        "record",
        "write records of finished runs, for version control, or check records",
        "RUN... [options] | [RUN...] --check [options]",
        "A record is what a run leaves in version control: RESULTS/records/METHOD/ID.json and a picture. Tables and\n"
        "the report read it like a run. For a record by somebody else, differences of values are added.",
        ("dpgen record 3fa2 --by 'Ada Lovelace' --audit", "dpgen record 3fa2 --check", "dpgen record --check"),
    )
    help_text = "ids of finished runs, or the start of them"
    _complete(parser.add_argument("runs", nargs="*", metavar="RUN", help=help_text), "runs")
    parser.add_argument("--by", metavar="NAME", help="who measured the run (default: git's user.name)")
    parser.add_argument(
        "--log", action="append", default=[], metavar="SCALAR", help="keep a scalar of the public log; may be repeated"
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="audit runs without a certified epsilon; of runs that differ in their seed alone one is audited",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing records, which loses verifications")
    parser.add_argument(
        "--check",
        action="store_true",
        help="say why these records, or all, are not accepted; status 1 if one is not. All take a quarter of an hour "
        "or more",
    )
    _folders(parser, default_results())


def _list(add: Add) -> None:
    parser = add(
        "list",
        "list methods, datasets, protocols, presets and tables, with one line each",
        "[GROUP...] [options]",
        "",
        ("dpgen list", "dpgen list methods tables --config-dir my_conf"),
    )
    help_text = "methods, datasets, protocols, experiments or tables (default: all of them)"
    _complete(parser.add_argument("groups", nargs="*", metavar="GROUP", help=help_text), "groups")
    _folders(parser)


def _run_id(parser: Parser) -> None:
    help_text = "the id of a run, the start of it, or the run's folder"
    _complete(parser.add_argument("run", metavar="RUN", help=help_text), "runs")


def _overrides(parser: Parser) -> None:
    help_text = "KEY=VALUE of the config, ~KEY, +KEY=VALUE"
    _complete(parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=help_text), "overrides")


def _complete(argument: argparse.Action, kind: str) -> None:
    """Complete the text of an argument; see `completion.completer`."""
    vars(argument)["completer"] = completer(kind)


def _folders(parser: Parser, results: Path | None = None) -> None:
    """Add the options that every verb has."""
    parser.add_argument(
        "--results",
        type=Path,
        default=results,
        metavar="DIR",
        help="the folder of results (default: the environment variable DPGEN_RESULTS, or results)",
    )
    parser.add_argument(
        "-cd",
        "--config-dir",
        type=values.folder,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with yamls of your own, such as method/x.yaml; may be repeated. Without it, verbs that read "
        "results use the folders with which their runs were executed",
    )
