"""`dpgen audit CASE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dpgen_bench.audit.cases import case_files, load_case
from dpgen_bench.cli import main

CASE = {
    "name": "mine",
    "title": "A sum with too little noise",
    "claimed": {"epsilon": 1.0, "delta": 1e-5, "relation": "add_remove", "source": "nobody"},
    "mechanisms": [{"name": "sum", "sampling": {"kind": "Full"}, "moved": 2.0, "std": 3.7306, "times": 1}],
}


def written(tmp_path, **changes):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**CASE, **changes}))
    return str(path)


def mechanism(**changes):
    return {"mechanisms": [{**CASE["mechanisms"][0], **changes}]}


@pytest.mark.parametrize("name", sorted(case_files()))
def test_every_case_of_the_bench_can_be_read(name):
    assert load_case(case_files()[name]).name == name


def test_a_claim_is_refuted(tmp_path, capsys):
    assert main(["audit", written(tmp_path), "--trials", "5000"]) == 1
    out = capsys.readouterr().out
    assert "REFUTED" in out
    assert "5,000 trials in each world" in out
    assert "Gaussian by construction" in out


def test_a_claim_that_holds_is_not_refuted(tmp_path, capsys):
    assert main(["audit", written(tmp_path, **mechanism(moved=1.0)), "--trials", "5000"]) == 0
    assert "no proof that the claim holds" in capsys.readouterr().out


def test_the_result_as_json(tmp_path, capsys):
    assert main(["audit", written(tmp_path), "--trials", "2000", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["refuted"]
    assert result["gdp"] > result["claimed"] == 1.0


def test_rows_of_one_release_move_together(tmp_path):
    path = written(tmp_path, **mechanism(rows=9, moved=[-1.0, 1.0], sampling={"kind": "Poisson", "rate": "1/469"}))
    (attacked,) = load_case(Path(path)).attacked
    assert (attacked.movement.first, attacked.movement.second) == (-3.0, 3.0)
    assert attacked.event.sampling.rate == 1 / 469


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (mechanism(sampling={"kind": "Poison", "rate": 0.1}), "a sampling with `kind` in"),
        (mechanism(sampling={"kind": "Poisson", "rat": 0.1}), "settings of Poisson in rate"),
        (mechanism(sampling={"kind": "Poisson"}), "all settings of Poisson"),
        (mechanism(moved="far"), "a number or a fraction"),
        (mechanism(moved=[1.0]), "as a distance or as two values"),
        (mechanism(stdd=1.0), "did you mean 'std'"),
        (mechanism(times=0.5), "times"),
        ({"mechanisms": []}, "a list of mechanisms"),
        ({"claimed": {**CASE["claimed"], "relation": "swap"}}, "a relation in"),
        ({"claimed": {"epsilon": 1.0}}, "expected delta, relation, source"),
        ({"claimed": {**CASE["claimed"], "delta": 1.0}}, "delta in"),
    ],
)
def test_mistakes_in_a_case_are_named(tmp_path, capsys, changes, message):
    assert main(["audit", written(tmp_path, **changes)]) == 2
    assert message in capsys.readouterr().err


def test_unknown_targets_are_named(tmp_path, capsys):
    assert main(["audit", "gs_wgan_publishd"]) == 2
    assert "did you mean 'gs_wgan_published'" in capsys.readouterr().err
    assert main(["audit", str(tmp_path / "none.yaml")]) == 2
    assert "which is no file" in capsys.readouterr().err
    assert main(["audit", written(tmp_path), "--relation", "replace_one"]) == 2
    assert "Write a case for the other relation" in capsys.readouterr().err
