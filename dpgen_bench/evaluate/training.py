"""Steps of `networks.Network`: one epoch of training on labelled images, augmentation, and predictions.

Images keep their type (uint8, or float32 within 0..255) and are scaled batch by batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CROP_PADDING = 4
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


def crop_flip(images: Tensor, moves: Tensor) -> Tensor:
    """Shift images [b, c, h, w] by up to `CROP_PADDING` pixels in each direction and mirror them; new pixels are black.

    Args:
        moves: int64 [b, 3]: the crop's first row and column within the padded image, 0..2·CROP_PADDING, and whether
            the image is mirrored, 0 or 1.
    """
    height, width = images.shape[2:]
    # Index arrays that pick, for each image, the rows and columns of its crop.
    padded = nn.functional.pad(images, (CROP_PADDING,) * 4)
    columns = torch.arange(width, device=images.device).expand(len(images), width)
    columns = torch.where(moves[:, 2:] == 1, columns.flip(1), columns) + moves[:, 1:2]
    rows = torch.arange(height, device=images.device) + moves[:, :1]
    image = torch.arange(len(images), device=images.device)
    channel = torch.arange(images.shape[1], device=images.device)
    return padded[
        image[:, None, None, None], channel[None, :, None, None], rows[:, None, :, None], columns[:, None, None]
    ]


def train_epoch(
    net: nn.Module,
    optimiser: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    rng: torch.Generator,
    normalise: tuple[float, float] | None = None,
    augment: bool = False,
) -> None:
    """Train on all `images` once, in an order drawn from `rng` (a CPU generator). The last batch may be smaller.

    With `augment`, every image is shifted and mirrored by `crop_flip`, uniformly at random.
    """
    net.train()
    order = torch.randperm(len(images), generator=rng).to(images.device)
    moves = None
    if augment:
        shifts = torch.randint(2 * CROP_PADDING + 1, (len(images), 2), generator=rng)
        mirrored = torch.randint(2, (len(images), 1), generator=rng)
        moves = torch.cat([shifts, mirrored], dim=1).to(images.device)
    for start in range(0, len(images), batch_size):
        batch = order[start : start + batch_size]
        pixels = images[batch]
        if moves is not None:
            pixels = crop_flip(pixels, moves[start : start + batch_size])
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
