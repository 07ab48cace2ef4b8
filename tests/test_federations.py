"""Records with clients, any dataset split over clients, and the configs of datasets with clients."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from dpgen_bench.data.datasets import Digits, Mnist
from dpgen_bench.data.federations import Clients, Emnist, FederatedEmnist
from dpgen_bench.data.records import MissingData, Records
from dpgen_bench.utils.validation import check_types

ROOT = Path(__file__).resolve().parents[1]


def yaml_dataset(*overrides: str):
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base=None):
        config = compose(overrides=["+data_root=some/where", *overrides])
    return instantiate(config.dataset, _convert_="all")


# Records


def test_clients_enter_the_content_hash_and_only_where_there_are_any():
    images, labels = torch.arange(32, dtype=torch.uint8).reshape(2, 1, 4, 4), torch.tensor([3, 1])
    plain = Records(images, labels)
    owned = [Records(images, labels, torch.tensor(clients)) for clients in ([0, 0], [0, 1])]
    # As it was before records had clients, so that caches named after it stay.
    assert plain.content_hash == hashlib.sha256(plain.images_hash.encode() + labels.numpy().tobytes()).hexdigest()
    assert len({plain.content_hash, *(records.content_hash for records in owned)}) == 3
    assert {records.images_hash for records in owned} == {plain.images_hash}


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"int64 clients \[2\]"),
        (torch.zeros(2, dtype=torch.int32), r"int64 clients \[2\]"),
        (torch.tensor([0, -1]), "clients from 0"),
    ],
)
def test_records_refuse_wrong_clients(clients, message):
    with pytest.raises(ValueError, match=message):
        Records(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), clients)


def test_other_datasets_have_no_clients():
    assert (Digits().num_clients, Digits().unaccounted, Digits().load("test").clients) == (None, None, None)


def test_data_import_no_evaluation():
    for path in (ROOT / "dpgen_bench" / "data").glob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        assert not {
            name for name in names if name.startswith(("dpgen_bench.evaluate", "dpgen_bench.data.debugging"))
        }, path


# Any dataset, split


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"clients": 0}, "clients >= 1"),
        ({"clients": 2.5}, "clients >= 1"),
        ({"partition": "dirichlet", "alpha": 0.0}, "alpha > 0"),
        ({"partition": "dirichlet", "alpha": float("inf")}, "use iid"),
        ({"partition": "classes", "classes_per_client": 11}, "between 1 and 10"),
        ({"partition": "shards"}, "iid, dirichlet or classes"),
        ({"base": "imagenet"}, "mnist, fashion_mnist, digits, cifar10, emnist"),
        ({"base": 3}, "a dataset or the name of one"),
    ],
)
def test_bad_clients_are_refused_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        Clients(**{"base": "digits", "clients": 4, **wrong})


def test_clients_hold_the_bases_records():
    base, spec = Digits().load("train"), Clients("digits", 20)
    records = spec.load("train")
    assert records.images_hash == base.images_hash
    assert torch.equal(records.labels, base.labels)
    assert sorted(torch.bincount(records.clients).tolist()) == [71] * 3 + [72] * 17
    test = spec.load("test")
    assert (test.content_hash, test.clients) == (Digits().load("test").content_hash, None)
    assert (spec.num_clients, spec.image_shape, spec.num_classes, spec.unaccounted) == (20, (1, 28, 28), 10, None)


def test_records_of_classes_without_a_holder_are_left_out():
    spec = Clients("digits", 2, partition="classes", classes_per_client=3)
    records, base = spec.load("train"), Digits().load("train")
    assert len(records.labels.unique()) == 6
    assert len(records) == int(torch.isin(base.labels, records.labels.unique()).sum())
    for client in (0, 1):
        assert len(records.labels[records.clients == client].unique()) == 3


def test_dirichlet_leaves_some_clients_empty_and_still_counts_them():
    spec = Clients("digits", 200, partition="dirichlet", alpha=0.01)
    assert len(spec.load("train").clients.unique()) < 200 == spec.num_clients


def test_the_identity_of_clients_has_all_settings_that_change_records(tmp_path):
    kinds = [
        Clients("digits", 20),
        Clients("mnist", 20),
        Clients("digits", 21),
        Clients("digits", 20, partition_seed=1),
        Clients("digits", 20, partition="dirichlet"),
        Clients("digits", 20, partition="dirichlet", alpha=1.0),
        Clients("digits", 20, partition="classes"),
        Clients("digits", 20, partition="classes", classes_per_client=3),
    ]
    assert len({json.dumps(spec.identity(), sort_keys=True) for spec in kinds}) == len(kinds)
    same = Clients(Digits(root="there"), 20, alpha=3.0, classes_per_client=5, root=str(tmp_path))
    assert same.identity() == kinds[0].identity()
    assert len({*kinds, Clients("digits", 20)}) == len(kinds)  # hashable, by content


def test_clients_read_their_base_from_the_given_root(tmp_path):
    spec = Clients("mnist", 3, name="clients_mnist", root=str(tmp_path))
    with pytest.raises(MissingData, match=f"dpgen fetch dataset=mnist data_root={tmp_path}"):
        spec.load("train")
    assert (Clients(Mnist(root="there"), 3).root, Clients(Mnist(root="there"), 3, root="here").source.root) == (
        "there",
        "here",
    )


def test_a_federation_is_not_split_again():
    with pytest.raises(ValueError, match="has clients already"):
        Clients(Clients("digits", 3), 4).load("train")


def test_mnist_over_100_clients(data_root):
    if not (data_root / "MNIST").is_dir():
        pytest.skip(f"no MNIST below {data_root}")
    records = Clients("mnist", 100, root=str(data_root)).load("train")
    assert torch.bincount(records.clients).tolist() == [600] * 100


@pytest.mark.parametrize(
    ("choice", "kind", "num_clients"),
    [
        ("federated_emnist", FederatedEmnist, 3400),
        ("emnist", Emnist, None),
        ("clients_mnist", Clients, 100),
        ("clients_fashion_mnist", Clients, 100),
        ("clients_digits", Clients, 20),
    ],
)
def test_yamls_build(choice, kind, num_clients):
    spec = yaml_dataset(f"+dataset={choice}")
    assert type(spec) is kind
    assert (spec.name, spec.root, spec.num_clients) == (choice, "some/where", num_clients)
    assert spec.identity()["name"] == choice


def test_leafs_yaml_does_not_expect_the_complete_dataset():
    spec = yaml_dataset("+dataset=federated_emnist_leaf")
    assert (spec.name, spec.layout, spec.complete, spec.classes) == ("federated_emnist_leaf", "leaf", False, 36)
    with pytest.raises(MissingData, match="femnist/train"):
        spec.identity()


def test_a_base_may_be_a_dataset_with_settings():
    nested = {"_target_": "dpgen_bench.data.federations.Emnist", "split": "digits"}
    check_types(Clients, {"base": nested, "clients": 5}, "dataset")
    spec = instantiate({"_target_": "dpgen_bench.data.federations.Clients", "base": nested, "clients": 5, "root": "r"})
    assert spec.source == Emnist(root="r", split="digits")
    with pytest.raises(ValueError, match=r"dataset\.clients: expected an integer"):
        check_types(Clients, {"clients": "many"}, "dataset")
