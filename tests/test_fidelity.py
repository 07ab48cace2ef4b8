"""Tests of the Fréchet distance against closed forms and pytorch-fid, of Inception features and of their cache."""

from __future__ import annotations

import socket
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from pytorch_fid.fid_score import calculate_fid_given_paths, calculate_frechet_distance, get_activations
from pytorch_fid.inception import InceptionV3

from dpgen_bench.data.datasets import Digits
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.features import InceptionFeatures, cached_features, weights_path
from dpgen_bench.evaluate.fidelity import Fid, frechet_distance, mean_and_covariance
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate


def gaussian(d: int, rank: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A mean [d] and a covariance [d, d] of the given rank."""
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((d, rank))
    return rng.standard_normal(d), factor @ factor.T / rank


def pytorch_fids(*moments: np.ndarray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy deprecates a function that pytorch-fid calls
        return float(calculate_frechet_distance(*moments))


# Moments


@pytest.mark.parametrize("n", [2, 50, 5000])
def test_moments_equal_those_of_numpy(n):
    features = (np.random.default_rng(n).standard_normal((n, 20)) * 3 + 5).astype(np.float32)
    mean, covariance = mean_and_covariance(features)
    assert mean.dtype == covariance.dtype == np.float64
    np.testing.assert_allclose(mean, features.astype(np.float64).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(features.astype(np.float64), rowvar=False), rtol=1e-9, atol=1e-12)


def test_moments_refuse_one_image_and_broken_features():
    with pytest.raises(ValueError, match="at least 2 images for a covariance, got 1"):
        mean_and_covariance(np.zeros((1, 4)))
    with pytest.raises(ValueError, match="finite"):
        mean_and_covariance(np.full((3, 4), np.nan))


# The distance


def test_closed_form_for_diagonal_covariances():
    """With C = diag(s²) on both sides the distance is |m1 - m2|² + |s1 - s2|²."""
    mean1, mean2 = np.array([1.0, 0.0, 2.0]), np.array([0.0, 2.0, 2.0])
    std1, std2 = np.array([1.0, 2.0, 0.5]), np.array([3.0, 2.0, 0.25])
    distance = frechet_distance(mean1, np.diag(std1**2), mean2, np.diag(std2**2))
    assert distance == pytest.approx(5.0 + 4.0 + 0.0625, rel=1e-12)


def test_closed_form_in_two_dimensions_with_covariances_that_do_not_commute():
    """For 2x2 matrices tr √M = √(tr M + 2 √det M)."""
    cov1, cov2 = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0, -0.5], [-0.5, 4.0]])
    product = cov1 @ cov2
    root = np.sqrt(np.trace(product) + 2 * np.sqrt(np.linalg.det(product)))
    expected = np.trace(cov1) + np.trace(cov2) - 2 * root
    assert frechet_distance(np.zeros(2), cov1, np.zeros(2), cov2) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rank", [40, 10, 1])
def test_zero_for_equal_gaussians(rank):
    mean, covariance = gaussian(40, rank, seed=0)
    assert 0.0 <= frechet_distance(mean, covariance, mean, covariance) < 1e-9 * np.trace(covariance)


@pytest.mark.parametrize(("rank1", "rank2"), [(30, 30), (30, 5), (5, 30), (5, 7)])
def test_symmetric_and_invariant_to_rotations(rank1, rank2):
    one, two = gaussian(30, rank1, seed=1), gaussian(30, rank2, seed=2)
    rotation, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((30, 30)))
    turned = [(rotation @ mean, rotation @ cov @ rotation.T) for mean, cov in (one, two)]
    distance = frechet_distance(*one, *two)
    assert frechet_distance(*two, *one) == pytest.approx(distance, rel=1e-9)
    assert frechet_distance(*turned[0], *turned[1]) == pytest.approx(distance, rel=1e-9)


@pytest.mark.parametrize("d", [3, 64, 200])
def test_equal_to_pytorch_fid(d):
    one, two = gaussian(d, 2 * d, seed=4), gaussian(d, 2 * d, seed=5)
    assert frechet_distance(*one, *two) == pytest.approx(pytorch_fids(*one, *two), rel=1e-9)


@pytest.mark.parametrize(("n1", "n2"), [(30, 1000), (1000, 30), (30, 50)])
def test_fewer_images_than_features(n1, n2):
    """Against tr √(C1 C2) as the sum of singular values of A1ᵀ A2, C = A Aᵀ; and pytorch-fid, up to the error of its
    root of a singular matrix."""
    rng = np.random.default_rng(6)
    sets = [(rng.standard_normal((n, 100)) @ rng.standard_normal((100, 100))) for n in (n1, n2)]
    moments = [mean_and_covariance(features) for features in sets]
    factors = [(features - features.mean(axis=0)).T / np.sqrt(len(features) - 1) for features in sets]
    root = np.linalg.svd(factors[0].T @ factors[1], compute_uv=False).sum()
    gap = moments[0][0] - moments[1][0]
    expected = gap @ gap + np.trace(moments[0][1]) + np.trace(moments[1][1]) - 2 * root
    distance = frechet_distance(*moments[0], *moments[1])
    assert distance == pytest.approx(expected, rel=1e-9)
    assert distance == pytest.approx(pytorch_fids(*moments[0], *moments[1]), rel=1e-5)


def test_a_constant_set_has_a_distance():
    """C1 = 0: the distance is |m1 - m2|² + tr(C2)."""
    mean, covariance = gaussian(10, 10, seed=7)
    assert frechet_distance(np.zeros(10), np.zeros((10, 10)), mean, covariance) == pytest.approx(
        mean @ mean + np.trace(covariance), rel=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", [3000, 500])
def test_equal_to_pytorch_fid_at_full_size(n):
    rng = np.random.default_rng(8)
    sets = [rng.gamma(0.5, 0.6, (n, 2048)) * scale for scale in (1.0, 1.2)]
    moments = [moment for features in sets for moment in mean_and_covariance(features)]
    assert frechet_distance(*moments) == pytest.approx(pytorch_fids(*moments), rel=1e-6)


# Features


class FakeExtractor:
    """Mean and maximum of an image; counts its calls."""

    dim = 2

    def __init__(self, version: str = "fake 1") -> None:
        self.version, self.calls = version, 0

    def __call__(self, images: torch.Tensor, batch_size: int) -> np.ndarray:
        self.calls += 1
        rows = images.flatten(1).float()
        return torch.stack([rows.mean(1), rows.amax(1)], dim=1).numpy()


def noise_records(n: int, seed: int, channels: int = 1) -> Records:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, channels, 28, 28), generator=generator, dtype=torch.uint8)
    return Records(images, torch.arange(n) % 2)


def test_features_are_cached_by_content_and_version(tmp_path):
    extractor = FakeExtractor()
    first = cached_features(noise_records(5, 0), extractor, tmp_path)
    assert np.array_equal(first, FakeExtractor()(noise_records(5, 0).images, 64))
    assert np.array_equal(cached_features(noise_records(5, 0), extractor, tmp_path), first)
    assert extractor.calls == 1
    cached_features(noise_records(5, 1), extractor, tmp_path)
    assert extractor.calls == 2
    other = FakeExtractor("fake 2")
    cached_features(noise_records(5, 0), other, tmp_path)
    assert other.calls == 1
    files = [path.suffix for path in (tmp_path / "features").iterdir()]
    assert sorted(files) == [".lock"] * 3 + [".npz"] * 3  # and no temporary file


@pytest.mark.parametrize("corruption", ["truncate", "flip", "empty", "swap"])
def test_a_corrupt_cache_is_reported_and_replaced(tmp_path, corruption):
    extractor, records = FakeExtractor(), noise_records(5, 0)
    good = cached_features(records, extractor, tmp_path)
    (path,) = (tmp_path / "features").glob("*.npz")
    content = path.read_bytes()
    if corruption == "truncate":
        path.write_bytes(content[: len(content) // 2])
    elif corruption == "flip":
        position = content.index(good.tobytes())
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
    elif corruption == "empty":
        path.write_bytes(b"")
    else:
        cached_features(noise_records(5, 1), extractor, tmp_path)
        (other,) = set((tmp_path / "features").glob("*.npz")) - {path}
        other.replace(path)
    with pytest.warns(UserWarning, match="computed again"):
        mended = cached_features(records, extractor, tmp_path)
    assert np.array_equal(mended, good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(cached_features(records, extractor, tmp_path), good)


def test_a_full_disk_costs_no_features(tmp_path, monkeypatch):
    def full(path):
        raise OSError("no space left on device")

    monkeypatch.setattr("dpgen_bench.utils.cache.atomic", full)
    with pytest.warns(UserWarning, match="no space left"):
        features = cached_features(noise_records(5, 0), FakeExtractor(), tmp_path)
    assert np.array_equal(features, FakeExtractor()(noise_records(5, 0).images, 64))


def test_an_interrupted_computation_resumes_at_its_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("dpgen_bench.evaluate.features.CHUNK", 2)

    class Stopped(FakeExtractor):
        def __call__(self, images, batch_size):
            if self.calls == 2:
                raise KeyboardInterrupt
            return super().__call__(images, batch_size)

    with pytest.raises(KeyboardInterrupt):
        cached_features(noise_records(7, 0), Stopped(), tmp_path)
    extractor = FakeExtractor()
    features = cached_features(noise_records(7, 0), extractor, tmp_path)
    assert extractor.calls == 2
    assert np.array_equal(features, FakeExtractor()(noise_records(7, 0).images, 64))


def test_without_a_cache_nothing_is_kept(tmp_path):
    extractor = FakeExtractor()
    for _ in range(2):
        cached_features(noise_records(5, 0), extractor, None)
    assert extractor.calls == 2


def test_an_interrupted_computation_leaves_no_cache(tmp_path):
    class Stopped(FakeExtractor):
        def __call__(self, images, batch_size):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_features(noise_records(5, 0), Stopped(), tmp_path)
    assert not list(tmp_path.rglob("*.npz"))


def test_without_weights_fid_is_not_measured_and_no_network_is_opened(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise AssertionError("a run opened a network connection")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub_home"))
    monkeypatch.setattr(socket.socket, "connect", no_network)
    ctx = EvalContext(seed=0, device="cpu", num_classes=2, cache=tmp_path)
    result = evaluate(Fid(), noise_records(4, 0), noise_records(4, 1), ctx)
    assert result.status == "not measured"
    expected = tmp_path / "hub_home" / "hub" / "checkpoints" / "pt_inception-2015-12-05-6726825d.pth"
    assert f"weights missing at {expected}" in result.reason
    assert "python -c" in result.reason


def test_broken_weights_fail_with_their_path(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    weights_path().parent.mkdir(parents=True)
    weights_path().write_bytes(b"no weights")
    ctx = EvalContext(seed=0, device="cpu", num_classes=2, cache=tmp_path)
    result = evaluate(Fid(), noise_records(4, 0), noise_records(4, 1), ctx)
    assert result.status == "failed"
    assert str(weights_path()) in result.reason


def test_fid_knows_two_references():
    with pytest.raises(ValueError, match="'test' or 'train', got 'valid'"):
        Fid(reference="valid")


def gaussian_features(monkeypatch, sets: dict[int, np.ndarray]) -> list[int]:
    """Let `features_of` return the features of a set by its number of records; returns a list of the calls' numbers."""
    asked = []

    def features_of(records, ctx, *, real, tool, precision):
        asked.append(len(records))
        return sets[len(records)]

    monkeypatch.setattr("dpgen_bench.evaluate.fidelity.features_of", features_of)
    return asked


def test_fid_of_samples_of_two_gaussians_is_near_the_closed_form(monkeypatch, tmp_path):
    """N(m1, S1) and N(m2, S2) in 8 dimensions, 200,000 draws each: the estimate is within 1% of the exact distance (its
    standard deviation over seeds is 0.2%)."""
    rng = np.random.default_rng(0)
    laws = [gaussian(8, 16, seed=seed) for seed in (1, 2)]
    draws = [rng.multivariate_normal(*law, size=200_000) for law in laws]
    distance = frechet_distance(*mean_and_covariance(draws[0]), *mean_and_covariance(draws[1]))
    assert distance == pytest.approx(frechet_distance(*laws[0], *laws[1]), rel=0.01)


def test_a_note_says_that_few_images_bias_the_distance(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    gaussian_features(monkeypatch, {n: rng.standard_normal((n, 20)) for n in (10, 50, 60)})
    few = evaluate(Fid(), noise_records(10, 0), noise_records(50, 1), EvalContext(0, "cpu", 2, tmp_path))
    assert few.notes == ["10 samples for 20 features: the covariance is singular, which biases FID upwards"]
    assert few.status == "measured"
    assert not evaluate(Fid(), noise_records(60, 0), noise_records(50, 1), EvalContext(0, "cpu", 2, tmp_path)).notes


def test_fid_to_the_training_records_and_on_parts(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    asked = gaussian_features(monkeypatch, {n: rng.standard_normal((n, 3)) for n in (1437, 30, 20)})
    ctx = EvalContext(0, "cpu", 10, tmp_path, dataset=Digits())
    test = noise_records(50, 1)
    assert Fid("train", num_samples=30)(noise_records(40, 0), test, ctx)["fid_num_reference"] == 1437.0
    assert Fid("train", num_reference=20)(noise_records(30, 0), test, ctx)["fid_num_reference"] == 20.0
    assert asked == [1437, 30, 20, 30]
    closed = EvalContext(0, "cpu", 10, tmp_path, dataset=Digits(), train_closed="not this run's")
    assert evaluate(Fid("train"), noise_records(40, 0), test, closed).reason == "not this run's"
    with pytest.raises(ValueError, match="expected num_reference of 2 or more, or null for all, got -1"):
        Fid(num_reference=-1)
    with pytest.raises(ValueError, match="expected at least 41 samples, got 40"):
        Fid(num_samples=41)(noise_records(40, 0), test, ctx)


def inception_or_skip(dim: int = 2048) -> InceptionFeatures:
    try:
        return InceptionFeatures(dim=dim)
    except NotMeasured as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def inception() -> InceptionFeatures:
    return inception_or_skip()


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "n"), [(64, 80), (192, 240), (2048, 300)])
def test_fid_of_two_folders_equals_that_of_pytorch_fid(tmp_path, dim, n):
    """For the same PNG folders, pytorch-fid's function returns the same FID: relative error below 1e-4."""
    folders, moments = folders_and_features(tmp_path, inception_or_skip(dim), n)
    expected = calculate_fid_given_paths(folders, batch_size=40, device="cpu", dims=dim, num_workers=0)
    assert frechet_distance(*moments[0], *moments[1]) == pytest.approx(expected, rel=1e-4)


def folders_and_features(tmp_path, extractor, n: int):
    """Two folders of digits as PNG files, the second's blurred, and the moments of our features of the same images."""
    digits = Digits().load("test" if n <= 360 else "train").images[:n]
    blurred = torch.nn.functional.avg_pool2d(digits.float(), 3, stride=1, padding=1).round().to(torch.uint8)
    folders, moments = [], []
    for name, images in (("sharp", digits), ("blurred", blurred)):
        (tmp_path / name).mkdir()
        for i, image in enumerate(images):
            Image.fromarray(image[0].numpy()).save(tmp_path / name / f"{i:04d}.png")
        folders.append(str(tmp_path / name))
        moments.append(mean_and_covariance(extractor(images)))
    return folders, moments


@pytest.mark.parametrize("channels", [1, 3])
def test_features_equal_those_of_pytorch_fid(inception, tmp_path, channels):
    """pytorch-fid computes the same features from PNG files of the same images.

    Features are of size 1; 94 convolutions in batches of other sizes move them by some 1e-5.
    """
    records = noise_records(3, 0, channels) if channels == 3 else Digits().load("test")
    images = records.images[:3]
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, image in zip(files, images, strict=True):
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels).save(file)
    reference = get_activations([str(file) for file in files], InceptionV3([3]), 3, num_workers=0)
    features = inception(images, batch_size=2)
    assert features.shape == (3, 2048)
    np.testing.assert_allclose(features, reference, rtol=1e-4, atol=1e-4)
    unrounded = inception(images.float(), batch_size=3)
    np.testing.assert_allclose(unrounded, reference, rtol=1e-4, atol=1e-4)
    assert inception(images[1:2])[0] == pytest.approx(features[1], rel=1e-3, abs=1e-4)


def test_missing_weights_are_an_error_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(NotMeasured, match="weights missing"):
        InceptionFeatures()


def test_fid_of_a_few_images(inception, tmp_path):
    """Against the distance from the features themselves, tr √(C1 C2) being the sum of singular values of A1ᵀ A2."""
    digits = Digits().load("test")
    real, generated = Records(digits.images[:4], digits.labels[:4]), noise_records(3, 0)
    ctx = EvalContext(seed=0, device="cpu", num_classes=10, cache=tmp_path)
    values = Fid()(generated, real, ctx)
    features = [inception(records.images).astype(np.float64) for records in (generated, real)]
    centred = [(rows - rows.mean(axis=0)) / np.sqrt(len(rows) - 1) for rows in features]
    gap = features[0].mean(axis=0) - features[1].mean(axis=0)
    root = np.linalg.svd(centred[0] @ centred[1].T, compute_uv=False).sum()
    expected = gap @ gap + (centred[0] ** 2).sum() + (centred[1] ** 2).sum() - 2 * root
    assert values["fid"] == pytest.approx(expected, rel=1e-4)
    assert (values["fid_num_samples"], values["fid_num_reference"]) == (3.0, 4.0)
    (kept,) = (tmp_path / "features").glob("*.npz")
    with np.load(kept) as file:
        np.testing.assert_allclose(file["features"], features[1], rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_features_on_an_accelerator_are_those_of_a_cpu(inception):
    images = noise_records(20, 3).images
    np.testing.assert_allclose(InceptionFeatures("cuda")(images), inception(images), rtol=1e-3, atol=1e-4)
