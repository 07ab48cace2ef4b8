"""Planted faults of published code, each a function that `audit_code` can call, and the honest code next to them.

What all of them declare is in `DECLARED`: one vector of 64 numbers in each of 4 releases, clipped to 1, with noise of
the multiplier that one release needs for epsilon 1, so that the declared noise is right for the honest code.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.events import Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, OneShard

TIMES, STD = 4, 8.0
DECLARED = Event(Full(), Sensitivity(1.0, 2.0), STD, TIMES)
ROWS = Event(Full(), Sensitivity(2.0, 2.0), STD, TIMES)
SHARDS = Event(OneShard(TIMES, "public_balanced"), Sensitivity(1.0, 2.0), STD, TIMES)


def rows_of(images: Tensor) -> np.ndarray:
    return images.flatten(1).double().numpy()


def clipped(rows: np.ndarray, C: float = 1.0) -> np.ndarray:
    return rows * np.minimum(1.0, C / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12))


def noisy(exact, rng, std=STD):
    exact = np.asarray(exact, dtype=np.float64)
    return exact if rng is None else exact + std * rng.standard_normal(exact.shape)


def released(value, rng, times=TIMES):
    return [noisy(value, rng) for _ in range(times)]


def honest(images, labels, rng):
    return released(clipped(rows_of(images)).sum(axis=0), rng)


def no_clip(images, labels, rng):
    return released(rows_of(images).sum(axis=0), rng)


def clip_of_each_tensor(images, labels, rng):
    """DP-CGAN: four tensors of a gradient, each clipped to C."""
    rows = rows_of(images).reshape(len(images), 4, 16)
    return released(clipped(rows).sum(axis=0).ravel(), rng)


def realised_size(images, labels, rng):
    """The sum is scaled by the number of records that are there, which is private."""
    rows = clipped(rows_of(images))
    return released(24.0 * rows.mean(axis=0), rng)


def half_of_the_noise(images, labels, rng):
    exact = clipped(rows_of(images)).sum(axis=0)
    return [noisy(exact, rng, STD / 2.0) for _ in range(TIMES)]


def one_draw_twice(images, labels, rng):
    return [noisy(clipped(rows_of(images)).sum(axis=0), rng)] * TIMES


def noise_without_effect(images, labels, rng):
    """DP-Kernel: the noise is added to a value of a loss, and the released gradient of the loss does not contain it."""
    record = torch.from_numpy(clipped(rows_of(images)).sum(axis=0))
    point = torch.zeros(64, dtype=torch.float64, requires_grad=True)
    noise = torch.from_numpy(np.zeros(64) if rng is None else STD * rng.standard_normal(64))
    loss = (point * record).sum() + noise.sum()
    (gradient,) = torch.autograd.grad(loss, [point])
    return [gradient.numpy()] * TIMES


def fixed_seed(images, labels, rng):
    """PrivImage: the generator of the noise is seeded by a constant."""
    return honest(images, labels, None if rng is None else np.random.default_rng(0))


def private_labels(images, labels, rng):
    """Labels of the batch, which tell the generator what to draw, are released without noise."""
    counts = np.bincount(labels.numpy(), minlength=4)
    return [np.concatenate([each, counts]) for each in honest(images, labels, rng)]


def batch_norm(images, labels, rng):
    rows = rows_of(images)
    rows = (rows - rows.mean(axis=0)) / (rows.std(axis=0) + 1e-5)
    return released(clipped(rows).sum(axis=0), rng)


def bounds_of_the_data(images, labels, rng):
    """Pixels are scaled by the smallest and largest ones of the data."""
    rows = rows_of(images)
    rows = (rows - rows.min()) / (rows.max() - rows.min())
    return released(clipped(rows).sum(axis=0), rng)


def one_release_more(images, labels, rng):
    return released(clipped(rows_of(images)).sum(axis=0), rng, TIMES + 1)


def shards_dealt_again(images, labels, rng):
    """A record belongs to another shard in each step, so that it takes part in most releases."""
    rows = clipped(rows_of(images))
    shards = [np.random.default_rng(step).integers(2, size=1000)[: len(rows)] == 0 for step in range(TIMES)]
    return [noisy(rows[shard].sum(axis=0), rng) for shard in shards]


def shards(images, labels, rng):
    """Honest: each record belongs to one of four shards, and each release is of one shard."""
    rows = clipped(rows_of(images))
    shard = np.arange(len(rows)) % TIMES
    return [noisy(rows[shard == step].sum(axis=0), rng) for step in range(TIMES)]


def joint_rows(images, labels, rng):
    """GS-WGAN: 32 rows of one draw, each clipped to 1 and any function of the draw, accounted as one row."""
    total = rows_of(images).sum()
    signs = np.where(np.sin(1000.0 * total) > 0.0, 1.0, -1.0)
    return released(signs * clipped(np.ones((32, 8))).ravel(), rng)


FAULTS = {
    no_clip: (DECLARED, "a"),
    clip_of_each_tensor: (DECLARED, "a"),
    realised_size: (DECLARED, "a"),
    half_of_the_noise: (DECLARED, "b"),
    one_draw_twice: (DECLARED, "b"),
    noise_without_effect: (DECLARED, "b"),
    fixed_seed: (DECLARED, "b"),
    private_labels: (DECLARED, "b"),
    batch_norm: (DECLARED, "a"),
    bounds_of_the_data: (DECLARED, "a"),
    one_release_more: (DECLARED, "a"),
    shards_dealt_again: (SHARDS, "a"),
    joint_rows: (ROWS, "a"),
}
HONEST = {honest: DECLARED, shards: SHARDS}
