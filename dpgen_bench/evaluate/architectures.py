"""The papers' networks that classify images; "conv_net" is the one that PSG's sets are matched to.

Each maps images [b, c, h, w], scaled as its `networks.Network` says, to logits [b, num_classes].
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from dpgen_bench.nets.image_set import MatchNet

Shape = tuple[int, int, int]


def check_side(image_shape: Shape, smallest: int) -> None:
    """Check the height and width of images.

    Raises:
        ValueError: if one of them is below `smallest`.
    """
    if min(image_shape[1:]) < smallest:
        raise ValueError(
            f"expected images of at least {smallest}x{smallest} pixels, got {image_shape[1]}x{image_shape[2]}."
        )


class DpganNet(nn.Module):
    """The classifier in the code of "Private GANs, Revisited" (1,199,882 parameters for 1x28x28 pixels, 10 classes).

    conv 3x3, 32 - ReLU - conv 3x3, 64 - ReLU - max pool 2 - dropout 0.25 - linear 128 - ReLU - dropout 0.5 - linear,
    without padding.
    """

    def __init__(self, image_shape: Shape, num_classes: int) -> None:
        super().__init__()
        check_side(image_shape, 6)
        channels, height, width = image_shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv2(self.conv1(images).relu_())
        # Max pooling before ReLU gives the same values and needs a quarter of the ReLUs. Maps are flattened before
        # dropout, so that the dropped units do not depend on the memory format.
        x = nn.functional.max_pool2d(x, 2).relu_().flatten(1)
        x = nn.functional.dropout(x, 0.25, self.training)
        x = nn.functional.dropout(self.fc1(x).relu_(), 0.5, self.training)
        return self.fc2(x)


class Linear(nn.Module):
    """Multinomial logistic regression: one linear layer on all pixels (7,850 parameters for 1x28x28, 10 classes)."""

    def __init__(self, image_shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(image_shape), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images.flatten(1))


class PaperMlp(nn.Module):
    """One hidden layer of ReLUs (GS-WGAN, DP-Sinkhorn: 100 units; 79,510 parameters for 1x28x28 pixels, 10 classes)."""

    def __init__(self, image_shape: Shape, num_classes: int, hidden: int = 100) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(image_shape), hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc2(self.fc1(images.flatten(1)).relu_())


class PaperCnn(nn.Module):
    """Two convolutional layers of 32 and 64 filters, ReLU, and dropout between all intermediate layers.

    The papers of DP-Sinkhorn (appendix D.2, p = 0.5) and GS-WGAN (appendix C.3, p is not printed) describe it so.
    Neither prints kernels, padding or pooling. We choose 3x3 kernels with padding 1 and max pooling 2 after each:
    conv 32 - ReLU - max pool - dropout - conv 64 - ReLU - max pool - dropout - linear (50,186 parameters for 1x28x28
    pixels, 10 classes).
    """

    def __init__(self, image_shape: Shape, num_classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        check_side(image_shape, 4)
        channels, height, width = image_shape
        self.dropout = dropout
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64 * (height // 4) * (width // 4), num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(images), 2).relu_()
        x = nn.functional.dropout(x, self.dropout, self.training)
        x = nn.functional.max_pool2d(self.conv2(x), 2).relu_().flatten(1)
        return self.fc(nn.functional.dropout(x, self.dropout, self.training))


class SinkhornCnn(nn.Module):
    """The CNN in the released evaluation of DP-Sinkhorn (241,546 parameters for 1x28x28 pixels, 10 classes).

    conv 3x3, 32 - max pool 2 - ReLU - dropout of channels - conv 3x3, 64 - max pool 2 - ReLU - dropout of channels -
    conv 3x3, 128 - ReLU - linear 128 - ReLU - dropout - linear, without padding and with dropout 0.5. It is not the
    paper's, which is `PaperCnn`.
    """

    def __init__(self, image_shape: Shape, num_classes: int) -> None:
        super().__init__()
        check_side(image_shape, 18)
        channels, *sides = image_shape
        height, width = (((side - 2) // 2 - 2) // 2 - 2 for side in sides)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.conv3 = nn.Conv2d(64, 128, 3)
        self.fc1 = nn.Linear(128 * height * width, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for conv in (self.conv1, self.conv2):
            x = nn.functional.dropout2d(nn.functional.max_pool2d(conv(x), 2).relu_(), 0.5, self.training)
        x = self.fc1(self.conv3(x).relu_().flatten(1)).relu_()
        return self.fc2(nn.functional.dropout(x, 0.5, self.training))


class Vgg11(nn.Module):
    """VGG's configuration A with batch norm and one linear layer, by which GS-WGAN's authors compute Inception Scores.

    Convolutions 3x3 with padding 1, each with batch norm and ReLU, of 64 M 128 M 256 256 M 512 512 M 512 512 M filters
    (M: max pool 2). For images below 32 pixels, the first convolution has padding 3 as in the authors' code, which
    enlarges 28 pixels to 32. For larger images we choose padding 1 (9,229,962 parameters for 1x28x28 pixels, 10
    classes).
    """

    plan = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")

    def __init__(self, image_shape: Shape, num_classes: int) -> None:
        super().__init__()
        check_side(image_shape, 28)
        channels, height, width = image_shape
        padding = 3 if min(height, width) < 32 else 1
        height, width = ((side + 2 * padding - 2) // 32 for side in (height, width))
        layers: list[nn.Module] = []
        for step in self.plan:
            if isinstance(step, int):
                layers += [nn.Conv2d(channels, step, 3, padding=padding), nn.BatchNorm2d(step), nn.ReLU(inplace=True)]
                channels, padding = step, 1
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels * height * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).flatten(1))


NETS: dict[str, type[nn.Module]] = {
    "conv_net": MatchNet,
    "dpgan_cnn": DpganNet,
    "linear": Linear,
    "paper_cnn": PaperCnn,
    "paper_mlp": PaperMlp,
    "sinkhorn_cnn": SinkhornCnn,
    "vgg11": Vgg11,
}
