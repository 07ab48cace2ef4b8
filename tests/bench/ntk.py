"""Cost of DP-NTK's mean embedding and generator step against a loop of autograd over images (width 800, 10 classes).

A feature has 636,010 numbers. `ours` computes the class sums of the features as products of factors, by the bound that
clips them (`PerRecordProducts`, in float64); `loop` calls torch.autograd.grad for each image and adds the normalised
gradient to the row of its class; `loop_by_columns` adds it to a column of an array [636010, 10], as the authors' code
does, which is slower. All are interleaved in one process, on one CPU thread. A loop's time is proportional to the
images, so each of its rounds takes a share of them and is scaled up. Times are processor time of the process; ratios
are medians of round-by-round ratios. `difference` is the distance of both results, relative to the norm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpgen_bench.nets.code_generator import CodeGenerator
from dpgen_bench.nets.ntk_features import NTKFeatures, squared_distance
from dpgen_bench.privacy.bounds import Batch
from dpgen_bench.privacy.factors import PerRecordProducts
from dpgen_bench.privacy.key import Key
from tests.bench._machine import machine

PIXELS, WIDTH, CLASSES, ROUNDS = 784, 800, 10, 5
RECORDS, RECORDS_OF_LOOP = 6000, 300
IMAGES, IMAGES_OF_LOOP = 500, 50  # of a generator step of the reduced presets


class Network(nn.Module):
    """The network as its authors write it."""

    def __init__(self, drawn: NTKFeatures) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(PIXELS, WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.last = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.first.weight.copy_(drawn.weight)
            self.first.bias.copy_(drawn.bias)
            self.last.weight.copy_((drawn.slope / CLASSES).expand(CLASSES, -1))

    def class_sums(self, images: Tensor, labels: Tensor, create_graph: bool = False) -> Tensor:
        """Sums of the normalised gradients by class [classes, 636010], by a loop over images."""
        sums = [torch.zeros(sum(p.numel() for p in self.parameters())) for _ in range(CLASSES)]
        for image, label in zip(images, labels.tolist(), strict=True):
            outputs = self.last(self.norm(self.first(image.flatten()).relu()))
            gradients = torch.autograd.grad(outputs.sum(), list(self.parameters()), create_graph=create_graph)
            row = torch.cat([gradient.flatten() for gradient in gradients])
            sums[label] = sums[label] + row / row.norm()
        return torch.stack(sums)

    def class_sums_by_columns(self, images: Tensor, labels: Tensor) -> Tensor:
        """The same sums without gradients [636010, classes]."""
        sums = torch.zeros(sum(p.numel() for p in self.parameters()), CLASSES)
        for image, label in zip(images, labels.tolist(), strict=True):
            outputs = self.last(self.norm(self.first(image.flatten()).relu()))
            gradients = torch.autograd.grad(outputs.sum(), list(self.parameters()))
            row = torch.cat([gradient.flatten() for gradient in gradients])
            sums[:, label] += row / row.norm()
        return sums


def _draw() -> tuple[NTKFeatures, Network]:
    features = NTKFeatures.draw(PIXELS, WIDTH, CLASSES, torch.Generator().manual_seed(0), torch.device("cpu"))
    return features, Network(features)


def _images(number: int) -> tuple[Tensor, Tensor]:
    images = torch.rand(number, 1, 28, 28, generator=torch.Generator().manual_seed(1)).square()
    return images, torch.arange(number) % CLASSES


def embedding() -> dict[str, Any]:
    """The sum of the features of 6,000 records by class."""
    features, network = _draw()
    bound = PerRecordProducts(C=1.0, shapes={"first": (WIDTH, PIXELS + 1), "last": (1, WIDTH + 1)}, classes=CLASSES)
    images, labels = _images(RECORDS)

    def factors(x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        outer, inputs, hidden = features(x)
        return {"first": (outer, inputs), "last": (torch.ones_like(hidden[:, :1]), hidden)}

    def ours(number: int = RECORDS) -> dict[str, Tensor]:
        batch = Batch(images[:number], labels[:number], torch.arange(number), Key.seeded("bench"))
        return bound.value(factors, batch, None)

    some = images[:RECORDS_OF_LOOP], labels[:RECORDS_OF_LOOP]
    sums, W = network.class_sums(*some).double(), WIDTH * PIXELS
    made = ours(RECORDS_OF_LOOP)
    first = made["first"]
    # The parts of a gradient: W, b, V as equal rows, c; the bound has one row that is sqrt(10) times as large.
    rows = made["last"][:, 0] / CLASSES**0.5
    alike = torch.cat(
        [first[..., :-1].flatten(1), first[..., -1], rows[:, :-1].repeat(1, CLASSES), rows[:, -1:].repeat(1, CLASSES)],
        1,
    )
    assert sums.shape == alike.shape
    assert sums.shape[1] == W + WIDTH + CLASSES * (WIDTH + 1)
    difference = float((sums - alike).norm() / sums.norm())
    loops = {"loop": lambda: network.class_sums(*some), "loop_by_columns": lambda: network.class_sums_by_columns(*some)}
    times = _compared(ours, loops, RECORDS / RECORDS_OF_LOOP)
    return {
        "records": RECORDS,
        "records_of_a_round_of_the_loop": RECORDS_OF_LOOP,
        **times,
        "difference": float(f"{difference:.2g}"),
    }


def generator_step() -> dict[str, Any]:
    """The loss of 500 generated images and its gradient in the generator's parameters."""
    features, network = _draw()
    generator = CodeGenerator(5, CLASSES, (1, 28, 28))
    z, y = torch.randn(IMAGES, 5, generator=torch.Generator().manual_seed(2)), torch.arange(IMAGES) % CLASSES
    first, last = torch.zeros(CLASSES, WIDTH, PIXELS + 1), torch.zeros(CLASSES, WIDTH + 1)

    def step(loss_of: Callable[[Tensor, Tensor], Tensor], number: int) -> tuple[Tensor, ...]:
        loss = loss_of(generator(z[:number], y[:number]), y[:number])
        return torch.autograd.grad(loss, list(generator.parameters()))

    def ours(images: Tensor, labels: Tensor) -> Tensor:
        return squared_distance(first, last, features(images), labels)

    def loop(images: Tensor, labels: Tensor) -> Tensor:
        return (network.class_sums(images, labels, create_graph=True) / len(labels)).square().sum()

    one, other = (torch.cat([g.flatten() for g in step(loss, IMAGES_OF_LOOP)]) for loss in (ours, loop))
    difference = float((one - other).norm() / other.norm())
    times = _compared(lambda: step(ours, IMAGES), {"loop": lambda: step(loop, IMAGES_OF_LOOP)}, IMAGES / IMAGES_OF_LOOP)
    return {
        "images": IMAGES,
        "images_of_a_round_of_the_loop": IMAGES_OF_LOOP,
        **times,
        "difference": float(f"{difference:.2g}"),
    }


def _compared(ours: Callable[[], Any], loops: dict[str, Callable[[], Any]], scale: float) -> dict[str, Any]:
    """Median seconds of each way, and how many times as fast as each loop ours is, over interleaved rounds."""
    ways = {"ours": (ours, 1.0), **{name: (loop, scale) for name, loop in loops.items()}}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(ROUNDS + 1):
        for name, (function, factor) in ways.items():
            start = time.process_time()
            function()
            if i:  # the first round fills caches
                seconds[name].append((time.process_time() - start) * factor)
    times = {f"{name}_s": round(statistics.median(values), 3) for name, values in seconds.items()}
    ratios = {name: [slow / fast for fast, slow in zip(seconds["ours"], seconds[name], strict=True)] for name in loops}
    fast = {f"times_as_fast_as_{name}": round(statistics.median(values), 1) for name, values in ratios.items()}
    return {"rounds": ROUNDS, **times, **fast}


def measure() -> dict[str, Any]:
    """All values of this benchmark."""
    torch.set_num_threads(1)
    return {
        "what": " ".join((__doc__ or "").split()),
        "machine": machine(),
        "embedding": embedding(),
        "generator_step": generator_step(),
    }
