"""Federated EMNIST in both layouts and EMNIST without writers, on generated files, and the errors for bad files."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torchvision

from dpgen_bench.data.federations import Clients, Emnist, FederatedEmnist
from dpgen_bench.data.fetch import fetch
from dpgen_bench.data.records import MissingData

# Federated EMNIST, on generated files

WRITERS = ("f0001_02", "f0000_14", "f0003_09")  # not in order; f0003_09 wrote no digit
LABELS = {"f0001_02": [0, 9, 10, 36, 61], "f0000_14": [35, 5], "f0003_09": [40]}


def made_up(split: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{writer: (grey levels 0..255 of the files' [n, 28, 28], labels)}; 255 is white."""
    rng = np.random.default_rng(len(split))
    return {
        user: (rng.integers(0, 256, (len(LABELS[user]), 28, 28)), np.array(LABELS[user], np.int32)) for user in WRITERS
    }


def write_tff(root: Path) -> None:
    (root / "fed_emnist").mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        with h5py.File(root / "fed_emnist" / f"fed_emnist_{split}.h5", "w") as file:
            for user, (levels, labels) in made_up(split).items():
                file[f"examples/{user}/pixels"] = (levels / 255).astype(np.float32)
                file[f"examples/{user}/label"] = labels


def write_leaf(root: Path) -> None:
    for split in ("train", "test"):
        (root / "femnist" / split).mkdir(parents=True, exist_ok=True)
        data = {
            user: {"x": (levels.reshape(len(labels), 784) / 255).tolist(), "y": labels.tolist()}
            for user, (levels, labels) in made_up(split).items()
        }
        for number, users in enumerate((WRITERS[:1], WRITERS[1:])):
            content = {
                "users": list(users),
                "num_samples": [len(LABELS[user]) for user in users],
                "user_data": {user: data[user] for user in users},
            }
            path = root / "femnist" / split / f"all_data_{number}_niid_1_keep_0_{split}_9.json"
            path.write_text(json.dumps(content))


WRITE = {"tff": write_tff, "leaf": write_leaf}


@pytest.fixture(params=["tff", "leaf"])
def spec_of_part(request, tmp_path):
    """A part of the dataset with three writers, in either layout."""
    WRITE[request.param](tmp_path)
    return FederatedEmnist(root=str(tmp_path), layout=request.param, complete=False)


@pytest.mark.parametrize("split", ["train", "test"])
def test_writers_are_clients_in_the_order_of_their_ids(spec_of_part, split):
    records, order = spec_of_part.load(split), sorted(WRITERS)
    files = made_up(split)
    # Ink is 0.0 in the files and 255 here.
    assert np.array_equal(records.images[:, 0].numpy(), np.concatenate([255 - files[user][0] for user in order]))
    assert records.labels.tolist() == [5 if i == 1 else label for i, label in enumerate([35, 5, 0, 9, 10, 36, 61, 40])]
    if split == "train":
        assert records.clients.tolist() == [0, 0, 1, 1, 1, 1, 1, 2]
    else:
        assert records.clients is None
    assert spec_of_part.num_clients == 3


@pytest.mark.parametrize(
    ("classes", "labels", "clients"),
    [
        (62, [35, 5, 0, 9, 10, 36, 61, 40], [0, 0, 1, 1, 1, 1, 1, 2]),
        (36, [35, 5, 0, 9, 10, 10, 35, 14], [0, 0, 1, 1, 1, 1, 1, 2]),
        (10, [5, 0, 9], [0, 1, 1]),
    ],
)
def test_classes_are_merged_or_left_out(spec_of_part, classes, labels, clients):
    spec = FederatedEmnist(root=spec_of_part.root, layout=spec_of_part.layout, complete=False, classes=classes)
    records = spec.load("train")
    assert (records.labels.tolist(), records.clients.tolist()) == (labels, clients)
    assert len(spec.class_names) == classes
    assert spec.num_clients == 3  # client 2 wrote no digit, and is still a client


def test_class_names_follow_the_files():
    """TensorFlow Federated's documentation: label 11 is B, label 37 is b."""
    names = FederatedEmnist().class_names
    assert (names[9], names[11], names[35], names[37], names[61]) == ("9", "B", "Z", "b", "z")


def test_all_grey_levels_are_recovered(tmp_path):
    """TensorFlow Federated's float32 pixels are k/255; every k is recovered."""
    (tmp_path / "fed_emnist").mkdir()
    with h5py.File(tmp_path / "fed_emnist" / "fed_emnist_train.h5", "w") as file:
        levels = np.resize(np.arange(256), (1, 28, 28))
        file["examples/a/pixels"] = levels.astype(np.float32) / np.float32(255)
        file["examples/a/label"] = np.zeros((1, 1), np.int32)
    records = FederatedEmnist(root=str(tmp_path), complete=False).load("train")
    assert np.array_equal(records.images[:, 0].numpy(), 255 - levels)


def test_a_part_of_federated_emnist_is_refused_by_default(spec_of_part, monkeypatch):
    spec = FederatedEmnist(root=spec_of_part.root, layout=spec_of_part.layout)
    with pytest.raises(ValueError, match=r"3400 users with 671585 examples.*got 3 with 8[\s\S]*complete=false"):
        spec.load("train")
    with pytest.raises(ValueError, match="77483"):
        spec.load("test")
    monkeypatch.setattr(FederatedEmnist, "users", 3)
    monkeypatch.setattr(FederatedEmnist, "examples", {"train": 8, "test": 8})
    assert len(spec.load("train")) == len(spec.load("test")) == 8


def test_the_whole_is_known_without_its_files(tmp_path):
    spec = FederatedEmnist(root=str(tmp_path))
    assert (spec.num_clients, spec.unaccounted) == (3400, None)
    assert spec.examples == {"train": 671_585, "test": 77_483}  # GS-WGAN, appendix C.2
    assert "content" not in spec.identity()


def test_the_identity_of_a_part_is_its_files_and_no_path(spec_of_part, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    WRITE[spec_of_part.layout](elsewhere)
    if spec_of_part.layout == "leaf":  # HDF5 files may hold times, and so differ
        assert FederatedEmnist(root=str(elsewhere), layout="leaf", complete=False).identity() == spec_of_part.identity()
    before = spec_of_part.identity()
    assert spec_of_part.root not in json.dumps(before)
    file = spec_of_part._files("test")[0]
    file.write_bytes(file.read_bytes() + b" ")
    assert spec_of_part.identity()["content"] != before["content"]
    kinds = [FederatedEmnist(layout=layout, classes=n).identity() for layout in ("tff", "leaf") for n in (62, 36, 10)]
    assert len({json.dumps(kind) for kind in kinds}) == 6


@pytest.mark.parametrize(("layout", "place"), [("tff", "fed_emnist_train.h5"), ("leaf", "femnist/train")])
def test_missing_files_are_named_with_the_manual_way(tmp_path, layout, place):
    spec = FederatedEmnist(root=str(tmp_path), layout=layout)
    with pytest.raises(MissingData) as caught:
        spec.load("train")
    assert place in str(caught.value)
    assert {"tff": "tff-datasets-public/fed_emnist.tar.bz2", "leaf": "preprocess.sh"}[layout] in str(caught.value)
    assert "dpgen fetch" not in str(caught.value)  # there is no download
    with pytest.raises(ValueError, match="by hand"):
        fetch(spec)


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (np.zeros((2, 28, 28)), [0, 62], r"labels 0\.\.61"),
        (np.zeros((2, 28, 28)), [0, -1], r"labels 0\.\.61"),
        (np.zeros((2, 28, 28)), [0.0, 1.0], "integer labels"),
        (np.zeros((2, 28, 28)), [0], "f0000_14"),
        (np.zeros((2, 28, 27)), [0, 1], r"\[n, 28, 28\]"),
        (np.full((2, 28, 28), 1.5), [0, 1], r"within \[0, 1\]"),
        (np.full((2, 28, 28), np.nan), [0, 1], r"within \[0, 1\]"),
        (None, [0, 1], "examples / id / pixels, label"),
    ],
)
def test_damaged_hdf5(tmp_path, pixels, labels, message):
    write_tff(tmp_path)
    path = tmp_path / "fed_emnist" / "fed_emnist_train.h5"
    with h5py.File(path, "a") as file:
        del file["examples/f0000_14/pixels"], file["examples/f0000_14/label"]
        if pixels is not None:
            file["examples/f0000_14/pixels"] = pixels
        file["examples/f0000_14/label"] = labels
    with pytest.raises(ValueError, match=message) as caught:
        FederatedEmnist(root=str(tmp_path), complete=False).load("train")
    assert f"{path} is damaged" in str(caught.value)


@pytest.mark.parametrize("corruption", ["cut", "text", "no examples", "empty"])
def test_files_that_are_no_hdf5_of_examples(tmp_path, corruption):
    write_tff(tmp_path)
    path = tmp_path / "fed_emnist" / "fed_emnist_train.h5"
    if corruption == "cut":
        path.write_bytes(path.read_bytes()[:3000])
    elif corruption == "text":
        path.write_text("<html>Not found</html>")
    else:
        with h5py.File(path, "w") as file:
            file.create_group("examples" if corruption == "empty" else "data")
    spec = FederatedEmnist(root=str(tmp_path), complete=False)
    with pytest.raises(ValueError, match=r"fed_emnist_train\.h5 is damaged"):
        spec.load("train")
    if corruption != "empty":
        with pytest.raises(ValueError, match=r"fed_emnist_train\.h5 is damaged"):
            _ = spec.num_clients


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["user_data"]["f0001_02"]["y"].pop(), "f0001_02"),
        (lambda c: c["user_data"]["f0001_02"]["x"][0].pop(), "784 numbers"),
        (lambda c: c["user_data"]["f0001_02"].pop("x"), "784 numbers"),
        (lambda c: c["user_data"]["f0001_02"]["x"][0].__setitem__(0, 255), r"within \[0, 1\]"),
        (lambda c: c["users"].append("f0007_00"), "different ids"),
        (lambda c: c.pop("user_data"), "not a file of LEAF"),
        (lambda c: c["users"].append("f0000_14") or c["user_data"].update(f0000_14={"x": [], "y": []}), "another file"),
    ],
)
def test_damaged_json(tmp_path, change, message):
    write_leaf(tmp_path)
    path = next((tmp_path / "femnist" / "train").glob("all_data_0*.json"))
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        FederatedEmnist(root=str(tmp_path), layout="leaf", complete=False).load("train")
    assert "damaged" in str(caught.value)


def test_cut_or_absent_json(tmp_path):
    write_leaf(tmp_path)
    spec = FederatedEmnist(root=str(tmp_path), layout="leaf", complete=False)
    first, second = sorted((tmp_path / "femnist" / "train").iterdir())
    first.write_text(first.read_text()[:-10])
    with pytest.raises(ValueError, match="JSONDecodeError"):
        spec.load("train")
    first.unlink()
    second.unlink()
    with pytest.raises(ValueError, match=r"no \.json file"):
        spec.load("train")


@pytest.mark.parametrize("wrong", [{"layout": "sqlite"}, {"classes": 47}])
def test_federated_emnist_options_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FederatedEmnist(**wrong)


# EMNIST without writers


@pytest.fixture
def small_emnist(tmp_path, monkeypatch):
    """Five images of EMNIST's letters, the same for training and testing, as the published files hold them."""
    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "test"):
        head = b"\x00\x00\x08\x03" + b"".join(size.to_bytes(4, "big") for size in images.shape)
        (raw / f"emnist-letters-{split}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = b"\x00\x00\x08\x01" + (5).to_bytes(4, "big")
        (raw / f"emnist-letters-{split}-labels-idx1-ubyte").write_bytes(head + bytes([1, 26, 2, 3, 1]))
    monkeypatch.setattr(Emnist, "sizes", {"letters": {"train": 5, "test": 5}})
    return tmp_path, images


def test_emnist_is_transposed_and_labels_start_at_0(small_emnist):
    root, images = small_emnist
    records = Emnist(root=str(root), split="letters").load("train")
    assert np.array_equal(records.images[:, 0].numpy(), images.transpose(0, 2, 1))
    assert records.labels.tolist() == [0, 25, 1, 2, 0]
    assert records.clients is None
    reference = torchvision.datasets.EMNIST(str(root), split="letters", train=True)
    for record, label in enumerate(records.labels.tolist()):
        assert reference.classes[int(reference.targets[record])] == Emnist(split="letters").class_names[label]


@pytest.mark.parametrize("split", ["byclass", "bymerge", "balanced", "digits", "mnist"])
def test_emnist_classes_are_torchvisions(split):
    assert list(Emnist(split=split).class_names) == torchvision.datasets.EMNIST.classes_split_dict[split]


def test_emnist_sizes_are_the_publishers():
    """https://www.nist.gov/itl/products-and-services/emnist-dataset gives the sums."""
    totals = {split: sum(sizes.values()) for split, sizes in Emnist.sizes.items()}
    assert totals == {
        "byclass": 814_255,
        "bymerge": 814_255,
        "balanced": 131_600,
        "letters": 145_600,
        "digits": 280_000,
        "mnist": 70_000,
    }


@pytest.mark.parametrize("corruption", ["cut", "header", "longer", "label"])
def test_damaged_and_missing_emnist(small_emnist, monkeypatch, corruption):
    root, _ = small_emnist
    spec = Emnist(root=str(root), split="letters")
    kind = "labels-idx1" if corruption == "label" else "images-idx3"
    path = root / "EMNIST" / "raw" / f"emnist-letters-train-{kind}-ubyte"
    content = path.read_bytes()
    if corruption == "longer":
        monkeypatch.setattr(Emnist, "sizes", {"letters": {"train": 6, "test": 5}})
    else:
        path.write_bytes(
            {"cut": content[:-1], "header": b"no idx file", "label": content[:-1] + bytes([27])}[corruption]
        )
    with pytest.raises(ValueError, match="damaged") as caught:
        spec.load("train")
    assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(MissingData, match=f"dpgen fetch dataset=emnist data_root={root}"):
        spec.load("train")


def test_emnist_split_is_checked_and_identified():
    with pytest.raises(ValueError, match="byclass, bymerge"):
        Emnist(split="all")
    assert len({json.dumps(Emnist(split=split).identity()) for split in Emnist.names}) == 6


def test_emnist_is_fetched_through_torchvision(small_emnist, monkeypatch, tmp_path_factory):
    source, _ = small_emnist
    root = tmp_path_factory.mktemp("fresh")

    def fake_download(into: str, split: str, download: bool) -> None:
        assert (split, download) == ("letters", True)
        (source / "EMNIST").rename(Path(into) / "EMNIST")
        (Path(into) / "EMNIST" / "raw" / "gzip.zip").write_bytes(b"the archive")

    monkeypatch.setattr(torchvision.datasets, "EMNIST", fake_download)
    # A federation of EMNIST downloads EMNIST, too.
    spec = Clients(Emnist(split="letters"), 2, root=str(root))
    assert fetch(spec) == root / "EMNIST"
    assert len(spec.load("train")) == 5
    assert not (root / "EMNIST" / "raw" / "gzip.zip").exists()
