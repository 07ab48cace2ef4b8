"""Utility of samples: the accuracy on real test images of classifiers that are trained on samples only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.classifiers import Classifier
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured
from dpgen_bench.evaluate.reference import REFERENCE_SEED, percent_correct, predictions, reference_predictions


@dataclass
class Accuracy:
    """Accuracy on the real test images of a classifier trained on samples; test labels are read once, at the end.

    Returns acc_NAME_pct and, with `calibrate`, acc_NAME_real_pct, the accuracy of the same classifier trained on all
    real training records, and acc_NAME_calibrated_pct = 100 · acc_NAME_pct / acc_NAME_real_pct. If the real training
    records are not available, acc_NAME_pct is the only value, and a note says why.

    Args:
        name: of the classifier in the names of the values: mlp, cnn, logreg, ...
        classifier: the classifier that is trained.
        calibrate: whether to compare with the classifier trained on real records.
        distinct: whether to train on each different sample once. The samples of a generator that is a finite set are
            then this set, as long as there are many more samples than images.
    """

    name: str
    classifier: Classifier
    calibrate: bool = True
    distinct: bool = False

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        """Accuracies in percent, by the names above."""
        train = self._real_train(ctx)
        if self.distinct:
            samples = distinct(samples)
        # If the samples are the real records, their classifier is the reference: it is not trained twice.
        is_real = train is not None and ctx.seed == REFERENCE_SEED and samples.content_hash == train.content_hash
        reference = None
        if train is not None and (self.calibrate or is_real):
            reference = reference_predictions(self.classifier, train, real_test.images, ctx)
        predicted = reference if is_real else predictions(self.classifier, samples, real_test.images, ctx)
        assert predicted is not None
        truth = real_test.labels.cpu()
        accuracy = percent_correct(predicted, truth)
        values = {f"acc_{self.name}_pct": accuracy}
        if self.calibrate and reference is not None:
            real = percent_correct(reference, truth)
            values[f"acc_{self.name}_real_pct"] = real
            if real > 0.0:
                values[f"acc_{self.name}_calibrated_pct"] = 100.0 * (accuracy / real)
            else:
                ctx.note(
                    f"acc_{self.name}_calibrated_pct not measured: the accuracy after training on real records is 0"
                )
        return values

    def one_core(self, device: torch.device | str) -> bool:
        """Whether this may be measured in a separate process, with one thread."""
        return self.classifier.one_core(device)

    def _real_train(self, ctx: EvalContext) -> Records | None:
        try:
            return ctx.train()
        except NotMeasured as error:
            if self.calibrate:
                ctx.note(f"acc_{self.name}_calibrated_pct not measured: {error}")
            return None


def distinct(samples: Records) -> Records:
    """Each different pair of an image and a label once, in the order of their first samples."""
    first: dict[tuple[bytes, int], int] = {}
    for i, (image, label) in enumerate(zip(samples.images.cpu().numpy(), samples.labels.tolist(), strict=True)):
        first.setdefault((image.tobytes(), label), i)
    chosen = torch.tensor([*first.values()], dtype=torch.int64)
    return Records(samples.images[chosen], samples.labels[chosen])


@dataclass
class AverageAccuracy:
    """Means over classifiers: acc_avg_pct of acc_NAME_pct, and acc_calibrated_pct of acc_NAME_calibrated_pct.

    acc_calibrated_pct is a mean of ratios, not the ratio of means, as in GS-WGAN's Tables A1 and A2. The means are
    computed by `combine` from the values of other metrics.

    Args:
        of: names of the classifiers.

    Raises:
        ValueError: if there are no names, or the same name occurs twice.
    """

    of: list[str]

    def __post_init__(self) -> None:
        if not self.of or len(set(self.of)) < len(self.of):
            raise ValueError(f"expected one or more classifiers' names, each once, got {self.of}.")

    def combine(self, values: Mapping[str, float], notes: list[str] | None = None) -> dict[str, float]:
        """The means over classifiers of `values`, which are the values of all metrics by name.

        If a calibrated accuracy is missing, acc_calibrated_pct is missing as well, and `notes` gets a line about it.

        Raises:
            NotMeasured: if the accuracy of a classifier is missing.
        """
        if missing := [name for name in self.of if f"acc_{name}_pct" not in values]:
            raise NotMeasured(f"needs the accuracy of {', '.join(missing)}, which was not measured")
        means = {"acc_avg_pct": self._mean(values, "acc_{}_pct")}
        missing = [name for name in self.of if f"acc_{name}_calibrated_pct" not in values]
        if not missing:
            means["acc_calibrated_pct"] = self._mean(values, "acc_{}_calibrated_pct")
        elif notes is not None:
            notes.append(f"acc_calibrated_pct not measured: {', '.join(missing)} without a calibrated accuracy")
        return means

    def _mean(self, values: Mapping[str, float], key: str) -> float:
        return sum(values[key.format(name)] for name in self.of) / len(self.of)
