"""The Inception Score of GS-WGAN's paper, by a classifier trained on the real training records and kept in a cache."""

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

MOST_BIAS = 0.01  # a score that falls short by more of itself is noted


@dataclass
class InceptionScore:
    """How surely a classifier of real records names each sample, and how evenly the samples spread over the classes.

    exp(mean over samples of KL(p(class | sample) || p(class))), p(class) being the mean over the samples: between 1 and
    the number of classes, and higher is better. The samples are put into an order drawn from ctx.seed (they come sorted
    or cyclic by class) and cut into `splits` parts; the score is the mean over the parts. It compares with no score by
    another classifier, so that one's accuracy on the real test records is given beside it.

    Args:
        classifier: trained on the real training records, once for each dataset; kept in ctx.cache/classifiers.
        splits: parts of the samples.

    Raises:
        ValueError: when called with fewer samples than parts.
        NotMeasured: when called where the real training records are not to be had.
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
        if bias > MOST_BIAS:
            ctx.note(
                f"inception_score: {n // self.splits:,} samples for each of {self.splits} splits and {ctx.num_classes} "
                f"classes: biased downwards, by up to about {100 * bias:.0f}% of it; compare it only with scores from "
                "as many samples and splits."
            )
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
    """Mean and standard deviation (divided by `splits`, as NumPy does) of the scores of `splits` contiguous parts.

    Args:
        probabilities: [n, classes], n ≥ splits, each row a distribution; 0·log 0 counts as 0.

    Raises:
        ValueError: if there are fewer rows than parts, or rows that are no distributions.
    """
    p = torch.as_tensor(probabilities, dtype=torch.float64)
    if p.ndim != 2 or not 1 <= splits <= len(p):
        raise ValueError(
            f"expected probabilities [n, classes] with n of at least {splits} splits, got {tuple(p.shape)}."
        )
    if not bool(((p >= 0).all(dim=1) & ((p.sum(dim=1) - 1).abs() < 1e-6)).all()):  # NaN fails it too
        raise ValueError("expected rows of probabilities, none below 0 and each with sum 1, got others (or NaN).")
    scores = []
    for i in range(splits):
        part = p[i * len(p) // splits : (i + 1) * len(p) // splits]
        marginal = part.mean(dim=0, keepdim=True)
        divergence = (torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(dim=1)
        scores.append(float(divergence.mean().exp()))
    return float(np.mean(scores)), float(np.std(scores))


def expected_bias(samples: int, num_classes: int) -> float:
    """By what share of itself a score from so few samples falls short, at most and about: (classes - 1) / (2·samples).

    The log score is the entropy of the mean prediction less the mean entropy of the predictions. The first is that of
    an average over few samples, which falls short of the limit's by (classes - 1) / (2·samples) when each prediction is
    sure of one class (Miller 1955), and by less when they are not; the second has no bias.
    """
    return (num_classes - 1) / (2 * samples)
