"""The global generators of random numbers: their states, seeds, and private code that changes them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dpgen_bench.privacy.state import GlobalRandomness, public_randomness_untouched
from dpgen_bench.utils.randomness import kept, seed_everything, seeded

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002, the global generator is meant
    "numpy, one of two": lambda: float(np.random.standard_normal()),  # noqa: NPY002
    "python": random.random,
    "python, one of two": lambda: random.gauss(0.0, 1.0),
}

CASES = [
    *(pytest.param(draw, id=name) for name, draw in DRAWS.items()),
    pytest.param(lambda: float(torch.rand((), device="cuda")), id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("draw", CASES)
def test_a_draw_is_found_and_its_generator_restored(draw):
    with seeded(1):
        draw()
        expected = [draw(), draw()]
    with seeded(1):
        draw()
        with kept() as changed:
            draw()
        assert changed == [True]
        assert [draw(), draw()] == expected
        with kept() as changed:
            torch.rand(3, generator=torch.Generator())
        assert changed == [False]


@pytest.mark.parametrize("draw", CASES)
@pytest.mark.parametrize("error", [GlobalRandomness, ZeroDivisionError])
def test_private_code_that_draws_is_refused_and_public_randomness_is_as_before(draw, error):
    """Also if it raises another error, which a method may catch."""

    def private() -> None:
        with public_randomness_untouched("a function"):
            draw()
            if error is ZeroDivisionError:
                raise ZeroDivisionError

    with seeded(2):
        expected = draw()
    with seeded(2):
        with pytest.raises(error):
            private()
        assert draw() == expected


def test_one_seed_gives_the_same_numbers_of_all_generators():
    with seeded(0):
        first = [draw() for draw in DRAWS.values()]
    with kept():
        seed_everything(0)
        assert [draw() for draw in DRAWS.values()] == first
    with seeded(1):
        assert all(draw() != other for draw, other in zip(DRAWS.values(), first, strict=True))
