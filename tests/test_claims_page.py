"""The page of claims is what `python docs/make_claims.py` makes, and its verdicts follow from the intervals."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from docs import make_claims as made
from dpgen_bench.store.folders import Store
from dpgen_bench.store.records import Record
from dpgen_bench.store.statistics import Difference


def test_the_page_is_made_from_the_claims_and_the_records() -> None:
    """After a new record: `python docs/make_claims.py`."""
    assert made.PAGE.read_text() == made.page()


@pytest.mark.parametrize("has_records", [True, False])
def test_local_runs_are_no_evidence(has_records: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run made again here does not hide its record, and a run without a record does not count."""
    claim = ABOUT_RUNS[0]
    recorded = [run for line in made.lines(claim) for run in made.row(line).measured]
    results = tmp_path / "results"
    for run in recorded:
        folder = Store(results).folder(run.id)
        for name in ("identity.json", "ledger.json"):
            folder.write_json(name, run.read_json(name))
        OmegaConf.save(run.config, folder.path / "config.yaml")
        for measurement in run.measurements.all():
            folder.measurements.write(measurement)
        folder.finish()
    if has_records:
        (results / "records").symlink_to(made.ROOT / "results" / "records")
    else:
        (results / "records").mkdir()
    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(made, "row", made.row.__wrapped__)
    found = [run for line in made.lines(claim) for run in made.row(line).measured]
    assert [run.id for run in found] == ([run.id for run in recorded] if has_records else [])
    assert all(isinstance(run, Record) for run in found)
    assert bool(made.evidence(claim)) == has_records


def test_the_sweep_makes_the_runs_of_all_claims() -> None:
    table = yaml.safe_load((made.ROOT / "conf" / "table" / "claims.yaml").read_text())
    assert table["sweeps"] == made.sweeps()


ABOUT_RUNS = [claim for claim in made.claims() if "epsilon" not in claim]


@pytest.mark.parametrize("claim", ABOUT_RUNS, ids=lambda claim: claim["claim"])
def test_both_settings_of_a_claim_differ_and_have_the_same_budget(claim: made.Claim) -> None:
    one, other = (made.row(line).specs for line in made.lines(claim))
    assert {spec.id for spec in one}.isdisjoint(spec.id for spec in other)
    assert len({spec.config.privacy.relation for spec in (*one, *other)}) == 1
    budgets = {spec.config.privacy.epsilon for spec in (*one, *other)}
    assert len(budgets) == (2 if claim.get("varies") == "epsilon" else 1)
    assert claim["paper"] in made.PAPERS


@pytest.mark.parametrize(("proven", "expected"), [("9.99", made.CONFIRMED), ("10.1", made.NOT_CONFIRMED)])
def test_a_claimed_epsilon_is_confirmed_if_no_more_is_proven(proven: str, expected: str) -> None:
    assert made.verdict_of_epsilon({"claimed": "10", "proven": proven}) == expected


def test_a_claimed_epsilon_is_refuted_if_an_audit_certifies_more() -> None:
    line = {"claimed": "10", "proven": "610"}
    assert [made.verdict_of_epsilon(line, certified) for certified in ("17.1", "9.9")] == [
        made.REFUTED,
        made.NOT_CONFIRMED,
    ]


def test_a_p_value_below_5_percent_goes_with_a_verdict() -> None:
    for claim in ABOUT_RUNS:
        p = made.p_of(claim)
        assert p is None or (p < 0.05) == (made.verdict_on(claim) != made.UNDECIDED)


def test_a_verdict_is_final_where_the_correction_decides() -> None:
    final = {made.CONFIRMED, made.NOT_CONFIRMED}
    assert {claim["number"] for claim in ABOUT_RUNS if made.verdict_on(claim) in final} == made.decided()


@pytest.mark.parametrize(("p", "is_decided"), [(0.024, True), (0.026, False)])
def test_a_comparison_is_decided_at_half_the_level_because_it_may_be_tested_twice(
    p: float, is_decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "claims", lambda: [{"number": 1}, {"number": 2, "epsilon": "a published one"}])
    monkeypatch.setattr(made, "p_of", lambda claim: p)
    assert made.decided.__wrapped__() == (frozenset({1}) if is_decided else frozenset())


def test_the_published_epsilons_of_the_three_papers_have_the_verdicts_of_their_accounting() -> None:
    verdicts = {claim["epsilon"]: made.verdict_on(claim) for claim in made.claims() if "epsilon" in claim}
    assert verdicts == {
        "GS-WGAN, Chen et al. 2020": made.REFUTED,
        "DP-Sinkhorn, Cao et al. 2021": made.REFUTED,
        "DP-Sinkhorn, earlier version, Cao et al. 2021": made.CONFIRMED,
        "DPGAN, Bie et al. 2023": made.CONFIRMED,
    }


@pytest.mark.parametrize(
    ("interval", "margin", "expected"),
    [
        ((0.1, 4.0), 0.0, made.CONFIRMED),
        ((-0.1, 4.0), 0.0, made.UNDECIDED),
        ((-4.0, -0.1), 0.0, made.NOT_CONFIRMED),
        ((-1.9, 4.0), 2.0, made.CONFIRMED),
        ((-4.0, -0.1), 2.0, made.UNDECIDED),
        ((-4.0, -2.1), 2.0, made.NOT_CONFIRMED),
        (None, 0.0, made.UNDECIDED),
    ],
)
def test_a_verdict_follows_from_the_interval(
    interval: tuple[float, float] | None, margin: float, expected: str
) -> None:
    assert made.verdict(Difference(1.0, interval), margin) == expected
    weaker = {made.CONFIRMED: made.FOR, made.NOT_CONFIRMED: made.AGAINST}.get(expected, expected)
    assert made.verdict(Difference(1.0, interval), margin, decided=False) == weaker


def test_a_claim_without_runs_has_no_verdict() -> None:
    assert made.verdict(None) == made.NOT_RUN


def test_of_a_metric_of_which_less_is_better_the_difference_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """FID 50 against 60 is 10 better."""
    known = {"for": [[50.0], [51.0], [52.0]], "against": [[60.0], [61.0], [62.0]]}
    monkeypatch.setattr(made, "lines", lambda claim: ("for", "against"))
    monkeypatch.setattr(made, "values", lambda line, metric: known[line])
    found = made.compared({"metric": "fid"})
    assert found is not None
    assert found.mean == pytest.approx(10.0)
    assert found.ci95 is not None
    assert 0.0 < found.ci95[0] < 10.0 < found.ci95[1]
    assert made.compared({"metric": "acc_mlp_pct"}).mean == pytest.approx(-10.0)


COLUMNS = {"CNN": "acc_cnn_pct", "MLP": "acc_mlp_pct", "FID": "fid", "logistic regression": "acc_logreg_pct"}


def noted(text: str) -> set[tuple[str, float]]:
    """(column, value) of every value with a decimal in a note, whose metric is the last one named before it.

    A difference and its interval, which follow "a difference" up to the end of the clause, are left out.
    """
    values = set()
    for clause in re.split(r";|, a difference[^;]*", text):
        parts = re.split(r"(CNN|MLP|FID|logistic regression)", clause)
        for name, words in zip(parts[1::2], parts[2::2], strict=True):
            values |= {(COLUMNS[name], float(value)) for value in re.findall(r"(?<![-+\d.])\d+\.\d\b", words)}
    return values


NOTES = {claim["claim"]: noted(claim["also"]) for claim in made.claims() if "also" in claim}


@pytest.mark.parametrize("claim", [name for name, values in NOTES.items() if values])
def test_the_values_of_a_note_are_means_of_a_table(claim: str) -> None:
    lines = [line for path in (made.ROOT / "results" / "tables").glob("*.csv") for line in csv.DictReader(path.open())]
    means = [(line["metric"], line["mean"]) for line in lines if re.fullmatch(r"[\d.]+", line.get("mean") or "")]
    for column, value in NOTES[claim]:
        assert any(metric == column and abs(float(mean) - value) < 0.0501 for metric, mean in means), (column, value)


def test_values_of_a_note_are_found() -> None:
    text = "MLP 43.8 on one and 48.7 on the other, a difference of -4.9 [-12.2, +2.5] ; CNN 50.1 at ε = 1"
    assert noted(f"{text} and logistic regression 9.5") == {
        ("acc_mlp_pct", 43.8),
        ("acc_mlp_pct", 48.7),
        ("acc_cnn_pct", 50.1),
        ("acc_logreg_pct", 9.5),
    }
