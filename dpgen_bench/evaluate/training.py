"""Steps of `networks.Network`: one epoch of training on labelled images, and predictions.

Images keep their type (uint8, or float32 within 0..255) and are scaled batch by batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpgen_bench.evaluate.augmentation import AUGMENTATIONS

# Batch size of predictions. On a CPU larger batches are slower: their activations no longer fit in its caches.
PREDICTION_BATCH = {"cpu": 128}


def placed(net: nn.Module, device: torch.device | str) -> nn.Module:
    """The network on the device. On a CPU it has the memory format channels last, which is faster there."""
    net = net.to(device)
    return net.to(memory_format=torch.channels_last) if torch.device(device).type == "cpu" else net


def network_input(images: Tensor, normalise: tuple[float, float] | None) -> Tensor:
    """Scale images [b, c, h, w] from 0..255 to float32 in [0, 1]; subtract the mean and divide by the deviation."""
    scaled = images.float() / 255.0
    return scaled if normalise is None else (scaled - normalise[0]) / normalise[1]


def train_epoch(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    rng: torch.Generator,
    normalise: tuple[float, float] | None = None,
    augment: str = "none",
) -> None:
    """Train on all `images` once, in an order drawn from `rng` (a CPU generator). The last batch may be smaller.

    With `augment`, a name in `AUGMENTATIONS` or "none", every image is changed at random.
    """
    net.train()
    order = torch.randperm(len(images), generator=rng).to(images.device)
    augmentation = None if augment == "none" else AUGMENTATIONS[augment]
    moves = None if augmentation is None else augmentation.draw(len(images), rng).to(images.device)
    for start in range(0, len(images), batch_size):
        batch = order[start : start + batch_size]
        pixels = images[batch]
        if augmentation is not None and moves is not None:
            pixels = augmentation.apply(pixels, moves[start : start + batch_size])
        loss = nn.functional.cross_entropy(net(network_input(pixels, normalise)), labels[batch])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()


@torch.no_grad()
def class_logits(net: nn.Module, images: Tensor, normalise: tuple[float, float] | None = None) -> Tensor:
    """Logits float32 [n, classes], on the CPU, of images [n, c, h, w] by the network in evaluation mode."""
    net.eval()
    device = next(net.parameters()).device
    parts = images.split(PREDICTION_BATCH.get(device.type, 1000))
    return torch.cat([net(network_input(part.to(device), normalise)) for part in parts]).cpu()


def count_correct(net: nn.Module, images: Tensor, labels: Tensor, normalise: tuple[float, float] | None = None) -> int:
    """How many of `images` the network, in evaluation mode, classifies as `labels`."""
    return int((class_logits(net, images, normalise).argmax(dim=1) == labels.cpu()).sum())
