"""Computes digests of the public files that a run would write for a fit: checkpoint, generator, claimed epsilons."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpgen_bench.generator import Generator
from dpgen_bench.method import Method
from dpgen_bench.privacy.accountants.table import claimed_epsilon, conditional_epsilon
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.testing.digest import Digests, as_json, digests
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.training.checkpoint import public_randomness
from dpgen_bench.training.plain import plain


def state_digests(stateful: dict[str, Any]) -> Digests:
    """Digests of the state dicts that a checkpoint contains.

    Raises:
        ConformanceError: if a checkpoint cannot contain them.
    """
    try:
        return digests(plain({name: value.state_dict() for name, value in stateful.items()}))
    except ValueError as error:
        raise ConformanceError(
            f"a checkpoint cannot contain the state that was passed to ctx.steps: {error}"
        ) from error


def randomness_digests(generator: torch.Generator) -> Digests:
    """Digests of the states of public random generators, which every checkpoint contains."""
    states = public_randomness(generator)
    for source in ("numpy", "python"):  # thousands of numbers, which get one digest together
        states[source] = repr([part.tolist() if isinstance(part, Tensor) else part for part in states[source]])
    return digests(states, "public randomness")


def released_digests(generator: Generator) -> Digests:
    """Digests of the state and config that `Generator.save` writes: tensors by their bits, the config as JSON text.

    Raises:
        ConformanceError: if the config cannot be written as JSON.
    """
    kind = f"{type(generator).__module__}.{type(generator).__qualname__}"
    state = {name: value.detach().cpu().contiguous() for name, value in generator.state().items()}
    return digests({"state": state, "config": as_json({"kind": kind, **generator.config()}, "a generator's config")})


def claims_text(method: Method, ledger: Ledger, delta: float) -> str:
    """`epsilon_claimed` and `epsilon_conditional` of the approved events, as JSON text.

    Raises:
        ConformanceError: if they cannot be written as JSON.
    """
    claims = [claimed_epsilon(method, ledger.events, delta), conditional_epsilon(method, ledger.events, delta)]
    return as_json(claims, "claims")


def saved_digests(generator: Generator) -> Digests:
    """Digests of the files of a generator whose class overrides `save`; empty for other generators."""
    if type(generator).save is Generator.save:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        generator.save(Path(folder))
        files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
        return digests({str(path.relative_to(folder)): path.read_bytes() for path in files})
