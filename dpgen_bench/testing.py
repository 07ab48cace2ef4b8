"""The conformance suite that every method gets for free: `check_method`, and `dpgen check method=NAME`.

The heart is a replay. The method is fitted once, and every release is taped: who was drawn, the exact value, the noisy
value. Then it is fitted again on a neighbouring dataset with the same coins, and is given the noisy values of the
first fit back. A method that is private by construction must then

- release an exact value that moved by at most the declared sensitivity, and not at all when the changed record was not
  drawn;
- make the same releases in the same order, write the same log, and end with the same generator, bit by bit: it knows
  the data through its releases alone.

A replay cannot see a wrong noise scale, a wrong sampling rate or a draw used twice; those have statistical tests, which
reject an honest method with probability below 1e-6.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf
from rich.console import Console
from scipy import stats
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context, Method
from dpgen_bench.privacy.accountants import epsilon
from dpgen_bench.privacy.events import Budget, Relation
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import AllowanceExhausted, Mechanism
from dpgen_bench.privacy.noise import Key
from dpgen_bench.privacy.sampling import OneShard, Poisson
from dpgen_bench.privacy.state import StatePlace
from dpgen_bench.specify import RunSpec, build_dataset, build_method, compose_config

TOLERANCE = 1e-5  # of the sensitivity, for float32 sums
FALSE_ALARM = 1e-6  # of each statistical test
MOST_SHARDS = 4  # of which one record each is changed

Parts = dict[str, Tensor]


class ConformanceError(AssertionError):
    """A method (or the harness under it) broke a rule that its privacy rests on."""


@dataclass
class Release:
    """One taped release."""

    mechanism: str
    index: int
    drawn: np.ndarray
    exact: Parts
    noisy: Parts


@dataclass
class Tape:
    """Records releases; with a `source`, replays the source's noisy values into the method."""

    source: Tape | None = None
    releases: list[Release] = field(default_factory=list)

    def release(self, mechanism: Mechanism, index: int, drawn: np.ndarray, exact: Parts, noisy: Parts) -> Parts:
        exact = {part: value.detach().clone() for part, value in exact.items()}
        noisy = {part: value.detach().clone() for part, value in noisy.items()}
        if self.source is not None:
            if len(self.releases) >= len(self.source.releases):
                raise ConformanceError(f"a neighbouring dataset led to an extra release of {mechanism.name!r}.")
            first = self.source.releases[len(self.releases)]
            if (first.mechanism, first.index) != (mechanism.name, index) or _shapes(first.exact) != _shapes(exact):
                raise ConformanceError(
                    f"control flow depends on the data: where {first.mechanism!r} release {first.index} with shapes "
                    f"{_shapes(first.exact)} was made, a neighbouring dataset led to {mechanism.name!r} release "
                    f"{index} with shapes {_shapes(exact)}."
                )
            noisy = {part: value.clone() for part, value in first.noisy.items()}
        self.releases.append(Release(mechanism.name, index, drawn.copy(), exact, noisy))
        return noisy

    def before_records(self) -> None:
        """A fit in the suite is a real one: private state is made."""


@dataclass
class Fit:
    """One fit of the method under test and all that came of it."""

    tape: Tape
    ledger: Ledger
    data: PrivateData
    generator: Generator
    log: list[dict[str, object]]
    bytes_sent: dict[str, int]


@dataclass(frozen=True)
class Bench:
    """What the method is tested on: a few records, a budget, fixed coins.

    Args:
        make_method: a fresh method for each fit.
        records: how many; they are smooth random images with random labels.
    """

    make_method: Callable[[], Method]
    image_shape: tuple[int, int, int] = (1, 28, 28)
    num_classes: int = 10
    records: int = 48
    seed: int = 0
    budget: Budget = field(default_factory=lambda: Budget(epsilon=10.0))

    def images(self) -> tuple[Tensor, Tensor]:
        """Float images [n, c, h, w] in [0, 1] and labels int64 [n]."""
        coins = torch.Generator().manual_seed(self.seed + 1)
        coarse = torch.rand(self.records, self.image_shape[0], 4, 4, generator=coins)
        images = torch.nn.functional.interpolate(coarse, self.image_shape[1:], mode="bilinear", align_corners=False)
        return images, torch.randint(self.num_classes, (self.records,), generator=coins)

    def fit(self, images: Tensor, labels: Tensor, ids: np.ndarray, tape: Tape, place: StatePlace | None = None) -> Fit:
        ledger = Ledger(self.budget, self.records)
        data = PrivateData(
            images,
            labels,
            self.num_classes,
            ledger,
            Key.seeded(f"conformance:{self.seed}"),
            ids=ids,
            public_n=self.records,
            observer=tape,
            state_place=place,
        )
        context = Context(self.seed, "cpu", data=data)
        generator = self.make_method().fit(data, context)
        return Fit(tape, ledger, data, generator, context.history, context.bytes_sent)


@dataclass(frozen=True)
class Neighbour:
    """A dataset that differs from the first in one record."""

    name: str
    relation: Relation
    changed: int
    images: Tensor
    labels: Tensor
    ids: np.ndarray


def neighbours(images: Tensor, labels: Tensor, changed: Sequence[int], num_classes: int) -> Iterator[Neighbour]:
    """For each id in `changed`: without it, and with it replaced by odd records; and one dataset with a record more."""
    ids = np.arange(len(labels))
    odd = {
        "NaN": torch.full_like(images[0], math.nan),
        "1e30": torch.full_like(images[0], 1e30),
        "constant": torch.ones_like(images[0]),
        "sign-flipped": -images[0],
    }
    for record in changed:
        keep = ids != record
        yield Neighbour(f"record {record} removed", "add_remove", record, images[keep], labels[keep], ids[keep])
        for name, image in odd.items():
            replaced, relabelled = images.clone(), labels.clone()
            replaced[record] = image if name != "sign-flipped" else -images[record]
            relabelled[record] = (labels[record] + 1) % num_classes
            yield Neighbour(f"record {record} replaced by {name}", "replace_one", record, replaced, relabelled, ids)
    more = torch.cat([images, odd["constant"][None]]), torch.cat([labels, labels[:1]])
    yield Neighbour("one record added", "add_remove", len(labels), *more, np.arange(len(labels) + 1))


def check_method(
    make_method: Callable[[], Method],
    *,
    image_shape: tuple[int, int, int] = (1, 28, 28),
    num_classes: int = 10,
    records: int = 48,
    seed: int = 0,
    budget: Budget | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Put a method through every conformance check; a few seconds for a method with small settings.

    Args:
        make_method: returns a fresh method with the same small settings each time.
        records: size of the made-up dataset; the method's batches should be well below it.
        tell: gets one line per check passed.

    Raises:
        ConformanceError: the first rule that was broken, in words.
    """
    bench = Bench(make_method, image_shape, num_classes, records, seed, budget or Budget(epsilon=10.0))
    images, labels = bench.images()
    first = bench.fit(images, labels, np.arange(records), Tape())
    check_budget(first, bench.budget)
    tell(f"ledger within ε = {bench.budget.epsilon:g}; {len(first.tape.releases)} releases, one more is refused")
    check_noise(first)
    tell("noise has the ledger's standard deviation and is never used twice")
    check_draws(first, records)
    tell("draws have the ledger's rate and are fresh for each release")
    for neighbour in neighbours(images, labels, telling_records(first.tape), num_classes):
        check_replay(bench, first, neighbour)
        tell(f"replay, {neighbour.name}: within its sensitivity, same log, same generator")
    if any(entry.bound.get("private_state") for entry in first.ledger.entries.values()):
        check_kept_state(bench, first, images, labels)
        tell("private state found in a cache, or kept on disk, changes nothing")
    check_empty_draws(bench, images, labels)
    tell("empty draws are survived")
    check_generator(first.generator, image_shape, num_classes)
    tell("samples: shape, dtype, labels, seeds, prefixes, save and load")


def telling_records(tape: Tape) -> list[int]:
    """Records to change: one of the first draw that a later one missed, and one drawn only later (where there are).

    A method that keeps its first draw is caught by the former, one that looks at records before they are drawn by the
    latter. Where draws are of few shards, one record of each shard.
    """
    draws = [release.drawn for release in tape.releases if len(release.drawn)] or [np.arange(1)]
    distinct = {tuple(draw): draw for draw in draws}
    disjoint = len(np.unique(np.concatenate(list(distinct.values())))) == sum(map(len, distinct.values()))
    if 1 < len(distinct) <= MOST_SHARDS and disjoint:
        return sorted({int(draw[len(draw) // 2]) for draw in distinct.values()})
    early, late = np.setdiff1d(draws[0], draws[-1]), np.setdiff1d(draws[-1], draws[0])
    return sorted({int((early if len(early) else draws[0])[0]), int((late if len(late) else draws[-1])[-1])})


def check_budget(fit: Fit, budget: Budget) -> None:
    """The approved allowances cost at most the budget, and release times + 1 is refused."""
    fit.ledger.refuse_if_spoiled()
    cost = epsilon(fit.ledger.events, budget.delta, budget.relation, budget.accountant)
    _expect(cost <= budget.epsilon, f"the ledger's epsilon is {cost:.4g}, over the budget of {budget.epsilon:g}.")
    for name, mechanism in fit.data.mechanisms.items():
        entry = fit.ledger.entries[name]
        made = sum(release.mechanism == name for release in fit.tape.releases)
        _expect(made == entry.executed, f"{name!r}: {made} releases were made, the ledger says {entry.executed}.")
        _expect(made <= entry.event.times, f"{name!r}: {made} releases, {entry.event.times} were approved.")
        _expect(mechanism.times == entry.event.times, f"{name!r}: its allowance was changed after approval.")
        mechanism.resume_at(entry.event.times)
        try:
            mechanism(lambda *_: torch.zeros(1))
        except AllowanceExhausted:
            continue
        raise ConformanceError(f"{name!r}: release {entry.event.times + 1} was not refused.")


def check_noise(fit: Fit) -> None:
    """Two-sided chi-square test of (noisy - exact) / std per mechanism; no correlation between two releases."""
    for name, entry in fit.ledger.entries.items():
        noises = [_flat(r.noisy) - _flat(r.exact) for r in fit.tape.releases if r.mechanism == name]
        if not noises or entry.event.std == 0:
            continue
        scaled = torch.stack(noises) / entry.event.std
        total, count = float(scaled.square().sum()), scaled.numel()
        p = 2 * min(stats.chi2.cdf(total, count), stats.chi2.sf(total, count))
        _expect(
            p >= FALSE_ALARM,
            f"{name!r}: the noise has {math.sqrt(total / count):.4f} of the standard deviation in the ledger "
            f"({count} values, p = {p:.1e}).",
        )
        if len(noises) > 1:
            directions = scaled / scaled.norm(dim=1, keepdim=True)
            worst = float((directions @ directions.T).fill_diagonal_(0.0).abs().max())
            pairs = len(noises) * (len(noises) - 1) / 2
            limit = stats.norm.isf(FALSE_ALARM / (2 * pairs)) / math.sqrt(scaled.shape[1])
            _expect(
                worst < max(limit, 1e-6) or limit >= 1,
                f"{name!r}: the noise of two releases is correlated ({worst:.3f}, at most {limit:.3f} by chance); the "
                "same noise must never be added to two queries.",
            )


def check_draws(fit: Fit, records: int) -> None:
    """Binomial tests: each record is drawn at the ledger's rate, and twice in a row at its square."""
    for name, entry in fit.ledger.entries.items():
        sampling = entry.event.sampling
        draws = [r.drawn for r in fit.tape.releases if r.mechanism == name]
        if isinstance(sampling, OneShard):
            _check_shards(name, sampling, draws, records)
            continue
        if not isinstance(sampling, Poisson):
            _expect(all(len(d) == records for d in draws), f"{name!r}: full sampling, but a draw missed records.")
            continue
        total = sum(len(d) for d in draws)
        p = stats.binomtest(total, records * len(draws), sampling.rate).pvalue if draws else 1.0
        _expect(
            p >= FALSE_ALARM,
            f"{name!r}: {total} records in {len(draws)} draws of {records} do not fit the rate {sampling.rate:.4g} in "
            f"the ledger (p = {p:.1e}).",
        )
        if len(draws) < 2 or sampling.rate == 1.0:
            continue
        both = sum(len(np.intersect1d(a, b)) for a, b in itertools.pairwise(draws))
        p = stats.binomtest(both, records * (len(draws) - 1), sampling.rate**2).pvalue
        _expect(
            p >= FALSE_ALARM,
            f"{name!r}: {both} records were drawn twice in a row; fresh draws at rate {sampling.rate:.4g} would give "
            f"about {records * (len(draws) - 1) * sampling.rate**2:.0f} (p = {p:.1e}). A draw must not be used again.",
        )


def _check_shards(name: str, sampling: OneShard, draws: list[np.ndarray], records: int) -> None:
    """Draws are whole shards of one partition into parts of equal size, and follow the ledger's schedule."""
    shards = {tuple(draw) for draw in draws}
    members = [record for shard in shards for record in shard]
    _expect(
        len(members) == len(set(members)),
        f"{name!r}: a record was drawn with two different shards; shards must not overlap.",
    )
    sizes = {records // sampling.shards, -(-records // sampling.shards)}
    _expect(
        {len(shard) for shard in shards} <= sizes,
        f"{name!r}: draws of {sorted({len(shard) for shard in shards})} records do not fit {records} records in "
        f"{sampling.shards} shards, as the ledger has it.",
    )
    visits = [sum(tuple(draw) == shard for draw in draws) for shard in shards]
    if sampling.schedule == "public_balanced":
        most = -(-len(draws) // sampling.shards)
        _expect(
            max(visits, default=0) <= most,
            f"{name!r}: one shard was drawn {max(visits, default=0)} times in {len(draws)} releases; a balanced "
            f"schedule of {sampling.shards} shards draws none more than {most} times.",
        )
        return
    p = sampling.shards * stats.binom.sf(max(visits, default=0) - 1, len(draws), sampling.rate)
    _expect(
        p >= FALSE_ALARM,
        f"{name!r}: one shard was drawn {max(visits, default=0)} times in {len(draws)} releases, which does not fit "
        f"{sampling.shards} shards drawn uniformly, as the ledger has it (p = {p:.1e}).",
    )


def check_replay(bench: Bench, first: Fit, neighbour: Neighbour) -> None:
    """The replay of one neighbouring dataset; see the module's docstring."""
    tape = Tape(source=first.tape)
    second = bench.fit(neighbour.images, neighbour.labels, neighbour.ids, tape)
    where = f"with {neighbour.name}"
    _expect(
        len(tape.releases) == len(first.tape.releases),
        f"{where}, {len(tape.releases)} releases were made instead of {len(first.tape.releases)}.",
    )
    for a, b in zip(first.tape.releases, tape.releases, strict=True):
        moved = float((_flat(a.exact) - _flat(b.exact)).norm())
        drawn = neighbour.changed in a.drawn or neighbour.changed in b.drawn
        sensitivity = getattr(first.ledger.entries[a.mechanism].event.sensitivity, neighbour.relation)
        allowed = sensitivity * (1 + TOLERANCE) if drawn else 0.0
        what = f"{where}, release {a.index} of {a.mechanism!r} moved by {moved:.6g}"
        if drawn:
            _expect(moved <= allowed, f"{what}; its declared sensitivity ({neighbour.relation}) is {sensitivity:.6g}.")
        else:
            _expect(
                moved == 0.0,
                f"{what} although the record was not in its draw: the release knows records from elsewhere (another "
                "draw, or something kept from an earlier call).",
            )
    _expect(first.log == second.log, f"{where}, the log differs: it holds something that was not released.")
    _expect(first.bytes_sent == second.bytes_sent, f"{where}, the counts of bytes sent differ, which are public.")
    one, other = first.generator.state(), second.generator.state()
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    same = same and first.generator.config() == second.generator.config()
    _expect(same, f"{where}, the generator differs although all releases were the same: data reached it another way.")


def check_kept_state(bench: Bench, first: Fit, images: Tensor, labels: Tensor) -> None:
    """A fit that makes its first states into a cache, and one that finds them there, are the first fit, bit by bit."""
    with tempfile.TemporaryDirectory() as folder:
        for what in ("made into", "found in"):
            place = StatePlace(Path(folder) / what, Path(folder) / "cache", {})
            again = bench.fit(images, labels, np.arange(len(labels)), Tape(), place)
            same = all(
                torch.equal(_flat(a.noisy), _flat(b.noisy))
                for a, b in zip(first.tape.releases, again.tape.releases, strict=True)
            )
            one, other = first.generator.state(), again.generator.state()
            _expect(
                same and all(torch.equal(one[key], other[key]) for key in one),
                f"private state {what} a cache led to other releases or another generator: its `start` must draw from "
                "the coins it is given, and from nothing else.",
            )


def check_empty_draws(bench: Bench, images: Tensor, labels: Tensor) -> None:
    """With no record at all every draw is empty; the releases are made all the same and stay finite."""
    fit = bench.fit(images[:0], labels[:0], np.arange(0), Tape())
    for release in fit.tape.releases:
        _expect(
            bool(torch.isfinite(_flat(release.noisy)).all()), f"{release.mechanism!r}: an empty draw gave no number."
        )
    made = {name: entry.executed for name, entry in fit.ledger.entries.items()}
    _expect(all(made.values()), f"no release was made on empty draws ({made}).")


def check_generator(generator: Generator, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """Sampling: uint8 [n, c, h, w]; a function of (seed, i, label i) alone; the same after saving and loading."""
    labels = torch.arange(30) % num_classes
    images = generator.sample(labels, seed=1)
    _expect(
        images.dtype == torch.uint8 and tuple(images.shape) == (30, *image_shape),
        f"expected samples uint8 {(30, *image_shape)}, got {images.dtype} {tuple(images.shape)}.",
    )
    _expect(generator.num_classes == num_classes, f"expected {num_classes} classes, got {generator.num_classes}.")
    _expect(torch.equal(images, generator.sample(labels, seed=1)), "sampling twice with one seed gave two results.")
    _expect(not torch.equal(images, generator.sample(labels, seed=2)), "two seeds gave the same samples.")
    _expect(
        torch.equal(images[:7], generator.sample(labels[:7], seed=1)),
        "the first samples depend on how many are asked for.",
    )
    others = labels.clone()
    others[1:] = (others[1:] + 1) % num_classes
    _expect(torch.equal(images[0], generator.sample(others, seed=1)[0]), "a sample depends on the labels of others.")
    _expect(len(generator.sample(labels[:0], seed=1)) == 0, "no labels should give no images.")
    with tempfile.TemporaryDirectory() as folder:
        generator.save(Path(folder))
        loaded = Generator.load(Path(folder))
    _expect(torch.equal(images, loaded.sample(labels, seed=1)), "a generator saved and loaded samples differently.")


def check_configured_method(overrides: list[str]) -> int:
    """`dpgen check method=NAME [OVERRIDES]`: the suite on a configured method, with its yaml's `check` settings.

    Those are the method's own arguments, and `privacy.epsilon` for a method that can keep no finite one.
    """
    console = Console()
    config = compose_config(overrides)
    for key, value in (config.method.get("check") or {}).items():
        path = key if key.startswith("privacy.") else f"method.{key}"
        if path not in {word.split("=")[0].lstrip("+~") for word in overrides}:
            OmegaConf.update(config, path, value)
    dataset = build_dataset(config)
    console.print(f"{config.method.name}: its yaml builds {config.method['_target_']}")
    try:
        check_method(
            lambda: build_method(config),
            image_shape=dataset.image_shape,
            num_classes=dataset.num_classes,
            budget=RunSpec(config, training={}).budget(),
            tell=lambda line: console.print(f"  ok  {line}", highlight=False),
        )
    except Exception as error:  # whatever a plugin does wrong is the suite's answer, not its crash
        kind = "" if isinstance(error, ConformanceError) else f"{type(error).__name__}: "
        console.print(f"  FAILED  {kind}{error}", highlight=False)
        return 1
    console.print(f"{config.method.name} conforms")
    return 0


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConformanceError(otherwise)


def _flat(parts: Parts) -> Tensor:
    return torch.cat([parts[name].double().flatten() for name in sorted(parts)])


def _shapes(parts: Parts) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in parts.items()}
