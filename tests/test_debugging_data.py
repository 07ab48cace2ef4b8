"""The debugging task: which clients are inverted, which are selected, and when the selection is a release."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from scipy import stats

from dpgen_bench.data import debugging
from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.debugging import DebuggingClients
from dpgen_bench.data.federations import Clients
from dpgen_bench.evaluate.networks import RecordClassifier

ROOT = Path(__file__).resolve().parents[1]
FEDERATION = Clients("digits", 20)


def task(**settings) -> DebuggingClients:
    """On 20 clients of the digits, with the classifier of conf/dataset/debugging_digits.yaml."""
    return DebuggingClients(**{"federation": FEDERATION, "classifier": RecordClassifier("paper_mlp", 60), **settings})


# Clients with the bug


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 10), (0.52, 10), (0.525, 11), (1.0, 20)])
def test_the_bug_inverts_all_images_of_its_clients_and_no_others(share, count):
    plain, records = FEDERATION.load("train"), task(inverted=share).load("train")
    bugs = task(inverted=share).inverted_clients()
    has_bug = torch.isin(records.clients, torch.from_numpy(bugs))
    assert len(bugs) == count
    assert torch.equal(records.images[has_bug], 255 - plain.images[has_bug])
    assert torch.equal(records.images[~has_bug], plain.images[~has_bug])
    assert torch.equal(records.labels, plain.labels)
    assert torch.equal(records.clients, plain.clients)


def test_the_test_split_has_no_bug():
    test = task(inverted=1.0).load("test")
    assert (test.content_hash, test.clients) == (Digits().load("test").content_hash, None)


def test_every_client_has_the_bug_equally_often():
    """Chi-square with false alarm below 1e-6: clients drawn without replacement vary less than it assumes."""
    bugs = np.concatenate([task(inverted=0.25, bug_seed=seed).inverted_clients() for seed in range(400)])
    assert stats.chisquare(np.bincount(bugs, minlength=20)).pvalue > 1e-6
    # Golden values of this code: other clients need a new REVISION.
    assert task().inverted_clients().tolist() == [1, 2, 3, 7, 9, 10, 12, 14, 15, 16]


# Selection of clients


def test_suspects_and_others_by_flag_are_all_clients_renumbered():
    everyone = task().load("train")
    for select, flagged in (("suspected", True), ("others", False)):
        spec = task(select=select)
        chosen, records = spec.chosen_clients(), spec.load("train")
        assert chosen.tolist() == [k for k in range(20) if (k in task().inverted_clients()) == flagged]
        assert (spec.num_clients, records.clients.unique().tolist()) == (10, list(range(10)))
        for number, client in enumerate(chosen):
            old, new = everyone.clients == client, records.clients == number
            assert torch.equal(everyone.images[old], records.images[new])
            assert torch.equal(everyone.labels[old], records.labels[new])


def test_numbers_of_clients_are_known_without_records(monkeypatch):
    monkeypatch.setattr(Digits, "load", lambda *_: pytest.fail("records were read"))
    assert [task(select=select, inverted=0.3).num_clients for select in ("all", "suspected", "others")] == [20, 6, 14]


def test_the_classifier_finds_the_inverted_clients():
    """The threshold is far below the accuracy on original images, and far above that on inverted ones."""
    spec = task(select="suspected", by="classifier", threshold=0.5)
    assert spec.chosen_clients().tolist() == spec.inverted_clients().tolist()
    assert spec.num_clients == 10
    accuracies, bugs = spec.accuracies(), np.isin(np.arange(20), spec.inverted_clients())
    assert accuracies[~bugs].mean() > 0.9
    assert accuracies[bugs].max() < 0.3
    assert spec.load("train").content_hash == task(select="suspected").load("train").content_hash
    others = replace(spec, select="others")
    assert sorted([*spec.chosen_clients(), *others.chosen_clients()]) == list(range(20))


def test_accuracies_are_those_of_each_clients_records():
    """The accuracies are computed client by client with the same trained classifier."""
    spec = task(bug_seed=1)
    records = spec.load("train")
    fitted = debugging._fitted(FEDERATION, RecordClassifier("paper_mlp", 60))
    right = fitted.predict(records.images) == records.labels
    counted = [right[records.clients == client].double().mean().item() for client in range(20)]
    assert spec.accuracies() == pytest.approx(np.array(counted), abs=1e-12)


def test_the_threshold_is_strict_and_clients_without_records_are_not_suspected():
    federation = Clients("digits", 150, partition="dirichlet", alpha=0.02)
    empty = sorted(set(range(150)) - set(federation.load("train").clients.tolist()))
    spec = task(federation=federation, inverted=0.0, select="suspected", by="classifier", threshold=1.0)
    assert empty
    assert (spec.accuracies()[empty] == 1).all()
    assert spec.chosen_clients().tolist() == np.flatnonzero(spec.accuracies() < 1).tolist()
    others = replace(spec, select="others")
    assert set(empty) <= set(others.chosen_clients())
    assert others.num_clients == len(others.chosen_clients()) > len(others.load("train").clients.unique())


def test_the_classifier_is_the_same_for_any_number_of_threads():
    train = debugging._fitted.__wrapped__
    one = train(FEDERATION, RecordClassifier("paper_mlp", 2)).state
    try:
        torch.set_num_threads(2)
        two = train(FEDERATION, RecordClassifier("paper_mlp", 2)).state
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_the_classifier_of_mnists_yaml(data_root):
    if not (data_root / "MNIST").is_dir():
        pytest.skip(f"no MNIST below {data_root}")
    spec = yaml_dataset("+dataset=debugging_mnist", f"data_root={data_root}", "dataset.by=classifier")
    bugs = np.isin(np.arange(100), spec.inverted_clients())
    assert spec.accuracies()[~bugs].mean() > 0.95
    assert spec.chosen_clients().tolist() == np.flatnonzero(bugs).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inverted": 0.0, "select": "suspected"}, r"got none of 20.*change dataset\.inverted \(now 0\)"),
        ({"inverted": 1.0, "select": "others"}, r"change dataset\.inverted \(now 1\)"),
        ({"threshold": 0.0, "select": "suspected", "by": "classifier"}, r"change dataset\.threshold \(now 0\)"),
    ],
)
def test_a_selection_without_clients_is_refused(settings, message):
    spec = task(**settings)
    with pytest.raises(ValueError, match=message):
        spec.load("train")
    with pytest.raises(ValueError, match=r"dataset\.select=all"):
        _ = spec.num_clients


def test_a_dataset_without_clients_is_refused():
    with pytest.raises(ValueError, match="'digits', which has none"):
        DebuggingClients(Digits()).load("train")
    with pytest.raises(ValueError, match="dataset with clients"):
        DebuggingClients("digits")


@pytest.mark.parametrize(
    "wrong",
    [
        {"select": "some"},
        {"by": "luck"},
        {"inverted": 1.1},
        {"threshold": float("nan")},
        {"by": "classifier", "classifier": None},
    ],
)
def test_options_are_checked(wrong):
    with pytest.raises(ValueError, match=f"dataset.{next(iter(wrong))}"):
        task(**wrong)


# Identity and privacy


def test_only_a_choice_by_the_classifier_is_a_release(monkeypatch):
    for select in ("all", "suspected", "others"):
        assert task(select=select).unaccounted is None
    assert task(by="classifier").unaccounted is None
    reason = task(select="others", by="classifier", threshold=0.882).unaccounted
    assert "accuracy on their private data (suspected below 0.882)" in reason
    monkeypatch.setattr(Clients, "unaccounted", "the writers were asked")
    assert task().unaccounted == "the writers were asked"
    assert task(select="others", by="classifier").unaccounted == f"the writers were asked; {reason}"


def test_the_identity_has_all_settings_that_change_records():
    kinds = [
        task(),
        task(federation=Clients("digits", 21)),
        task(inverted=0.4),
        task(bug_seed=1),
        task(select="suspected"),
        task(select="others"),
        task(select="others", by="classifier"),
        task(select="others", by="classifier", threshold=0.5),
        task(select="others", by="classifier", classifier=RecordClassifier("paper_cnn", 60)),
        task(select="others", by="classifier", classifier=RecordClassifier("paper_mlp", 61)),
    ]
    assert len({json.dumps(spec.identity(), sort_keys=True) for spec in kinds}) == len(kinds)
    assert (
        task(by="classifier", threshold=0.1, classifier=RecordClassifier("paper_mlp", 1)).identity()
        == task().identity()
    )
    assert task(root="there").identity() == task().identity()
    assert task(root="there").federation.source.root == "there"


# Configs


def yaml_dataset(*overrides: str) -> DebuggingClients:
    all_overrides = (
        overrides if any(text.startswith("data_root=") for text in overrides) else (*overrides, "data_root=some/where")
    )
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base=None):
        config = compose(overrides=[f"+{w}" if w.startswith("data_root=") else w for w in all_overrides])
    return instantiate(config.dataset, _convert_="all")


@pytest.mark.parametrize(
    ("choice", "by", "population"),
    [("debugging_mnist", "flag", 100), ("debugging_digits", "flag", 20), ("debugging_emnist", "classifier", 3400)],
)
def test_yamls_build(choice, by, population):
    spec = yaml_dataset(f"+dataset={choice}")
    assert (type(spec), spec.name, spec.root, spec.federation.root) == (
        DebuggingClients,
        choice,
        "some/where",
        "some/where",
    )
    assert (spec.select, spec.by, spec.threshold) == ("suspected", by, 0.882)
    assert len(spec.inverted_clients()) == population / 2
    assert (spec.unaccounted is None) == (by == "flag")


def test_nested_settings_are_set_from_outside():
    spec = yaml_dataset("+dataset=debugging_digits", "dataset.federation.clients=5", "dataset.select=all")
    assert spec.num_clients == 5
    assert len(spec.load("train")) == 1437
