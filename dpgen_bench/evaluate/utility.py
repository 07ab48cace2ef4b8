"""How much the samples are worth to someone who has nothing else: train a classifier on them, test it on real records.

Every figure is an accuracy on all real test records, in percent. The classifier and all choices made on the way
(stopping, the epoch kept) see samples alone; test labels are read once, at the end.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import sklearn.linear_model
import sklearn.neural_network
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, seeded


def pixel_rows(records: Records) -> np.ndarray:
    """Images as rows of pixels in [0, 1], float32 [n, c·h·w]."""
    return records.images.flatten(1).cpu().numpy().astype(np.float32) / 255.0


def tested(model: Any, samples: Records, real_test: Records) -> float:
    """Accuracy in percent on `real_test` of a scikit-learn classifier fitted to `samples`.

    Samples of one class only leave nothing to fit: such a classifier answers with that class. An iteration limit that
    is reached is part of the classifier's definition and no cause for a warning.
    """
    truth = real_test.labels.cpu().numpy()
    labels = samples.labels.cpu().numpy()
    if len(np.unique(labels)) == 1:
        return 100.0 * float((truth == labels[0]).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(pixel_rows(samples), labels)
    return 100.0 * float((model.predict(pixel_rows(real_test)) == truth).mean())


@dataclass
class LogisticRegression:
    """scikit-learn's multinomial logistic regression by L-BFGS, on pixels in [0, 1].

    Args:
        max_iter: L-BFGS iterations at most (DP-Sinkhorn's paper: 5,000).
        inverse_penalty: scikit-learn's C, the inverse weight of the L2 penalty.
    """

    max_iter: int = 5000
    inverse_penalty: float = 1.0

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        model = sklearn.linear_model.LogisticRegression(
            C=self.inverse_penalty, max_iter=self.max_iter, random_state=ctx.seed
        )
        return {"acc_logreg_pct": tested(model, samples, real_test)}


@dataclass
class Mlp:
    """scikit-learn's perceptron with one hidden layer of ReLUs, by Adam, on pixels in [0, 1].

    The defaults are DP-Sinkhorn's paper: 100 units, Adam as it comes, 10% of the samples held out, stop after 10
    epochs without a better accuracy on them.

    Args:
        hidden: units of the hidden layer.
        learning_rate, batch_size: of Adam.
        max_iter: epochs at most.
        early_stopping: hold out `holdout` of the samples to stop by; else stop when the training loss stalls.
        patience: epochs without improvement before stopping.

    Raises:
        ValueError: when called with early_stopping on too few samples to hold out some of every class.
    """

    hidden: int = 100
    learning_rate: float = 1e-3
    batch_size: int = 200
    max_iter: int = 300
    early_stopping: bool = True
    holdout: float = 0.1
    patience: int = 10

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        counts = torch.bincount(samples.labels)
        counts = counts[counts > 0]
        held_out = math.ceil(self.holdout * len(samples)) if self.early_stopping else 0
        # What scikit-learn's stratified hold-out needs: two of each class, and as many rows held out as classes.
        if self.early_stopping and len(counts) > 1 and (counts.min() < 2 or held_out < len(counts)):
            raise ValueError(
                f"too few samples to hold out {self.holdout:.0%} for early stopping: {len(samples)} of {len(counts)} "
                f"classes, {int(counts.min())} in the smallest. Expected 2 or more in each class and {len(counts)} or "
                "more held out: raise protocol.num_samples or set early_stopping=false."
            )
        model = sklearn.neural_network.MLPClassifier(
            hidden_layer_sizes=(self.hidden,),
            learning_rate_init=self.learning_rate,
            batch_size=min(self.batch_size, len(samples) - held_out),
            max_iter=self.max_iter,
            early_stopping=self.early_stopping,
            validation_fraction=self.holdout,
            n_iter_no_change=self.patience,
            random_state=ctx.seed,
        )
        return {"acc_mlp_pct": tested(model, samples, real_test)}


class DpganNet(nn.Module):
    """The classifier of "Private GANs, Revisited" (the released code's; 1,199,882 parameters at 1x28x28, 10 classes).

    conv 3x3, 32 - ReLU - conv 3x3, 64 - ReLU - max pool 2 - dropout 0.25 - linear 128 - ReLU - dropout 0.5 - linear,
    no padding. Images [b, c, h, w] in [0, 1] to logits [b, num_classes].
    """

    def __init__(self, image_shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        channels, height, width = image_shape
        if min(height, width) < 6:
            raise ValueError(f"expected images of at least 6x6 pixels, got {height}x{width}.")
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv2(self.conv1(images).relu()).relu()
        x = nn.functional.max_pool2d(x, 2)
        x = nn.functional.dropout(x, 0.25, self.training).flatten(1)
        x = nn.functional.dropout(self.fc1(x).relu(), 0.5, self.training)
        return self.fc2(x)


@dataclass
class DpganCnn:
    """The CNN of "Private GANs, Revisited", trained as its authors do.

    Adam on the cross-entropy; the epoch kept is the first with the best accuracy on held-out *samples*. The authors
    hold out the last 5,000 of 60,000 samples with independent labels; here the samples are shuffled first, which is
    the same in law and does no harm when they come sorted by class. Of fewer than 60,000 samples 1/12 is held out.

    Args:
        learning_rate, batch_size, epochs: of Adam.
        holdout: samples held out at most.

    Raises:
        ValueError: when called with fewer than 12 samples.
    """

    learning_rate: float = 1e-3
    batch_size: int = 64
    epochs: int = 10
    holdout: int = 5000

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        if len(samples) < 12:
            raise ValueError(f"expected at least 12 samples, of which one is held out, got {len(samples)}.")
        with seeded(ctx.seed), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            net = self._train(samples, ctx)
            correct = count_correct(net, real_test.images, real_test.labels, ctx)
        return {"acc_cnn_pct": 100.0 * correct / len(real_test)}

    def _train(self, samples: Records, ctx: EvalContext) -> DpganNet:
        coins = torch.Generator().manual_seed(ctx.seed)
        order = torch.randperm(len(samples), generator=coins)
        held = min(self.holdout, len(samples) // 12)
        images, labels = samples.images[order].to(ctx.device), samples.labels[order].to(ctx.device)
        rows = len(samples) - held
        channels, height, width = samples.images.shape[1:]
        net = DpganNet((channels, height, width), ctx.num_classes).to(ctx.device)
        adam = torch.optim.Adam(net.parameters(), lr=self.learning_rate)
        best, kept = -1, net.state_dict()
        for _ in range(self.epochs):
            net.train()
            for batch in torch.randperm(rows, generator=coins).split(self.batch_size):
                batch = batch.to(ctx.device)
                loss = nn.functional.cross_entropy(net(images[batch].float() / 255.0), labels[batch])
                adam.zero_grad(set_to_none=True)
                loss.backward()
                adam.step()
            correct = count_correct(net, images[rows:], labels[rows:], ctx)
            if correct > best:
                best, kept = correct, copy.deepcopy(net.state_dict())
        net.load_state_dict(kept)
        return net


@torch.no_grad()
def count_correct(net: nn.Module, images: Tensor, labels: Tensor, ctx: EvalContext, batch_size: int = 500) -> int:
    """How many of `images` (uint8 [n, c, h, w]) the network, in evaluation mode, gives their own label."""
    net.eval()
    correct = 0
    for part, truth in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        logits = net(part.to(ctx.device).float() / 255.0)
        correct += int((logits.argmax(dim=1) == truth.to(ctx.device)).sum())
    return correct
