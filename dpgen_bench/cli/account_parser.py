"""The options of `dpgen account`, and what they mean."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from dpgen_bench.cli import values

_SIGMA = """\
sigma is the noise multiplier: noise std over the add/remove sensitivity of ONE released row. For a sum of clipped
per-record gradients that sensitivity is C. For rows that may be any function of the batch (DP-Sinkhorn, GS-WGAN) it
is 2C. The papers' sigma is already relative to 2C (DP-Sinkhorn's Algorithm 1): pass it as published.

B releases that use the same draw are one joint release with the multiplier sigma / sqrt(B), made T times: this is what
is proven.

--shards K instead of --q: a draw is one of K disjoint parts of the records (GS-WGAN), which may keep private state.
--clients N instead of --q: each step asks one of N clients, each at most --max-answers times, and the client adds the
noise. The table holds against outsiders, who see the generator; the line below it holds against the server.

Overrides instead of these options: the mechanisms that the run would request are accounted, before any data is used.
With several mechanisms the table also shows the epsilon of each alone, by the budget's accountant. These epsilons do
not add up."""


def add_account(add: Callable[..., argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """The parser of `dpgen account`, made by `add`, without the arguments that verbs share."""
    parser = add(
        "account",
        "compute epsilon by RDP, PRV and PLD under both neighbouring relations",
        "(--q Q | --shards K | --clients N) --sigma S --steps T [options] | dpgen account OVERRIDES [options]",
        _SIGMA,
        (
            "dpgen account --q 1/469 --sigma 1 --steps 450000 --published",
            "dpgen account --shards 1000 --sigma 1.07 --steps 20000 --releases-per-draw 32 --published",
            "dpgen account --clients 3400 --sigma 1.07 --steps 30000 --releases-per-draw 32 --max-answers 20",
            "dpgen account method=dpgan dataset=mnist privacy.epsilon=10",
        ),
    )
    # How records are drawn.
    parser.add_argument("--q", type=values.rate, help="Poisson sampling rate in (0, 1], e.g. 1/469; 1: every record")
    parser.add_argument("--shards", type=values.integer, metavar="K", help="each draw is one of K disjoint parts")
    parser.add_argument(
        "--clients",
        type=values.integer,
        metavar="N",
        help="each step asks one of N clients; the unit of privacy is a client",
    )
    parser.add_argument(
        "--schedule", choices=("random", "public_balanced"), help="how shards or clients are drawn (default random)"
    )
    parser.add_argument(
        "--max-answers",
        type=values.integer,
        metavar="K",
        help="most answers of one client; further steps release nothing",
    )
    # The noise, the number of releases, and what one release is.
    parser.add_argument("--sigma", type=values.number, help="noise multiplier of one released row (see above)")
    parser.add_argument("--steps", type=values.integer, metavar="T", help="number of draws")
    parser.add_argument("--delta", type=values.number, help="default 1e-5, or privacy.delta of the overrides")
    parser.add_argument(
        "--releases-per-draw",
        type=values.integer,
        default=1,
        metavar="B",
        help="rows released from each draw (default 1)",
    )
    parser.add_argument(
        "--bound",
        choices=("record", "row"),
        help="record: a row is a clipped sum over records (replacing a record changes it twice as much as removal). "
        "row: any clipped function of the batch (both change it by at most 2C). Default: record if B is 1, else row; "
        "always row with --clients",
    )
    # What is printed.
    parser.add_argument("--published", action="store_true", help="also print epsilon as the paper counts it")
    parser.add_argument(
        "--timeout", type=values.number, default=60.0, metavar="S", help="seconds per cell (default 60)"
    )
    parser.add_argument("--cache", type=Path, metavar="FILE", help="JSON file in which slow cells are cached")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def check_options(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Check what argparse cannot: options that need or exclude each other, and ranges of values.

    Raises:
        ValueError: for unknown options, missing ones, options that exclude each other, or values out of range.
    """
    # argparse returns what it does not know: overrides, but also misspelt options and loose words.
    stray = [token for token in overrides if "=" not in token.lstrip("-") and not token.startswith("~")]
    stray += [token for token in overrides if token.startswith("-") and token not in stray]
    if stray:
        raise ValueError(
            f"expected options or Hydra overrides (key=value), got {' '.join(stray)}; see dpgen account --help."
        )
    # There are two forms of the command: by options or by overrides, never by both.
    options = [name for name in ("q", "shards", "clients", "sigma", "steps") if getattr(arguments, name) is not None]
    sampling = [name for name in options if name in ("q", "shards", "clients")]
    expected_options = "--q or --shards, --sigma and --steps"
    if options and overrides:
        raise ValueError(
            f"expected either {expected_options}, or overrides, got both (--{options[0]}, {overrides[0]})."
        )
    if len(sampling) > 1:
        raise ValueError(
            f"expected one of --{' and --'.join(sampling)}, got {'both' if len(sampling) == 2 else 'all'}."
        )
    missing = [name for name in ("q", "sigma", "steps") if name not in options and not (name == "q" and sampling)]
    if options and missing:
        raise ValueError(f"expected {expected_options} together; missing {', '.join(f'--{name}' for name in missing)}.")
    if not options and not overrides:
        raise ValueError(
            f"expected {expected_options}, or Hydra overrides such as method=dpgan; see --help, for --clients too."
        )
    # Options that refine one form only.
    if arguments.schedule and sampling not in (["shards"], ["clients"]):
        raise ValueError("expected --schedule together with --shards or --clients.")
    if arguments.max_answers is not None and sampling != ["clients"]:
        raise ValueError("expected --max-answers together with --clients.")
    if overrides and (arguments.bound or arguments.releases_per_draw != 1):
        raise ValueError(f"expected --bound and --releases-per-draw together with {expected_options}, got overrides.")
    # Ranges are checked last, when the form of the command is known.
    rules = {
        "q": ("in (0, 1]", lambda q: 0.0 < q <= 1.0),
        "shards": (">= 1", lambda shards: shards >= 1),
        "clients": (">= 1", lambda clients: clients >= 1),
        "max_answers": (">= 1", lambda answers: answers >= 1),
        "sigma": ("> 0 and finite", lambda sigma: 0.0 < sigma < math.inf),
        "steps": (">= 1", lambda steps: steps >= 1),
        "delta": ("in (0, 1)", lambda delta: 0.0 < delta < 1.0),
        "releases_per_draw": (">= 1", lambda releases: releases >= 1),
        "timeout": ("> 0", lambda seconds: seconds > 0.0),
    }
    for name, (expected, is_valid) in rules.items():
        value = getattr(arguments, name)
        if value is not None and not is_valid(value):
            raise ValueError(f"expected --{name.replace('_', '-')} {expected}, got {value:g}.")
