"""Checks that a fit that is killed and resumed by a new instance of the method equals the fit without a kill."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from dpgen_bench.privacy.key import Key
from dpgen_bench.testing.bench import Bench, Fit, Killed
from dpgen_bench.testing.checks import compare_generators, compare_states
from dpgen_bench.testing.digest import digests, without
from dpgen_bench.testing.errors import expect
from dpgen_bench.testing.tape import Query, Release, Tape, flat

FEW = 4  # a fit without loops that makes at most this number of releases is killed before each of them but the first


def check_resume(bench: Bench, first: Fit, clocks: tuple[set[str], set[str]], times: int) -> list[str]:
    """Kill a fit at `times` random places, resume each from its folder by a new method, and compare it with the first.

    A fit without loops that makes at most `FEW` releases is killed before each of them but the first. When it starts
    again, earlier releases are read back and their functions are not called. A value that an earlier function kept in
    memory for a later one is therefore missing.

    Args:
        bench: makes the fits.
        first: the fit without a kill.
        clocks: paths in the log, and paths in state dicts, that hold times.
        times: the number of kills, except for a fit without loops that makes few releases.

    Returns:
        A description of each kill; empty for a fit of fewer than two steps that makes no release, or whose releases
        need `ctx.steps`.

    Raises:
        ConformanceError: if a resumed fit differs from the first one.
    """
    in_loops_only = _mechanisms_of_loops(first)
    releases = first.tape.releases
    if _steps(first) < 2 and (not releases or any(release.mechanism in in_loops_only for release in releases)):
        return []
    rng = Key.seeded(f"kill:{bench.seed}").generator("places")
    if _steps(first) >= 2:
        return [_kill_once(bench, first, clocks, rng) for _ in range(times)]
    few = 2 <= len(releases) <= FEW
    numbers = np.arange(1, len(releases)) if few else rng.integers(0, len(releases), size=times)
    return [_kill_once(bench, first, clocks, rng, int(number)) for number in numbers]


def _steps(fit: Fit) -> int:
    """The number of steps of all loops together."""
    return len(fit.states) - 1  # the last state is that at the end of the fit


def _kill_once(
    bench: Bench, first: Fit, clocks: tuple[set[str], set[str]], rng: np.random.Generator, number: int = 0
) -> str:
    """Kill the fit in a random step or, if it has fewer than two steps, before release `number`; resume and compare.

    Returns:
        A description of the kill.
    """
    steps = _steps(first)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if steps >= 2:
            kill = int(rng.integers(2, steps + 1))
            saved = int(rng.integers(1, kill))
            where = f"killed in step {kill} of {steps} and resumed from the checkpoint of step {saved}"
            tape = _killed(bench, folder, Tape(), kill_after=kill, save_at=saved)
        else:
            places = len(first.tape.releases)
            where = f"killed before release {number + 1} of {places} and started again"
            tape = _killed(bench, folder, Tape(query=_killer(number)))
        again = bench.fit(bench.base, Tape(), folder=folder, save_at=-1)
        _compare(first, tape, again, folder, where, clocks)
    return where


def _mechanisms_of_loops(fit: Fit) -> set[str]:
    """Mechanisms whose releases are made in ctx.steps only: those with private state, and those that ask clients."""
    entries = fit.ledger.entries.items()
    return {name for name, entry in entries if entry.bound.get("private_state") or fit.ledger.unit == "client"}


def _killer(number: int) -> Query:
    """A query of a tape that ends the fit before release `number`, counted over all mechanisms from 0."""
    releases = itertools.count()

    def query(*_: object) -> None:
        if next(releases) == number:
            raise Killed

    return query


def _killed(bench: Bench, folder: Path, tape: Tape, **options: int) -> Tape:
    """The tape of a fit that was killed in this folder."""
    try:
        bench.fit(bench.base, tape, folder=folder, **options)  # type: ignore[arg-type]
    except Killed:
        return tape
    expect(
        False,
        "the method caught a BaseException, by which its process ends: let it propagate, or a kill loses the run.",
    )
    return tape


def _compare(first: Fit, killed: Tape, again: Fit, folder: Path, where: str, clocks: tuple[set[str], set[str]]) -> None:
    """Compare the killed fit and its resumption, together, with the first fit."""
    expected = {(release.mechanism, release.index): release for release in first.tape.releases}
    for release in (*killed.releases, *again.tape.releases):
        _compare_release(expected.get((release.mechanism, release.index)), release, where)
    keys = {(release.mechanism, release.index) for release in (*killed.releases, *again.tape.releases)}
    expect(
        keys == expected.keys(),
        f"{where}, the fit did not make {sorted(expected.keys() - keys)}: a resumed run must make the same releases as "
        "one that was not killed.",
    )
    log_clocks, state_clocks = clocks
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    expect(
        without(first.log, log_clocks) == without([digests(row) for row in rows], log_clocks),
        f"{where}, the log differs: {RESTORE_ALL}",
    )
    expect(
        first.counts == again.counts,
        f"{where}, the counters are {again.counts} instead of {first.counts}: {RESTORE_ALL}",
    )
    compare_states(first, again, where, state_clocks, last=1)
    compare_generators(first, again, where)


RESTORE_ALL = (
    "state that changes in a loop must be passed to ctx.steps, and everything outside of loops must be computed again "
    "in the same way."
)


def _compare_release(first: Release | None, release: Release, where: str) -> None:
    what = f"{where}, release {release.index} of {release.mechanism!r}"
    expect(first is not None, f"{what} was made, but not in the fit without a kill: {RESTORE_ALL}")
    assert first is not None
    same = torch.equal(flat(first.exact), flat(release.exact)) and torch.equal(flat(first.noisy), flat(release.noisy))
    expect(
        same,
        f"{what} has another value: it is another query with the same noise, so that its difference to the first one "
        f"contains no noise. Some state was not restored: {RESTORE_ALL}",
    )
