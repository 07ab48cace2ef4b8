"""Methods that subtract the noise, or use a key or a private method of the harness, fail; an honest method passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.state import private_rng
from dpgen_bench.testing import ConformanceError, PrivateAccess, check_method
from dpgen_bench.testing.other_noise import OtherNoise
from tests.cheats_noise import PrivateMethodOfTheClass, SubtractsTheNoise

SMALL = {"image_shape": (1, 8, 8), "num_classes": 3}


@pytest.mark.parametrize("by", ["patch", "C"])
def test_methods_that_subtract_the_noise_are_detected(by):
    with pytest.raises(ConformanceError, match=r"but other noise, .* The method depends on the noise"):
        check_method(lambda: SubtractsTheNoise(by=by), **SMALL)


def test_a_method_that_subtracts_a_constant_passes():
    check_method(SubtractsTheNoise, **SMALL)


def test_a_guessed_key_and_private_functions_of_a_class_are_refused():
    with pytest.raises(PrivateAccess, match=r"cheats_noise.py:\d+ used 'seeded' of Key"):
        check_method(lambda: SubtractsTheNoise(by="guess"), **SMALL)
    with pytest.raises(PrivateAccess, match=r"cheats_noise.py:\d+ used '_PrivateData__batch' of PrivateData"):
        check_method(PrivateMethodOfTheClass, **SMALL)


def test_other_noise_has_the_same_draws_and_is_independent():
    one, other = Key.seeded("test").derive("sum", 1), OtherNoise.seeded("test").derive("sum", 1)
    assert np.array_equal(one.bernoulli("draw", 0.3, 1000), other.bernoulli("draw", 0.3, 1000))
    assert one.integer("draw", 10**9) == other.integer("draw", 10**9)
    ids = torch.arange(5)
    assert torch.equal(RecordRng(one, ids).normal(), RecordRng(other, ids).normal())
    assert private_rng(one).initial_seed() == private_rng(other).initial_seed()
    a, b = (add_noise(torch.zeros(10_000), 2.0, key.derive("value")) for key in (one, other))
    # The correlation of independent normal values has a standard deviation of 1 / 100; six of them: 2e-9.
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.06
    assert abs(float(b.std()) / 2.0 - 1.0) < 6 / 20_000**0.5
