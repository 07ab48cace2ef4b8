"""The audit is audited: every planted fault is found at its level, and honest code is not accused."""

from __future__ import annotations

import numpy as np
import pytest

from dpgen_bench.audit.code import audit_code
from dpgen_bench.audit.noise import noise_faults
from tests.audit_faults import FAULTS, HONEST, noise_without_effect

STD = 1.7


@pytest.mark.parametrize("code", FAULTS, ids=lambda code: code.__name__)
def test_a_planted_fault_is_found(code):
    event, level = FAULTS[code]
    faults = {
        found
        for relation in ("add_remove", "replace_one")
        for found, _ in audit_code(code, event, relation, 1e-5, trials=2).faults
    }
    assert level in faults


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("code", HONEST, ids=lambda code: code.__name__)
def test_honest_code_is_not_accused(code, relation):
    assert audit_code(code, HONEST[code], relation, 1e-5, trials=2).faults == ()


def test_code_whose_noise_has_no_effect_is_certified_to_leak_all_that_the_trials_allow():
    event, _ = FAULTS[noise_without_effect]
    result = audit_code(noise_without_effect, event, "add_remove", 1e-5, trials=300)
    assert (result.false, result.true) == (0, 300)
    assert result.epsilon > 4.0


def runs(rng, number=2, releases=3, size=2000, std=STD):
    return [[std * rng.standard_normal(size) for _ in range(releases)] for _ in range(number)]


def test_noise_as_stated_is_not_accused():
    accused = sum(bool(noise_faults(runs(np.random.default_rng(seed)), STD)) for seed in range(100))
    assert accused == 0  # each test has a false alarm with a probability of 1e-6


def test_each_kind_of_wrong_noise_is_named():
    rng = np.random.default_rng(0)
    right = runs(rng)
    assert "0.9" in noise_faults([[0.93 * each for each in run] for run in right], STD)[0]
    shared = [[run[0], run[0], run[2]] for run in right]
    assert any("two releases of a run" in text for text in noise_faults(shared, STD))
    assert any("two runs" in text for text in noise_faults([right[0], right[0]], STD))
    uniform = [[STD * np.sqrt(12.0) * (rng.random(20_000) - 0.5)] for _ in range(2)]
    assert any("not normal" in text for text in noise_faults(uniform, STD))
    smooth = [[np.convolve(each, [0.8, 0.6])[1:] for each in run] for run in right]
    assert any("neighbouring numbers" in text for text in noise_faults(smooth, STD))
    silent = [[np.r_[each[:-200], np.zeros(200)] for each in run] for run in right]
    assert any("of 10 of the numbers" in text or "standard deviation" in text for text in noise_faults(silent, STD))


def test_noise_of_single_numbers_is_tested():
    same = [[np.array([2.0]), np.array([2.0])], [np.array([0.5]), np.array([-1.0])]]
    assert any("two releases of a run" in text for text in noise_faults(same, STD))


def test_a_missing_standard_deviation_is_not_tested():
    assert noise_faults([[np.zeros(5)]], 0.0) == []
