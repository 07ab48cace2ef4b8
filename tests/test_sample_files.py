"""`dpgen sample` writes images as NumPy arrays, a folder, a zip or Parquet, which can be read again."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpgen_bench.cli import main
from dpgen_bench.data.datasets import Cifar10, FashionMnist
from dpgen_bench.data.folder import ImageFolder
from dpgen_bench.data.npz import Npz
from dpgen_bench.generator import Generator
from dpgen_bench.outcomes.sample_command import sample_run
from dpgen_bench.outcomes.sample_files import Samples, class_folders, read_samples, writer
from dpgen_bench.runs.execute import execute
from tests.run_toys import config

RNG = np.random.default_rng(0)
NAMES = {"cat": ("cat", "dog", "eel"), "shirt": ("t-shirt/top", "trouser", "ankle boot")}


def samples(channels: int = 1, names: tuple[str, ...] = NAMES["cat"], n: int = 30) -> Samples:
    images = RNG.integers(0, 256, (n, channels, 8, 8), dtype=np.uint8)
    images[:, :, 0, 0] = np.arange(channels) * 80  # not grey, if there are three channels
    return Samples(images, np.arange(n) % len(names), names)


def rows(images, labels) -> set[tuple[bytes, int]]:
    return {(np.asarray(image).tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}


def read(spec) -> set[tuple[bytes, int]]:
    """The records of both splits of a data set."""
    return set().union(*(rows(spec.load(split).images, spec.load(split).labels) for split in ("train", "test")))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("names", NAMES.values(), ids=list(NAMES))
def test_a_folder_is_read_again_as_a_data_set(tmp_path, channels, names):
    written = samples(channels, names)
    writer(tmp_path / "out", overwrite=False)(written)
    spec = ImageFolder(path=str(tmp_path / "out"), image_size=8)
    assert spec.image_shape == (channels, 8, 8)
    assert read(spec) == rows(written.images, written.labels)
    assert spec.class_names == tuple(class_folders(names))
    again = read_samples(tmp_path / "out", names)  # for metrics, in the order in which they were drawn
    assert np.array_equal(again.images, written.images)
    assert np.array_equal(again.labels, written.labels)


def test_a_file_of_arrays_is_read_again_as_a_data_set(tmp_path):
    written = samples(3, NAMES["shirt"])
    writer(tmp_path / "out.npz", overwrite=False)(written)
    spec = Npz(str(tmp_path / "out.npz"))
    assert read(spec) == rows(written.images, written.labels)
    assert spec.class_names == NAMES["shirt"]


def test_a_zip_holds_the_same_files_as_the_folder_and_no_dates(tmp_path):
    written = samples(3)
    for name in ("out", "out.zip", "again.ZIP"):
        writer(tmp_path / name, overwrite=False)(written)
    with zipfile.ZipFile(tmp_path / "out.zip") as file:
        content = {info.filename: file.read(info) for info in file.infolist()}
        assert {(info.date_time, info.compress_type) for info in file.infolist()} == {((1980, 1, 1, 0, 0, 0), 0)}
    folder = tmp_path / "out"
    assert content == {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.glob("*/*")}
    assert (tmp_path / "out.zip").read_bytes() == (tmp_path / "again.ZIP").read_bytes()


@pytest.mark.parametrize("names", [NAMES["shirt"], ("crane", "crane", "heron")], ids=["distinct", "twice"])
def test_parquet_has_the_columns_of_hugging_face(tmp_path, names):
    from pyarrow import parquet

    written = samples(3, names)
    writer(tmp_path / "out.parquet", overwrite=False)(written)
    table = parquet.read_table(tmp_path / "out.parquet")
    features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    listed = list(names) if len(set(names)) == 3 else ["0_crane", "1_crane", "2_heron"]
    assert features == {"image": {"_type": "Image"}, "label": {"names": listed, "_type": "ClassLabel"}}
    assert str(table.schema.field("image").type) == "struct<bytes: binary, path: string>"
    assert table["label"].to_pylist() == written.labels.tolist()
    images = [Image.open(io.BytesIO(each["bytes"])) for each in table["image"].to_pylist()]
    assert np.array_equal([np.asarray(image).transpose(2, 0, 1) for image in images], written.images)
    assert table["image"][7]["path"].as_py() == "000007.png"


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else find(name))
    with pytest.raises(ValueError, match=r"expected the package pyarrow .*\n *pip install 'dpgen-bench\[parquet\]'"):
        writer(tmp_path / "out.parquet", overwrite=False)
    writer(tmp_path / "out.npz", overwrite=False)


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (map(str, range(10)), [str(digit) for digit in range(10)]),
        (map(str, range(11)), [f"{number:02}" for number in range(11)]),
        (Cifar10().class_names, list(Cifar10().class_names)),
        (FashionMnist().class_names[:3], ["0_t-shirt_top", "1_trouser", "2_pullover"]),
        (("b", "a"), ["0_b", "1_a"]),
        (("A", "a"), ["0_A", "1_a"]),  # one name on some file systems
        (("test", "x"), ["0_test", "1_x"]),  # would be taken for the test split
        (("..", "x"), ["0___", "1_x"]),
        (("", "x"), ["0_", "1_x"]),
    ],
)
def test_sorted_folders_have_the_order_of_the_labels(names, folders):
    assert class_folders(list(names)) == folders == sorted(folders)


@pytest.mark.parametrize("name", ["out.npz", "out", "out.zip", "out.parquet"])
def test_existing_output_is_replaced_only_on_request(tmp_path, name):
    out = tmp_path / name
    writer(out, overwrite=False)(samples())
    with pytest.raises(ValueError, match=r"name a new file or folder, got .*--overwrite to replace it"):
        writer(out, overwrite=False)
    reference = tmp_path / f"other-{name}"
    fewer = samples(3, n=6)
    for path, overwrite in ((reference, False), (out, True)):
        writer(path, overwrite)(fewer)
    files = [{p.relative_to(path): p.read_bytes() for p in (path.rglob("*.png") if path.is_dir() else [])}
             for path in (out, reference)]  # fmt: skip
    assert files[0] == files[1]
    assert out.is_dir() or out.read_bytes() == reference.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {out.name, reference.name}  # no temporary file is left


def test_a_folder_with_other_files_is_never_replaced(tmp_path):
    writer(tmp_path / "out", overwrite=False)(samples())
    (tmp_path / "out" / "cat" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"which also holds cat.thesis\.tex; choose another name"):
        writer(tmp_path / "out", overwrite=True)
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ValueError, match=r"expected --out to name a file to be replaced, got .*, which is a folder"):
        writer(tmp_path / "folder.npz", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"expected --out to name a folder to be replaced, got .*, which is a file"):
        writer(tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("name", ["new", "deep/new.npz"])
def test_output_in_no_folder_is_refused(tmp_path, name, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"in a folder that can be written to, got .*file.*, but .*file is a file"):
        writer(tmp_path / "file" / name, overwrite=False)
    writer(tmp_path / "new folder" / name, overwrite=False)(samples())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"but .* cannot be written to; choose another"):
        writer(tmp_path / "another" / name, overwrite=False)


@pytest.mark.parametrize("name", ["out", "out.zip", "out.npz", "out.parquet"])
def test_writing_that_fails_leaves_what_was_there(tmp_path, name, monkeypatch):
    writer(tmp_path / name, overwrite=False)(samples(n=6))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write = writer(tmp_path / name, overwrite=True)
    broken = samples()
    broken.images[20:] = 0

    def fail(*_args, **_settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="No space left"):
        write(broken)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["out.png", "out.tar", "images.hdf5"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"expected --out to be a name that ends in \.npz, \.zip or \.parquet, or a"):
        writer(tmp_path / name, overwrite=False)
    writer(tmp_path / "eps1.0", overwrite=False)  # a folder


# Of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return execute(config(tmp_path_factory.mktemp("run"), "privacy.epsilon=inf"))  # nothing to calibrate


def test_a_run_keeps_the_names_of_its_classes(run, tmp_path):
    kept = run.read_json("dataset.json")
    assert kept == {"class_names": [str(digit) for digit in range(10)], "image_shape": [1, 8, 8]}
    run.write_json("dataset.json", {**kept, "class_names": list(FashionMnist().class_names)})
    results = run.path.parent.parent
    try:
        sample_run(results, run.id, 20, 0, tmp_path / "named", "balanced", benchmark=True)
    finally:
        run.write_json("dataset.json", kept)
    assert sorted(path.name for path in (tmp_path / "named").iterdir())[:2] == ["0_t-shirt_top", "1_trouser"]
    (run.path / "dataset.json").unlink()  # as in a run of an older version
    try:
        sample_run(results, run.id, 20, 0, tmp_path / "numbered", "balanced", benchmark=True)
    finally:
        run.write_json("dataset.json", kept)
    assert sorted(path.name for path in (tmp_path / "numbered").iterdir()) == [str(digit) for digit in range(10)]
    expected = Generator.load(run.path).sample(torch.arange(20) % 10, 0)
    assert torch.equal(read_samples(tmp_path / "numbered", kept["class_names"]).images, expected)


def test_the_command_refuses_bad_output_before_it_draws_images(run, tmp_path, capsys, monkeypatch):
    common = ["sample", run.id, "--n", "10", "--benchmark", f"--results={run.path.parent.parent}"]
    assert main([*common, f"--out={tmp_path / 'a'}"]) == 0
    monkeypatch.setattr(Generator, "load", lambda folder: pytest.fail("the generator was loaded"))
    assert main([*common, f"--out={tmp_path / 'a'}"]) == 2
    assert "--overwrite to replace it" in capsys.readouterr().err
    assert main([*common, f"--out={tmp_path / 'a.jpg'}"]) == 2
    assert "which ends in .jpg" in capsys.readouterr().err
    monkeypatch.undo()
    assert main([*common, "--overwrite", f"--out={tmp_path / 'a'}"]) == 0


def test_a_folder_in_which_no_file_can_be_made_is_refused_by_the_name_of_the_option():
    samples = Samples(np.zeros((1, 1, 4, 4), np.uint8), np.zeros(1, np.int64), ("0",))
    with pytest.raises(ValueError, match=r"expected --out in a folder that can be written to, got /proc/a\.npz"):
        writer(Path("/proc/a.npz"), overwrite=False)(samples)
