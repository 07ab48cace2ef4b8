"""Level d of an audit: what an attack on samples sees of canaries, which are unusual records among the training ones.

One fit is attacked (Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023). Each of m
canaries is a training record with probability 1/2. The attacker sees samples of the trained generator and the canaries,
and guesses for each one whether it was: a canary that is near to a sample of its label was. This is an attack on a
generator and not on a mechanism, so it sees little of what a mechanism leaks, and nothing is certified by it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from dpgen_bench.audit.bounds import rate_above, rate_below
from dpgen_bench.audit.distinguisher import CONFIDENCE
from dpgen_bench.audit.methods import expect_public
from dpgen_bench.config.spec import RunSpec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.nearest import Memorisation, nearest
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context, fit_method
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.runs.prepare import new_ledger
from dpgen_bench.runs.samples import sample_by_protocol

CANARIES = 1000
# Shares of the canaries that are guessed to be training records (the nearest ones) and not to be (the farthest ones).
# The best of these guesses is taken, with a correction for their number. The last one is for few copies among samples.
SHARES = ((0.5, 0.5), (0.125, 0.125), (0.025, 0.025), (0.02, 0.0))
_COMPARED = 1000  # samples that are compared with the training records


@dataclass(frozen=True)
class Planted:
    """Training records with canaries.

    Attributes:
        records: the training records: the included canaries, and all records whose place no canary has.
        ids: of the training records.
        canaries: all canaries.
        kinds: of each canary, 0 for a record with a wrong label and 1 for noise.
        included: whether each canary is a training record, each with probability 1/2.
    """

    records: Records
    ids: np.ndarray
    canaries: Records
    kinds: np.ndarray
    included: np.ndarray


@dataclass(frozen=True)
class Seen:
    """What the attack saw, which is no statement about what the generator does not leak.

    Attributes:
        epsilon: with probability `confidence`, a fit whose epsilon is smaller shows less to this attack; 0.0 if the
            guesses are not better than chance.
        ceiling: the `epsilon` of an attack that guesses for all of these canaries correctly.
        guesses, correct: for all canaries, by the nearer half of the canaries of each kind.
        rate, below, above: the rate of correct guesses, and its interval at `confidence` (Clopper-Pearson).
        copies_pct, closer_to_train_pct: of `Memorisation`, for samples and the training records.
        copies_above_pct: upper bound at `confidence` on the percentage of copies.
    """

    canaries: int
    included: int
    delta: float
    confidence: float
    epsilon: float
    ceiling: float
    guesses: int
    correct: int
    rate: float
    below: float
    above: float
    samples: int
    copies_pct: float
    copies_above_pct: float
    closer_to_train_pct: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"level": "d", **asdict(self)}


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The largest probability of this many correct guesses under (epsilon, delta)-DP (Theorem 5.2 of the paper)."""
    rate = 1.0 / (1.0 + math.exp(-epsilon))
    largest, tried, number = 0.0, 0, 256
    # The maximum over i of P[correct - i <= Bin < correct] / i: after i places it is at most 1 / i.
    while tried < correct and largest < 1.0 / (tried or 0.5):
        tried = min(number, correct)
        places = np.arange(1, tried + 1)
        largest = float((np.cumsum(binom.pmf(correct - places, guesses, rate)) / places).max())
        number *= 4
    return min(1.0, float(binom.sf(correct - 1, guesses, rate)) + 2.0 * canaries * delta * largest)


def one_run_epsilon(canaries: int, guesses: int, correct: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The lower bound on epsilon from guesses of which canaries one run included, 0.0 if they show nothing."""
    if guesses == 0 or p_value(canaries, guesses, correct, 0.0, delta) >= 1.0 - confidence:
        return 0.0
    below, above = 0.0, 50.0
    while above - below > 1e-4:
        middle = (below + above) / 2.0
        if p_value(canaries, guesses, correct, middle, delta) < 1.0 - confidence:
            below = middle
        else:
            above = middle
    return below


@cache
def ceiling(delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that an attack on one run can show, with any number of canaries and no wrong guess."""
    # With few canaries the trials limit it, and with many the term of delta does: the best number is about 0.4 / delta.
    numbers = np.unique(np.geomspace(0.1 / delta, 1.0 / delta, 20).astype(int).clip(2))
    values = [one_run_epsilon(int(m), int(m), int(m), delta, confidence) for m in numbers]
    return max(values)


def plant(train: Records, number: int, num_classes: int, seed: int) -> Planted:
    """Replace `number` training records by canaries, each of which is included with probability 1/2.

    Half of the canaries are records with a wrong label (noise if there is one class only), the others noise images.
    """
    rng = np.random.default_rng(seed)
    places = rng.permutation(len(train))[:number]
    kinds, included = np.arange(number) % 2, rng.random(number) < 0.5
    images, labels = train.images[places].clone(), train.labels[places].clone()
    if num_classes == 1:
        kinds = np.ones_like(kinds)
    noise = torch.from_numpy(kinds == 1)
    images[noise] = torch.from_numpy(rng.integers(0, 256, tuple(images[noise].shape), dtype=np.uint8))
    shift = torch.from_numpy(rng.integers(1, max(num_classes, 2), number))
    labels = (labels + shift) % num_classes
    all_images, all_labels = train.images.clone(), train.labels.clone()
    all_images[places], all_labels[places] = images, labels
    ids = np.setdiff1d(np.arange(len(train)), places[~included])
    return Planted(Records(all_images[ids], all_labels[ids]), ids, Records(images, labels), kinds, included)


def distances(canaries: Records, samples: Records) -> np.ndarray:
    """The distance of each canary to the nearest sample of its label, inf if there is none."""
    found = torch.full((len(canaries),), math.inf, dtype=torch.float64)
    for label in canaries.labels.unique().tolist():
        own, of_label = canaries.labels == label, samples.labels == label
        if bool(of_label.any()):
            found[own] = nearest(canaries.images[own], samples.images[of_label])
    return np.asarray(found.numpy())


def guess(planted: Planted, found: np.ndarray, delta: float, seed: int) -> tuple[float, int]:
    """The epsilon that guesses of the included canaries show, and for how many of all canaries they are correct.

    Of each kind of canaries the nearest ones are guessed to be included, and the farthest ones not.
    """
    ties = np.random.default_rng(seed + 1).random(len(found))
    position = np.empty(len(found))  # from 0, the nearest of its kind, to 1
    for kind in np.unique(planted.kinds):
        own = np.flatnonzero(planted.kinds == kind)
        order = own[np.lexsort((ties[own], found[own]))]
        position[order] = (np.arange(len(order)) + 0.5) / len(order)
    shown, correct_of_all = 0.0, 0
    for nearest_share, farthest_share in SHARES:
        guessed_in, guessed_out = position < nearest_share, position >= 1.0 - farthest_share
        correct = int((guessed_in & planted.included).sum() + (guessed_out & ~planted.included).sum())
        guesses = int((guessed_in | guessed_out).sum())
        confidence = 1.0 - (1.0 - CONFIDENCE) / len(SHARES)
        shown = max(shown, one_run_epsilon(len(found), guesses, correct, delta, confidence))
        if nearest_share + farthest_share == 1.0:
            correct_of_all = correct
    return shown, correct_of_all


@dataclass(frozen=True)
class _Context(EvalContext):
    """A context of metrics with the records of this fit in place of those of a dataset."""

    trained: Records | None = None

    def train(self) -> Records:
        assert self.trained is not None
        return self.trained


def attack_samples(
    fit: Callable[[Planted], Records],
    train: Records,
    test: Records,
    num_classes: int,
    delta: float,
    *,
    canaries: int = CANARIES,
    seed: int = 0,
) -> Seen:
    """Plant canaries, fit once, and report what the samples show.

    Args:
        fit: trains a generator on the planted records and returns samples of it.
        train, test: the records of a data set; canaries take places of training records.
        canaries: their number; at most a tenth of the training records.

    Raises:
        ValueError: for fewer than 2 canaries, or more training records than that.
    """
    number = min(canaries, len(train) // 10)
    if number < 2:
        raise ValueError(
            f"expected at least 2 canaries among at most a tenth of the training records, got {canaries} canaries for "
            f"{len(train)} records; use a larger dataset or more canaries."
        )
    # One fit, and the attack's guesses of which canaries were among the records.
    planted = plant(train, number, num_classes, seed)
    samples = fit(planted)
    shown, correct = guess(planted, distances(planted.canaries, samples), delta, seed)
    # Memorisation of all training records, canaries included, compared with test records.
    ctx = _Context(seed, "cpu", num_classes, Path(), trained=planted.records)
    memory = Memorisation(max_samples=_COMPARED)(samples, test, ctx)
    error, compared = (1.0 - CONFIDENCE) / 2.0, int(memory["nn_num_samples"])
    copies = np.array(round(memory["nn_copies_pct"] / 100.0 * compared))
    right = np.array(correct)
    return Seen(
        canaries=number,
        included=int(planted.included.sum()),
        delta=delta,
        confidence=CONFIDENCE,
        epsilon=shown,
        ceiling=one_run_epsilon(number, number, number, delta, CONFIDENCE),
        guesses=number,
        correct=correct,
        rate=correct / number,
        below=float(rate_below(right, number, error)),
        above=float(rate_above(right, number, error)),
        samples=len(samples),
        copies_pct=memory["nn_copies_pct"],
        copies_above_pct=100.0 * float(rate_above(copies, compared, 1.0 - CONFIDENCE)),
        closer_to_train_pct=memory["nn_closer_to_train_pct"],
    )


def fitted_samples(spec: RunSpec, planted: Planted, records: int) -> Records:
    """Samples, as the protocol of a run draws them, of its method fitted on planted records.

    Args:
        records: the number of records that the method is told, which is that of the run.
    """
    dataset = spec.dataset()
    with tempfile.TemporaryDirectory() as folder:
        services = Services(
            new_ledger(spec, records),
            Key.seeded(f"canaries:{spec.seed}"),
            place=StatePlace(Path(folder) / "state", Path(folder) / "cache"),
        )
        data = PrivateData(
            planted.records.images,
            planted.records.labels,
            dataset.num_classes,
            services,
            ids=planted.ids,
            public_n=records,
            class_names=dataset.class_names,
        )
        ctx = Context(spec.seed, "cpu", scale=spec.scale(), services=services)
        generator: Generator = fit_method(spec.method(), data, ctx)
        data.close()
        ctx.close()
        return sample_by_protocol(generator, spec.config.protocol, spec.seed)


def audit_samples(spec: RunSpec, canaries: int = CANARIES) -> Seen:
    """What an attack on samples sees of canaries in one fit with the settings of a run.

    Raises:
        ValueError: for a run with privacy.noise=os, whose records must not be attacked, for records of clients, and for
            a run that starts from another one, which had no canaries.
    """
    expect_public(spec)
    dataset = spec.dataset()
    if dataset.num_clients:
        raise ValueError(f"expected records without clients, got {spec.config.dataset.name}: canaries have no client.")
    if spec.config.restart:
        raise ValueError("expected a run from its first step, got one that starts from another run, without canaries.")
    train = dataset.load("train")

    def fit(planted: Planted) -> Records:
        return fitted_samples(spec, planted, len(train))

    return attack_samples(
        fit,
        train,
        dataset.load("test"),
        dataset.num_classes,
        spec.budget().delta,
        canaries=canaries,
        seed=spec.seed,
    )


def describe_seen(seen: Seen) -> list[str]:
    """What the attack saw, in sentences; none of them states a guarantee."""
    at = f"{100 * seen.confidence:g} %"
    return [
        f"what this attack saw: {seen.correct:,} of {seen.guesses:,} guesses whether a canary was included are correct "
        f"({100 * seen.rate:.1f} %, {at} interval {100 * seen.below:.1f} to {100 * seen.above:.1f} %); "
        f"{seen.included:,} canaries were training records",
        f"what this attack saw: an epsilon of {seen.epsilon:.3g} or more at {at}; with {seen.canaries:,} canaries and "
        f"without a wrong guess it would be {seen.ceiling:.3g} or more",
        f"what this attack saw: {seen.copies_pct:.3g} % of {min(seen.samples, _COMPARED):,} samples are copies of "
        f"training records (at most {seen.copies_above_pct:.3g} % at {at}), and {seen.closer_to_train_pct:.1f} % are "
        "nearer to training than to test records (50 % if nothing is memorised)",
        f"an attack on one run can show no epsilon above {ceiling(seen.delta):.2f} at delta {seen.delta:g}, with any "
        "number of canaries: it can neither refute a larger claim nor prove a smaller one",
    ]
