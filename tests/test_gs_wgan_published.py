"""GS-WGAN's values of Tables 1, A1 and A2: those typed here, of a preset's comment, and of the published tables."""

from __future__ import annotations

import csv

import pytest

from dpgen_bench.utils.paths import CONF
from tests.defaults import comment

# Table 1: Inception Score, FID, accuracies of MLP and CNN, average accuracy, calibrated accuracy in percent.
TABLE_1 = {"mnist": "9.23 61.34 0.79 0.80 0.60 69", "fashion_mnist": "5.32 131.34 0.65 0.65 0.53 67"}
# Tables A1 and A2, columns "Ours" and "GAN (non-private)": accuracy, calibrated accuracy in percent.
CLASSIFIERS = (
    *("MLP", "CNN", "adaboost", "bagging", "bernoulli nb", "decision tree", "gaussian nb", "gbm", "lda", "linear svc"),
    *("logistic reg", "random forest", "xgboost", "Average"),
)
APPENDIX = {
    "mnist": """
        0.79 81  0.80 81  0.21 29  0.45 48  0.77 92  0.35 40  0.64 114  0.39 43  0.78 89  0.76 83
        0.79 85  0.52 54  0.50 55  0.60 69""",
    "nonprivate_gan_mnist": """
        0.84 85  0.84 85  0.28 39  0.46 49  0.80 95  0.40 45  0.71 126  0.50 55  0.84 95  0.81 88
        0.83 90  0.39 41  0.44 49  0.63 71""",
    "fashion_mnist": """
        0.65 74  0.64 70  0.25 45  0.47 56  0.55 85  0.40 51  0.48 81  0.38 46  0.67 84  0.65 77
        0.68 81  0.54 61  0.47 57  0.53 67""",
    "nonprivate_gan_fashion_mnist": """
        0.77 88  0.73 80  0.41 74  0.57 68  0.59 91  0.53 67  0.55 93  0.44 53  0.77 96  0.77 91
        0.76 90  0.69 78  0.65 78  0.61 77""",
}


def table_1(dataset: str) -> str:
    names = ("IS", "FID", "MLP", "CNN", "Avg", "Calibrated")
    return ", ".join(f"{name} {number}" for name, number in zip(names, TABLE_1[dataset].split(), strict=True)) + "%"


def appendix(preset: str) -> str:
    numbers = APPENDIX[preset].split()
    cells = zip(CLASSIFIERS, numbers[::2], numbers[1::2], strict=True)
    return ", ".join(f"{name} {accuracy} ({calibrated}%)" for name, accuracy, calibrated in cells)


def test_the_comment_of_the_preset_has_its_values() -> None:
    text = comment(CONF / "experiment" / "gs_wgan" / "mnist.yaml")
    assert "Table A1" in text
    assert appendix("mnist") in text
    assert f'Table 1, row "Ours" ({table_1("mnist")})' in text
    assert "laimed 9.99" in text
    assert "proven 610.3" in text


def published(table: str) -> list[dict[str, str]]:
    root = CONF.parent
    for folder in (root / "results" / "published", root.parent / "shared" / "reference" / "published"):
        path = folder / f"gswgan_table{table}.csv"
        if path.exists():
            return list(csv.DictReader(path.open()))
    pytest.skip(f"gswgan_table{table}.csv, the paper's table as CSV, is not kept with this checkout")


@pytest.mark.parametrize("preset", APPENDIX)
def test_the_values_typed_here_are_those_of_the_published_tables(preset: str) -> None:
    """Another person typed the CSVs from the paper."""
    dataset = "FashionMNIST" if "fashion" in preset else "MNIST"
    method = "GAN (non-private)" if "gan" in preset else "GS-WGAN"

    def values(table: str) -> dict[str, float]:
        rows = [row for row in published(table) if (row["dataset"], row["method"]) == (dataset, method)]
        return {row["metric"]: float(row["value"]) for row in rows}

    remaining, numbers = values("A2" if "fashion" in preset else "A1"), APPENDIX[preset].split()
    for name, accuracy, calibrated in zip(CLASSIFIERS, numbers[::2], numbers[1::2], strict=True):
        key = name.lower().replace(" ", "_")
        assert remaining.pop(f"acc_{key}_frac") == float(accuracy)
        assert remaining.pop(f"acc_{key}_calibrated_pct") == float(calibrated)
    assert not remaining
    if preset in TABLE_1:
        assert list(values("1").values()) == [float(number) for number in TABLE_1[preset].split()]
