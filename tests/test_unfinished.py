"""Tests of trainings of networks that are interrupted and continued."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import networks, unfinished
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.networks import FittedNetwork, Network
from dpgen_bench.evaluate.reference import reference_network
from dpgen_bench.utils.randomness import kept

ADAM = Network("dpgan_cnn", epochs=5, holdout=0.1, keep="best", patience=4)  # with dropout
SGD = Network(
    "paper_cnn", optimiser="sgd", learning_rate=0.02, momentum=0.9, epochs=4, milestones=(3,), augment="crop_flip"
)


@pytest.fixture
def records() -> Records:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (120, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return Records(images, torch.randint(0, 10, (120,), generator=rng))


@pytest.fixture
def ctx(tmp_path, monkeypatch) -> EvalContext:
    monkeypatch.setattr(unfinished, "SAVE_S", 0.0)
    return EvalContext(seed=3, device="cpu", num_classes=10, cache=tmp_path / "cache", scratch=tmp_path / "scratch")


class Killed(BaseException):
    """In place of a signal, which nothing catches."""


@pytest.fixture
def epochs(monkeypatch) -> list[int]:
    """The number of epochs after which a training is killed, and the number of those that were trained."""
    counts = [99]
    train_epoch = networks.train_epoch

    def counted(*args) -> None:
        counts[-1] += 1
        if counts[-1] > counts[0]:
            raise Killed
        train_epoch(*args)

    monkeypatch.setattr(networks, "train_epoch", counted)
    return counts


def files(ctx: EvalContext) -> list[str]:
    assert ctx.scratch is not None
    return [path.name for path in ctx.scratch.rglob("*") if path.is_file()]


def killed_after(complete: int, network: Network, records: Records, ctx: EvalContext, epochs: list[int]) -> None:
    epochs[:] = [complete, 0]
    with pytest.raises(Killed):
        network.fit(records, ctx)
    epochs[:] = [99, 0]


def same(one: FittedNetwork, other: FittedNetwork) -> bool:
    return all(torch.equal(value, other.state[name]) for name, value in one.state.items())


@pytest.mark.parametrize("network", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("complete", [1, 3])
def test_it_continues_bit_for_bit(network, complete, records, ctx, epochs):
    with kept():
        uninterrupted = network.fit(records, dataclasses.replace(ctx, scratch=None))
    killed_after(complete, network, records, ctx, epochs)
    assert len(files(ctx)) == 1
    torch.rand(7)  # the global generators of another process have another state
    continued = network.fit(records, ctx)
    assert epochs[-1] == network.epochs - complete
    assert same(continued, uninterrupted)
    assert files(ctx) == []


def test_patience_counts_the_epochs_before(records, ctx, epochs):
    """Killed one epoch before it stops: the next process trains this epoch alone."""
    network = dataclasses.replace(ADAM, patience=2, epochs=50)
    epochs[:] = [99, 0]
    network.fit(records, dataclasses.replace(ctx, scratch=None))
    needed = epochs[-1]
    assert needed < 50
    killed_after(needed - 1, network, records, ctx, epochs)
    network.fit(records, ctx)
    assert epochs[-1] == 1


def test_other_settings_samples_and_seeds_start_from_the_beginning(records, ctx, epochs):
    killed_after(2, SGD, records, ctx, epochs)
    for network, samples, context in (
        (dataclasses.replace(SGD, learning_rate=0.01), records, ctx),
        (SGD, Records(255 - records.images, records.labels), ctx),
        (SGD, records, dataclasses.replace(ctx, seed=4)),
    ):
        epochs[:] = [99, 0]
        network.fit(samples, context)
        assert epochs[-1] == SGD.epochs
    assert len(files(ctx)) == 1  # that of the killed one


@pytest.mark.parametrize("damage", ["cut", "bits", "text", "other"])
def test_a_damaged_file_is_reported_and_the_network_trained_from_the_start(damage, records, ctx, epochs):
    uninterrupted = SGD.fit(records, dataclasses.replace(ctx, scratch=None))
    killed_after(2, SGD, records, ctx, epochs)
    (path,) = ctx.scratch.iterdir()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "bits":
        saved = torch.load(path, weights_only=True)
        saved["state"]["randomness"]["context"][0] ^= 1
        torch.save(saved, path)
    elif damage == "other":
        killed_after(2, ADAM, records, ctx, epochs)
        (other,) = set(ctx.scratch.iterdir()) - {path}
        other.rename(path)
    else:
        path.write_text("no checkpoint")
    with pytest.warns(UserWarning, match="the network is trained from the start") as warned:
        fitted = SGD.fit(records, ctx)
    assert "weights_only" not in str(warned[0].message)  # the advice of PyTorch's text
    assert epochs[-1] == SGD.epochs
    assert same(fitted, uninterrupted)


def test_a_full_disk_is_reported_and_stops_no_training(records, ctx, monkeypatch):
    def full(*args) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.warns(UserWarning, match="cannot be written"):
        SGD.fit(records, ctx)
    assert files(ctx) == []


def test_a_file_that_cannot_be_removed_loses_no_network(records, ctx, monkeypatch):
    remove = Path.unlink

    def refused(path: Path, **kwargs) -> None:
        if path.name.startswith("unfinished"):
            raise PermissionError("read-only")
        remove(path, **kwargs)

    monkeypatch.setattr(Path, "unlink", refused)
    assert len(SGD.fit(records, ctx).predict(records.images)) == len(records)
    assert len(files(ctx)) == 1


def test_files_are_written_once_a_minute(records, ctx, monkeypatch, epochs):
    monkeypatch.setattr(unfinished, "SAVE_S", 60.0)
    killed_after(3, SGD, records, ctx, epochs)
    assert ctx.scratch is not None
    assert not ctx.scratch.exists()


def test_a_reference_continues_in_another_run(records, ctx, epochs, tmp_path):
    """Its file is in the cache that runs share, and not in the folder of the run that was killed."""
    epochs[:] = [2, 0]
    with pytest.raises(Killed):
        reference_network(SGD, records, ctx)
    assert not ctx.scratch.exists()
    epochs[:] = [99, 0]
    reference_network(SGD, records, dataclasses.replace(ctx, scratch=tmp_path / "other"))
    assert epochs[-1] == SGD.epochs - 2
    assert not list(ctx.cache.rglob("unfinished*"))
