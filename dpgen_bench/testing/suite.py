"""Runs every check of the suite on one method; checks with more specific messages run first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.method import Method
from dpgen_bench.pretraining.pretrained import plugin_of
from dpgen_bench.privacy.accountants.proven import Accountant
from dpgen_bench.privacy.bounds import PerRecord, PerRecordGradient
from dpgen_bench.privacy.events import Budget, Event, Relation, budget_text
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.sampling import EveryShard, Poisson
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.testing.bench import SAMPLE_SEED, SAMPLES, Bench, DataSet, Fit, random_images
from dpgen_bench.testing.checks import Replays, check_budget, check_empty_draws, check_generator, check_kept_state
from dpgen_bench.testing.draws import check_draws, check_noise, check_votes_of_shards
from dpgen_bench.testing.errors import ConformanceError, expect
from dpgen_bench.testing.fresh import FreshSamples, NotSampled, now
from dpgen_bench.testing.independence import check_row_independence
from dpgen_bench.testing.neighbours import (
    Family,
    client_families,
    other_data,
    owners,
    record_families,
    units_to_change,
)
from dpgen_bench.testing.other_noise import check_other_noise
from dpgen_bench.testing.pristine import Pristine
from dpgen_bench.testing.resume import check_resume
from dpgen_bench.testing.tape import Tape
from dpgen_bench.utils.compiled import import_compiler
from dpgen_bench.utils.source import own_modules


def check_method(
    make_method: Callable[[], Method],
    *,
    image_shape: tuple[int, int, int] = (1, 28, 28),
    num_classes: int = 10,
    records: int = 48,
    seed: int = 0,
    budget: Budget | None = None,
    data: DataSet | None = None,
    clients: int = 8,
    class_names: tuple[str, ...] | None = None,
    data_folders: Sequence[str] = (),
    thorough: bool = False,
    echo: Callable[[str], None] = lambda line: None,
) -> None:
    """Run every conformance check on a method; this takes seconds for a method with small settings.

    Args:
        make_method: returns a fresh method with the same small settings each time.
        image_shape: (c, h, w) of the made-up records.
        num_classes: the number of classes, also those of `data`.
        records: the number of made-up records; the method's batches should be much smaller.
        seed: of the made-up records, of the key and of public randomness.
        budget: the budget of each fit; epsilon 10 by default.
        data: records to use instead of made-up ones; images are float32 [n, c, h, w] in [0, 1] or uint8.
        clients: the number of clients that the records belong to.
        class_names: the names of the classes; None takes their numbers.
        data_folders: folders that sampling a saved generator must not read, in addition to $DPGEN_DATA.
        thorough: whether to replay all neighbours of each changed unit (otherwise a part of them), to call the private
            functions of twelve releases of each mechanism again (otherwise three), and to kill three fits (otherwise
            one).
        echo: called with one line for each check that passed.

    Raises:
        TypeError: if `make_method` is no function.
        ConformanceError: for the first rule that is broken; the message names it.
        Exception: the error of a method that fails.
    """
    if not callable(make_method):
        raise TypeError(
            "expected make_method to be a function that returns a fresh method, such as lambda: MyMethod(steps=3), got "
            f"{make_method!r}; `dpgen check method=NAME` checks a method by its name."
        )
    import_compiler()
    base = random_data(image_shape, records, num_classes, clients, seed) if data is None else data
    shape = (base.images.shape[1], base.images.shape[2], base.images.shape[3])
    method = make_method()
    expect(method is not make_method(), "expected a fresh method from each call of make_method, got one twice.")
    pristine = Pristine(type(plugin_of(method)))
    bench = Bench(
        make_method, base, shape, num_classes, seed, budget or Budget(epsilon=10.0), clients, pristine, class_names
    )
    started = now()
    with _cached_accounting():
        first = bench.fit(base, Tape())
        closed = [*data_folders, *_environment()]
        sources = [path for path, _ in own_modules(type(plugin_of(method)).__module__).values()]
        fresh = FreshSamples(first.generator, _labels(num_classes), SAMPLE_SEED, started, closed, sources)
        try:
            _check(bench, first, fresh, thorough, echo)
        finally:
            fresh.close()


def _check(bench: Bench, first: Fit, fresh: FreshSamples, thorough: bool, echo: Callable[[str], None]) -> None:
    """All checks, given the first fit and the samples that a new process draws in the meantime."""
    entries = first.ledger.entries
    # The first fit alone.
    check_budget(first, bench.budget)
    releases = ", ".join(
        f"{sum(release.mechanism == name for release in first.tape.releases)} of {name!r}" for name in entries
    )
    unit = "one record" if first.ledger.unit == "record" else f"one of {first.ledger.records} clients"
    within = f"ledger within epsilon = {budget_text(bench.budget.epsilon)}, unit: {unit}"
    echo(f"{within}; releases: {releases or 'none'}; one more is refused")
    check_noise(first)
    echo("noise has the ledger's standard deviation and is never used twice")
    check_draws(first)
    check_votes_of_shards(first)
    echo("draws have the ledger's rate and are independent for each release")
    # Replays on the same data, on unrelated data, on neighbours, and with other noise.
    replays = Replays(bench, first)
    replays.same_data()
    echo("a second fit on the same data gives the same results")
    for other in other_data(bench.base, bench.num_classes, bench.seed + 2):
        replays.on(other)
        echo(f"replay, {other.name}: the same generator, samples, state, log, counters and order of releases")
    for family in _families(bench, first, thorough):
        for name in replays.family(family):
            echo(f"replay, {name}: the same results, and exact values within the sensitivity")
    check_other_noise(bench, replays)
    echo("other noise with the same releases: the same results")
    # Fits in which something else happens: more calls of private functions, a cache, a kill, no records.
    if any(isinstance(mechanism, Mechanism) and _has_rows(mechanism) for mechanism in first.data.mechanisms.values()):
        checked = check_row_independence(bench, first.tape, 12 if thorough else 3)
        echo(f"rows depend on their own record alone, before clipping ({checked} releases)")
    if any(entry.bound.get("private_state") or entry.noise_at == "client" for entry in entries.values()):
        check_kept_state(bench, first)
        echo("private state in a cache or on disk: the same results")
    kills = check_resume(bench, first, (replays.log_clocks, replays.state_clocks), 3 if thorough else 1)
    for where in kills:
        echo(f"{where}: the same releases, state, log and generator")
    if not kills:
        echo("kill and resume: not checked, because the fit has no second step before which it could be killed")
    check_empty_draws(bench)
    echo("empty draws: every release is made, and is finite")
    # The generator of the first fit.
    check_generator(first, bench.image_shape, bench.num_classes)
    echo("samples: shape, dtype, labels, seeds, prefixes, save and load")
    _check_fresh(first, fresh)
    echo("samples from a new process without data or network are the same")


@contextmanager
def _cached_accounting() -> Iterator[None]:
    """Cache the epsilons of compositions: every fit calibrates the same noise, which takes longer than a small fit."""
    original, cache = Accountant.epsilon, {}

    def epsilon(self: Accountant, events: Sequence[Event], delta: float, relation: Relation) -> float:
        key = (self, tuple(events), delta, relation)  # a search uses coarser accountants of the same name
        if key not in cache:
            cache[key] = original(self, events, delta, relation)
        return cache[key]

    Accountant.epsilon = epsilon  # type: ignore[method-assign]
    try:
        yield
    finally:
        Accountant.epsilon = original  # type: ignore[method-assign]


def _has_rows(mechanism: Mechanism) -> bool:
    """Whether the values of a mechanism are sums of rows that each belong to one record."""
    kinds = PerRecord | PerRecordGradient | PerRecordProducts | PerRecordMoments | Votes
    return isinstance(mechanism.bound, kinds) and not isinstance(mechanism.event.sampling, EveryShard)


def random_data(image_shape: tuple[int, int, int], records: int, num_classes: int, clients: int, seed: int) -> DataSet:
    """Made-up records: smooth random images with random labels, distributed over the clients in turn."""
    images, labels = random_images(image_shape, records, num_classes, seed + 1)
    return DataSet("", images, labels, np.arange(records), owners(records, clients))


def _families(bench: Bench, first: Fit, thorough: bool) -> Iterator[Family]:
    """Families of data sets that differ in one unit of the ledger of the first fit, a record or a client."""
    changed = units_to_change(first.tape, [event.sampling for event in first.ledger.events])
    if first.ledger.unit == "record":
        return record_families(bench.base, changed, first.tape, bench.num_classes, thorough=thorough)
    join = all(isinstance(event.sampling, Poisson) for event in first.ledger.events)
    return client_families(bench.base, changed, bench.num_classes, join=join, thorough=thorough)


def _labels(num_classes: int) -> Tensor:
    return torch.arange(SAMPLES) % num_classes


def _environment() -> list[str]:
    return [place for place in (os.environ.get("DPGEN_DATA"),) if place]


def _check_fresh(first: Fit, fresh: FreshSamples) -> None:
    try:
        samples = fresh.result()
    except NotSampled as error:
        raise ConformanceError(
            f"the saved generator could not be loaded and sampled in a new process without data or network: {error}"
        ) from None
    expect(
        torch.equal(samples, first.samples),
        "the saved generator draws other samples in a new process: sampling reads something outside of its state and "
        "config (a module's global, a class attribute, a default argument).",
    )
