"""Measures the FID of real images to other real images, which shows what the papers' printed values of real data are.

It writes results/real_fid.csv, and from it the table of docs/methods/real_data.md:

    DPGEN_DATA=data .venv/bin/python docs/make_real_fid.py

The features, by the TensorFlow 1 graph, take two hours of a CPU core for each data set. They are kept in the folder
`cache` of the results (`DPGEN_RESULTS`), and runs use the same ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd

from docs.page_tables import page_with, table
from dpgen_bench.config.display import dataset_name
from dpgen_bench.data.datasets import FashionMnist, Mnist
from dpgen_bench.evaluate.features import InceptionFeatures, cached_features
from dpgen_bench.evaluate.fidelity import frechet_distance, mean_and_covariance

ROOT = Path(__file__).resolve().parent.parent
VALUES = ROOT / "results" / "real_fid.csv"
PAGE = ROOT / "docs" / "methods" / "real_data.md"
BEGIN, END = "<!-- table: made by docs/make_real_fid.py -->", "<!-- end of the table -->"
DATASETS = {"mnist": Mnist, "fashion_mnist": FashionMnist}
DRAWINGS = 5


def fid(images: np.ndarray, reference: np.ndarray) -> float:
    """FID of images with features [n, 2048] to images with features [m, 2048]."""
    return frechet_distance(*mean_and_covariance(images), *mean_and_covariance(reference))


def measured(train: np.ndarray, test: np.ndarray) -> list[tuple[str, str, list[float]]]:
    """Which training images, to which images, and their FID: a value for each drawing of random images.

    Args:
        train: features [60000, 2048] of the training images, in the order of the data set's files.
        test: features [10000, 2048] of the test images.
    """
    drawn = [np.split(train[np.random.default_rng(i).permutation(len(train))], [20_000]) for i in range(DRAWINGS)]
    return [
        ("all 60,000", "test images", [fid(train, test)]),
        ("the first 10,000", "test images", [fid(train[:10_000], test)]),
        ("10,000 at random", "test images", [fid(part[:10_000], test) for part, _ in drawn]),
        ("20,000 at random", "all training images", [fid(part, train) for part, _ in drawn]),
        ("20,000 at random", "the 40,000 other training images", [fid(part, rest) for part, rest in drawn]),
    ]


def measure(dataset: str, data: Path, cache: Path) -> pd.DataFrame:
    """The values of `measured` for a data set below `data`, with its features kept below `cache`."""
    spec = DATASETS[dataset](root=str(data))
    extractor = InceptionFeatures(tool="tensorflow1")
    train, test = (cached_features(spec.load(split), extractor, cache) for split in ("train", "test"))
    return pd.DataFrame(
        [
            (dataset, images, reference, len(values), np.mean(values), np.std(values, ddof=1) if values[1:] else None)
            for images, reference, values in measured(train, test)
        ],
        columns=["dataset", "images", "reference", "drawings", "fid", "sd"],
    )


def made() -> str:
    """The table in Markdown: a line for each choice of images, a column for each data set."""
    values = pd.read_csv(VALUES).set_index("dataset")
    rows = [
        (str(lines["images"].iloc[0]), str(lines["reference"].iloc[0]), *map(_shown, lines["fid"], lines["sd"]))
        for _, lines in values.groupby(["images", "reference"], sort=False)
    ]
    return table(("training images", "to", *map(dataset_name, DATASETS)), rows)


def _shown(value: float, sd: float) -> str:
    return f"{value:.2f}" if np.isnan(sd) else f"{value:.2f} ± {sd:.1g}"


def page() -> str:
    """The page with its table made again."""
    return page_with(PAGE, BEGIN, made(), END)


if __name__ == "__main__":
    data, results = Path(os.environ.get("DPGEN_DATA", "data")), Path(os.environ.get("DPGEN_RESULTS", "results"))
    values = pd.concat(measure(dataset, data, results / "cache") for dataset in DATASETS)
    values.to_csv(VALUES, index=False, float_format="%.4f")
    PAGE.write_text(page())
