"""Changes of images, compared with functions of torchvision and PyTorch that make the same ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torchvision.transforms.functional as vision

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.augmentation import (
    AUGMENTATIONS,
    CROP_PADDING,
    ROTATION,
    SCALE,
    affine,
    crop_flip,
    draw_crop_scale_rotate,
)
from dpgen_bench.evaluate.networks import Network
from tests.accuracy_toys import context


@pytest.mark.parametrize("channels", [1, 3])
def test_crop_flip_equals_that_of_torchvision(channels):
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, channels, 6, 9), generator=rng, dtype=torch.uint8)
    moves = torch.cat([torch.randint(9, (40, 2), generator=rng), torch.randint(2, (40, 1), generator=rng)], dim=1)
    moved = crop_flip(images, moves)
    for image, (top, left, mirrored), got in zip(images, moves.tolist(), moved, strict=True):
        expected = vision.crop(vision.pad(image, [4]), top, left, 6, 9)
        assert torch.equal(got, vision.hflip(expected) if mirrored else expected)
    still = torch.tensor([[4, 4, 0]]).expand(40, 3)
    assert torch.equal(crop_flip(images, still), images)


def moved(images, down=0.0, right=0.0, tall=1.0, wide=1.0, degrees=0.0):
    return affine(images, torch.tensor([[down, right, tall, wide, degrees]]).expand(len(images), 5))


@pytest.mark.parametrize("side", [8, 9])
def test_affine_moves_whole_pixels_exactly(side):
    images = torch.randint(256, (5, 1, side, side), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    exact = images.float()
    close = {"rtol": 0.0, "atol": 1e-2}  # of 255: grid_sample interpolates between neighbours with rounded weights
    torch.testing.assert_close(moved(images), exact, **close)
    torch.testing.assert_close(moved(images, degrees=90.0), exact.rot90(1, (2, 3)), **close)
    torch.testing.assert_close(moved(images, degrees=-90.0), exact.rot90(-1, (2, 3)), **close)
    for down, right in [(2, -1), (-4, 3)]:
        crop = torch.tensor([[CROP_PADDING - down, CROP_PADDING - right, 0]]).expand(5, 3)
        torch.testing.assert_close(moved(images, down, right), crop_flip(images, crop).float(), **close)


def test_affine_scales_height_and_width_independently():
    """A block of 4 x 4 pixels in the centre becomes one of 8 x 2; pixels that are not at its borders are exact."""
    images = torch.zeros(1, 1, 16, 16)
    images[:, :, 6:10, 6:10] = 200.0
    got = moved(images, tall=2.0, wide=0.5)
    assert float(got.sum()) == pytest.approx(200.0 * 16, rel=1e-5)  # the area stays: 2 x 0.5
    assert (got[0, 0, 5:11, 7:9] == 200.0).all()
    assert (got[0, 0, :3] == 0.0).all()
    assert (got[0, 0, :, :6] == 0.0).all()


def test_a_crop_a_scale_or_a_rotation_is_drawn_for_each_image_alone():
    moves = draw_crop_scale_rotate(3000, torch.Generator().manual_seed(0))
    shifts, scales, degrees = moves[:, :2], moves[:, 2:4], moves[:, 4]
    kinds = torch.stack([(shifts != 0).any(1), (scales != 1).any(1), degrees != 0], dim=1)
    assert (kinds.sum(1) <= 1).all()
    still = torch.tensor([1 / 81, 0.0, 1 / 91])  # the share of crops and rotations that move nothing
    expected = 3000 / 3 * (1 - still)
    assert ((kinds.sum(0) - expected).abs() < 5 * (3000 * 2 / 9) ** 0.5).all()
    assert set(shifts.flatten().tolist()) == set(range(-CROP_PADDING, CROP_PADDING + 1))
    assert 1 - SCALE <= float(scales.min()) < 1 - 0.95 * SCALE
    assert 1 + 0.95 * SCALE < float(scales.max()) <= 1 + SCALE
    assert (float(degrees.min()), float(degrees.max())) == (-ROTATION, ROTATION)


def test_every_shift_is_drawn_in_training_and_none_in_prediction(tmp_path, monkeypatch):
    images = torch.randint(256, (1000, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    records = Records(images, torch.arange(1000) % 10)
    seen = []

    def watched(images, moves):
        seen.append(moves)
        return crop_flip(images, moves)

    monkeypatch.setitem(AUGMENTATIONS, "crop_flip", replace(AUGMENTATIONS["crop_flip"], apply=watched))
    network = Network("paper_mlp", epochs=3, augment="crop_flip", holdout=0.1, keep="best")
    fitted = network.fit(records, context(tmp_path))
    moves = torch.cat(seen)
    assert len(moves) == 3 * 900
    for column, sides in ((0, 9), (1, 9), (2, 2)):
        counts = moves[:, column].bincount()
        assert len(counts) == sides
        assert float((counts - 2700 / sides).abs().max()) < 5 * (2700 / sides) ** 0.5
    assert not torch.equal(seen[0], seen[len(seen) // 3])  # other shifts in the next epoch
    fitted.predict(images)
    assert len(torch.cat(seen)) == 3 * 900
