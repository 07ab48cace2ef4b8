"""Checks of one fit (budget, samples) and of several (replays, cached private state, empty draws)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.generator import Generator
from dpgen_bench.privacy.accountants.proven import epsilon
from dpgen_bench.privacy.allowance import AllowanceExhausted
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.sampling import EveryShard, OneShard
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.testing.bench import SAMPLE_SEED, SAMPLES, Bench, DataSet, Fit
from dpgen_bench.testing.digest import as_json, clocks, different, without, without_order
from dpgen_bench.testing.errors import ConformanceError, expect
from dpgen_bench.testing.neighbours import Family, relation
from dpgen_bench.testing.tape import Tape, flat, rounding

TOLERANCE = 1e-5  # relative to the sensitivity, for the rounding of one record's part of a sum in float32


def check_budget(fit: Fit, budget: Budget) -> None:
    """Check that the approved allowances cost at most the budget, and that release `times` + 1 is refused.

    Raises:
        ConformanceError: if a rule is broken.
        Invalidated: if a private function raised during the fit.
    """
    fit.ledger.refuse_if_invalidated()
    expect(not fit.ledger.unproven, f"the ledger's epsilon is not proven: {'; '.join(fit.ledger.unproven)}.")
    cost = epsilon(fit.ledger.events, budget.delta, budget.relation, budget.accountant)
    expect(cost <= budget.limit, f"the ledger's epsilon is {cost:.4g}, over the budget of {budget.limit:g}.")
    for name, mechanism in fit.data.mechanisms.items():
        entry = fit.ledger.entries[name]
        taped = sum(release.mechanism == name for release in fit.tape.releases)
        # A round in which no client takes part counts as executed, and the tape has no release of it.
        if not isinstance(mechanism, ClientMechanism):
            expect(
                taped == entry.executed,
                f"{name!r}: {taped} releases were made, but the ledger says {entry.executed}.",
            )
        expect(
            taped <= entry.event.times, f"{name!r}: {taped} releases were made, but {entry.event.times} were approved."
        )
        expect(mechanism.times == entry.event.times, f"{name!r}: its allowance was changed after approval.")
        fit.services.controls[name].resume_at(entry.event.times)
        try:
            mechanism(lambda *_: torch.zeros(1))  # type: ignore[operator]  # refused before the value is used
        except AllowanceExhausted:
            continue
        raise ConformanceError(f"{name!r}: release {entry.event.times + 1} was not refused.")


class Replays:
    """Replays: fits that receive the noisy values of the first fit, each compared with the first fit.

    Attributes:
        bench: makes the fits.
        first: the first fit.
        log_clocks: paths in the log that hold times, which differ in every fit; `same_data` determines them.
        state_clocks: such paths in state dicts.
    """

    def __init__(self, bench: Bench, first: Fit) -> None:
        self.bench, self.first = bench, first
        self.log_clocks: set[str] = set()
        self.state_clocks: set[str] = set()

    def same_data(self) -> None:
        """Check that a second fit on the same data equals the first, and record which entries are times.

        Otherwise no difference between fits could be attributed to their data.

        Raises:
            ConformanceError: if the fits differ in more than times.
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
        """Replay on a data set that is no neighbour, and check that its draws and all public results are the same.

        Raises:
            ConformanceError: for the first difference.
        """
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
        """Compare everything but the exact values: number of releases, log, counters, state, generator and samples.

        Args:
            other: the fit to compare with the first one.
            where: the beginning of a message, which names the other fit.

        Raises:
            ConformanceError: for the first difference.
        """
        first = self.first
        number, expected = len(other.tape.releases), len(first.tape.releases)
        expect(number == expected, f"{where}, {number} releases were made instead of {expected}.")
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
        """Replay each member of a family, and compare it with the first fit and with all earlier members.

        Yields:
            The name of each member after it has passed.

        Raises:
            ConformanceError: for the first member that differs in public results, or whose exact values are further
                from those of another member than the declared sensitivity.
        """
        base = self.first.tape if family.base is None else self.on(family.base).tape
        replayed = [("the first data set" if family.base is None else family.base.name, family.base_there, base)]
        for member in family.members:
            tape = Tape(source=self.first.tape)
            fit = self.bench.fit(member.data, tape)
            self.compare(fit, f"with {member.data.name}")
            replayed.append((member.data.name, member.there, tape))
            for earlier in replayed[:-1]:
                self._compare_exact_values(family.changed, earlier, replayed[-1])
            yield member.data.name

    def _compare_exact_values(self, changed: int, one: tuple[str, bool, Tape], other: tuple[str, bool, Tape]) -> None:
        """Check that the exact values of two members differ by at most the sensitivity of their relation.

        Args:
            changed: the record or client in which the members differ.
            one: name of a member, whether it contains that unit, and the tape of its fit.
            other: the same of another member.
        """
        (name, there, before), (other_name, other_there, after) = one, other
        which = relation(there, other_there)
        for a, b in zip(before.releases, after.releases, strict=True):
            distance = float((flat(a.exact) - flat(b.exact)).norm())
            drawn = changed in a.drawn or changed in b.drawn
            # For a sum over clients or shards, the rows of those that did not change must be the same.
            sampling = self.first.ledger.entries[a.mechanism].event.sampling
            what, own = "client", changed
            if isinstance(sampling, EveryShard | OneShard):
                what, own = "shard", int(sampling.shard_of(np.array([changed]))[0])
            for part in (a.rows.keys() | b.rows.keys()) - {own}:
                expect(
                    part in a.rows and part in b.rows and _equal(a.rows[part], b.rows[part]),
                    f"with {other_name}, the row of {what} {part} in release {a.index} of {a.mechanism!r} differs "
                    f"from that with {name}: an answer must depend on public inputs and that {what}'s records alone.",
                )
            # So must the private states of shards that did not change. Votes hide most changes of a state.
            for part in (a.states.keys() & b.states.keys()) - {own}:
                expect(
                    all(map(_equal, a.states[part], b.states[part])),
                    f"with {other_name}, the private state of shard {part} in release {a.index} of {a.mechanism!r} "
                    f"differs from that with {name}: a state must depend on public inputs and on the records of its "
                    "shard alone.",
                )
            sensitivity = getattr(self.first.ledger.entries[a.mechanism].event.sensitivity, which)
            what = f"with {other_name}, release {a.index} of {a.mechanism!r} differs by {distance:.6g} from {name}"
            if drawn:
                allowed = sensitivity * (1 + TOLERANCE) + rounding(a.exact, b.exact)
                expect(distance <= allowed, f"{what}; its declared sensitivity ({which}) is {sensitivity:.6g}.")
                continue
            expect(
                distance == 0.0,
                f"{what} although the changed {self.first.ledger.unit} was not in its draw: the release depends on "
                "records outside of its draw (those of another draw, or a value kept from an earlier call).",
            )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; NaN equals NaN."""
    if one.is_floating_point():
        one, other = one.nan_to_num(nan=1.2345), other.nan_to_num(nan=1.2345)
    return torch.equal(one, other)


def compare_states(first: Fit, other: Fit, where: str, times: set[str], *, last: int | None = None) -> None:
    """Compare the objects passed to ctx.steps bit by bit, after each step and at the end.

    Args:
        first: the first fit.
        other: the fit to compare with it.
        where: the beginning of a message, which names the other fit.
        times: paths that hold times, which are not compared.
        last: of a fit that was killed and resumed, compare the last so many states only, without the order of keys; the
            state at the end counts as one.

    Raises:
        ConformanceError: for the first difference.
    """
    expected, states = without(first.states, times), without(other.states, times)
    if last is None:
        expect(
            len(states) == len(expected),
            f"{where}, ctx.steps made {len(states) - 1} steps instead of {len(expected) - 1}.",
        )
    else:
        expected, states = without_order(expected[-last:]), without_order(states[-last:])
    for step, (a, b) in enumerate(zip(expected, states, strict=True)):
        if paths := different(a, b):
            at = "at the end" if step == len(expected) - 1 else f"after step {step}"
            reason = (
                "It is written into checkpoints, which are public, together with the state of public randomness: it "
                "must be a function of releases and public inputs."
            )
            if last is not None:
                reason = "State that changes in a loop must be passed to ctx.steps, which restores it and nothing else."
            raise ConformanceError(f"{where}, the state passed to ctx.steps differs {at} in {_some(paths)}. {reason}")


def compare_generators(first: Fit, other: Fit, where: str) -> None:
    """Compare the generators' state, config, files, samples and drawn labels.

    Raises:
        ConformanceError: for the first difference.
    """
    paths = different(first.released, other.released)
    expect(
        not paths,
        f"{where}, the generator differs in {_some(paths)} although all releases were the same: it depends on records "
        "other than through releases.",
    )
    expect(
        first.saved == other.saved,
        f"{where}, the generator saves other files: they contain something that is not in its state or config.",
    )
    expect(
        torch.equal(first.samples, other.samples) and first.labels == other.labels,
        f"{where}, samples differ although the generator's state and config are the same: sampling reads something "
        "outside of them (a module's global, a class attribute, a default argument, a file).",
    )


def compare_ledgers(first: Fit, other: Fit, where: str) -> None:
    """Compare the content of the ledgers, as JSON text, and the epsilons that the method claims.

    Raises:
        ConformanceError: for the first difference.
    """
    expected, ledger = first.ledger_file, other.ledger_file
    names, other_names = ([entry["name"] for entry in file["entries"]] for file in (expected, ledger))
    expect(
        names == other_names, f"{where}, other mechanisms were requested: {names}, {other_names}. {LEDGER_IS_PUBLIC}"
    )
    for entry, found in zip(expected["entries"], ledger["entries"], strict=True):
        same = as_json(entry, "entries") == as_json(found, "entries")
        expect(same, f"{where}, the ledger's entry of {entry['name']!r} differs: {entry}, {found}. {LEDGER_IS_PUBLIC}")
    rest = [key for key in expected if as_json(expected[key], "a ledger") != as_json(ledger[key], "a ledger")]
    expect(not rest, f"{where}, the ledger differs in {', '.join(rest)}. {LEDGER_IS_PUBLIC}")
    expect(
        first.claims == other.claims,
        f"{where}, epsilon_claimed or epsilon_conditional differ: {first.claims}, {other.claims}. They are public, and "
        "must be functions of the events and of delta.",
    )


LEDGER_IS_PUBLIC = "The ledger is public: requests for mechanisms must be a function of releases and public inputs."


def _some(paths: list[str]) -> str:
    """The first three paths as text, and how many more there are."""
    shown = ", ".join(path.lstrip("/") for path in paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more"


def check_kept_state(bench: Bench, first: Fit) -> None:
    """Check that a fit that writes its first private states to a cache, and one that reads them, equal the first fit.

    Raises:
        ConformanceError: if their releases or generators differ.
    """
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
    """Check that a fit on no records, whose draws are all empty, makes finite releases of every mechanism.

    Raises:
        ConformanceError: if a mechanism makes no release, or one that is not finite.
    """
    base = bench.base
    none = DataSet("no records", base.images[:0], base.labels[:0], base.ids[:0], base.clients[:0])
    fit = bench.fit(none, Tape())
    for release in fit.tape.releases:
        expect(
            bool(torch.isfinite(flat(release.noisy)).all()),
            f"{release.mechanism!r}: the release of an empty draw is not finite.",
        )
    executed = {name: entry.executed for name, entry in fit.ledger.entries.items()}
    expect(all(executed.values()), f"no release was made on empty draws ({executed}).")


def check_generator(fit: Fit, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """Check that samples are uint8 [n, c, h, w], and that sample i is a function of the seed, i and label i alone.

    Saving and loading the generator must not change its samples.

    Raises:
        ConformanceError: for the first rule that is broken.
    """
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
        "the first samples depend on the number of samples.",
    )
    others = labels.clone()
    others[1:] = (others[1:] + 1) % num_classes
    one = generator.sample(others, seed=SAMPLE_SEED)[0]
    expect(torch.equal(images[0], one), "a sample depends on the labels of other samples.")
    expect(len(generator.sample(labels[:0], seed=SAMPLE_SEED)) == 0, "no labels should give no images.")
    with tempfile.TemporaryDirectory() as folder:
        generator.save(Path(folder))
        loaded = Generator.load(Path(folder))
    expect(
        torch.equal(images, loaded.sample(labels, seed=SAMPLE_SEED)),
        "a generator saved and loaded samples differently.",
    )
