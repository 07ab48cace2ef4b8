"""DP-Gauss against its formulas without noise, and what it does about noise, rare classes and wrong settings."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec
from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.nets.class_gaussians import ClassGaussians
from dpgen_bench.nets.gaussian_clusters import Clusters, root
from dpgen_bench.pretraining.radii import BINS, bins_of, quantile_of
from dpgen_bench.pretraining.shrinkage import Bands
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing import check_method
from methods.dp_gauss import DPGauss
from tests.defaults import build

CLASSES = 3


def fit(
    images: Tensor, labels: Tensor, eps: float = math.inf, mode: str = "seeded", **settings: Any
) -> tuple[NetGenerator, Ledger]:
    ledger = Ledger(Budget(eps, 1e-5, "replace_one", "pld"), len(labels), noise=mode)
    key = Key.seeded("test") if mode == "seeded" else Key.from_os(b"\x07" * 32)
    services = Services(ledger, key)
    data = PrivateData(images, labels, CLASSES, services)
    return build(DPGauss, **settings).fit(data, Context(0, services=services)), ledger


def records(n: int = 300, side: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images of one normal distribution per class, of rank 3 and within [0, 1]."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    centres = 0.3 + 0.4 * torch.rand(CLASSES, side * side, generator=rng)
    basis = torch.randn(3, side * side, generator=rng)
    codes = 0.015 * torch.randn(n, 3, generator=rng) * (1.0 + labels[:, None])
    return (centres[labels] + codes @ basis).clamp(0.0, 1.0).view(n, 1, side, side), labels


WIDE: dict[str, Any] = dict(radius=10.0, radius_residual=10.0, radius_code=10.0)


def test_without_noise_means_and_covariances_are_those_of_the_classes():
    """The images have rank 2 + 3: two differences of means and three directions within classes."""
    images, labels = records()
    generator, _ = fit(images, labels, dim=5, **WIDE)
    net, x = generator.net, images.flatten(1)
    for c in range(CLASSES):
        own = x[labels == c]
        torch.testing.assert_close(net.means[c].detach(), own.mean(dim=0), atol=5e-3, rtol=0)
        A = (net.basis @ net.roots[c]).detach()
        torch.testing.assert_close(A @ A.T, torch.cov(own.T, correction=0), atol=5e-4, rtol=0)
    V = net.basis.detach()
    torch.testing.assert_close(V.T @ V, torch.eye(5), atol=1e-5, rtol=0)


def test_the_texture_is_what_the_subspace_leaves_of_the_variance_within_classes():
    rng = torch.Generator().manual_seed(0)
    images = (0.5 + 0.1 * torch.randn(3000, 1, 4, 4, generator=rng)).clamp(0.0, 1.0)
    images[:, 0, 0, 0] = torch.rand(3000, generator=rng)  # the first direction
    for texture in (1.0, 0.5):
        generator, _ = fit(images, torch.arange(3000) % CLASSES, dim=1, texture=texture, **WIDE)
        assert generator.net.texture.item() == pytest.approx(0.1 * texture, rel=0.03)
        samples = generator.sample(torch.zeros(400, dtype=torch.int64), seed=0).float() / 255.0
        assert float(samples.std(dim=0)[0, 3, 3]) == pytest.approx(0.1 * texture, rel=0.15)


def test_samples_have_the_released_law_and_the_threshold_makes_pixels_black():
    net = ClassGaussians(5, 2, (1, 1, 3), threshold=0.2)
    with torch.no_grad():
        net.means.copy_(torch.tensor([[0.5, 0.5, 0.1], [0.9, 0.1, 0.6]]))
        net.basis.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        net.roots.copy_(torch.tensor([[[0.03, 0.0], [0.02, 0.01]], [[0.0, 0.0], [0.0, 0.0]]]))
    z = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0))
    x = net(z, torch.zeros(4000, dtype=torch.int64)).detach().flatten(1)
    expected = net.roots[0].detach() @ net.roots[0].detach().T
    torch.testing.assert_close(torch.cov(x[:, :2].T), expected, atol=6e-5, rtol=0)
    assert (x[:, 2] == 0.0).all()  # 0.1 is below the threshold
    torch.testing.assert_close(net(z[:1], torch.tensor([1])).flatten(), torch.tensor([0.9, 0.0, 0.6]))


def test_a_class_without_records_gets_the_mean_and_covariance_of_all():
    images, labels = records()
    labels = labels % 2  # 200 records of class 0, 100 of class 1, none of class 2
    for eps in (math.inf, 10.0):
        generator, _ = fit(images, labels, eps, dim=3, **WIDE)
        net = generator.net
        roots = net.roots.detach()
        assert torch.isfinite(roots).all()
        if eps == math.inf:
            torch.testing.assert_close(net.means[2].detach(), images.flatten(1).mean(dim=0), atol=0.02, rtol=0)
            pooled = (2.0 * roots[0] @ roots[0] + roots[1] @ roots[1]) / 3.0
            torch.testing.assert_close(roots[2] @ roots[2], pooled, atol=2e-3, rtol=0.05)
        assert generator.sample(torch.full((5,), 2), seed=0).float().std() > 0


def test_eigenvalues_below_the_noise_are_dropped():
    covariance = torch.diag(torch.tensor([4.0, 0.5, -0.3]))
    torch.testing.assert_close(root(covariance, 0.6), torch.diag(torch.tensor([2.0, 0.0, 0.0])))
    torch.testing.assert_close(root(covariance, 0.0), torch.diag(torch.tensor([2.0, 0.5**0.5, 0.0])))


def pairs_of_clusters(n: int = 1200) -> tuple[Tensor, Tensor]:
    """In each class, a quarter of the images is bright in the upper half, and the others in the lower half."""
    rng = torch.Generator().manual_seed(0)
    labels, upper = torch.arange(n) % CLASSES, torch.arange(n) // CLASSES % 4 == 0
    images = 0.2 + 0.1 * labels[:, None, None, None] + 0.02 * torch.randn(n, 1, 4, 4, generator=rng)
    images[upper, :, :2] += 0.4
    images[~upper, :, 2:] += 0.4
    return images.clamp(0.0, 1.0), labels


@pytest.mark.parametrize("eps", [math.inf, 100.0])
def test_clusters_of_a_class_are_found_with_their_sizes_and_covariances(eps: float) -> None:
    images, labels = pairs_of_clusters()
    settings = dict(radius=1.0, radius_residual=0.5, radius_code=0.5, share_means=0.15, share_residuals=0.25)
    generator, _ = fit(images, labels, eps, dim=3, clusters=2, **settings)
    samples = generator.sample_unrounded(torch.arange(3000) % CLASSES, seed=0) / 255.0
    for c in range(CLASSES):
        of_class = samples[c::CLASSES]
        upper = of_class[:, 0, :2].mean(dim=(1, 2)) > of_class[:, 0, 2:].mean(dim=(1, 2))
        assert float(upper.float().mean()) == pytest.approx(0.25, abs=0.06)
        for drawn, half in ((of_class[upper], slice(0, 2)), (of_class[~upper], slice(2, 4))):
            mean = torch.full((4, 4), 0.2 + 0.1 * c)
            mean[half] += 0.4
            torch.testing.assert_close(drawn.mean(dim=(0, 1)), mean, atol=0.03, rtol=0)
            # It is 0.02 in the images, 0.2 without clusters, and 0 if the covariance is below its noise.
            assert float(drawn.std(dim=0).mean()) == pytest.approx(0.02 if eps == math.inf else 0.0, abs=0.01)


def test_a_mixture_chooses_clusters_with_their_probabilities() -> None:
    net = ClassGaussians(1 + 3 + 1, 2, (1, 1, 3), clusters=2)
    levels = torch.tensor([0.1, 0.9, 0.3, 0.6])  # of two clusters of class 0 and two of class 1
    with torch.no_grad():
        net.means.copy_(levels[:, None].expand(4, 3))
        net.cumulative.copy_(torch.tensor([[0.25, 1.0], [1.0, 1.0]]))
    z, y = torch.randn(4000, 5, generator=torch.Generator().manual_seed(0)), torch.arange(4000) % 2
    grey = net(z, y).detach()[:, 0, 0, 0]
    assert float((grey[y == 0] == levels[0]).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert set(grey[y == 0].tolist()) == set(levels[:2].tolist())
    assert (grey[y == 1] == levels[2]).all()


def test_a_cluster_that_is_not_above_its_noise_keeps_its_centre_and_is_never_drawn() -> None:
    clusters = Clusters.draw(2, 3, torch.eye(4), torch.Generator().manual_seed(0))
    sums = torch.zeros(2, 3, 5)
    sums[0, 0], sums[0, 1], sums[0, 2] = 30.0, 90.0, 9.0  # with the constant 3, of 10, 30 and 3 records
    moved = clusters.moved(sums.flatten(1), constant=3.0, least=5.0)
    torch.testing.assert_close(moved.size, torch.tensor([[10.0, 30.0, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(moved.centres[0, :2], torch.full((2, 4), 3.0))
    torch.testing.assert_close(moved.centres[0, 2], clusters.centres[0, 2])
    torch.testing.assert_close(moved.weights, torch.tensor([[0.25, 0.75, 0.0], [1 / 3, 1 / 3, 1 / 3]]))


def test_clusters_of_a_class_without_records() -> None:
    images, labels = records()
    for eps in (math.inf, 1.0):
        generator, _ = fit(images, labels % 2, eps, dim=3, clusters=3, **WIDE)
        assert all(torch.isfinite(value).all() for value in generator.net.state_dict().values())
        assert generator.sample(torch.full((5,), 2), seed=0).float().std() > 0


def test_the_row_of_a_record_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: a row that rounding moves across a border would move another record's, too."""
    functions: list[Callable[[Tensor, Tensor], Tensor]] = []
    release = Mechanism.__call__

    def note(mechanism: Mechanism, fn: Callable[[Tensor, Tensor], Tensor]) -> Any:
        functions.append(fn)
        return release(mechanism, fn)

    monkeypatch.setattr(Mechanism, "__call__", note)
    images, labels = records(n=600, side=8)
    images = (255.0 * images).round() / 255.0
    fit(images, labels, 10.0, dim=6, clusters=3, share_radii=0.2)
    assert len(functions) == 9  # three histograms, images, residuals, three steps, and codes
    for fn in functions:
        rows = fn(images, labels)
        for batch in (1, 7, 100):
            of_batches = [fn(x, y) for x, y in zip(images.split(batch), labels.split(batch), strict=True)]
            assert torch.equal(torch.cat(of_batches), rows)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(clusters=2), dict(share_radii=0.1), dict(shrinkage=True, clusters=2)])
def test_the_method_with_options_conforms(settings: dict[str, Any]) -> None:
    make = partial(build, DPGauss, dim=2, **settings)
    check_method(make, image_shape=(1, 4, 4), num_classes=2)


def test_options_that_were_added_do_not_change_the_id_of_earlier_runs() -> None:
    """The id of the record in results/records."""
    run = ["experiment=dp_gauss/plain", "seed=0"]
    assert build_spec(compose_config(run)).id == "5edbacf72b84"
    assert build_spec(compose_config([*run, "method.share_clusters=0.15", "method.quantile=0.5"])).id == "5edbacf72b84"
    assert build_spec(compose_config([*run, "method.clusters=4"])).id != "5edbacf72b84"
    assert build_spec(compose_config([*run, "method.shrinkage=false"])).id == "5edbacf72b84"
    assert build_spec(compose_config([*run, "method.share_radii=0.05"])).id != "5edbacf72b84"
    assert build_spec(compose_config([*run, "method.shrinkage=true"])).id != "5edbacf72b84"
    pretrained = ["experiment=dpdm/reduced_mnist", "init=gauss", "privacy.epsilon=10", "seed=0"]
    assert build_spec(compose_config(pretrained)).id == "7e7dcd8719b9"
    assert build_spec(compose_config([*pretrained, "init.shrinkage=true"])).id != "7e7dcd8719b9"


def shares_of(ledger: Ledger) -> dict[str, float]:
    """The share of each mechanism, of all its releases together, in the squared multiplier mu^2."""
    events = {name: entry.event for name, entry in ledger.entries.items()}
    costs = {name: each.times * (each.sensitivity.replace_one / each.std) ** 2 for name, each in events.items()}
    return {name: cost / sum(costs.values()) for name, cost in costs.items()}


def test_the_budget_is_shared_and_the_sensitivities_are_about_sqrt_2():
    images, labels = records()
    _, ledger = fit(images, labels, 1.0, dim=3, share_means=0.2, share_residuals=0.3)
    assert list(shares_of(ledger).values()) == pytest.approx([0.2, 0.3, 0.5], rel=0.01)
    # Those of the codes can have an inner product of -0.2^4 / 4 relative to w2^2 = 1, as on the method's page.
    expected = [2**0.5, 2**0.5, 1.4144855]
    sensitivities = [entry.event.sensitivity.replace_one for entry in ledger.entries.values()]
    assert sensitivities == pytest.approx(expected, abs=1e-7)


def test_lloyd_steps_share_their_share_of_the_budget() -> None:
    _, ledger = fit(*records(), 1.0, dim=3, clusters=2, share_clusters=0.24, share_means=0.16, share_residuals=0.2)
    shares = shares_of(ledger)
    assert list(shares) == ["images", "residuals", "clusters", "codes"]
    assert list(shares.values()) == pytest.approx([0.16, 0.2, 0.24, 0.4], rel=0.01)
    assert ledger.entries["clusters"].event.times == 3


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
def test_a_radius_holds_its_share_of_the_vectors_to_one_bin(q: float) -> None:
    """Without noise: at least q of the vectors are within the radius, and less than q are within one of a bin less."""
    rng = torch.Generator().manual_seed(0)
    p, n = 12, 1000
    vectors = torch.rand(n, p, generator=rng) * torch.rand(n, 1, generator=rng)
    bins = bins_of(vectors, p)
    assert bins.shape == (n, 1)
    radius = quantile_of(torch.bincount(bins[:, 0], minlength=BINS).double(), q, n, p)
    lengths = vectors.norm(dim=1)
    assert float((lengths <= radius).float().mean()) >= q
    assert float((lengths < radius - p**0.5 / BINS).float().mean()) < q


def test_a_radius_of_noise_alone_clips_nothing_and_of_no_record_is_one_bin() -> None:
    assert quantile_of(torch.full((BINS,), -1.0), 0.5, 100, 4) == 2.0
    assert quantile_of(torch.full((BINS,), 1000.0), 0.5, 100, 4) == pytest.approx(2.0 / BINS)
    white = torch.ones(1, 1, 2, 2)
    for factor in (1.0, 2.0, 1e30):  # the last has an infinite length in float32
        assert int(bins_of(factor * white, 4)) == BINS - 1


def test_released_radii_fit_bright_images() -> None:
    """Images like dark digits on white paper are longer than the default radius, which makes their means too dark."""
    images, labels = records(1200)
    bright = 1.0 - 0.3 * images
    settings: dict[str, Any] = dict(eps=100.0, dim=5, texture=0.0)

    def error(**changes: Any) -> float:
        samples = fit(bright, labels, **settings, **changes)[0].sample_unrounded(torch.arange(600) % CLASSES, 0)
        means = [samples[c::CLASSES].mean(dim=0) / 255.0 - bright[labels == c].mean(dim=0) for c in range(CLASSES)]
        return float(torch.stack(means).abs().mean())

    assert error() > 0.1
    assert error(share_radii=0.1, quantile=0.95) < 0.01
    assert error(share_radii=0.1, quantile=0.95, clusters=2) < 0.01


def test_released_radii_have_their_share_of_the_budget() -> None:
    _, ledger = fit(*records(), 1.0, dim=3, share_radii=0.1, share_means=0.2, share_residuals=0.3)
    shares = shares_of(ledger)
    assert list(shares) == ["radii", "images", "residuals", "codes"]
    assert list(shares.values()) == pytest.approx([0.1, 0.2, 0.3, 0.4], rel=0.01)
    assert ledger.entries["radii"].event.times == 3
    with pytest.raises(ValueError, match=r"method.share_radii: expected a sum below 1"):
        build(DPGauss, share_radii=0.6)


def smooth_records(n: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """n images [n, 1, 16, 16] in [0, 1] of the 4 x 4 lowest frequencies, their labels, and the class means [k, 256]."""
    labels, low = torch.arange(n) % CLASSES, Bands((1, 16, 16))
    coefficients = torch.zeros(CLASSES + n, 16, 16)
    coefficients[:, :4, :4] = torch.randn(CLASSES + n, 4, 4, generator=rng)
    centres, deviations = low.images(coefficients.flatten(1)).split([CLASSES, n])
    images = (0.5 + centres[labels] + 0.3 * deviations).clamp(0.0, 1.0)
    truth = torch.stack([images[labels == c].mean(dim=0) for c in range(CLASSES)])
    return images.view(n, 1, 16, 16), labels, truth


def means_of_samples(generator: NetGenerator) -> Tensor:
    samples = generator.sample_unrounded(torch.arange(3000) % CLASSES, seed=0).flatten(1) / 255.0
    return torch.stack([samples[c::CLASSES].mean(dim=0) for c in range(CLASSES)])


@pytest.mark.parametrize("settings", [{}, dict(clusters=2), dict(share_radii=0.1)])
def test_shrinkage_removes_noise_from_smooth_images(settings: dict[str, Any]) -> None:
    images, labels, truth = smooth_records(900, torch.Generator().manual_seed(0))
    errors = []
    for shrinkage in (False, True):
        radii = dict(radius=0.8, radius_residual=0.3, radius_code=0.3)
        generator, _ = fit(images, labels, 3.0, dim=16, shrinkage=shrinkage, **radii, **settings)
        errors.append(float((means_of_samples(generator) - truth).square().sum()))
    assert errors[1] < errors[0] / 2


def test_shrinkage_of_many_records_changes_nothing() -> None:
    images, labels, _ = smooth_records(900, torch.Generator().manual_seed(0))
    means = [means_of_samples(fit(images, labels, 1e4, dim=16, shrinkage=on)[0]) for on in (False, True)]
    assert float(means[0].std()) > 0.1
    torch.testing.assert_close(means[0], means[1], atol=0.01, rtol=0)


def test_shrinkage_of_several_channels_and_unequal_sides() -> None:
    images, labels = torch.rand(90, 3, 5, 4, generator=torch.Generator().manual_seed(0)), torch.arange(90) % CLASSES
    generator, _ = fit(images, labels, 10.0, dim=5, shrinkage=True)
    assert generator.sample(torch.arange(3), seed=0).shape == (3, 3, 5, 4)
    assert all(bool(torch.isfinite(value).all()) for value in generator.net.state_dict().values())


@pytest.mark.parametrize("side", [8, pytest.param(32, marks=pytest.mark.slow)])
def test_colour_images_and_noise_for_release(side: int) -> None:
    """Radii grow with the square root of the number of values of an image."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, side, side), dtype=torch.uint8, generator=rng)
    generator, ledger = fit(images, torch.arange(60) % CLASSES, 10.0, mode="os", dim=4)
    assert generator.sample(torch.arange(3), seed=0).shape == (3, 3, side, side)
    radii = [entry["bound"]["radius"] for entry in ledger.to_dict()["entries"]]
    assert radii == pytest.approx([radius * side * 3**0.5 for radius in (0.4, 0.27, 0.25)])


PEAK = """
import resource, torch
from tests.test_dp_gauss import fit
images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
labels = torch.arange(60_000) % 3
fit(images[:600], labels[:600], 1.0, dim=40)  # what libraries allocate once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
fit(images, labels, 1.0, dim=40)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are in KiB on Linux alone")
def test_60000_records_are_streamed():
    """A fit takes less than the 179 MiB of the images as float32."""
    done = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert float(done.stdout) < 120.0


def test_mistakes_are_refused_before_records_are_read():
    images, labels = records(12)
    for radius in (1e300, 1e-300, math.nan):
        with pytest.raises(ValueError, match=r"method.radius: expected a number in \[1e-3, 10\]"):
            fit(images, labels, dim=3, radius=radius)
    with pytest.raises(ValueError, match=r"image_shape: expected at most 16,383 pixels in all channels, .* got 16,384"):
        build(DPGauss).expect_data(["a", "b"], (1, 128, 128))
    build(DPGauss).expect_data(["a", "b"], (1, 127, 129))
    with pytest.raises(
        ValueError, match=r"method.dim: expected less than 16, the number of pixels of an image, got 16"
    ):
        fit(images, labels, dim=16)
    # 3 symmetric matrices of side 5,000 * 3.
    with pytest.raises(ValueError, match=r"method.dim=3 and method.clusters=5000 .* at most 134,217,728 numbers"):
        fit(images, labels, dim=3, clusters=5000)
    with pytest.raises(ValueError, match=r"expected a sum below 1, because the codes get the rest, got 0.6 [+] 0.4"):
        build(DPGauss, share_means=0.6, share_residuals=0.4)
    build(
        DPGauss, share_means=0.5, share_residuals=0.4, share_clusters=0.15
    )  # without clusters, nothing is spent on them
    with pytest.raises(ValueError, match=r"method.share_clusters: expected a sum below 1, .* got 0.5 [+] 0.4 [+] 0.15"):
        build(DPGauss, share_means=0.5, share_residuals=0.4, share_clusters=0.15, clusters=2)
