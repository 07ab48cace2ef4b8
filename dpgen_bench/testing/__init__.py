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

from collections.abc import Callable, Iterator

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from torch import Tensor

from dpgen_bench.method import Method
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.specify import RunSpec, build_dataset, build_method, compose_config
from dpgen_bench.testing.bench import Bench, ConformanceError, Fit, Tape
from dpgen_bench.testing.checks import (
    check_budget,
    check_empty_draws,
    check_generator,
    check_kept_state,
    check_replay,
)
from dpgen_bench.testing.draws import check_draws, check_noise
from dpgen_bench.testing.neighbours import Neighbour, client_neighbours, neighbours, owners, telling_units

__all__ = ["ConformanceError", "check_configured_method", "check_method"]


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
    first = bench.fit(images, labels, np.arange(records), owners(records, bench.clients), Tape())
    check_budget(first, bench.budget)
    tell(f"ledger within ε = {bench.budget.epsilon:g}; {len(first.tape.releases)} releases, one more is refused")
    check_noise(first)
    tell("noise has the ledger's standard deviation and is never used twice")
    check_draws(first)
    tell("draws have the ledger's rate and are fresh for each release")
    for neighbour in _neighbours(bench, first, images, labels):
        check_replay(bench, first, neighbour)
        tell(f"replay, {neighbour.name}: within its sensitivity, same log, same generator")
    if any(entry.bound.get("private_state") or entry.noise_at == "client" for entry in first.ledger.entries.values()):
        check_kept_state(bench, first, images, labels)
        tell("private state found in a cache, or kept on disk, changes nothing")
    check_empty_draws(bench, images, labels)
    tell("empty draws are survived")
    check_generator(first.generator, image_shape, num_classes)
    tell("samples: shape, dtype, labels, seeds, prefixes, save and load")


def _neighbours(bench: Bench, first: Fit, images: Tensor, labels: Tensor) -> Iterator[Neighbour]:
    """Data sets that differ from the first in one unit of its ledger."""
    changed = telling_units(first.tape)
    if first.ledger.unit == "record":
        return neighbours(images, labels, changed, bench.num_classes, bench.clients)
    join = all(isinstance(event.sampling, Poisson) for event in first.ledger.events)
    return client_neighbours(images, labels, changed, bench.num_classes, bench.clients, join=join)


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
