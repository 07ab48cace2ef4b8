"""Level d of an audit: guesses of which canaries one fit included."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy import stats

from dpgen_bench.audit.canaries import attack_samples, ceiling, describe_seen, guess, one_run_epsilon, p_value, plant
from dpgen_bench.cli import main
from dpgen_bench.data.records import Records

DELTA, CLASSES = 1e-5, 3


def images(number, seed=0):
    """Smooth random images with labels, which resemble each other more than they resemble noise."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(0, CLASSES, number))
    coarse = torch.from_numpy(rng.integers(0, 256, (number, 1, 2, 2), dtype=np.uint8))
    return Records(coarse.repeat_interleave(4, 2).repeat_interleave(4, 3), labels)


def publishes(planted):
    """A generator whose samples are its training records."""
    return planted.records


def overfits(planted):
    """A generator that was trained without noise, and repeats a part of its training records inexactly."""
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.permutation(len(planted.records))[: len(planted.records) // 2])
    noise = torch.from_numpy(rng.normal(0.0, 8.0, tuple(planted.records.images[chosen].shape))).float()
    near = (planted.records.images[chosen].float() + noise).clamp(0, 255)
    return Records(near, planted.records.labels[chosen])


def honest(planted):
    """A generator that learnt nothing about single records."""
    return images(500, seed=9)


def seen_by(fit, seed=0, canaries=200):
    return attack_samples(fit, images(2000), images(300, seed=5), CLASSES, DELTA, canaries=canaries, seed=seed)


def test_no_attack_on_one_run_shows_more_than_8_24():
    assert ceiling(1e-5) == pytest.approx(8.24, abs=0.005)
    expected = {100: 3.49, 1000: 5.78, 10_000: 7.83, 100_000: 8.13}  # computed for the reference pages
    assert {m: round(one_run_epsilon(m, m, m, DELTA), 2) for m in expected} == expected


def test_the_p_value_without_delta_is_that_of_randomised_response():
    for epsilon in (0.0, 0.7, 2.0):
        rate = 1.0 / (1.0 + np.exp(-epsilon))
        assert p_value(50, 40, 31, epsilon, 0.0) == pytest.approx(stats.binom.sf(30, 40, rate))


def test_randomised_response_is_not_accused_more_often_than_the_confidence_allows():
    """Random bits that are reported correctly with the rate of epsilon = 1 are what the bound is for."""
    rng = np.random.default_rng(0)
    correct = rng.binomial(400, 1.0 / (1.0 + np.exp(-1.0)), size=100)
    above = sum(one_run_epsilon(400, 400, int(each), 0.0) > 1.0 for each in correct)
    assert stats.binomtest(above, 100, 0.05, alternative="greater").pvalue > 1e-3


def test_canaries_are_included_at_random_and_others_stay():
    train = images(400)
    planted = plant(train, 100, CLASSES, seed=3)
    assert 30 < planted.included.sum() < 70
    assert len(planted.records) == 400 - (~planted.included).sum() == len(planted.ids)
    wrong = planted.kinds == 0
    assert 0 < wrong.sum() < 100
    kept = np.flatnonzero(np.isin(planted.ids, np.arange(400)))
    same = (planted.records.images == train.images[planted.ids]).flatten(1).all(dim=1).numpy()
    assert (~same).sum() == (planted.included & ~wrong).sum()
    moved = (planted.records.labels != train.labels[planted.ids]).numpy() & same
    assert moved.sum() == (planted.included & wrong).sum()
    assert len(kept) == len(planted.ids)


@pytest.mark.parametrize("fit", [publishes, overfits])
def test_a_generator_that_repeats_its_training_records_is_seen(fit):
    seen = seen_by(fit)
    assert seen.epsilon > 1.0
    assert seen.below > 0.5
    assert seen.epsilon <= seen.ceiling < 8.25
    assert (seen.copies_pct > 99.0) == (fit is publishes)


def test_few_copies_among_samples_are_seen():
    """Four per cent of the training records are published: most canaries cannot be guessed, but a few are certain."""

    def few(planted):
        return Records(planted.records.images[::25], planted.records.labels[::25])

    seen = attack_samples(few, images(10_000), images(300, seed=5), CLASSES, DELTA, canaries=1000)
    assert seen.epsilon > 0.3
    assert seen.below < 0.55


def test_an_honest_generator_is_not_seen():
    """It shows an epsilon above 0 in at most 5 % of fits."""
    found = [seen_by(honest, seed=seed, canaries=60) for seed in range(40)]
    above = sum(each.epsilon > 0.0 for each in found)
    assert stats.binomtest(above, 40, 0.05, alternative="greater").pvalue > 1e-3
    outside = sum(not each.below <= 0.5 <= each.above for each in found)
    assert stats.binomtest(outside, 40, 0.05, alternative="greater").pvalue > 1e-3
    assert all(each.copies_pct == 0.0 for each in found)


def test_equal_distances_show_nothing():
    planted = plant(images(400), 100, CLASSES, seed=3)
    shown, correct = guess(planted, np.full(100, np.inf), DELTA, seed=0)
    assert shown == 0.0
    assert 25 < correct < 75


def test_what_was_seen_is_never_called_certified():
    lines = describe_seen(seen_by(publishes))
    assert all("certified" not in line and "proven" not in line for line in lines)
    assert any("95 % interval" in line for line in lines)
    assert "8.24" in lines[-1]


def test_too_few_records_are_refused():
    with pytest.raises(ValueError, match="at least 2 canaries"):
        attack_samples(publishes, images(15), images(15), CLASSES, DELTA)


def test_the_command_sees_published_records_and_no_canaries_of_an_honest_method(capsys):
    real = ["audit", "real_data", "dataset=digits", "privacy.epsilon=inf", "--level", "d", "--trials", "60"]
    assert main([*real, "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["level"], seen["canaries"], seen["copies_pct"]) == ("d", 60, 100.0)
    assert seen["epsilon"] > 1.0
    small = ["method.features=20", "method.steps=3", "method.batch_size=20", "protocol.num_samples=200"]
    assert main(["audit", "dp_merf", "dataset=digits", "privacy.epsilon=1", *small, "--level", "d"]) == 0
    out = capsys.readouterr().out
    assert "what this attack saw" in out
    assert "certified" not in out


def test_more_than_the_budget_is_an_accusation(monkeypatch, capsys):
    """A method that publishes its records, with the budget of an honest one."""
    from dpgen_bench.audit import canaries

    monkeypatch.setattr(canaries, "fitted_samples", lambda spec, planted, records: planted.records)
    arguments = ["audit", "dp_merf", "dataset=digits", "privacy.epsilon=0.5", "--level", "d"]
    assert main(arguments) == 1
    assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dp_merf", "dataset=digits", "privacy.epsilon=1", "privacy.noise=os"], "an audit computes from the records"),
        (["gs_wgan_published"], "no other level than c"),
    ],
)
def test_what_cannot_be_attacked_is_said(arguments, message, capsys, tmp_path):
    assert main(["audit", *arguments, "--level", "d", "--results", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
