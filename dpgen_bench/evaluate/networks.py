"""`Network`: a network that classifies images, with the settings of its training on samples."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.architectures import NETS
from dpgen_bench.evaluate.augmentation import AUGMENTATIONS
from dpgen_bench.evaluate.classifiers import training_key
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.training import class_logits, count_correct, placed, train_epoch
from dpgen_bench.evaluate.unfinished import Training, Unfinished
from dpgen_bench.utils.randomness import seeded

# Raise it when trained networks give other predictions for the same settings, so that cached ones are not used.
REVISION = 1
RECORD_CLASSIFIER_SEED = 0


@dataclass(frozen=True)
class Network:
    """Settings of a network that is trained by Adam or SGD on the cross-entropy of samples, and of no other records.

    Held-out samples, by which training stops and an epoch is chosen, are drawn at random, because samples may be sorted
    by class. The defaults are those of "Private GANs, Revisited" except for its hold-out: that is
    `holdout=5000, keep="best"`, where the paper holds out the last samples. Both have the same distribution if labels
    are independent. All randomness derives from ctx.seed.

    Args:
        net: a name in `architectures.NETS`, such as "paper_cnn".
        net_params: arguments of the architecture in addition to shape and classes, such as {"hidden": 100}.
        optimiser: "adam" or "sgd".
        learning_rate, weight_decay: of both optimisers; other settings of Adam are PyTorch's defaults.
        momentum: of SGD.
        batch_size: samples in a step; the last batch of an epoch may be smaller.
        epochs: the largest number of epochs.
        milestones: numbers of epochs after which the learning rate is multiplied by `gamma`.
        gamma: see `milestones`.
        holdout: a whole number of samples, or 1/12 of the samples if that is less; or a fraction below 1 of the
            samples, rounded down. 0 holds out none.
        keep: the "best" epoch (the first with the most correct predictions for held-out samples) or the "last".
        patience: stop after this number of epochs in a row without more correct predictions; None never stops.
        augment: "none"; "crop_flip": shift each image by up to 4 pixels, and mirror it with probability 1/2; or
            "crop_scale_rotate": shift, scale or rotate each image (`augmentation.draw_crop_scale_rotate`).
        normalise: (mean, deviation) of pixels in [0, 1], to subtract and to divide by; None leaves them unchanged.

    Raises:
        ValueError: for unknown or contradictory settings.
    """

    net: str
    net_params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: int = 10
    milestones: Sequence[int] = ()
    gamma: float = 0.1
    holdout: float = 0
    keep: Literal["best", "last"] = "last"
    patience: int | None = None
    augment: Literal["none", "crop_flip", "crop_scale_rotate"] = "none"
    normalise: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))  # yaml has no tuples
        if self.normalise is not None:
            object.__setattr__(self, "normalise", tuple(self.normalise))
        for name, known in (
            ("net", tuple(NETS)),
            ("optimiser", ("adam", "sgd")),
            ("keep", ("best", "last")),
            ("augment", ("none", *AUGMENTATIONS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"expected {name} among {', '.join(known)}, got {getattr(self, name)!r}.")
        takes = list(inspect.signature(NETS[self.net]).parameters)[2:]
        if unknown := sorted(set(self.net_params) - set(takes)):
            raise ValueError(f"{self.net} takes {', '.join(takes) or 'nothing'} as net_params, got {unknown}.")
        if min(self.batch_size, self.epochs) < 1 or self.learning_rate <= 0:
            raise ValueError(
                "expected batch_size and epochs of 1 or more and a learning_rate above 0, "
                f"got {self.batch_size}, {self.epochs} and {self.learning_rate}."
            )
        if self.optimiser == "adam" and self.momentum:
            raise ValueError(f"expected momentum with optimiser sgd only, got {self.momentum} with adam; leave it out.")
        if self.holdout < 0 or (self.holdout != int(self.holdout) and self.holdout > 1):
            raise ValueError(f"expected holdout to be a whole number or a fraction below 1, got {self.holdout}.")
        if not self.holdout and (self.keep == "best" or self.patience is not None):
            raise ValueError(
                "expected a holdout above 0 with keep best or patience, which use held-out samples, got 0."
            )
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"expected a patience of 1 epoch or more, or null, got {self.patience}.")
        if self.normalise is not None and (len(self.normalise) != 2 or self.normalise[1] <= 0):
            raise ValueError(f"expected normalise to be a mean and a deviation above 0, got {self.normalise}.")

    def one_core(self, device: Any) -> bool:
        """Whether it runs on one thread, next to others: on a CPU it does, on an accelerator it does not."""
        return torch.device(device).type == "cpu"

    def held_out(self, n: int) -> int:
        """How many of `n` samples are held out.

        Raises:
            ValueError: if there are too few samples to hold out one.
        """
        if not self.holdout:
            held, smallest = 0, 1
        elif self.holdout < 1:
            held, smallest = math.floor(self.holdout * n + 1e-9), math.ceil(1 / self.holdout - 1e-9)
        else:
            held, smallest = min(int(self.holdout), n // 12), 12
        if n < smallest:
            reason = f", of which one is held out (holdout={self.holdout})" if self.holdout else ""
            raise ValueError(f"expected at least {smallest} samples{reason}, got {n}: raise protocol.num_samples.")
        return held

    def fit(self, records: Records, ctx: EvalContext) -> FittedNetwork:
        """Train a new network on `records`; a training that was killed continues from its file in `ctx.scratch`.

        Raises:
            ValueError: if there are too few samples to hold out one, or the images are too small for the network.
        """
        held = self.held_out(len(records))
        rows = len(records) - held
        with repeatable(ctx.seed):
            # Shuffle the samples; the last `held` are held out.
            rng = torch.Generator().manual_seed(ctx.seed)
            order = torch.randperm(len(records), generator=rng)
            images, labels = records.images[order].to(ctx.device), records.labels[order].to(ctx.device)
            net = placed(self.build(records.images.shape, ctx.num_classes), ctx.device)
            training = Training(net, self._optimiser(net), rng)
            unfinished = Unfinished(ctx.scratch, training_key(self, records, ctx))
            unfinished.load_into(training)
            while training.epochs < self.epochs and training.epochs_since != self.patience:
                for group in training.optimiser.param_groups:
                    passed = sum(after <= training.epochs for after in self.milestones)
                    group["lr"] = self.learning_rate * self.gamma**passed
                train = images[:rows], labels[:rows]
                train_epoch(net, training.optimiser, *train, self.batch_size, rng, self.normalise, self.augment)
                training.epochs += 1
                if held:
                    # Early stopping and the choice of an epoch.
                    correct = count_correct(net, images[rows:], labels[rows:], self.normalise)
                    training.epochs_since += 1
                    if correct > training.best:
                        training.best, training.epochs_since = correct, 0
                        training.kept = copy.deepcopy(net.state_dict()) if self.keep == "best" else None
                unfinished.save(training)
            if training.kept is not None:
                net.load_state_dict(training.kept)
            unfinished.remove()
        return FittedNetwork(net.eval(), self.normalise)

    def build(self, image_shape: Sequence[int], num_classes: int) -> nn.Module:
        """An untrained network for images [..., c, h, w]; its weights are drawn by PyTorch's global generator."""
        return NETS[self.net](tuple(image_shape[-3:]), num_classes, **self.net_params)

    def restore(
        self, state: Mapping[str, Tensor], image_shape: Sequence[int], num_classes: int, device: torch.device | str
    ) -> FittedNetwork:
        """The fitted network with this `FittedNetwork.state`.

        Raises:
            RuntimeError: if it is the state of another architecture.
        """
        with seeded(0):
            net = self.build(image_shape, num_classes)
        net.load_state_dict(state)
        return FittedNetwork(placed(net.eval(), device), self.normalise)

    def _optimiser(self, net: nn.Module) -> torch.optim.Optimizer:
        if self.optimiser == "sgd":
            return torch.optim.SGD(
                net.parameters(), lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
            )
        # `fused` updates all parameters in one pass.
        return torch.optim.Adam(net.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay, fused=True)


@dataclass(frozen=True)
class FittedNetwork:
    """A trained network in evaluation mode, with the normalisation of its pixels."""

    net: nn.Module
    normalise: tuple[float, float] | None = None

    def predict(self, images: Tensor) -> Tensor:
        """Labels int64 [n], on the CPU, of images [n, c, h, w], uint8 or float32 within 0..255."""
        return self._logits(images).argmax(dim=1)

    def probabilities(self, images: Tensor) -> Tensor:
        """float64 [n, classes], on the CPU; each row sums to 1."""
        return self._logits(images).double().softmax(dim=1)

    @property
    def state(self) -> dict[str, Tensor]:
        """All parameters and running statistics by name, on the CPU; the argument of `Network.restore`."""
        return {name: value.cpu().contiguous() for name, value in self.net.state_dict().items()}

    def _logits(self, images: Tensor) -> Tensor:
        with repeatable(0):
            logits = class_logits(self.net, images, self.normalise)
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(
                "expected finite logits of the trained network, got NaN or infinity: its training diverged."
            )
        return logits


@dataclass(frozen=True)
class RecordClassifier:
    """A `Network` with default settings that is trained on records on the CPU, independently of a protocol.

    It is used as the `classifier` of `dpgen_bench.data.debugging.DebuggingClients`.

    Raises:
        ValueError: for an unknown architecture or fewer than 1 epoch.
    """

    net: str
    epochs: int = 3

    def __post_init__(self) -> None:
        self._network()

    def _network(self) -> Network:
        return Network(self.net, epochs=self.epochs)

    def identity(self) -> list[Any]:
        return [self.net, self.epochs, RECORD_CLASSIFIER_SEED, REVISION]

    def fit(self, records: Records, num_classes: int) -> FittedNetwork:
        return self._network().fit(records, EvalContext(RECORD_CLASSIFIER_SEED, "cpu", num_classes, cache=Path()))


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Seed global generators, and restrict cuDNN to deterministic algorithms in full float32, inside the block."""
    with seeded(seed), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
