"""Names for readers: of metrics and costs, methods, data sets and settings. Tables, plots and the report use these.

No key of a file, such as `acc_cnn_pct`, is shown in a table, a plot or the report; the CSV of a table has the keys.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from dpgen_bench.config.catalogue import names
from dpgen_bench.utils.own_folders import own_folders

# Metrics and costs by key: the heading of a column, and the name in a sentence or at an axis.
METRICS = {
    "fid": ("FID", "FID"),
    "kid": ("KID", "KID"),
    "inception_score": ("IS", "Inception Score"),
    "inception_score_classifier_acc_pct": (
        "IS classifier acc. (%)",
        "accuracy of the Inception Score's classifier (%)",
    ),
    "precision": ("Precision", "precision"),
    "recall": ("Recall", "recall"),
    "density": ("Density", "density"),
    "coverage": ("Coverage", "coverage"),
    "nn_copies_pct": ("Copies (%)", "samples that are copies of training images (%)"),
    "nn_closer_to_train_pct": ("Closer to train (%)", "samples closer to training than to test images (%)"),
    "mean_intensity": ("Intensity", "mean intensity"),
    "inverted_score": ("Inversion score", "score of inverted images"),
    "inverted_verdict": ("Inverted", "images are judged inverted"),
    "seconds_total": ("Time (s)", "training time (s)"),
    "cpu_seconds": ("CPU time (s)", "processor time of training (s)"),
    "seconds_outside_loops": ("Time outside loops (s)", "time outside loops (s)"),
    "peak_memory_mib": ("Memory (MiB)", "peak memory (MiB)"),
    "peak_memory_since_process_start_mib": ("Memory (MiB)", "peak memory since the start of the process (MiB)"),
    "peak_memory_accelerator_mib": ("GPU memory (MiB)", "peak memory of the accelerator (MiB)"),
    "parameters_released_generator": ("Parameters", "parameters of the generator"),
    "parameters_D": ("Parameters of D", "parameters of the discriminator"),
    "param_ratio": ("Parameters, ratio", "parameters, relative"),
    "comm_cost_bytes": ("Communication (bytes)", "communication of a client in one update (bytes)"),
    "clients_asked": ("Clients asked", "clients asked"),
    "rounds": ("Rounds", "rounds"),
    "generator_updates": ("Updates of G", "updates of the generator"),
    "epsilon": ("ε", "ε"),
}
# Classifiers in acc_CLASSIFIER_pct and acc_CLASSIFIER_calibrated_pct: in a heading, and in a sentence.
CLASSIFIERS = {
    "": ("avg.", "average"),
    "avg": ("avg.", "average"),
    "cnn": ("CNN", "CNN"),
    "convnet": ("ConvNet", "ConvNet"),
    "mlp": ("MLP", "MLP"),
    "logreg": ("log. reg.", "logistic regression"),
    "adaboost": ("AdaBoost", "AdaBoost"),
    "bagging": ("bagging", "bagging"),
    "bernoulli_nb": ("Bernoulli NB", "Bernoulli naive Bayes"),
    "decision_tree": ("dec. tree", "decision tree"),
    "gaussian_nb": ("Gaussian NB", "Gaussian naive Bayes"),
    "gbm": ("GBM", "gradient boosting"),
    "lda": ("LDA", "linear discriminant analysis"),
    "linear_svc": ("linear SVC", "linear SVC"),
    "random_forest": ("rand. forest", "random forest"),
    "xgboost": ("XGBoost", "XGBoost"),
}
# Config keys in the papers' symbols. Mathtext where a letter needs it; other text can be searched in an SVG.
SETTINGS = {
    "dataset.name": "data set",
    "epsilon_claimed": "ε claimed by the paper's count",
    "epsilon_proven": "ε proven",
    "init.share": "share",
    "method.batch_size": "$B$",
    "method.clip_norm": "$C$",
    "method.cost": "cost",
    "method.d_d": r"$d_\mathcal{D}$",
    "method.lr": "learning rate",
    "method.lr_d": "learning rate of D",
    "method.lr_g": "learning rate of G",
    "method.m": "$m$",
    "method.n_d": r"$n_\mathcal{D}$",
    "method.name": "method",
    "method.p": "$p$",
    "method.shards": "$K$",
    "method.sigma": "σ",
    "method.steps": "$T$",
    "privacy.epsilon": "ε (budget)",
    "restart.checkpoint": "restart from",
    "d_accuracy_on_fakes": "accuracy of the discriminator on fakes",
}
# Neighbouring relations by the value of privacy.relation.
RELATIONS = {"add_remove": "add/remove", "replace_one": "replace-one"}
PAPERS = {
    "dpgan_revisited": "Private GANs, Revisited (Bie, Kamath & Zhang, TMLR 2023)",
    "dp_sinkhorn_final": "DP-Sinkhorn (Cao et al., NeurIPS 2021)",
    "dp_sinkhorn_earlier": "DP-Sinkhorn, an earlier version",
    "gs_wgan": "GS-WGAN (Chen, Orekondy & Fritz, NeurIPS 2020)",
}
# The metrics with a direction. Numbers of samples, spreads and accuracies on real data have none.
_LOWER = re.compile(
    r"fid|kid|nn_copies_pct|nn_closer_to_train_pct|(seconds|peak_memory|bytes|comm|parameters|steps)_\w+|cpu_seconds"
)
_HIGHER = re.compile(r"inception_score|precision|recall|density|coverage|acc_(?!\w*real_pct$)\w+_pct")

_ACCURACIES = {
    None: ("Acc.", "accuracy,"),
    "calibrated": ("Calib. acc.", "calibrated accuracy,"),
    "real": ("Real-data acc.", "accuracy with real data,"),
}
_UNITS = {"_pct": " (%)", "_mib": " (MiB)", "_bytes": " (bytes)"}
_LONGEST = 32  # characters of a name at the beginning of a yaml


def metric_label(name: str) -> str:
    """The heading of a column for a metric or a cost by its key: `Acc. CNN (%)`."""
    return _metric(name, 0)


def metric_name(name: str) -> str:
    """A metric or a cost in a sentence or at an axis: `accuracy, logistic regression (%)`."""
    return _metric(name, 1)


def metric_with_value(name: str, value: str) -> str:
    """A metric and its value in a list, with the unit at the value: `Acc. CNN 94.5%`, `Time 12.0 s`, `FID 12.3`."""
    match = re.fullmatch(r"(.+) \(([^()]+)\)", metric_label(name))
    if not match:
        return f"{metric_label(name)} {value}"
    return f"{match[1]} {value}{'' if match[2] == '%' else ' '}{match[2]}"


def _metric(name: str, long: int) -> str:
    if name in METRICS:
        return METRICS[name][long]
    if match := re.fullmatch(r"acc_(\w*?)_?(calibrated|real)?_?pct", name):
        classifier = CLASSIFIERS.get(match[1], (match[1].replace("_", " "),) * 2)[long]
        return f"{_ACCURACIES[match[2]][long]} {classifier} (%)"
    if match := re.fullmatch(r"seconds_(\w+)", name):
        text = f"time of {match[1].replace('_', ' ')} (s)"
    else:
        unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
        text = name.removesuffix(unit).replace("_", " ") + _UNITS.get(unit, "")
    return text if long else text[:1].upper() + text[1:]


def direction(name: str) -> Literal["lower", "higher"] | None:
    """Which values of a metric are better; None if that is unknown."""
    return "lower" if _LOWER.fullmatch(name) else "higher" if _HIGHER.fullmatch(name) else None


def is_accuracy_in_percent(name: str) -> bool:
    """Whether the metric of this name is the accuracy of a classifier."""
    return name.startswith("acc_") and name.endswith("_pct")


def label_of(name: str, plain: bool = False) -> str:
    """The label of a config key or a metric, in mathtext where the papers have a symbol; `plain`: without mathtext."""
    if name in SETTINGS:
        return re.sub(r"\$|\\mathcal|[{}]", "", SETTINGS[name]) if plain else SETTINGS[name]
    # Without the group: `init.share` is "share", and `method.pretraining.steps` "pretraining steps".
    return re.sub(r"[._]", " ", name.split(".", 1)[1]) if "." in name else metric_name(name)


def method_name(name: str) -> str:
    """A method's name for readers: what stands before the colon in the first line of its yaml, or else `name`."""
    return _titles("method", own_folders()).get(name, name)


def dataset_name(name: str) -> str:
    """A data set's name for readers: what stands before the colon in the first line of its yaml, or else `name`.

    A selection of clients in brackets stays: `Debugging task, MNIST (suspected)`.
    """
    base, bracket, selection = name.partition(" (")
    return _titles("dataset", own_folders()).get(base, base) + bracket + selection


def paper_name(name: str) -> str:
    """The name of a paper for readers, by its key in results/published."""
    return PAPERS.get(name, name)


def relation_name(relation: str) -> str:
    """A neighbouring relation for readers, by its value in a config or a ledger: `add/remove`, `replace-one`."""
    return RELATIONS.get(relation, relation)


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 run`, `2 runs`, or with that plural `2 copies`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


@lru_cache
def _titles(group: str, _: tuple[Path, ...]) -> dict[str, str]:
    """Names for readers of a group's yamls by their own name, cached for each value of `own_folders`."""
    titles = {}
    for name, path in names(group).items():
        with path.open(encoding="utf-8", errors="replace") as file:
            match = re.match(rf"#\s*([^:]{{1,{_LONGEST}}}):\s", file.readline())
        if match:
            titles[name] = match[1].strip()
    return titles
