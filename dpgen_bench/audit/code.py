"""Audits of code outside of the bench: a function that makes all releases of a run, with or without noise.

    def releases(images, labels, rng):  # images float32 [n, c, h, w] in [0, 1], labels int64 [n]
        ...
        return [value, ...]             # one array for each release; without noise if rng is None

Nothing is known about the function, so a trial of level c executes it. That is slow, and needs no law of the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.audit.bounds import epsilon_from_counts
from dpgen_bench.audit.distinguisher import CONFIDENCE, choose_threshold, rejections
from dpgen_bench.audit.laws import certain_participations
from dpgen_bench.audit.noise import DRAWS, noise_faults
from dpgen_bench.audit.search import candidates
from dpgen_bench.privacy.events import Event, Relation
from dpgen_bench.testing.bench import random_images
from dpgen_bench.testing.checks import TOLERANCE
from dpgen_bench.utils.errors import describe_error

Code = Callable[[Tensor, Tensor, np.random.Generator | None], Sequence[np.ndarray]]

RECORDS = 24  # made-up records of both data sets
SHAPE = (1, 8, 8)
CLASSES = 4


@dataclass(frozen=True)
class Neighbours:
    """Two neighbouring data sets, and the exact values of all releases on both."""

    name: str
    first: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    before: list[np.ndarray]
    after: list[np.ndarray]

    @property
    def distances(self) -> np.ndarray:
        """How far each release moves."""
        return np.array([np.linalg.norm(b - a) for a, b in zip(self.before, self.after, strict=True)])


@dataclass(frozen=True)
class CodeAudit:
    """What an audit of code found.

    Attributes:
        faults: by level, "a" or "b", in words.
        worst: the neighbours whose releases are furthest apart; None if releases on neighbours cannot be compared.
        epsilon: the certified epsilon at level c.
    """

    faults: tuple[tuple[str, str], ...]
    worst: Neighbours | None
    epsilon: float
    trials: int
    false: int
    true: int
    threshold: float


def audit_code(
    code: Code, event: Event, relation: Relation, delta: float, *, trials: int = 1000, seed: int = 0
) -> CodeAudit:
    """Audit code at all three levels.

    Args:
        code: see the module.
        event: what is declared: sampling, sensitivity, noise and number of releases.
        trials: executions of the code in each world at level c; the pilot has as many.

    Raises:
        ValueError: for code that does not return a list of finite arrays.
        RuntimeError: for code that raises an error.
    """
    images, labels = random_images(SHAPE, RECORDS, CLASSES, seed + 1)
    faults: list[tuple[str, str]] = []
    pairs = []
    for name, other in _neighbours(images, labels, relation):
        before, after = (_exact(code, *data) for data in ((images, labels), other))
        if [each.shape for each in before] != [each.shape for each in after]:
            if not faults:  # one pair is proof enough
                faults.append(("a", f"the number or the shapes of releases depend on the data ({name})"))
            continue
        pairs.append(Neighbours(name, (images, labels), other, before, after))
    worst = max(pairs, key=lambda pair: float(np.square(pair.distances).sum()), default=None)
    faults += [("a", text) for text in _movement_faults(pairs, event, relation)]
    faults += [("b", text) for text in _code_noise_faults(code, images, labels, event.std, seed)]
    if worst is None:
        return CodeAudit(tuple(faults), None, 0.0, 0, 0, 0, 0.0)
    streams = [np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(4)]
    pilot = [_scores(code, worst, world, trials, streams[world]) for world in (0, 1)]
    threshold, rejects_first = choose_threshold(pilot[0], pilot[1], delta, CONFIDENCE)
    first, second = (_scores(code, worst, world, trials, streams[2 + world]) for world in (0, 1))
    false, true = rejections(first, second, threshold, rejects_first)
    epsilon = float(epsilon_from_counts(np.array(false), trials, np.array(true), trials, delta, CONFIDENCE))
    return CodeAudit(tuple(faults), worst, epsilon, trials, false, true, threshold)


def _exact(code: Code, images: Tensor, labels: Tensor) -> list[np.ndarray]:
    return _released(code, images, labels, None)


def _released(code: Code, images: Tensor, labels: Tensor, rng: np.random.Generator | None) -> list[np.ndarray]:
    """All releases of one execution, each float64 [p]."""
    try:
        values = code(images.clone(), labels.clone(), rng)
    except Exception as error:  # of any kind, since it is the user's code; the cause is kept
        noise = "without noise (rng is None)" if rng is None else "with noise"
        raise RuntimeError(f"the code under audit raised an error {noise}: {describe_error(error)}") from error
    expected = "expected code that returns a list with one array for each release"
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{expected}, got {'an empty list' if values == [] else type(values).__name__}.")
    arrays = [np.asarray(value, dtype=np.float64).ravel() for value in values]
    if not all(np.isfinite(each).all() for each in arrays):
        raise ValueError(f"{expected}, of finite numbers, got one with a NaN or an infinite number.")
    return arrays


def _neighbours(images: Tensor, labels: Tensor, relation: Relation) -> list[tuple[str, tuple[Tensor, Tensor]]]:
    """Data sets that differ from the first one in a record: its last one is removed, or replaced by candidates."""
    if relation == "add_remove":
        more = [("the last record removed", (images[:-1], labels[:-1]))]
        for each in candidates(images[-1], int(labels[-1]), images[:2], CLASSES):
            joined = (torch.cat([images, each.image[None]]), torch.cat([labels, torch.tensor([each.label])]))
            more.append((f"{each.name} added", joined))
        return more
    pairs = []
    for each in candidates(images[-1], int(labels[-1]), images[:2], CLASSES):
        replaced = (torch.cat([images[:-1], each.image[None]]), torch.cat([labels[:-1], torch.tensor([each.label])]))
        pairs.append((f"the last record replaced by {each.name}", replaced))
    return pairs


def _movement_faults(pairs: Sequence[Neighbours], event: Event, relation: Relation) -> list[str]:
    """Releases that move too far, that are too many, or that move more often than the record takes part."""
    found: list[str] = []
    declared = float(getattr(event.sensitivity, relation)) * (1.0 + TOLERANCE)
    allowed = certain_participations(event)
    for pair in pairs:
        if len(pair.before) > event.times:
            return [f"{len(pair.before)} releases are made, but {event.times} are declared"]
        furthest = float(pair.distances.max(initial=0.0))
        if furthest > declared:
            found.append(f"a release moves by {furthest:.6g}, but {declared:.6g} is declared ({pair.name})")
        moving = int((pair.distances > 0.0).sum())
        if allowed is not None and moving > allowed:
            found.append(f"a record takes part in {moving} releases, but in at most {allowed} by the declared sampling")
    return found[-1:]


def _code_noise_faults(code: Code, images: Tensor, labels: Tensor, std: float, seed: int) -> list[str]:
    """Faults of the noise of enough runs on one data set."""
    exact = _exact(code, images, labels)
    numbers = max(1, sum(map(len, exact)))
    runs = []
    for number in range(min(200, max(2, -(-DRAWS // numbers)))):
        released = _released(code, images, labels, np.random.default_rng([seed, number]))
        runs.append([value - own for value, own in zip(released, exact, strict=True)])
    return noise_faults(runs, std)


def _scores(code: Code, pair: Neighbours, world: int, trials: int, rng: np.random.Generator) -> np.ndarray:
    """Projections of all releases on the line between the exact values of both worlds, float64 [trials]."""
    images, labels = (pair.first, pair.second)[world]
    line = [b - a for a, b in zip(pair.before, pair.after, strict=True)]
    scores = np.empty(trials)
    for trial in range(trials):
        parts = zip(_released(code, images, labels, rng), pair.before, line, strict=True)
        scores[trial] = sum(float((value - own) @ way) for value, own, way in parts)
    return scores
