"""Generators: samples bit by bit, unrounded pixels, dependence of images on labels and seed, diverged networks."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor, nn

from dpgen_bench.generator import BLOCK, Generator, NetGenerator
from dpgen_bench.runs.samples import clipping_note
from tests.toys import Painter


class Levels(nn.Module):
    """Every pixel of an image of class y is `levels[y]`."""

    def __init__(self, levels: list[float]) -> None:
        super().__init__()
        self.levels = nn.Parameter(torch.tensor(levels))
        self.norm = nn.BatchNorm2d(1)  # parameters 2, buffers 3; not used

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.levels[y][:, None, None, None].expand(-1, 1, 2, 3)


def of_levels(*levels: float, value_range: tuple[float, float] = (0.0, 1.0)) -> NetGenerator:
    config = {"_target_": "tests.test_generator.Levels", "levels": list(levels)}
    return NetGenerator(Levels(list(levels)), config, 4, len(levels), (1, 2, 3), value_range=value_range)


def painter(latent: str = "normal") -> NetGenerator:
    config = {"_target_": "tests.toys.Painter", "num_classes": 3, "image_shape": [1, 2, 2]}
    return NetGenerator(Painter(3, [1, 2, 2]), config, 4, 3, (1, 2, 2), latent=latent)  # type: ignore[arg-type]


def test_pixels_that_are_clipped_by_more_than_a_tenth_of_the_range_are_counted_and_noted():
    tanh = of_levels(-1.0, -0.05, -0.9, 1.05)  # two of the four are clipped by more
    tanh.sample(torch.arange(4), 0)
    assert tanh.clipped == pytest.approx(0.5)
    assert clipping_note(tanh).startswith("50% of the pixels of a few samples are far outside of the generator's")
    assert "value_range, (0.0, 1.0), and are clipped" in clipping_note(tanh)
    declared = of_levels(-1.0, -0.05, -0.9, 1.05, value_range=(-1.0, 1.0))
    declared.sample(torch.arange(BLOCK + 4) % 4, 0)
    assert declared.clipped == 0.0
    assert clipping_note(declared) == clipping_note(Bare()) == ""


class Bare(Generator):
    """A generator that defines only the abstract methods."""

    num_classes, image_shape = 2, (1, 1, 1)

    def sample(self, labels, seed):
        return labels.to(torch.uint8).reshape(-1, 1, 1, 1)

    def config(self):
        return {}

    def state(self):
        return {
            "a": torch.zeros(2, 3),
            "b": torch.zeros(4, dtype=torch.float16),
            "c": torch.zeros(5, dtype=torch.int64),
        }

    @classmethod
    def rebuild(cls, config, state):
        return cls()


def test_pixels_are_the_value_range_mapped_to_0_255():
    generator = of_levels(-1.0, 0.0, 0.5, 1.0, -7.0, 7.0, value_range=(-1.0, 1.0))
    labels = torch.arange(6)
    unrounded = generator.sample_unrounded(labels, seed=0)
    assert unrounded.dtype == torch.float32
    assert unrounded.shape == (6, 1, 2, 3)
    assert unrounded[:, 0, 0, 0].tolist() == [0.0, 127.5, 191.25, 255.0, 0.0, 255.0]
    assert generator.sample(labels, seed=0)[:, 0, 1, 2].tolist() == [0, 128, 191, 255, 0, 255]


@pytest.mark.parametrize("latent", ["normal", "uniform", "bernoulli"])
def test_sample_is_the_rounding_of_unrounded(latent):
    generator = painter(latent)
    labels = torch.arange(2 * BLOCK + 13) % 3
    whole, unrounded = generator.sample(labels, 5), generator.sample_unrounded(labels, 5)
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, unrounded.round().to(torch.uint8))
    assert not torch.equal(unrounded, unrounded.round())
    assert float(unrounded.min()) >= 0
    assert float(unrounded.max()) <= 255


@pytest.mark.parametrize(
    ("latent", "digest"),
    [("normal", "9d45ad9e6f2470c4"), ("uniform", "30e683c842e66f1d"), ("bernoulli", "168b434c3c5b25ce")],
)
def test_samples_are_those_of_the_first_version(latent, digest):
    """SHA-256 of the bytes that version 0.1.0 drew, before there were unrounded samples."""
    images = painter(latent).sample(torch.arange(BLOCK + 50) % 3, seed=11)
    assert hashlib.sha256(images.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("draw", ["sample", "sample_unrounded"])
def test_an_image_depends_on_the_seed_its_position_and_its_label_alone(draw):
    generator = painter()
    with torch.no_grad():
        generator.net.means.copy_(torch.tensor([0.2, 0.5, 0.8]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2))
    labels = torch.randint(3, (BLOCK + 30,), generator=torch.Generator().manual_seed(0))
    images = getattr(generator, draw)(labels, 1)
    for n in (1, 29, BLOCK, BLOCK + 1):
        assert torch.equal(getattr(generator, draw)(labels[:n], 1), images[:n])
    for i in (0, 17, BLOCK - 1, BLOCK + 29):
        others = (labels + 1) % 3
        others[i] = labels[i]
        assert torch.equal(getattr(generator, draw)(others, 1)[i], images[i])
        relabelled = labels.clone()
        relabelled[i] = (labels[i] + 1) % 3
        assert not torch.equal(getattr(generator, draw)(relabelled, 1)[i], images[i])
    assert not torch.equal(getattr(generator, draw)(labels, 2), images)
    same = getattr(generator, draw)(torch.zeros_like(labels), 1)
    assert len(same.flatten(1).unique(dim=0)) > 20  # places differ
    assert len(getattr(generator, draw)(labels, 1)[[3, BLOCK + 3]].unique(dim=0)) == 2  # and so do blocks


def test_no_labels_give_no_images():
    assert painter().sample(torch.empty(0, dtype=torch.int64), 0).shape == (0, 1, 2, 2)
    assert painter().sample(torch.empty(0, dtype=torch.int64), 0).dtype == torch.uint8
    empty = painter().sample_unrounded(torch.empty(0, dtype=torch.int64), 0)
    assert empty.dtype == torch.float32
    assert empty.shape == (0, 1, 2, 2)


@pytest.mark.parametrize("draw", ["sample", "sample_unrounded"])
def test_samples_of_a_diverged_net_are_an_error(draw):
    generator = of_levels(0.5, math.nan, math.inf, -math.inf)
    generator.net.train()
    labels = torch.zeros(BLOCK + 40, dtype=torch.int64)
    labels[[3, 5, BLOCK + 7]] = torch.tensor([1, 2, 3])
    with pytest.raises(ValueError, match=rf"in 3 of {BLOCK + 40} images \(seed 21\).*diverged"):
        getattr(generator, draw)(labels, 21)
    assert generator.net.training
    assert float(getattr(generator, draw)(labels[6:BLOCK], 21).double().mean()) == pytest.approx(127.5, abs=0.5)


def test_padding_rows_do_not_count_as_diverged():
    generator = of_levels(math.nan, 0.5)  # blocks are padded with label 0
    assert generator.sample(torch.ones(3, dtype=torch.int64), 0).shape == (3, 1, 2, 3)


@pytest.mark.parametrize("draw", ["sample", "sample_unrounded"])
@pytest.mark.parametrize("labels", [torch.tensor([3]), torch.tensor([-1]), torch.tensor([0.0]), torch.tensor([[0]])])
def test_wrong_labels_are_refused(draw, labels):
    with pytest.raises(ValueError, match="expected labels"):
        getattr(painter(), draw)(labels, 0)


def test_unrounded_samples_survive_saving(tmp_path):
    generator = painter()
    generator.save(tmp_path)
    labels = torch.arange(40) % 3
    assert torch.equal(Generator.load(tmp_path).sample_unrounded(labels, 3), generator.sample_unrounded(labels, 3))


def test_parameters_are_counted():
    assert of_levels(0.0, 1.0, 0.5).num_parameters == 3 + 2
    assert painter().num_parameters == 3 * 1 * 2 * 2
    assert Bare().num_parameters == 2 * 3 + 4


def test_methods_that_a_generator_need_not_define():
    assert Bare().draw_labels(5, 0) is None
    assert painter().draw_labels(5, 0) is None
    with pytest.raises(ValueError, match="got Bare, which only has rounded ones: override sample_unrounded"):
        Bare().sample_unrounded(torch.tensor([0, 1]), 0)
