"""The Inception Score as GS-WGAN's paper uses it: by a classifier trained on the real training records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.networks import Network
from dpgen_bench.evaluate.reference import percent_correct, reference_network, reference_predictions

LARGEST_BIAS = 0.01  # relative bias of a score, above which a note is added


@dataclass
class InceptionScore:
    """Measures whether a classifier is certain of each sample's class, and whether classes are equally frequent.

    The score is exp(mean over samples of KL(p(class | sample) || p(class))), where p(class) is the mean over samples.
    It lies between 1 and the number of classes; higher is better. The samples, which are sorted or cyclic by class, are
    shuffled by ctx.seed and cut into `splits` parts; the value is the mean over the parts. Scores by different
    classifiers are not comparable, so the classifier's accuracy on the real test records is returned, too.

    Args:
        classifier: trained on the real training records, once for each dataset; see `reference.reference_network`.
        splits: number of parts.

    Raises:
        ValueError: for fewer than 1 part; when called, for fewer samples than parts.
        NotMeasured: when called, if the real training records are not available.
    """

    classifier: Network
    splits: int = 10

    def __post_init__(self) -> None:
        if self.splits < 1:
            raise ValueError(f"expected 1 split or more, got {self.splits}.")

    def one_core(self, device: Any) -> bool:
        return self.classifier.one_core(device)

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        n = len(samples)
        if n < self.splits:
            raise ValueError(f"expected at least {self.splits} samples, one for each split, got {n}.")
        bias = expected_bias(n // self.splits, ctx.num_classes)
        if bias > LARGEST_BIAS:
            ctx.note(
                f"inception_score: {n // self.splits:,} samples for each of {self.splits} splits and {ctx.num_classes} "
                f"classes: biased downwards, by up to about {100 * bias:.0f}% of it; compare it only with scores from "
                "as many samples and splits."
            )
        # The classifier, and its predictions on the test images for its accuracy.
        train = ctx.train()
        fitted = reference_network(self.classifier, train, ctx)
        predicted = reference_predictions(self.classifier, train, real_test.images, ctx)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(ctx.seed))
        mean, std = inception_score(fitted.probabilities(samples.images)[order], self.splits)
        return {
            "inception_score": mean,
            "inception_score_std_splits": std,
            "inception_score_classifier_acc_pct": percent_correct(predicted, real_test.labels.cpu()),
            "inception_score_num_samples": float(n),
        }


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """Mean and standard deviation (over `splits`, not `splits - 1`) of the scores of `splits` contiguous parts.

    Args:
        probabilities: [n, classes] with n ≥ splits; each row is a distribution. 0·log 0 counts as 0.
        splits: number of parts.

    Raises:
        ValueError: if there are fewer rows than parts, or a row is not a distribution.
    """
    p = torch.as_tensor(probabilities, dtype=torch.float64)
    if p.ndim != 2 or not 1 <= splits <= len(p):
        raise ValueError(
            f"expected probabilities [n, classes] with n of at least {splits} splits, got {tuple(p.shape)}."
        )
    if not bool(((p >= 0).all(dim=1) & ((p.sum(dim=1) - 1).abs() < 1e-6)).all()):  # False for NaN, too.
        raise ValueError("expected rows of probabilities, none below 0 and each with sum 1, got others (or NaN).")
    scores = []
    for i in range(splits):
        part = p[i * len(p) // splits : (i + 1) * len(p) // splits]
        marginal = part.mean(dim=0, keepdim=True)
        divergence = (torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(dim=1)
        scores.append(float(divergence.mean().exp()))
    return float(np.mean(scores)), float(np.std(scores))


def expected_bias(samples: int, num_classes: int) -> float:
    """Approximate upper bound of a score's relative downward bias: (classes - 1) / (2·samples).

    The logarithm of the score is the entropy of the mean prediction minus the mean entropy of the predictions. The
    first entropy is estimated from `samples` predictions and is too small by (classes - 1) / (2·samples) if each
    prediction is certain of one class (Miller, 1955), and by less otherwise. The second one is unbiased.
    """
    return (num_classes - 1) / (2 * samples)
