"""Read the values that the papers' tables print (results/published/*.csv) in the bench's names and units."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from dpgen_bench.utils.paths import PUBLISHED

COLUMNS = (
    "source_paper",
    "table",
    "dataset",
    "method",
    "variant",
    "epsilon",
    "delta",
    "metric",
    "value",
    "std",
    "reported_in",
    "note",
)
# The prefix of each paper's files: PREFIX_tableN.csv.
PAPERS = {
    "dpgan_revisited": "dpgan",
    "dp_sinkhorn_final": "dpsinkhorn_final",
    "dp_sinkhorn_earlier": "dpsinkhorn_early",
    "gs_wgan": "gswgan",
}
# The thirteen classifiers of GS-WGAN's Tables A1 and A2 as its files name them, and the bench's names that differ.
CLASSIFIERS = (
    "mlp",
    "cnn",
    "adaboost",
    "bagging",
    "bernoulli_nb",
    "decision_tree",
    "gaussian_nb",
    "gbm",
    "lda",
    "linear_svc",
    "logistic_reg",
    "random_forest",
    "xgboost",
)
CLASSIFIER_NAMES = {"logistic_reg": "logreg"}

NAMING_FIELDS = ("dataset", "method", "variant", "epsilon", "delta", "reported_in")
Key = tuple[str, str, str, str, str, str]  # the values of NAMING_FIELDS


@dataclass(frozen=True)
class Metric:
    """A printed metric in the bench's terms: `factor` times the printed number is a value of the bench's metric `name`.

    caveat: why no measured value is comparable with the printed one; "" if one can be.
    """

    name: str
    factor: float = 1.0
    caveat: str = ""


METRICS: dict[str, Metric] = {
    "fid": Metric("fid"),
    "inception_score": Metric("inception_score"),
    "acc_logreg_pct": Metric("acc_logreg_pct"),
    "acc_mlp_pct": Metric("acc_mlp_pct"),
    "acc_cnn_pct": Metric("acc_cnn_pct"),
    "acc_avg_frac": Metric("acc_avg_pct", 100.0),
    "acc_calibrated_pct": Metric("acc_calibrated_pct"),
    **{f"acc_{name}_frac": Metric(f"acc_{CLASSIFIER_NAMES.get(name, name)}_pct", 100.0) for name in CLASSIFIERS},
    **{
        f"acc_{name}_calibrated_pct": Metric(f"acc_{CLASSIFIER_NAMES.get(name, name)}_calibrated_pct")
        for name in CLASSIFIERS
    },
    # The rows "Average" of Tables A1 and A2 are the columns of Table 1.
    "acc_average_frac": Metric("acc_avg_pct", 100.0),
    "acc_average_calibrated_pct": Metric("acc_calibrated_pct"),
    "comm_cost_bytes": Metric("comm_cost_bytes"),
    "epsilon": Metric("epsilon", caveat="the paper's own count; what a run claims and proves stands in its ledger"),
    "params_millions": Metric("parameters_D", 1e6),
    "param_ratio": Metric(
        "param_ratio", caveat="follows from the numbers of parameters; the bench does not measure it"
    ),
    "wall_clock_minutes_1xA40": Metric("seconds_total", 60.0, caveat="wall clock on one NVIDIA A40"),
}


@dataclass(frozen=True)
class PublishedCell:
    """A printed value in the bench's unit.

    Args:
        value: None where the source is not legible.
        std: the printed spread in the same unit, over what the row or the table says; None if none is printed.
        note: a remark on the value, such as uncertain digits or disagreement with another table.
        decimals: how many decimals are printed, in the bench's unit.
    """

    value: float | None
    std: float | None
    note: str
    decimals: int = 0


@dataclass(frozen=True)
class PublishedRow:
    """The values that a table prints for one method on one data set, by the bench's metrics, in printed order.

    The other fields are texts of the files: epsilon is "inf" without privacy, and epsilon and delta are "" if they are
    not printed or not legible.
    """

    paper: str
    table: str
    dataset: str
    method: str
    variant: str
    epsilon: str
    delta: str
    reported_in: str
    cells: Mapping[str, PublishedCell]


def published_rows(paper: str, table: str, root: Path = PUBLISHED) -> list[PublishedRow]:
    """The rows of a paper's table, in printed order.

    Args:
        paper: one of PAPERS.
        table: its number as printed, "1" or "A1".
        root: the folder of the files.

    Raises:
        ValueError: if there is no such table, or its file does not follow results/published/README.md.
    """
    path = _path(paper, table, root)
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if tuple(header) != COLUMNS:
            raise ValueError(f"{path}, line 1: expected the columns {','.join(COLUMNS)}, got {','.join(header)}.")
        grouped: dict[Key, dict[str, PublishedCell]] = {}
        for fields in reader:
            try:
                key, metric, cell = _read_line(fields, paper, table)
                cells = grouped.setdefault(key, {})
                if metric in cells:
                    raise ValueError(f"expected {metric} once for each row, got it again for {', '.join(key)}.")
            except ValueError as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
            cells[metric] = cell
    if not grouped:
        raise ValueError(f"expected printed numbers in {path}, got none.")
    return [PublishedRow(paper, table, *key, cells) for key, cells in grouped.items()]


def _path(paper: str, table: str, root: Path) -> Path:
    if paper not in PAPERS:
        raise ValueError(f"expected a paper out of {', '.join(PAPERS)}, got {paper!r}.")
    if not root.is_dir():
        raise ValueError(
            f"expected the papers' printed values in {root}, got no such folder; the installation is not complete: "
            "install the package again."
        )
    stem = f"{PAPERS[paper]}_table"
    path = root / f"{stem}{table}.csv"
    if not path.is_file():
        there = sorted(file.stem.removeprefix(stem) for file in root.glob(f"{stem}*.csv"))
        raise ValueError(f"expected a table of {paper} out of {', '.join(there) or 'none'} in {root}, got {table!r}.")
    return path


def _read_line(fields: list[str], paper: str, table: str) -> tuple[Key, str, PublishedCell]:
    """The fields that name the row of a line, its metric, and its value."""
    if len(fields) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} fields, got {len(fields)}.")
    line = dict(zip(COLUMNS, fields, strict=True))
    if (line["source_paper"], line["table"]) != (paper, table):
        raise ValueError(f"expected {paper}, table {table}, got {line['source_paper']}, table {line['table']}.")
    for name in ("dataset", "method"):
        if not line[name]:
            raise ValueError(f"expected a {name}, got a blank.")
    metric = METRICS.get(line["metric"])
    if metric is None:
        raise ValueError(f"expected a metric out of {', '.join(METRICS)}, got {line['metric']!r}.")
    epsilon = None if line["epsilon"] == "inf" else _number(line["epsilon"], "epsilon")
    if epsilon is not None and epsilon <= 0:
        raise ValueError(f"expected an epsilon above 0, inf or a blank, got {line['epsilon']!r}.")
    delta = _number(line["delta"], "delta")
    if delta is not None and not 0 < delta < 1:
        raise ValueError(f"expected a delta between 0 and 1 or a blank, got {line['delta']!r}.")
    value, std = _number(line["value"], "value"), _number(line["std"], "std")
    if std is not None and (value is None or std < 0):
        raise ValueError(
            f"expected a std >= 0 for a value, or a blank, got {line['std']!r} for the value {line['value']!r}."
        )
    cell = PublishedCell(_scaled(value, metric), _scaled(std, metric), line["note"], _decimals(value, metric))
    key = (line["dataset"], line["method"], line["variant"], line["epsilon"], line["delta"], line["reported_in"])
    return key, metric.name, cell


def _number(text: str, name: str) -> Decimal | None:
    """The number as printed; None for a blank."""
    if not text:
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite():
        raise ValueError(f"expected a finite number or a blank as {name}, got {text!r}.")
    return number


def print_number(number: float, decimals: int | None) -> str:
    """A published number with that many decimals; None: with as many as needed."""
    return f"{number:g}" if decimals is None else f"{number:,.{decimals}f}"


def _decimals(number: Decimal | None, metric: Metric) -> int:
    if number is None:
        return 0
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # _number refuses others
    return max(0, -exponent - round(math.log10(metric.factor)))


def _scaled(number: Decimal | None, metric: Metric) -> float | None:
    # In decimals: as floats, 0.57 times 100 is 56.99999999999999.
    return None if number is None else float(number * Decimal(metric.factor))
