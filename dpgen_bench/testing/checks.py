"""The checks that compare fits: budget, replays on other data, cached private state, empty draws, samples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.generator import Generator
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.allowance import AllowanceExhausted
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.testing.bench import SAMPLE_SEED, SAMPLES, Bench, DataSet, Fit, Tape, flat
from dpgen_bench.testing.digest import as_json, clocks, different, without, without_order
from dpgen_bench.testing.errors import ConformanceError, expect
from dpgen_bench.testing.neighbours import Family, relation

TOLERANCE = 1e-5  # of the sensitivity, for float32 sums


def check_budget(fit: Fit, budget: Budget) -> None:
    """The approved allowances cost at most the budget, and release times + 1 is refused."""
    fit.ledger.refuse_if_invalidated()
    expect(not fit.ledger.unproven, f"the ledger's epsilon is not proven: {'; '.join(fit.ledger.unproven)}.")
    cost = epsilon(fit.ledger.events, budget.delta, budget.relation, budget.accountant)
    expect(cost <= budget.limit, f"the ledger's epsilon is {cost:.4g}, over the budget of {budget.limit:g}.")
    for name, mechanism in fit.data.mechanisms.items():
        entry = fit.ledger.entries[name]
        made = sum(release.mechanism == name for release in fit.tape.releases)
        passed = entry.executed - made if isinstance(mechanism, ClientMechanism) else 0  # rounds without a client
        expect(
            made + passed == entry.executed,
            f"{name!r}: {made} releases were made, but the ledger says {entry.executed}.",
        )
        expect(
            made <= entry.event.times, f"{name!r}: {made} releases were made, but {entry.event.times} were approved."
        )
        expect(mechanism.times == entry.event.times, f"{name!r}: its allowance was changed after approval.")
        fit.services.controls[name].resume_at(entry.event.times)
        try:
            mechanism(lambda *_: torch.zeros(1))  # type: ignore[operator]  # refused before the value is used
        except AllowanceExhausted:
            continue
        raise ConformanceError(f"{name!r}: release {entry.event.times + 1} was not refused.")


class Replays:
    """Fits on other data to which the noisy values of the first fit are returned, each compared with the first fit.

    Attributes:
        log_clocks, state_clocks: paths in the log and in state dicts that hold times, which no two fits share.
    """

    def __init__(self, bench: Bench, first: Fit) -> None:
        self.bench, self.first = bench, first
        self.log_clocks: set[str] = set()
        self.state_clocks: set[str] = set()

    def same_data(self) -> None:
        """Two fits on the same data are the same; otherwise no difference could be attributed to the data.

        Raises:
            ConformanceError: if they differ in more than clocks.
        """
        again = self.bench.fit(replace(self.bench.base, name="the same data"), Tape(source=self.first.tape))
        self.log_clocks = clocks(self.first.log, again.log)
        self.state_clocks = clocks(self.first.states, again.states)
        try:
            self.compare(again, "in a second fit on the same data")
        except ConformanceError as error:
            raise ConformanceError(
                f"{error} The fit is not reproducible, so it cannot be compared with fits on other data: take "
                "randomness from ctx.generator or PyTorch's global generator, leave the measurement of times to the "
                "harness (training.json), and keep nothing in modules or classes from one fit to the next."
            ) from None

    def on(self, data: DataSet) -> Fit:
        """The replay of a data set that is no neighbour; draws and everything public must be the same."""
        fit = self.bench.fit(data, Tape(source=self.first.tape))
        self.compare(fit, f"with {data.name}")
        for a, b in zip(self.first.tape.releases, fit.tape.releases, strict=True):
            expect(
                len(data) != len(self.bench.base) or np.array_equal(a.drawn, b.drawn),
                f"with {data.name}, release {a.index} of {a.mechanism!r} drew other records: a draw must depend on "
                "record ids alone.",
            )
        return fit

    def compare(self, other: Fit, where: str) -> None:
        """Everything but the exact values: releases made, log, counters, state, generator and samples.

        Raises:
            ConformanceError: the first difference.
        """
        first = self.first
        made, before = len(other.tape.releases), len(first.tape.releases)
        expect(made == before, f"{where}, {made} releases were made instead of {before}.")
        expect(
            without(first.log, self.log_clocks) == without(other.log, self.log_clocks),
            f"{where}, the log differs: its values must be functions of releases and public inputs.",
        )
        expect(
            as_json(first.counts, "counters") == as_json(other.counts, "counters"),
            f"{where}, the counts of the context differ (bytes, counters, steps, parameters, or the order of their "
            f"names), and training.json is public: {first.counts}, {other.counts}.",
        )
        compare_ledgers(first, other, where)
        expect(first.loops == other.loops, f"{where}, the loops of ctx.steps differ: {first.loops}, {other.loops}.")
        compare_generators(first, other, where)
        compare_states(first, other, where, self.state_clocks)

    def family(self, family: Family) -> Iterator[str]:
        """Replay each member, compare it with the first fit, and the exact values of all members with each other.

        Yields:
            the name of each member, when it has passed.
        """
        base = self.first.tape if family.base is None else self.on(family.base).tape
        seen = [("the first data set" if family.base is None else family.base.name, family.base_there, base)]
        for member in family.members:
            tape = Tape(source=self.first.tape)
            fit = self.bench.fit(member.data, tape)
            self.compare(fit, f"with {member.data.name}")
            seen.append((member.data.name, member.there, tape))
            for name, there, earlier in seen[:-1]:
                self._moved(family.changed, (name, there, earlier), seen[-1])
            yield member.data.name

    def _moved(self, changed: int, one: tuple[str, bool, Tape], other: tuple[str, bool, Tape]) -> None:
        """The exact values of two data sets of a family are within the sensitivity of their relation."""
        (name, there, before), (other_name, other_there, after) = one, other
        which = relation(there, other_there)
        for a, b in zip(before.releases, after.releases, strict=True):
            moved = float((flat(a.exact) - flat(b.exact)).norm())
            drawn = changed in a.drawn or changed in b.drawn
            for client in (a.rows.keys() | b.rows.keys()) - {changed}:
                expect(
                    client in a.rows and client in b.rows and torch.equal(a.rows[client], b.rows[client]),
                    f"with {other_name}, the row of client {client} in release {a.index} of {a.mechanism!r} differs "
                    f"from that with {name}: an answer must depend on the message and that client's records alone.",
                )
            sensitivity = getattr(self.first.ledger.entries[a.mechanism].event.sensitivity, which)
            what = f"with {other_name}, release {a.index} of {a.mechanism!r} differs by {moved:.6g} from {name}"
            if drawn:
                allowed = sensitivity * (1 + TOLERANCE)
                expect(moved <= allowed, f"{what}; its declared sensitivity ({which}) is {sensitivity:.6g}.")
                continue
            expect(
                moved == 0.0,
                f"{what} although the changed {self.first.ledger.unit} was not in its draw: the release depends on "
                "records outside of its draw (those of another draw, or a value kept from an earlier call).",
            )


def compare_states(first: Fit, other: Fit, where: str, clocks_: set[str], *, last: int | None = None) -> None:
    """The objects passed to ctx.steps are the same bit by bit after each step, or the `last` steps, and at the end.

    With `last`, the order of keys is not compared.
    """
    ours, others = without(first.states, clocks_), without(other.states, clocks_)
    if last is None:
        expect(len(ours) == len(others), f"{where}, ctx.steps made {len(others) - 1} steps instead of {len(ours) - 1}.")
    else:
        ours, others = without_order(ours[-last:]), without_order(others[-last:])
    for step, (a, b) in enumerate(zip(ours, others, strict=True)):
        if paths := different(a, b):
            at = "at the end" if step == len(ours) - 1 else f"after step {step}"
            raise ConformanceError(
                f"{where}, the state passed to ctx.steps differs {at} in {_some(paths)}. It is written into "
                "checkpoints, which are public, together with the state of public randomness: it must be a function "
                "of releases and public inputs."
            )


FILES = "they contain something that is not in its state or config."


def compare_generators(first: Fit, other: Fit, where: str) -> None:
    paths = different(first.released, other.released)
    expect(
        not paths,
        f"{where}, the generator differs in {_some(paths)} although all releases were the same: it depends on records "
        "other than through releases.",
    )
    expect(first.saved == other.saved, f"{where}, the generator saves other files: {FILES}")
    expect(
        torch.equal(first.samples, other.samples) and first.labels == other.labels,
        f"{where}, samples differ although the generator's state and config are the same: sampling reads something "
        "outside of them (a module's global, a class attribute, a default argument, a file).",
    )


def compare_ledgers(first: Fit, other: Fit, where: str) -> None:
    """The public content of the ledger, as JSON text, and the epsilons that the method claims are the same."""
    ours, others = first.ledger_file, other.ledger_file
    asked, asked_there = ([entry["name"] for entry in ledger["entries"]] for ledger in (ours, others))
    expect(asked == asked_there, f"{where}, other mechanisms were requested: {asked}, {asked_there}. {ASKED}")
    for entry, there in zip(ours["entries"], others["entries"], strict=True):
        same = as_json(entry, "entries") == as_json(there, "entries")
        expect(same, f"{where}, the ledger's entry of {entry['name']!r} differs: {entry}, {there}. {ASKED}")
    rest = [key for key in ours if as_json(ours[key], "a ledger") != as_json(others[key], "a ledger")]
    expect(not rest, f"{where}, the ledger differs in {', '.join(rest)}. {ASKED}")
    expect(
        first.claims == other.claims,
        f"{where}, epsilon_claimed or epsilon_conditional differ: {first.claims}, {other.claims}. They are public, and "
        "must be functions of the events and of delta.",
    )


ASKED = "The ledger is public: requests for mechanisms must be a function of releases and public inputs."


def _some(paths: list[str]) -> str:
    shown = ", ".join(path.lstrip("/") for path in paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def check_kept_state(bench: Bench, first: Fit) -> None:
    """A fit that writes its first states to a cache, and one that reads them from it, equal the first fit."""
    with tempfile.TemporaryDirectory() as folder:
        for what in ("written to", "read from"):
            place = StatePlace(Path(folder) / what, Path(folder) / "cache", {})
            again = bench.fit(bench.base, Tape(), place=place)
            same = all(
                torch.equal(flat(a.noisy), flat(b.noisy))
                for a, b in zip(first.tape.releases, again.tape.releases, strict=True)
            )
            expect(
                same and first.released == again.released,
                f"private state {what} a cache led to other releases or another generator: its `start` must draw from "
                "the random generator that it is given, and from nothing else.",
            )


def check_empty_draws(bench: Bench) -> None:
    """Without records every draw is empty; the releases must still be made, and be finite."""
    base = bench.base
    none = DataSet("no records", base.images[:0], base.labels[:0], base.ids[:0], base.clients[:0])
    fit = bench.fit(none, Tape())
    for release in fit.tape.releases:
        expect(
            bool(torch.isfinite(flat(release.noisy)).all()),
            f"{release.mechanism!r}: the release of an empty draw is not finite.",
        )
    made = {name: entry.executed for name, entry in fit.ledger.entries.items()}
    expect(all(made.values()), f"no release was made on empty draws ({made}).")


def check_generator(fit: Fit, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """Sampling: uint8 [n, c, h, w]; a function of (seed, i, label i) alone; the same after saving and loading."""
    generator, labels = fit.generator, torch.arange(SAMPLES) % num_classes
    images = generator.sample(labels, seed=SAMPLE_SEED)
    expect(
        images.dtype == torch.uint8 and tuple(images.shape) == (SAMPLES, *image_shape),
        f"expected samples uint8 {(SAMPLES, *image_shape)}, got {images.dtype} {tuple(images.shape)}.",
    )
    expect(generator.num_classes == num_classes, f"expected {num_classes} classes, got {generator.num_classes}.")
    expect(
        torch.equal(images, generator.sample(labels, seed=SAMPLE_SEED)),
        "sampling twice with the same seed gave different images.",
    )
    expect(not torch.equal(images, generator.sample(labels, seed=2)), "two seeds gave the same samples.")
    expect(
        torch.equal(images[:7], generator.sample(labels[:7], seed=SAMPLE_SEED)),
        "the first samples depend on how many are asked for.",
    )
    others = labels.clone()
    others[1:] = (others[1:] + 1) % num_classes
    one = generator.sample(others, seed=SAMPLE_SEED)[0]
    expect(torch.equal(images[0], one), "a sample depends on the labels of others.")
    expect(len(generator.sample(labels[:0], seed=SAMPLE_SEED)) == 0, "no labels should give no images.")
    with tempfile.TemporaryDirectory() as folder:
        generator.save(Path(folder))
        loaded = Generator.load(Path(folder))
    expect(
        torch.equal(images, loaded.sample(labels, seed=SAMPLE_SEED)),
        "a generator saved and loaded samples differently.",
    )
