"""The protocol's option `batch_statistics`: which images share their statistics, and that nothing else changes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.generator import BLOCK, Generator, NetGenerator, batch_sizes
from dpgen_bench.runs.execute import evaluate_run, execute
from dpgen_bench.runs.measure import measure
from dpgen_bench.runs.samples import draw_samples
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.store.measurements import Measurements
from dpgen_bench.utils.paths import CONF
from tests.test_generator import Bare
from tests.toys import Painter

LATENT, CLASSES, SHAPE = 4, 3, (2, 2, 2)


class ConditionalNorm(nn.Module):
    """One batch normalisation without scale and shift, then a gain and a bias for each class."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.gain = nn.Parameter(0.1 + 0.02 * torch.arange(num_classes * channels).float().reshape(num_classes, -1))
        self.bias = nn.Parameter(0.4 + 0.03 * torch.arange(num_classes * channels).float().reshape(num_classes, -1))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        return self.gain[y][:, :, None, None] * self.norm(h) + self.bias[y][:, :, None, None]


class Normed(nn.Module):
    """Two batch normalisations, two kinds of spectral norm, and a dropout, whose state must not change.

    Running statistics are far from those of any batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(LATENT, 8))
        self.flat = nn.BatchNorm1d(8)
        self.second = nn.utils.spectral_norm(nn.Linear(8, 8))
        self.dropout = nn.Dropout(0.5)
        self.conditional = ConditionalNorm(2, CLASSES)
        for norm in (self.flat, self.conditional.norm):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            nn.init.constant_(norm.running_mean, 0.3)
            nn.init.constant_(norm.running_var, 4.0)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        h = self.dropout(self.second(torch.tanh(self.flat(self.first(z)))))
        return self.conditional(h.reshape(-1, *SHAPE), y)


class Shades(nn.Module):
    """Images of one colour: mid-grey on average with the batch's statistics, darker with the running ones."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        nn.init.constant_(self.norm.weight, 0.3)
        nn.init.constant_(self.norm.bias, 0.5)
        assert self.norm.running_mean is not None
        nn.init.constant_(self.norm.running_mean, 1.0)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.norm(z[:, :1])[:, :, None, None].expand(-1, 1, 28, 28)


def normed() -> NetGenerator:
    torch.manual_seed(0)
    return NetGenerator(Normed(), {"_target_": "tests.test_batch_statistics.Normed"}, LATENT, CLASSES, SHAPE)


def some_labels(n: int) -> Tensor:
    return torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(5))


def by_hand(generator: NetGenerator, labels: Tensor, seed: int, sizes: list[int]) -> Tensor:
    """The images in float64, with each batch's mean and biased variance over rows (and pixels) written out."""

    def whiten(h: Tensor, dims: tuple[int, ...]) -> Tensor:
        variance = h.var(dims, correction=0, keepdim=True)
        return (h - h.mean(dims, keepdim=True)) / (variance + 1e-5).sqrt()

    net = generator.net.eval()
    latents = torch.cat([generator._latents(seed, block) for block in range(1 + len(labels) // BLOCK)])[: len(labels)]
    images = []
    for z, y in zip(latents.double().split(sizes), labels.split(sizes), strict=True):
        h = z @ net.first.weight.double().T + net.first.bias.double()
        h = torch.tanh(whiten(h, (0,)))
        h = h @ net.second.weight.double().T + net.second.bias.double()
        h = whiten(h.reshape(-1, *SHAPE), (0, 2, 3))
        gain, bias = net.conditional.gain[y].double(), net.conditional.bias[y].double()
        images.append(gain[:, :, None, None] * h + bias[:, :, None, None])
    return torch.cat(images).detach().clamp(0, 1) * 255


# Images


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [
        (2 * BLOCK + 30, 60, [60] * 8 + [50]),  # batches lie across the blocks in which latents are drawn
        (BLOCK + 51, 100, [100, 100, 101]),
        (30, 500, [30]),
    ],
)
def test_images_are_those_computed_by_hand(n, batch_size, sizes):
    generator, labels = normed(), some_labels(n)
    images = generator.sample_by_batch(labels, 3, batch_size)
    assert images.dtype == torch.float32
    assert images.shape == (n, *SHAPE)
    assert torch.allclose(images.double(), by_hand(generator, labels, 3, sizes), atol=1e-2)
    running = generator.sample_unrounded(labels, 3)
    assert float((images - running).abs().mean()) > 5  # of 255: the running statistics are others


def test_with_the_batchs_own_statistics_as_running_ones_sample_gives_the_same():
    generator, labels = normed(), some_labels(BLOCK)
    by_batch = generator.sample_by_batch(labels, 3, BLOCK)
    net = generator.net.train()
    net.first.eval()
    net.second.eval()
    net.dropout.eval()
    with torch.no_grad():
        seen: dict[nn.Module, Tensor] = {}
        norms = [net.flat, net.conditional.norm]
        hooks = [norm.register_forward_pre_hook(lambda norm, h: seen.update({norm: h[0]})) for norm in norms]
        net(generator._latents(3, 0), labels)
        for norm, hook in zip(norms, hooks, strict=True):
            hook.remove()
            dims = [dim for dim in range(seen[norm].ndim) if dim != 1]
            norm.running_mean.copy_(seen[norm].mean(dims))
            norm.running_var.copy_(seen[norm].var(dims, correction=0))
    assert torch.allclose(generator.sample_unrounded(labels, 3), by_batch, atol=1e-2)


def test_an_image_depends_on_its_batch_and_on_no_other():
    generator, labels = normed(), some_labels(30)
    # The net uses labels after its last normalisation only: let them move the latents too.
    generator.net.register_forward_pre_hook(lambda net, zy: (zy[0] + zy[1][:, None], zy[1]))
    changed = labels.clone()
    changed[12] = (labels[12] + 1) % CLASSES
    images, others = generator.sample_by_batch(labels, 3, 10), generator.sample_by_batch(changed, 3, 10)
    assert torch.equal(images[:10], others[:10])
    assert torch.equal(images[20:], others[20:])
    assert (images[10:20] != others[10:20]).flatten(1).any(dim=1).all()


def test_seeds_differ_and_repeat():
    generator, labels = normed(), some_labels(20)
    images = generator.sample_by_batch(labels, 3, 10)
    assert torch.equal(generator.sample_by_batch(labels, 3, 10), images)
    assert not torch.equal(generator.sample_by_batch(labels, 4, 10), images)
    assert generator.sample_by_batch(labels[:0], 3, 10).shape == (0, *SHAPE)


def test_a_layer_without_running_statistics_is_included():
    generator = normed()
    assert isinstance(generator.net, Normed)
    expected = generator.sample_by_batch(some_labels(20), 3, 10)
    generator.net.conditional.norm = nn.BatchNorm2d(2, affine=False, track_running_stats=False)
    assert torch.equal(generator.sample_by_batch(some_labels(20), 3, 10), expected)


# The generator stays what it is


def snapshot(net: nn.Module) -> dict:
    state = {name: value.clone() for name, value in net.state_dict().items()}
    return {"state": state, "training": {name: module.training for name, module in net.named_modules()}}


def assert_unchanged(net: nn.Module, before: dict) -> None:
    after = snapshot(net)
    assert list(after["state"]) == list(before["state"])
    for name, value in before["state"].items():
        assert torch.equal(after["state"][name], value), name
    assert after["training"] == before["training"]


@pytest.mark.parametrize("training", [True, False])
def test_the_generator_is_bit_identical_afterwards(training):
    generator, labels = normed(), some_labels(40)
    net = generator.net.train(training)
    net.conditional.train(not training)  # modes may be mixed: each is kept
    before, rounded = snapshot(net), generator.sample(labels, 3)
    buffers = {name: id(buffer) for name, buffer in net.named_buffers()}
    generator.sample_by_batch(labels, 3, 10)
    assert_unchanged(net, before)
    assert {name: id(buffer) for name, buffer in net.named_buffers()} == buffers
    assert torch.equal(generator.sample(labels, 3), rounded)


def test_the_generator_is_bit_identical_after_an_error():
    generator = normed()
    before = snapshot(generator.net)
    with pytest.raises(ValueError, match="expected labels in"):
        generator.sample_by_batch(some_labels(40) + 1, 3, 10)
    assert_unchanged(generator.net, before)

    def fail(*_):
        raise RuntimeError("in the midst of a pass")

    hook = generator.net.conditional.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="midst"):
        generator.sample_by_batch(some_labels(40), 3, 10)
    hook.remove()
    assert_unchanged(generator.net, before)


# Batches


def test_batches_are_consecutive_and_a_rest_of_one_row_joins_the_last_batch():
    assert batch_sizes(10, 5) == [5, 5]
    assert batch_sizes(12, 5) == [5, 5, 2]
    assert batch_sizes(11, 5) == [5, 6]
    assert batch_sizes(3, 2) == [3]
    assert batch_sizes(4, 5) == [4]
    assert batch_sizes(0, 5) == []
    assert batch_sizes(60_000, 500) == [500] * 120
    for n in range(2, 40):
        for size in range(2, 12):
            sizes = batch_sizes(n, size)
            assert sum(sizes) == n
            assert all(s == size for s in sizes[:-1])
            assert 2 <= sizes[-1] <= size + 1


def test_one_image_has_no_statistics():
    with pytest.raises(ValueError, match=r"expected at least 2 images .* got 1"):
        normed().sample_by_batch(some_labels(1), 3, 10)
    for wrong in (1, 0, -3, True, 2.5, "x"):
        with pytest.raises(ValueError, match="expected an integer batch size of at least 2, got"):
            normed().sample_by_batch(some_labels(20), 3, wrong)  # type: ignore[arg-type]


# Generators to which it does not apply


def test_generators_without_batch_normalisation_refuse():
    config = {"_target_": "tests.toys.Painter", "num_classes": 3, "image_shape": [1, 2, 2]}
    painter = NetGenerator(Painter(3, [1, 2, 2]), config, 4, 3, (1, 2, 2))
    with pytest.raises(ValueError, match=r"got Painter without a torch BatchNorm layer.*batch_statistics null"):
        painter.sample_by_batch(some_labels(20), 3, 10)
    with pytest.raises(ValueError, match=r"got Bare, .*batch_statistics null, or override sample_by_batch\(labels"):
        Bare().sample_by_batch(some_labels(20), 3, 10)


def test_real_data_refuses_it_in_evaluate_and_keeps_its_measurements(tmp_path):
    config = compose_config(
        ["method=real_data", "dataset=digits", "privacy.epsilon=inf", f"results={tmp_path}", "runtime.progress=false"]
    )
    OmegaConf.set_struct(config, False)
    config.protocol = {**protocol_of({"num_samples": 40}), "metrics": {"b": {"_target_": "tests.toys.Brightness"}}}
    folder = execute(config)
    before = {path: path.read_bytes() for path in folder.path.rglob("*.json")}
    with pytest.raises(ValueError, match="expected a generator with batch normalisation, got RealRecords"):
        evaluate_run(tmp_path, folder.id, ["protocol=quick", "+protocol.batch_statistics=50"])
    with pytest.raises(ValueError, match=r"protocol.batch_statistics to be null .* or an integer >= 2.* got 1\."):
        evaluate_run(tmp_path, folder.id, ["protocol=quick", "+protocol.batch_statistics=1"])
    assert {path: path.read_bytes() for path in folder.path.rglob("*.json")} == before


# Through a protocol


def protocol_of(changed: dict) -> dict:
    return {"name": "toy", "num_samples": 41, "labels": "uniform", "metrics": {}, **changed}


def spec_for(results, **changed) -> RunSpec:
    config = compose_config([f"results={results}", "dataset=digits", "method=dp_merf"])
    OmegaConf.set_struct(config, False)
    config.protocol = protocol_of(changed)
    return build_spec(config)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = Store(tmp_path).folder("run")
    folder.path.mkdir(parents=True)
    normed().save(folder.path)
    return folder


@pytest.mark.parametrize("wrong", [1, 0, -3, "x", True, False, 2.5, 50.0, [50]])
def test_wrong_batch_sizes_are_refused_before_training(tmp_path, wrong):
    with pytest.raises(ValueError, match=r"protocol.batch_statistics to be null .* or an integer >= 2"):
        spec_for(tmp_path, batch_statistics=wrong)


@pytest.mark.parametrize("right", [None, 2, 500])
def test_a_batch_size_is_stored_in_the_protocols_record(tmp_path, right):
    assert spec_for(tmp_path, batch_statistics=right).protocol_record().get("batch_statistics") == right


def test_samples_are_rounded_and_floored_as_others(folder):
    def draw(**changed):
        return draw_samples(folder, OmegaConf.create(protocol_of(changed)), 3)

    plain, unrounded = draw(), draw(batch_statistics=10, rounding="none")
    rounded, floored = draw(batch_statistics=10), draw(batch_statistics=10, floor=128)
    expected = Generator.load(folder.path).sample_by_batch(plain.labels, 3, 10)
    assert all(torch.equal(other.labels, plain.labels) for other in (unrounded, rounded, floored))
    assert torch.equal(unrounded.images, expected)
    assert rounded.images.dtype == floored.images.dtype == torch.uint8
    assert torch.equal(rounded.images, expected.round().to(torch.uint8))
    assert torch.equal(floored.images, torch.where(rounded.images < 128, 0, rounded.images))
    assert (rounded.images < 128).any()
    assert not torch.equal(rounded.images, plain.images)


def test_stored_samples_are_those_of_the_same_option(folder):
    def draw(**changed):
        drawn = draw_samples(folder, OmegaConf.create(protocol_of(changed)), 3).images
        with np.load(folder.path / "samples.npz") as kept:
            assert np.array_equal(kept["images"], drawn.numpy())
            return drawn, str(kept["made_by"])

    (plain, by), (tens, by_tens), (twenties, by_twenties) = (
        draw(),
        draw(batch_statistics=10),
        draw(batch_statistics=20),
    )
    assert not torch.equal(plain, tens)
    assert not torch.equal(tens, twenties)
    assert (json.loads(by_tens)["batch_statistics"], json.loads(by_twenties)["batch_statistics"]) == (10, 20)
    # As before there was the option, so that samples kept then are still read.
    assert by == '{"n": 41, "labels": "uniform", "rounding": "uint8", "floor": null, "seed": 3}'
    assert draw(batch_statistics=None)[1] == by


def test_measurements_with_and_without_batch_statistics_coexist(tmp_path, folder):
    shades = {"_target_": "tests.test_batch_statistics.Shades"}
    NetGenerator(Shades(), shades, LATENT, 10, (1, 28, 28)).save(folder.path)
    metrics = {"brightness": {"_target_": "tests.toys.Brightness"}}
    specs = [spec_for(tmp_path, metrics=metrics), spec_for(tmp_path, metrics=metrics, batch_statistics=10)]
    measurements = [measure(spec, folder, torch.device("cpu")) for spec in specs]
    assert ["batch_statistics" in measurement["protocol"] for measurement in measurements] == [False, True]
    assert measurements[1]["protocol"]["batch_statistics"] == 10
    assert [folder.measurements.of(spec.protocol_record()) for spec in specs] == measurements
    results = [measurement["repeats"][0]["metrics"]["brightness"] for measurement in measurements]
    values = [result["values"]["brightness"] for result in results]
    assert values[1] == pytest.approx(
        127.5, abs=3
    )  # the batch's mean is the bias; clipping and rounding move it a little
    assert values[0] < 80  # the latents' mean is 1 below the running one: the bias 0.5 less the gain 0.3


# Protocols


def test_a_protocol_without_the_option_has_its_old_record(tmp_path, monkeypatch):
    """The file name, with its hash, of this protocol's measurements before the option existed."""
    monkeypatch.setattr("dpgen_bench.config.spec.EVALUATION_VERSION", 2)
    metrics = {"mean": {"_target_": "tests.toy_metrics.Mean"}}
    spec = spec_for(tmp_path, num_samples=40, labels="balanced", rounding="none", floor=128, repeats=2, metrics=metrics)
    assert Measurements(tmp_path).file_of(spec.protocol_record()).name == "toy-cb66b6a9.json"
    names = {path.stem for path in (CONF / "protocol").glob("*.yaml")}
    records = {name: RunSpec(compose_config([f"protocol={name}"]), {}).protocol_record() for name in names}
    assert {name for name, record in records.items() if "batch_statistics" in record} == {"dp_sinkhorn_authors"}


def test_dp_sinkhorns_authors_protocol_has_the_papers_samples_with_two_settings_and_its_fid():
    """The authors' finalize_result.py: batches of 500, and pixels darker than mid-grey become black."""
    paper, authors = (
        OmegaConf.to_container(compose_config([f"protocol={name}"]).protocol)
        for name in ("dp_sinkhorn", "dp_sinkhorn_authors")
    )
    metrics = authors.pop("metrics"), paper.pop("metrics")
    assert metrics[0]["fid"] == metrics[1]["fid"]
    assert authors == {**paper, "name": "dp_sinkhorn_authors", "floor": 128, "batch_statistics": 500}


def test_null_does_not_change_a_protocols_record():
    config = compose_config(["method=dp_merf", "protocol=quick"])
    assert "batch_statistics" in config.protocol
    with_key = build_spec(config).protocol_record()
    OmegaConf.set_struct(config, False)
    del config.protocol["batch_statistics"]
    assert build_spec(config).protocol_record() == with_key
    set_to = build_spec(compose_config(["method=dp_merf", "protocol=quick", "protocol.batch_statistics=50"]))
    assert set_to.protocol_record() == {**with_key, "batch_statistics": 50}
