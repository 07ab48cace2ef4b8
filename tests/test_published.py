"""The published values: compared with the papers' text, in the bench's units, and files that their reader refuses."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from dpgen_bench.tables.published import (
    CLASSIFIER_NAMES,
    CLASSIFIERS,
    COLUMNS,
    METRICS,
    PAPERS,
    PUBLISHED,
    PublishedRow,
    published_rows,
)

MNIST, FASHION, CELEBA = "MNIST", "FashionMNIST", "CelebA-Gender 32x32"
TABLES = {
    "dpgan_revisited": ["1", "2", "3", "4", "6", "7", "8"],
    "dp_sinkhorn_final": ["1", "2", "3", "4", "5", "6"],
    "dp_sinkhorn_earlier": ["4", "5", "6"],
    "gs_wgan": ["1", "2", "A1", "A2"],
}
ALL = [(paper, table) for paper, tables in TABLES.items() for table in tables]


def only(paper: str, table: str, **fields: str) -> PublishedRow:
    rows = [row for row in published_rows(paper, table) if all(getattr(row, k) == v for k, v in fields.items())]
    (row,) = rows
    return row


# --- the numbers --------------------------------------------------------------------------------------------------

# The table, the row, the bench's metric, the value and its spread in the bench's unit, read in the papers' text.
GOLDEN = [
    ("dpgan_revisited", "1", dict(method="Our DPGAN", dataset=MNIST), "fid", 12.8, 0.3),
    ("dpgan_revisited", "1", dict(method="Our DPGAN", dataset=CELEBA), "acc_cnn_pct", 82.4, 4.4),
    ("dpgan_revisited", "2", dict(method="Our DPGAN", variant="+ large batches", epsilon="0.912", dataset=MNIST), "fid",
     106.2, 64.0),
    ("dpgan_revisited", "2", dict(method="DPGAN", reported_in="Long et al. 2021", epsilon="1", dataset=FASHION), "fid",
     472.03, None),
    ("dpgan_revisited", "3", dict(method="DP-Sinkhorn"), "fid", 189.5, None),
    ("dpgan_revisited", "4", dict(variant="d_D=96"), "parameters_D", 970_000.0, None),
    ("dpgan_revisited", "6", dict(variant="B=128; sigma=1; T=450000; n_D=10"), "fid", 103.4, 5.8),
    # Printed as 16h 54m and 3d 17h 49m.
    ("dpgan_revisited", "6", dict(variant="B=2048; sigma=5.6; T=98000; n_D=20"), "seconds_total", 60_840.0, None),
    ("dpgan_revisited", "7", dict(method="Our DPGAN", dataset=CELEBA), "seconds_total", 323_340.0, None),
    ("dpgan_revisited", "8", dict(variant="D_lr/G_lr=50; n_D=1; B=128; sigma=1"), "acc_cnn_pct", 54.5, None),
    ("dp_sinkhorn_final", "1", dict(method="DP-Sinkhorn", dataset=MNIST), "fid", 48.4, None),
    ("dp_sinkhorn_final", "1", dict(method="DP-MERF", dataset=FASHION), "acc_logreg_pct", 75.5, None),
    ("dp_sinkhorn_final", "2", dict(variant="perturb=image; loss=L1+L2; debias=full; m=1"), "fid", 86.0, None),
    ("dp_sinkhorn_final", "3", dict(method="Sinkhorn"), "acc_cnn_pct", 82.2, None),
    ("dp_sinkhorn_final", "4", dict(variant="sigma=1.9; Delta=0.7; p=0.2; m=1.0"), "acc_mlp_pct", 83.4, None),
    ("dp_sinkhorn_final", "5", dict(variant="sigma=1.9; Delta=0.5; p=0.4; m=1.0"), "fid", 133.0, None),
    ("dp_sinkhorn_final", "6", dict(method="BigGAN+DP-Sinkhorn"), "acc_cnn_pct", 75.79, None),
    ("dp_sinkhorn_earlier", "4", dict(variant="p=0.2; m=3; whole-matrix clip"), "fid", 48.0, None),
    ("dp_sinkhorn_earlier", "5", dict(variant="p=0.8; m=3; whole-matrix clip"), "acc_cnn_pct", 66.9, None),
    ("dp_sinkhorn_earlier", "6", dict(method="DCGAN+DP-Sinkhorn"), "fid", 156.7, None),
    ("gs_wgan", "1", dict(method="GS-WGAN", dataset=MNIST), "acc_mlp_pct", 79.0, None),  # printed 0.79
    ("gs_wgan", "1", dict(method="GS-WGAN", dataset=FASHION), "inception_score", 5.32, None),
    ("gs_wgan", "1", dict(method="GS-WGAN", dataset=FASHION), "acc_calibrated_pct", 67.0, None),
    ("gs_wgan", "2", dict(method="GS-WGAN (federated)"), "fid", 60.76, None),
    ("gs_wgan", "A1", dict(method="DP-Merf"), "acc_avg_pct", 57.0, None),  # printed 0.57
    ("gs_wgan", "A1", dict(method="GAN (non-private)"), "acc_gaussian_nb_calibrated_pct", 126.0, None),
    ("gs_wgan", "A2", dict(method="GS-WGAN"), "acc_logreg_pct", 68.0, None),  # "logistic reg"
    ("gs_wgan", "A2", dict(method="DP-Merf AE"), "acc_calibrated_pct", 56.0, None),  # "Average"
]  # fmt: skip


@pytest.mark.parametrize(("paper", "table", "fields", "metric_name", "value", "std"), GOLDEN)
def test_numbers_are_the_papers(
    paper: str, table: str, fields: dict[str, str], metric_name: str, value: float, std: float | None
) -> None:
    cell = only(paper, table, **fields).cells[metric_name]
    assert (cell.value, cell.std) == (value, std)


@pytest.mark.parametrize(
    ("paper", "table", "fields", "metric_names"),
    [
        ("gs_wgan", "2", dict(method="Fed Avg GAN"), ["epsilon", "comm_cost_bytes"]),
        ("gs_wgan", "2", dict(method="GS-WGAN (federated)"), ["epsilon", "comm_cost_bytes"]),
        (
            "dp_sinkhorn_final",
            "2",
            dict(variant="perturb=image; loss=L2 (inferred); debias=none"),
            ["fid", "acc_mlp_pct", "acc_cnn_pct"],
        ),
    ],
)
def test_what_is_not_legible_is_blank_and_says_so(
    paper: str, table: str, fields: dict[str, str], metric_names: list[str]
) -> None:
    row = only(paper, table, **fields)
    blank = [name for name, cell in row.cells.items() if cell.value is None]
    assert blank == metric_names
    assert all(re.search("missing|unreadable", row.cells[name].note) for name in blank)


def test_nothing_else_is_blank() -> None:
    cells = [cell for of in ALL for row in published_rows(*of) for cell in row.cells.values()]
    assert sum(cell.value is None for cell in cells) == 7


def test_all_tables_are_there() -> None:
    """963 numbers, each in one cell; no table that this list does not have."""
    numbers = {of: sum(len(row.cells) for row in published_rows(*of)) for of in ALL}
    assert sum(numbers.values()) == 963
    assert {f"{PAPERS[paper]}_table{table}.csv" for paper, table in ALL} == {
        path.name for path in PUBLISHED.glob("*.csv")
    }
    assert (
        numbers["gs_wgan", "A1"] == 7 * 14 + 6 * 14
    )  # accuracies of 13 classifiers and their mean; calibrated but for Real


def test_rows_and_cells_are_in_printed_order() -> None:
    rows = published_rows("dp_sinkhorn_earlier", "4")
    assert [row.variant.split("; whole")[0] for row in rows[:5]] == [
        "p=1.0; m=0",
        "p=1.0; m=0.3",
        "p=1.0; m=1",
        "p=1.0; m=3",
        "p=0.5; m=0",
    ]
    assert list(rows[0].cells) == ["fid", "acc_logreg_pct", "acc_mlp_pct", "acc_cnn_pct"]


def test_the_same_row_of_two_tables_has_the_same_numbers() -> None:
    """The last rows of DP-Sinkhorn's searches are Table 1's, as the text says; the earlier Table 6 is the final one."""
    first = {row.dataset: row.cells for row in published_rows("dp_sinkhorn_final", "1") if row.method == "DP-Sinkhorn"}
    for table, dataset in (("4", MNIST), ("5", FASHION)):
        last = published_rows("dp_sinkhorn_final", table)[-1].cells
        assert {name: cell.value for name, cell in last.items()} == {
            name: cell.value for name, cell in first[dataset].items()
        }
    earlier, final = (
        [[cell.value for cell in row.cells.values()] for row in published_rows(paper, "6")]
        for paper in ("dp_sinkhorn_earlier", "dp_sinkhorn_final")
    )
    assert earlier == final


@pytest.mark.parametrize("table", ["A1", "A2"])
def test_printed_calibration_is_the_accuracy_by_that_of_real_data(table: str) -> None:
    """For each classifier; both accuracies are rounded to 0.01, which leaves the ratio some slack."""
    rows = published_rows("gs_wgan", table)
    (real,) = [row.cells for row in rows if row.method == "Real"]
    checked = 0
    for row in rows:
        for name, cell in row.cells.items():
            if not name.endswith("_calibrated_pct") or name == "acc_calibrated_pct":  # a mean of the others
                continue
            plain = name.replace("_calibrated_pct", "_pct")
            accuracy, whole = row.cells[plain].value, real[plain].value
            assert accuracy is not None
            assert whole is not None
            assert cell.value is not None
            low, high = 100 * (accuracy - 0.5) / (whole + 0.5), 100 * (accuracy + 0.5) / (whole - 0.5)
            assert low - 0.5 <= cell.value <= high + 0.5, (row.method, name)
            checked += 1
    assert checked == 6 * 13


@pytest.mark.parametrize("table", ["A1", "A2"])
def test_printed_averages_are_the_means_of_their_columns(table: str) -> None:
    """To a rounding of each number; but for the column "GAN (non-private)", where the paper prints others."""
    caveat = []
    for row in published_rows("gs_wgan", table):
        for ending, average in (("_pct", "acc_avg_pct"), ("_calibrated_pct", "acc_calibrated_pct")):
            names = [f"acc_{CLASSIFIER_NAMES.get(name, name)}{ending}" for name in CLASSIFIERS]
            if average not in row.cells:  # calibrated, real data
                continue
            values = [row.cells[name].value or 0.0 for name in names]
            printed = row.cells[average].value
            assert printed is not None
            if abs(printed - sum(values) / 13) > 1.0:
                caveat.append((row.method, average))
                assert "the mean of the column is" in row.cells[average].note
    both = [("GAN (non-private)", "acc_avg_pct"), ("GAN (non-private)", "acc_calibrated_pct")]
    assert caveat == {"A1": both[1:], "A2": both}[table]


def test_metrics_say_what_cannot_be_compared() -> None:
    assert "A40" in METRICS["wall_clock_minutes_1xA40"].caveat
    assert {name for name, metric in METRICS.items() if metric.caveat} == {
        "epsilon",
        "param_ratio",
        "wall_clock_minutes_1xA40",
    }


def test_every_metric_is_used_by_some_table() -> None:
    printed = {line["metric"] for path in PUBLISHED.glob("*.csv") for line in csv.DictReader(path.open())}
    assert printed == set(METRICS)


# --- what is refused ----------------------------------------------------------------------------------------------

GOOD = "gs_wgan,9,MNIST,GS-WGAN,,10,1e-05,acc_mlp_frac,0.29,0.01,this paper,a note"


def table_of(root: Path, *lines: str, header: str = ",".join(COLUMNS)) -> list[PublishedRow]:
    (root / "gswgan_table9.csv").write_text("\n".join([header, *lines]) + "\n")
    return published_rows("gs_wgan", "9", root)


def test_fractions_become_per_cent_exactly(tmp_path: Path) -> None:
    """As floats, 0.29 times 100 is 28.999999999999996."""
    (row,) = table_of(tmp_path, GOOD)
    cell = row.cells["acc_mlp_pct"]
    assert (cell.value, cell.std, cell.note) == (29.0, 1.0, "a note")
    assert (row.paper, row.table, row.dataset, row.epsilon, row.delta) == ("gs_wgan", "9", MNIST, "10", "1e-05")


def test_lines_that_agree_make_one_row(tmp_path: Path) -> None:
    other = GOOD.replace("acc_mlp_frac,0.29,0.01", "fid,61.34,")
    another = other.replace(",10,", ",1,")
    rows = table_of(tmp_path, GOOD, another, other)
    assert [(row.epsilon, list(row.cells)) for row in rows] == [("10", ["acc_mlp_pct", "fid"]), ("1", ["fid"])]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("gs_wgan,", "dpgan_revisited,", "expected gs_wgan, table 9, got dpgan_revisited, table 9"),
        (",9,", ",8,", "expected gs_wgan, table 9, got gs_wgan, table 8"),
        ("MNIST", "", "expected a dataset"),
        ("GS-WGAN", "", "expected a method"),
        ("acc_mlp_frac", "acc_mlp", "expected a metric out of fid, .* got 'acc_mlp'"),
        ("0.29", "0,29", "expected 12 fields, got 13"),
        (",a note", "", "expected 12 fields, got 11"),
        ("0.29", "&0", "a finite number or a blank as value, got '&0'"),
        ("0.29", "nan", "a finite number or a blank as value, got 'nan'"),
        ("0.29", "inf", "a finite number or a blank as value, got 'inf'"),
        ("0.01", "-0.01", "expected a std >= 0"),
        ("0.29", "", "expected a std >= 0 for a value"),
        (",10,", ",ten,", "a finite number or a blank as epsilon, got 'ten'"),
        (",10,", ",-1,", "expected an epsilon above 0"),
        ("1e-05", "1", "expected a delta between 0 and 1"),
        ("1e-05", "0", "expected a delta between 0 and 1"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, old: str, new: str, words: str) -> None:
    good = GOOD.replace("acc_mlp_frac", "fid")
    with pytest.raises(ValueError, match=rf"gswgan_table9\.csv, line 3: .*{words}"):
        table_of(tmp_path, good, GOOD.replace(old, new, 1))


def test_a_metric_occurs_once_in_each_row(tmp_path: Path) -> None:
    """acc_mlp_frac and acc_mlp_pct are one metric of the bench."""
    again = GOOD.replace("acc_mlp_frac,0.29", "acc_mlp_pct,29")
    with pytest.raises(ValueError, match="line 3: expected acc_mlp_pct once for each row"):
        table_of(tmp_path, GOOD, again)


def test_columns_are_exactly_those(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: expected the columns source_paper,.*got source_paper,table"):
        table_of(tmp_path, GOOD, header="source_paper,table")
    with pytest.raises(ValueError, match="expected printed numbers in"):
        table_of(tmp_path)


def test_an_unknown_paper_or_table_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a paper out of dpgan_revisited, .* got 'dpgan'"):
        published_rows("dpgan", "1")
    with pytest.raises(
        ValueError, match=r"expected a table of dpgan_revisited out of 1, 2, 3, 4, 6, 7, 8 in .*got '5'"
    ):
        published_rows("dpgan_revisited", "5")
    with pytest.raises(ValueError, match="out of none"):
        published_rows("dpgan_revisited", "1", tmp_path)


def test_an_incomplete_installation_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got no such folder; the installation is not complete: install"):
        published_rows("gs_wgan", "1", tmp_path / "nowhere")
