"""The options of `dpgen audit`, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from dpgen_bench.cli import values

_DETAILS = """\
A case describes mechanisms of a paper, and what is claimed of them: it is one of the bench or a yaml of your own. Of a
method or a run, level a first searches for the record that moves its releases furthest, and level b tests the noise.
Level c is an attack that knows everything but which of two neighbouring data sets was used. docs/audit.md describes
cases and how to read the result. The exit status is 1 if an epsilon is refuted, a release moves further than declared,
or noise is not as stated."""


def add_audit(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `dpgen audit`, made by `add`, without the arguments that verbs share."""
    parser = add(
        "audit",
        "attack mechanisms, and certify the epsilon that they leak at least",
        "CASE | METHOD [OVERRIDES] | RUN [options]",
        _DETAILS,
        (
            "dpgen audit gs_wgan_published",
            "dpgen audit dp_merf dataset=mnist privacy.epsilon=1 --relation replace_one",
            "dpgen audit my_case.yaml --trials 1000000",
        ),
    )
    parser.add_argument("target", metavar="CASE|METHOD|RUN", help="a case, its yaml, a method, or the id of a run")
    parser.add_argument(
        "--level",
        choices=("a", "b", "c", "d"),
        help="a; a and b; a and c; or d, canaries in one fit of the whole run (default: a, b and c)",
    )
    parser.add_argument(
        "--trials",
        type=values.integer,
        metavar="N",
        help="trials in each world (default 100000; 1000 of code, which each executes; 100000000 of a test of counts), "
        "or canaries of level d (default 1000)",
    )
    parser.add_argument(
        "--relation",
        choices=("add_remove", "replace_one"),
        help="the neighbouring relation (default: that of the claim or of the budget)",
    )
    parser.add_argument(
        "--seed",
        type=values.integer,
        metavar="N",
        help="the seed of the trials; another one draws other trials (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print an object")
    return parser
