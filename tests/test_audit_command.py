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
    assert "this is no proof" in capsys.readouterr().out


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


CODE = """
import numpy as np


def releases(images, labels, rng):
    rows = images.flatten(1).double().numpy()
    total = (rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))).sum(axis=0)
    return [total if rng is None else total + 3.7306 * rng.standard_normal(total.shape)]
"""
DECLARED = {"sampling": {"kind": "Full"}, "add_remove": 1.0, "replace_one": 2.0, "std": 3.7306, "times": 1}


def test_code_whose_noise_is_detached_is_refuted(capsys):
    assert main(["audit", "detached_noise", "--trials", "100"]) == 1
    out = capsys.readouterr().out
    assert "0.0000 of the stated standard deviation" in out
    assert "0 false and 100 true rejections" in out
    assert "REFUTED" in out
    assert main(["audit", "detached_noise", "--trials", "20", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["level"] == "b"


def test_code_of_the_user_is_audited(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_paper_of_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    case = {key: value for key, value in CASE.items() if key != "mechanisms"}
    path = tmp_path / "my_paper.yaml"
    path.write_text(yaml.safe_dump({**case, "code": "my_paper_of_test.releases", "declared": DECLARED}))
    assert main(["audit", str(path), "--trials", "50"]) == 0
    assert "FAULT" not in capsys.readouterr().out
    path.write_text(yaml.safe_dump({**case, "code": "my_paper_of_test.release", "declared": DECLARED}))
    assert main(["audit", str(path)]) == 2
    assert "to name a function" in capsys.readouterr().err


def audited_code(tmp_path, monkeypatch, name, body):
    (tmp_path / f"{name}.py").write_text(f"import numpy as np\n\n\ndef releases(images, labels, rng):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    case = {key: value for key, value in CASE.items() if key != "mechanisms"}
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**case, "code": f"{name}.releases", "declared": DECLARED}))
    return str(path)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("return []", 2, "got an empty list"),
        ("return images.sum(0)", 2, "got Tensor"),
        ("return [np.full(3, np.nan)]", 2, "a NaN or an infinite number"),
        ("raise KeyError('x')", 1, "raised an error without noise (rng is None): KeyError: 'x'"),
        ("return [images.sum(0).numpy() if rng is None else 1 / 0]", 1, "with noise: ZeroDivisionError"),
    ],
)
def test_what_code_returns_is_checked(tmp_path, capsys, monkeypatch, body, status, message):
    """A NaN exceeds no threshold, so such code would not be refuted."""
    name = f"code_of_{len(body)}_characters"
    assert main(["audit", audited_code(tmp_path, monkeypatch, name, body), "--trials", "20"]) == status
    assert message in capsys.readouterr().err


def test_the_last_line_of_code_with_a_fault_is_no_acquittal(tmp_path, capsys, monkeypatch):
    body = "return [images.sum(0).numpy() * 0 + (0 if rng is None else 0.1 * rng.standard_normal((1, 8, 8)))]"
    assert main(["audit", audited_code(tmp_path, monkeypatch, "code_faulty", body), "--trials", "20"]) == 1
    out = capsys.readouterr().out
    assert "FAULT      level b" in out
    assert "FAILED" in out
    assert "not refuted" not in out


@pytest.mark.parametrize("trials", ["0", "-1", "1"])
@pytest.mark.parametrize("target", ["detached_noise", "gs_wgan_published", "dp_merf"])
def test_too_few_trials_are_refused_before_anything_is_done(capsys, target, trials):
    """A zero is no request for the default number."""
    assert main(["audit", target, "--trials", trials]) == 2
    captured = capsys.readouterr()
    assert "expected a whole number >= 2" in captured.err
    assert captured.out == ""


def test_more_trials_than_the_memory_holds_are_refused(tmp_path, capsys):
    assert main(["audit", written(tmp_path), "--trials", "10000000000"]) == 2
    assert "expected at most 100,000,000 trials" in capsys.readouterr().err


def test_another_seed_draws_other_trials(tmp_path, capsys):
    found = set()
    for seed in ("0", "0", "1"):
        main(["audit", written(tmp_path), "--trials", "100", "--seed", seed, "--json"])
        found.add(json.loads(capsys.readouterr().out)["gdp"])
    assert len(found) == 2
    assert main(["audit", "dp_merf", "--seed", "-1"]) == 2
    assert main(["audit", "dp_merf", "--level", "d", "--seed", "1"]) == 2
    assert "use seed=N" in capsys.readouterr().err
