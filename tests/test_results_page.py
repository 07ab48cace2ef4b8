"""The page of results is what `python docs/make_results.py` makes from the records."""

from __future__ import annotations

from docs import make_results as made


def test_the_tables_are_those_of_the_records() -> None:
    """After a new record: `python docs/make_results.py`."""
    assert made.PAGE.read_text() == made.page()


def test_a_line_has_all_seeds_of_its_settings() -> None:
    lines = made.measured()
    for preset, cnn in (("mnist", "95.2 ± 0.1"), ("plain", "95.0 ± 0.3")):
        gauss = lines["mnist", 1.0, "dp_gauss", "replace_one", f"`dp_gauss/{preset}`", "league"]
        assert len(gauss["acc_cnn_pct"]) == len(gauss[made.CPU]) == 3
        assert made.shown(gauss["acc_cnn_pct"]) == cnn


def test_a_spread_needs_three_values() -> None:
    assert [made.shown(values) for values in ([], [1.0, 2.0], [1.0, 2.0, 3.0])] == ["–", "1.5", "2.0 ± 1.0"]


def test_values_of_one_protocol_are_of_one_fit() -> None:
    """A run that was made again on another machine has the protocol's CNN of one fit, and CNN and FID of another."""
    record = next(each for each in made.records() if each.id == "890bee695a2e")
    cnns = [
        each["repeats"][0]["metrics"]["cnn"]["values"]["acc_cnn_pct"]
        for each in record.measurements.all()
        if each["protocol"]["name"] == "dpgan_revisited"
    ]
    values = made.values_of(record)["dpgan_revisited"]
    assert sorted(round(cnn, 1) for cnn in cnns) == [64.9, 71.6]
    assert round(values["acc_cnn_pct"], 1) == 64.9
    assert round(values["fid"], 1) == 106.2


def test_values_of_all_fits_of_real_data_belong_together() -> None:
    """Its classifiers and its FID were measured after different fits, which release the same images."""
    record = next(each for each in made.records() if each.id == "f9bc0837070f")
    values = made.values_of(record)["dp_sinkhorn"]
    assert {"acc_logreg_pct", "acc_mlp_pct", "fid"} <= set(values)
