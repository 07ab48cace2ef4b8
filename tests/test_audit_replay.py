"""Level a of an audit: the search for the record that moves a release furthest, and what level c makes of it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import zlib

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from scipy import stats

from dpgen_bench.audit.distinguisher import certify
from dpgen_bench.audit.methods import audit_method, method_spec, with_audited
from dpgen_bench.audit.noise import noise_faults
from dpgen_bench.audit.pretrained_once import PretrainedOnce
from dpgen_bench.audit.replay import Enough, ShortTape, _moved, attacked_record, describe, noise_of_runs, replay
from dpgen_bench.audit.search import furthest_first
from dpgen_bench.cli import main
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.outcomes.listing import describe_certified, epsilon_entry
from dpgen_bench.pretraining.pretrained import Pretrained
from dpgen_bench.privacy.bounds import PerRecord, Whole
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.sampling import EveryShard, Full, OneShard, Poisson
from dpgen_bench.privacy.shards import PerShard
from dpgen_bench.runs.plan import plan_spec
from dpgen_bench.testing.bench import Bench
from dpgen_bench.testing.checks import TOLERANCE
from dpgen_bench.testing.errors import ConformanceError
from dpgen_bench.testing.suite import random_data
from dpgen_bench.testing.tape import Release, Tape, rounding
from tests.toys import CoupledRows, MeanImage

SHAPE = (1, 8, 8)
SMALL = ["method=dp_merf", "method.features=20", "dataset=digits", "privacy.epsilon=1"]


def toy(make_method, records=40):
    bench = Bench(make_method, random_data(SHAPE, records, 3, 8, 0), SHAPE, 3, budget=Budget(10.0), public_n=1000)
    ledger = bench.fit(bench.base, Tape()).ledger
    record, _ = attacked_record(ledger, Key.seeded("conformance:0"), records)
    return bench, ledger, record


def replayed(make_method):
    return replay(*toy(make_method))


class Projection(MeanImage):
    """Each image is projected on signs. The norm is 1 for the image that is white where the sign is positive."""

    def row(self, images, labels):
        signs = torch.where(torch.arange(64) % 3 == 0, 1.0, -1.0)
        return (images.flatten(1) @ signs / 22.0)[:, None].expand(-1, 64).reshape(images.shape) / 8.0

    def mechanism(self, data, ctx):
        return data.mechanism("sum", sample=Full(), bound=PerRecord(C=2.0, shape=data.image_shape), times=2)


class Shards(MeanImage):
    def mechanism(self, data, ctx):
        bound = Whole(C=1.0, shape=data.image_shape)
        return data.mechanism("sum", sample=OneShard(2, "public_balanced"), bound=bound, times=4)

    def row(self, images, labels):
        return images.sum(dim=0)


class Voters(MeanImage):
    """Each of four shards answers with the sum of its images."""

    calls = 0

    def mechanism(self, data, ctx):
        bound = PerShard(C=1.0, shape=data.image_shape)
        return data.mechanism("sum", sample=EveryShard(4), bound=bound, times=4)

    def row(self, shards, rngs):
        Voters.calls += 1
        return torch.stack([images.sum(dim=0) for images, _ in shards])


def test_only_the_shard_of_the_attacked_record_is_asked():
    bench, ledger, record = toy(Voters)
    Voters.calls = 0
    tape = ShortTape(wanted={"sum": 3}, record=record)
    with contextlib.suppress(Enough):
        bench.fit(bench.base, tape)
    assert Voters.calls == 3
    assert [tuple(each.rows) for each in tape.releases] == [(EveryShard(4).shard_of(np.array([record]))[0],)] * 3
    moved, _ = replay(bench, ledger, record).furthest("sum", "replace_one")
    assert 0.0 < moved.distance < moved.declared == 2.0


def test_replays_on_neighbours_end_with_the_last_release_that_draws_the_attacked_record():
    bench, ledger, record = toy(Shards)
    draws = [ledger.entries["sum"].event.sampling.draw(np.arange(40), Key.seeded("conformance:0"), t) for t in range(3)]
    last = max(t for t in range(3) if record in draws[t])
    result = replay(bench, ledger, record)
    assert result.releases == {"sum": 3}
    assert max(each.index for pair in result.pairs for each in pair.moved) == last


def test_settings_for_audits_that_change_a_mechanism_are_refused():
    _, ledger, record = toy(MeanImage)
    other, _, _ = toy(Projection)
    with pytest.raises(ValueError, match="leave mechanism 'sum' as it is"):
        replay(other, ledger, record)


def test_the_warm_start_of_gs_wgan_is_left_out():
    method = method_spec(["method=gs_wgan", "dataset=digits", "privacy.epsilon=1"]).method()
    assert method.warm_start == 2000
    assert with_audited(method, {}).warm_start == 0
    assert with_audited(method, {}).shards == method.shards


@pytest.mark.slow
def test_an_audit_pretrains_once_and_finds_what_it_finds_without_that(monkeypatch):
    settings = ["method=dp_cgan", "method.hidden=8", "method.steps=9", "dataset=digits", "privacy.epsilon=1"]
    stage = ["init=gauss", "init.dim=4", "init.images=40", "method.pretraining.steps=3"]
    fits, original = [], Pretrained._networks
    monkeypatch.setattr(Pretrained, "_networks", lambda self, *rest: fits.append(1) or original(self, *rest))
    spec = method_spec([*settings, *stage])
    once = audit_method(spec, levels="a")
    assert len(fits) == 1
    assert audit_method(spec, levels="ab").noise == {name: [] for name in once.replayed.events}
    assert len(fits) == 2  # the fit with another seed, from which level b takes noise, has the same networks
    monkeypatch.setattr(PretrainedOnce, "_networks", Pretrained._networks)
    each = audit_method(spec, levels="a")
    assert len(fits) > 6
    assert [once.to_dict(), once.replayed.pairs] == [each.to_dict(), each.replayed.pairs]


def test_an_honest_sum_reaches_its_sensitivity_and_does_not_exceed_it():
    result = replayed(MeanImage)
    moved, pair = result.furthest("sum", "add_remove")
    assert moved.distance == pytest.approx(5.0, rel=1e-5)
    assert (pair.names[0], moved.declared) == ("removed", 5.0)
    assert moved.first == 0.0
    exchanged, _ = result.furthest("sum", "replace_one")
    assert 5.0 < exchanged.distance < 10.0
    assert result.exceeded == []
    assert any("moved 5" in line and "(1.000)" in line for line in describe(result))


def test_gradient_ascent_finds_a_record_that_no_list_contains():
    """A white image has the norm 20/22 and a black one 0; the best image has 42/22, with the other sign."""
    result = replayed(Projection)
    moved, pair = result.furthest("sum", "add_remove")
    assert "gradient ascent" in pair.names[1]
    assert moved.distance == pytest.approx(42.0 / 22.0, rel=1e-5)
    exchanged, pair = result.furthest("sum", "replace_one")
    assert exchanged.distance == pytest.approx(64.0 / 22.0, rel=1e-5)


class Turned(MeanImage):
    """Row of an image: in the part of its label, a vector of norm 2 whose angle is π times its projection on signs.

    Angles are in [-22π/64, 42π/64], so that the rows of two images of a label are opposite if their pixels are.
    """

    def row(self, images, labels):
        angles = math.pi * (images.flatten(1) @ torch.where(torch.arange(64) % 3 == 0, 1.0, -1.0) / 64.0)
        parts = torch.stack([angles.cos(), angles.sin()], dim=1)[:, None] * torch.eye(3)[labels % 3][:, :, None]
        return torch.cat([2.0 * parts.flatten(1), torch.zeros(len(images), 58)], dim=1).reshape(images.shape)


def test_the_search_finds_opposite_rows_though_rows_of_other_labels_are_far_already():
    """Rows of other labels are orthogonal, at a distance of 2√2, and gradients move them no further."""
    moved, pair = replayed(Turned).furthest("sum", "replace_one")
    assert moved.distance == pytest.approx(4.0, rel=1e-3), pair.names


@pytest.mark.parametrize("noise", [-2e-4, 0.0, 2e-4])
def test_distances_that_are_equal_up_to_rounding_keep_their_order(noise):
    distances = torch.tensor([0.5, 1.0, 1.0 + noise, 2.0, 2.0 - abs(noise), 0.0])
    assert furthest_first(distances) == [3, 4, 1, 2, 0, 5]
    assert furthest_first(torch.zeros(3)) == [0, 1, 2]


def sums(rows, dtype=torch.float32):
    """A release whose exact value is the sum of rows [n, p], added one after another in `dtype`."""
    total = torch.zeros(rows.shape[1], dtype=dtype)
    for row in rows:
        total += row.to(dtype)
    return Release("sum", 0, np.arange(1), {"value": total}, {})


@pytest.mark.parametrize(("dtype", "factor", "exceeds"), [
    (torch.float32, 1.0, False), (torch.float32, 1.001, True), (torch.float64, 1.0, False),
    (torch.float64, 1.00002, True),
])  # fmt: skip
def test_the_rounding_of_a_large_sum_is_no_movement(dtype, factor, exceeds):
    """A record of norm 1 is removed from 4,000 rows of norm 1 that add up, so that all others change places."""
    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(4000, 500) * 0.1 + 1.0, dim=1)
    rows[0] *= factor
    event = Event(Poisson(0.5), Sensitivity(1.0, 2.0), 1.0, 1)
    moved = _moved(sums(rows[1:], dtype), sums(rows, dtype), sums(rows[1:], dtype), event, "add_remove")
    assert moved.exceeds == exceeds
    assert moved.rounding == pytest.approx(torch.finfo(dtype).eps * float(rows.double().sum(0).norm()), rel=1e-3)
    assert moved.movement.distance <= 1.0 + 1e-12
    if dtype == torch.float32 and factor == 1.0:
        assert abs(moved.distance - 1.0) > TOLERANCE  # otherwise this test would show nothing


def test_a_value_that_is_not_finite_allows_no_rounding():
    assert rounding({"value": torch.tensor([torch.inf])}, {"value": torch.tensor([torch.nan])}) == 0.0
    assert rounding({"value": torch.tensor([3, 4])}) == 0.0
    assert rounding({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}) == pytest.approx(5.0 * 2.0**-23)


def test_rows_that_depend_on_the_batch_move_further_than_declared():
    result = replayed(CoupledRows)
    assert result.exceeded


def test_a_method_whose_releases_depend_on_other_releases_of_records_is_refused():
    class Stops(MeanImage):
        """Cheat: the number of releases depends on records."""

        def row(self, images, labels):
            self.seen = len(images)
            return images

        def fit(self, data, ctx):
            release = self.mechanism(data, ctx)
            release(self.row)
            other = super().fit
            return other(data, ctx)

    with pytest.raises((ConformanceError, ValueError)):
        replayed(Stops)


def test_movements_of_a_mechanism_that_was_replayed_completely_are_those_of_its_releases():
    result = replayed(Projection)
    _, attacked = result.attacked("add_remove")
    assert [each.event.times for each in attacked] == [1, 1]
    assert all(each.movement.distance == pytest.approx(42.0 / 22.0, rel=1e-5) for each in attacked)


def test_the_least_movement_stands_for_releases_that_were_not_replayed():
    result = replayed(MeanImage)
    pair, (attacked,) = result.attacked("replace_one")
    assert attacked.event.times == 6
    assert attacked.movement.distance == pytest.approx(min(each.distance for each in pair.moved))


def test_a_record_takes_part_in_the_draws_of_its_shard_only():
    result = replayed(Shards)
    pair, (attacked,) = result.attacked("add_remove")
    assert len(pair.moved) in (1, 2)  # of three replayed releases
    assert attacked.event.sampling == OneShard(2, "public_balanced")


def test_the_attacked_record_and_the_records_of_a_replay_are_in_the_first_draws():
    bench = Bench(MeanImage, random_data(SHAPE, 40, 3, 8, 0), SHAPE, 3)
    ledger = bench.fit(bench.base, Tape()).ledger
    key = Key.seeded("conformance:0")
    record, ids = attacked_record(ledger, key, 1000)
    draws = [ledger.entries["sum"].event.sampling.draw(np.arange(1000), key.derive("sum", t), t) for t in range(3)]
    assert sum(record in draw for draw in draws) >= 2
    assert record in ids
    assert len(ids) == 256
    assert set(ids) <= set(np.concatenate(draws))


def test_audit_of_a_method():
    lines = []
    result = audit_method(method_spec(SMALL), trials=20_000, echo=lines.append)
    assert result.relation == "add_remove"
    assert result.proven == pytest.approx(1.0, rel=1e-3)
    assert 0.8 < result.certificate.gdp < 1.0
    assert result.certificate.epsilon < result.certificate.gdp
    assert not result.exceeded
    assert result.noise == {"mean_embedding": []}
    assert not result.refuted
    assert lines
    record = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert record["moved"]["mean_embedding"]["add_remove"]["distance"] == pytest.approx(1.0, rel=1e-5)


def test_an_infinite_budget_is_audited_without_an_accusation():
    result = audit_method(method_spec([*SMALL[:3], "privacy.epsilon=inf"]), trials=200, levels="ac")
    assert result.proven == math.inf
    assert result.certificate.gdp == math.inf
    assert not result.refuted
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_noise_of_a_method_is_tested_with_enough_draws():
    bench, ledger, record = toy(MeanImage)
    result = replay(bench, ledger, record)
    (one, other) = noise_of_runs(bench, result)["sum"]
    assert len(one) == len(other)
    assert 60_000 < sum(map(len, one + other)) < 110_000
    std = ledger.entries["sum"].event.std
    assert noise_faults([one, other], std) == []
    assert noise_faults([one, other], 1.1 * std)


def test_the_command_audits_a_method(capsys):
    arguments = ["audit", "dp_merf", *SMALL[1:], "--trials", "2000", "--relation", "replace_one"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    (found,) = re.finditer(r"level a    mean_embedding, replace_one: moved ([\d.]+) of 2 declared", out)
    assert 1.99 < float(found.group(1)) <= 2.0  # features of two records can be opposite
    assert "certified  epsilon >= " in out
    assert "no proof" in out
    assert main([*arguments, "--level", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["certified"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dp_merff"], "did you mean 'dp_merf'"),
        (["public_fonts", "dataset=digits", "privacy.epsilon=0"], "which makes no release"),
        (["gs_wgan_published", "--level", "a"], "no other level than c"),
        (["dp_merf", "dataset=digits", "privacy.epsilon=1", "privacy.noise=os"], "an audit computes from the records"),
    ],
)
def test_what_cannot_be_audited_is_said(arguments, message, capsys, tmp_path):
    assert main(["audit", *arguments, "--results", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_what_was_certified_is_written_into_the_ledger_of_a_run(tmp_path, capsys):
    spec = method_spec([*SMALL, f"results={tmp_path}"])
    folder = tmp_path / "runs" / spec.id
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(json.dumps(spec.training))
    OmegaConf.save(spec.config, folder / "config.yaml")
    ledger = plan_spec(spec)
    ledger.path = folder / "ledger.json"
    ledger.epsilon = {"proven": 1.0, "claimed": None, "relation": "add_remove"}
    ledger.save()
    arguments = ["audit", spec.id[:6], "--results", str(tmp_path), "--trials", "5000"]
    assert main([*arguments, "--relation", "replace_one"]) == 0
    assert "certified" not in Ledger.load(folder / "ledger.json").epsilon
    assert main(arguments) == 0
    assert "written    to" in capsys.readouterr().out
    epsilon = Ledger.load(folder / "ledger.json").epsilon
    assert 0.5 < epsilon["certified"]["epsilon"] < 1.0
    assert epsilon["certified"]["attack"]["neighbours"][0] == "removed"
    assert "at 95 %, 5,000 trials, level c (Gaussian by construction, add/remove)" in describe_certified(epsilon)
    assert (epsilon["certified"]["run"], epsilon["certified"]["seed"]) == (spec.id, 0)
    assert epsilon_entry(epsilon, "certified") == epsilon["certified"]["epsilon"]


def test_a_run_that_was_not_audited_has_no_certified_epsilon():
    assert describe_certified({"proven": 1.0}) == "not audited"
    assert describe_certified({"certified": {"epsilon": None, "reason": "why"}}) == "not audited: why"


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("method", ["dp_merf", "dp_gauss", "dp_ntk", "dpgan", "dp_sinkhorn"])
def test_methods_of_the_bench_are_accused_no_more_often_than_the_confidence_allows(method, relation, record_property):
    """Each of three budgets is attacked 20 times, with the movements that level a found at the `check` settings."""
    accused = total = 0
    for claim in (0.2, 1.0, 10.0):
        chosen = [f"method={method}", "dataset=digits", f"privacy.epsilon={claim}", f"privacy.relation={relation}"]
        config = compose_config(chosen)
        for key, value in (config.method.get("check") or {}).items():
            if not key.startswith("privacy."):
                OmegaConf.update(config, f"method.{key}", value)
        result = audit_method(build_spec(config), levels="ab")
        assert not result.exceeded
        assert not result.wrong_noise
        _, attacked = result.replayed.attacked(relation)
        for seed in range(20):
            own = zlib.crc32(f"{method} {claim} {relation} {seed}".encode())  # so that all audits are independent
            accused += certify(attacked, result.delta, relation, trials=1000, seed=own).strongest > result.proven
            total += 1
    record_property("accused", f"{accused} of {total}")  # in the file of --junitxml, for docs/audit.md
    assert stats.binomtest(accused, total, 0.05, alternative="greater").pvalue > 1e-3
