"""Inception features of the two tools: live against torch-fidelity, and against published mean features.

What compares with pytorch-fid is in test_fidelity.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric

from dpgen_bench.data.datasets import Digits, Mnist
from dpgen_bench.data.records import Records
from dpgen_bench.evaluate import features
from dpgen_bench.evaluate.features import InceptionFeatures, cached_features, resize_as_tensorflow1, weights_path
from dpgen_bench.evaluate.fidelity import Fid, frechet_distance, mean_and_covariance
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured

EPS = float(np.finfo(np.float32).eps)


def extractor(tool: str, dim: int = 2048) -> InceptionFeatures:
    try:
        return InceptionFeatures(dim=dim, tool=tool)
    except NotMeasured as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tensorflow1() -> InceptionFeatures:
    return extractor("tensorflow1")


def colours(n: int, side: int = 28) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, side, side), generator=generator, dtype=torch.uint8)


@cache
def torch_fidelitys_network(dim: int) -> FeatureExtractorInceptionV3:
    """torch-fidelity's network with the weights of pytorch-fid."""
    return FeatureExtractorInceptionV3("live", [str(dim)], feature_extractor_weights_path=str(weights_path()))


@torch.no_grad()
def by_torch_fidelity(images: torch.Tensor, dim: int = 2048) -> np.ndarray:
    """Features [n, dim] of uint8 images."""
    return torch_fidelitys_network(dim)(images.expand(-1, 3, -1, -1).contiguous())[0].numpy()


# The resize


@pytest.mark.parametrize("shape", [(28, 28), (32, 32), (1, 3), (26, 46), (64, 20), (299, 299), (350, 301)])
def test_resize_equals_that_of_torch_fidelity(shape):
    """In float32 a position near `size` is known to eps * size, and the pixels on both sides differ by 255 at most; for
    each axis, and with the rounding of torch-fidelity's scale. 26 and 46 share factors with 299: there are positions
    on a pixel, where the two may round to either side of it."""
    images = torch.rand(2, 3, *shape, generator=torch.Generator().manual_seed(1)) * 255.0
    expected = interpolate_bilinear_2d_like_tensorflow1x(images, size=(299, 299), align_corners=False)
    measured = resize_as_tensorflow1(images, 299)
    assert measured.shape == expected.shape
    np.testing.assert_allclose(measured, expected, rtol=0, atol=4 * 255.0 * EPS * max(shape))


def test_resize_of_a_ramp_in_closed_form():
    """Of an image whose pixel (i, j) is 100 i + j, the pixel (i, j) of the result is 100 y + x with y = min(i h / 8,
    h - 1), x = min(j w / 8, w - 1): corners are not aligned, and neither are centres."""
    h, w = 3, 5
    ramp = 100.0 * torch.arange(h)[:, None] + torch.arange(w)[None, :]
    y = (torch.arange(8) * h / 8).clamp(max=h - 1)
    x = (torch.arange(8) * w / 8).clamp(max=w - 1)
    resized = resize_as_tensorflow1(ramp[None, None], 8)[0, 0]
    np.testing.assert_allclose(resized, 100.0 * y[:, None] + x[None, :], rtol=4 * EPS)


# Features


def relative(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Distance of each row of `one` from that of `other`, relative to the norm of the latter."""
    return np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)


@pytest.mark.parametrize("kind", ["digits", "colours"])
def test_features_equal_those_of_torch_fidelity(tensorflow1, kind):
    """A network of some 50 layers in float32: relative errors of 1e-6 were measured, 1e-4 is allowed. pytorch-fid's
    features of digits differ by a tenth and more."""
    images = Digits().load("test").images[:3] if kind == "digits" else colours(3)
    expected = by_torch_fidelity(images)
    assert relative(tensorflow1(images, batch_size=2), expected).max() < 1e-4
    assert relative(tensorflow1(images.float(), batch_size=3), expected).max() < 1e-4
    if kind == "digits":
        assert relative(extractor("pytorch_fid")(images), expected).min() > 0.05


def test_fid_of_two_sets_equals_that_of_torch_fidelity():
    """Of 16 features, for which 20 images make covariances of full rank; torch-fidelity works in float32."""
    images = Digits().load("test").images[:20]
    blurred = torch.nn.functional.avg_pool2d(images.float(), 3, stride=1, padding=1).round().to(torch.uint8)
    mine = extractor("tensorflow1", 64)
    moments = [moment for x in (images, blurred) for moment in mean_and_covariance(mine(x)[:, :16])]
    expected_features = [torch.from_numpy(by_torch_fidelity(x, 64)[:, :16]) for x in (images, blurred)]
    statistics = [fid_features_to_statistics(features) for features in expected_features]
    expected = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(*moments) == pytest.approx(expected, rel=1e-4)


def test_one_cache_keeps_the_features_of_both_tools_apart(tmp_path):
    digits = Digits().load("test")
    records = Records(digits.images[:2], digits.labels[:2])
    tools = [extractor(tool, 64) for tool in ("pytorch_fid", "tensorflow1")]
    first = [cached_features(records, tool, tmp_path) for tool in tools]
    assert relative(*first).min() > 1e-3
    again = [cached_features(records, tool, tmp_path) for tool in tools]
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert len(list((tmp_path / "features").glob("*.npz"))) == 2


@pytest.mark.parametrize("tool", ["pytorch_fid", "tensorflow1"])
def test_images_are_not_changed(tool):
    """Unrounded samples are float32 on the CPU, where dividing a batch in place would change the samples."""
    images = colours(2).float()
    before = images.clone()
    extractor(tool, 64)(images)
    assert torch.equal(images, before)


def test_fid_is_of_the_tool_that_it_names(monkeypatch, tmp_path):
    class OfTool:
        """Pixels, times 2 for tensorflow1, whose FID is then 4 times the other."""

        dim = 4

        def __init__(self, device: str, tool: str, precision: str) -> None:
            self.version, self.factor = tool, {"pytorch_fid": 1.0, "tensorflow1": 2.0}[tool]

        def __call__(self, images: torch.Tensor, batch_size: int) -> np.ndarray:
            return self.factor * images[:, 0, 0, 10:14].numpy().astype(np.float32)

    monkeypatch.setattr(features, "InceptionFeatures", OfTool)
    features._inception.cache_clear()
    generated, real = (Records(images, torch.zeros(20, dtype=torch.int64)) for images in colours(40).split(20))
    ctx = EvalContext(seed=0, device="cpu", num_classes=10, cache=tmp_path)
    values = {tool: Fid(tool=tool)(generated, real, ctx)["fid"] for tool in ("pytorch_fid", "tensorflow1")}
    features._inception.cache_clear()
    assert values["tensorflow1"] == pytest.approx(4 * values["pytorch_fid"], rel=1e-6)


def test_an_unknown_tool_is_refused():
    with pytest.raises(ValueError, match=r"expected pytorch_fid or tensorflow1 as the tool .*, got 'tensorflow2'"):
        Fid(tool="tensorflow2")
    with pytest.raises(ValueError, match="got 'tensorflow2'"):
        InceptionFeatures(tool="tensorflow2")


# Published features


def published_mean(data_root: Path) -> np.ndarray:
    """The mean feature [2048] of MNIST's test set that DP-Sinkhorn's authors published with their code."""
    path = data_root.parent / "reference" / "inception_mean_mnist_test.npy"
    if not path.is_file():
        pytest.skip(f"no published mean feature at {path}")
    return np.load(path)


def distance_to(published: np.ndarray, measured: np.ndarray) -> float:
    """Distance of the mean of features [n, 2048] from the published mean, relative to the norm of the latter."""
    return float(np.linalg.norm(measured.mean(axis=0, dtype=np.float64) - published) / np.linalg.norm(published))


@pytest.mark.slow
def test_mean_feature_of_part_of_mnists_test_set_is_near_the_published_one(tensorflow1, data_root):
    """For 50 images the difference is the sampling error, E|mean - m|² = tr(C)/50, of whose root 1.5 times are allowed.
    For inverted images it would be more than half."""
    published = published_mean(data_root)
    images = Mnist(root=str(data_root)).load("test").images
    measured = tensorflow1(images[::200])
    _, covariance = mean_and_covariance(measured)
    sampling = np.sqrt(np.trace(covariance) / len(measured)) / np.linalg.norm(published)
    assert distance_to(published, measured) < 1.5 * sampling < 0.2
    assert distance_to(published, tensorflow1(255 - images[::2000])) > 0.5


@pytest.mark.slow
def test_mean_feature_of_mnists_test_set_is_the_published_one(tensorflow1, data_root, tmp_path):
    """All 10,000 images: the authors used the TensorFlow 1 graph. The mean of 9,600 of them is 0.2 % away, that of
    pytorch-fid's features of all 10,000 is 1.0 % away; half of this is allowed."""
    published = published_mean(data_root)
    kept = Path(os.environ.get("DPGEN_TEST_CACHE", tmp_path))
    measured = cached_features(Mnist(root=str(data_root)).load("test"), tensorflow1, kept)
    assert distance_to(published, measured) < 0.005
