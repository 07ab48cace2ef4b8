"""The checks that compare fits: budget, replays on neighbouring data, state found again, empty draws, samples."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.federation.mechanism import ClientMechanism
from dpgen_bench.generator import Generator
from dpgen_bench.privacy.accountants import epsilon
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.mechanism import AllowanceExhausted
from dpgen_bench.privacy.state import StatePlace
from dpgen_bench.testing.bench import Bench, ConformanceError, Fit, Tape, expect, flat
from dpgen_bench.testing.neighbours import Neighbour, owners

TOLERANCE = 1e-5  # of the sensitivity, for float32 sums


def check_budget(fit: Fit, budget: Budget) -> None:
    """The approved allowances cost at most the budget, and release times + 1 is refused."""
    fit.ledger.refuse_if_spoiled()
    expect(not fit.ledger.doubts, f"the ledger doubts its own figure: {'; '.join(fit.ledger.doubts)}.")
    cost = epsilon(fit.ledger.events, budget.delta, budget.relation, budget.accountant)
    expect(cost <= budget.epsilon, f"the ledger's epsilon is {cost:.4g}, over the budget of {budget.epsilon:g}.")
    for name, mechanism in fit.data.mechanisms.items():
        entry = fit.ledger.entries[name]
        made = sum(release.mechanism == name for release in fit.tape.releases)
        passed = entry.executed - made if isinstance(mechanism, ClientMechanism) else 0  # rounds that asked nobody
        expect(
            made + passed == entry.executed, f"{name!r}: {made} releases were made, the ledger says {entry.executed}."
        )
        expect(made <= entry.event.times, f"{name!r}: {made} releases, {entry.event.times} were approved.")
        expect(mechanism.times == entry.event.times, f"{name!r}: its allowance was changed after approval.")
        fit.data._controls[name].resume_at(entry.event.times)
        try:
            mechanism(lambda *_: torch.zeros(1))  # type: ignore[arg-type]  # refused before anybody looks at it
        except AllowanceExhausted:
            continue
        raise ConformanceError(f"{name!r}: release {entry.event.times + 1} was not refused.")


def check_replay(bench: Bench, first: Fit, neighbour: Neighbour) -> None:
    """The replay of one neighbouring dataset; see the module's docstring."""
    tape = Tape(source=first.tape)
    second = bench.fit(neighbour.images, neighbour.labels, neighbour.ids, neighbour.clients, tape)
    where = f"with {neighbour.name}"
    expect(
        len(tape.releases) == len(first.tape.releases),
        f"{where}, {len(tape.releases)} releases were made instead of {len(first.tape.releases)}.",
    )
    for a, b in zip(first.tape.releases, tape.releases, strict=True):
        moved = float((flat(a.exact) - flat(b.exact)).norm())
        drawn = neighbour.changed in a.drawn or neighbour.changed in b.drawn
        sensitivity = getattr(first.ledger.entries[a.mechanism].event.sensitivity, neighbour.relation)
        allowed = sensitivity * (1 + TOLERANCE) if drawn else 0.0
        what = f"{where}, release {a.index} of {a.mechanism!r} moved by {moved:.6g}"
        if drawn:
            expect(moved <= allowed, f"{what}; its declared sensitivity ({neighbour.relation}) is {sensitivity:.6g}.")
        else:
            expect(
                moved == 0.0,
                f"{what} although the record was not in its draw: the release knows records from elsewhere (another "
                "draw, or something kept from an earlier call).",
            )
    expect(first.log == second.log, f"{where}, the log differs: it holds something that was not released.")
    expect(first.counts == second.counts, f"{where}, the counts of bytes and clients differ, which are public.")
    one, other = first.generator.state(), second.generator.state()
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    same = same and first.generator.config() == second.generator.config()
    expect(same, f"{where}, the generator differs although all releases were the same: data reached it another way.")


def check_kept_state(bench: Bench, first: Fit, images: Tensor, labels: Tensor) -> None:
    """A fit that makes its first states into a cache, and one that finds them there, are the first fit, bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        for what in ("made into", "found in"):
            place = StatePlace(Path(folder) / what, Path(folder) / "cache", {})
            own = owners(len(labels), bench.clients)
            again = bench.fit(images, labels, np.arange(len(labels)), own, Tape(), place)
            same = all(
                torch.equal(flat(a.noisy), flat(b.noisy))
                for a, b in zip(first.tape.releases, again.tape.releases, strict=True)
            )
            one, other = first.generator.state(), again.generator.state()
            expect(
                same and all(torch.equal(one[key], other[key]) for key in one),
                f"private state {what} a cache led to other releases or another generator: its `start` must draw from "
                "the coins it is given, and from nothing else.",
            )


def check_empty_draws(bench: Bench, images: Tensor, labels: Tensor) -> None:
    """With no record at all every draw is empty; the releases are made all the same and stay finite."""
    fit = bench.fit(images[:0], labels[:0], np.arange(0), np.arange(0), Tape())
    for release in fit.tape.releases:
        expect(bool(torch.isfinite(flat(release.noisy)).all()), f"{release.mechanism!r}: an empty draw gave no number.")
    made = {name: entry.executed for name, entry in fit.ledger.entries.items()}
    expect(all(made.values()), f"no release was made on empty draws ({made}).")


def check_generator(generator: Generator, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """Sampling: uint8 [n, c, h, w]; a function of (seed, i, label i) alone; the same after saving and loading."""
    labels = torch.arange(30) % num_classes
    images = generator.sample(labels, seed=1)
    expect(
        images.dtype == torch.uint8 and tuple(images.shape) == (30, *image_shape),
        f"expected samples uint8 {(30, *image_shape)}, got {images.dtype} {tuple(images.shape)}.",
    )
    expect(generator.num_classes == num_classes, f"expected {num_classes} classes, got {generator.num_classes}.")
    expect(torch.equal(images, generator.sample(labels, seed=1)), "sampling twice with one seed gave two results.")
    expect(not torch.equal(images, generator.sample(labels, seed=2)), "two seeds gave the same samples.")
    expect(
        torch.equal(images[:7], generator.sample(labels[:7], seed=1)),
        "the first samples depend on how many are asked for.",
    )
    others = labels.clone()
    others[1:] = (others[1:] + 1) % num_classes
    expect(torch.equal(images[0], generator.sample(others, seed=1)[0]), "a sample depends on the labels of others.")
    expect(len(generator.sample(labels[:0], seed=1)) == 0, "no labels should give no images.")
    with tempfile.TemporaryDirectory() as folder:
        generator.save(Path(folder))
        loaded = Generator.load(Path(folder))
    expect(torch.equal(images, loaded.sample(labels, seed=1)), "a generator saved and loaded samples differently.")
