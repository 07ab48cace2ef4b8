"""The options of `dpgen audit`, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dpgen_bench.cli import values

_DETAILS = """\
A case describes mechanisms of a paper, and what is claimed of them: it is one of the bench or a yaml of your own. The
attack knows everything but which of two neighbouring data sets was used, and draws trials of the mechanisms in both
worlds. docs/audit.md describes cases and how to read the result. The exit status is 1 if a claim is refuted."""


def add_audit(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `dpgen audit`, made by `add`, without the arguments that verbs share."""
    parser = add(
        "audit",
        "attack mechanisms, and certify the epsilon that they leak at least",
        "CASE [options]",
        _DETAILS,
        ("dpgen audit gs_wgan_published", "dpgen audit my_case.yaml --trials 1000000"),
    )
    parser.add_argument("target", metavar="CASE", help="the name of a case, or the path of its yaml")
    parser.add_argument(
        "--trials", type=values.integer, default=100_000, metavar="N", help="trials in each world (default 100000)"
    )
    parser.add_argument(
        "--relation",
        choices=("add_remove", "replace_one"),
        help="the neighbouring relation (default: that of the claim)",
    )
    parser.add_argument("--json", action="store_true", help="print an object")
    return parser
