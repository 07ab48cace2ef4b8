"""The entries of a table's `plot`: one dataclass per kind of plot, checked when the table is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from dpgen_bench.utils.validation import Count, Decay, Fraction, NonNegative, TwoOrMore, check_keys, check_types, frozen

Scalar = str | float | bool | None


@dataclass(frozen=True, kw_only=True)
class PlotSpec:
    """What all kinds of plots have.

    Args:
        only: the rows of the table that are drawn, as config keys with the value, or the list of values, that a row
            must have; empty: all rows.

    Raises:
        ValueError: for a value of another type than its field's, or outside its field's interval.
    """

    kind: ClassVar[str]
    only: dict[str, Scalar | tuple[Scalar, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(type(self), vars(self), "plot")


@dataclass(frozen=True, kw_only=True)
class LinesSpec(PlotSpec):
    """What plots with lines share.

    Args:
        y: metrics, a panel each; the yaml may give one name instead of a list.
        series: config keys whose values set lines apart; one name or a list.
        panel: a config key with a column of panels for each of its values.
        x_label, y_label: texts of the axes in place of the keys' own.
        log_y: whether the y axis is logarithmic.
    """

    y: tuple[str, ...]
    series: tuple[str, ...] = ()
    panel: str | None = None
    x_label: str | None = None
    y_label: str | None = None
    log_y: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.y:
            raise ValueError("plot.y: expected one metric or more, got an empty list; name what is drawn.")


@dataclass(frozen=True, kw_only=True)
class CurveSpec(LinesSpec):
    """Metrics of finished runs over a config key, over `epsilon_proven` or `epsilon_claimed`, or over a cost.

    Costs are `cpu_seconds`, `seconds_total` and `peak_memory_mib`; a point stands at the mean over the seeds.
    """

    kind: ClassVar[str] = "curve"
    x: str
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class PrivacyUtilitySpec(LinesSpec):
    """Metrics of finished runs over their proven epsilon, or over the one that the paper's accounting claims."""

    kind: ClassVar[str] = "privacy_utility"
    series: tuple[str, ...] = ("method.name",)
    epsilon: Literal["proven", "claimed"] = "proven"


@dataclass(frozen=True, kw_only=True)
class StepsSpec(LinesSpec):
    """Metrics of the generators that were kept during training, over steps; `per` is a config key that divides them."""

    kind: ClassVar[str] = "steps"
    per: str | None = None
    log_x: bool = False


@dataclass(frozen=True, kw_only=True)
class LogSpec(LinesSpec):
    """Scalars of log.jsonl: `ema` is the decay of their moving average, `x_max` the last row that is drawn."""

    kind: ClassVar[str] = "log"
    ema: Decay | None = None
    x_max: Count | None = None


@dataclass(frozen=True, kw_only=True)
class SamplesSpec(PlotSpec):
    """Grids of samples with `per_class` images of each class; `series` are config keys that set columns apart."""

    kind: ClassVar[str] = "samples"
    per_class: Count = 8
    series: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NormsSpec(PlotSpec):
    """Norms before clipping, of runs with privacy.diagnostics=unsafe; `series` are config keys in a panel's title."""

    kind: ClassVar[str] = "norms"
    series: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BiasVarianceSpec(PlotSpec):
    """DP-Sinkhorn's Figure 4(c), which is computed from a data set without a run (see `plots.bias_variance`).

    Args:
        dataset: the data set whose training images are used.
        p: debiasing fractions; n' = floor(n p). The reference, p = 1, is always computed.
        pool: how many images of each class the generator can draw, with a line of the plot for each; None: all.
        n: generated points of the cross group, and real points, of a batch [50 in appendix D.4].
        batches: of generated and real images [300 in section 5.2; half of them give the same picture in half the time].
        noise: standard deviation of the noise on a pool's images, whose range is [-1, 1]; 0 is a perfect generator.
        m, lam, alpha_c: weight of L1 in the cost, lambda, scale of the one-hot label [1, 0.05, 15 in appendix D.3].
        seed: of the split, the noise and the batches.
    """

    kind: ClassVar[str] = "bias_variance"
    dataset: str = "digits"
    p: tuple[Fraction, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    pool: tuple[Count | None, ...] = (1, 5, None)
    n: Count = 50
    batches: TwoOrMore = 150
    noise: NonNegative = 0.2
    m: float = 1.0
    lam: float = 0.05
    alpha_c: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("p", "pool"):
            if not getattr(self, name):
                raise ValueError(f"plot.{name}: expected one value or more, got an empty list; give a value.")


_CLASSES = (CurveSpec, PrivacyUtilitySpec, StepsSpec, LogSpec, SamplesSpec, NormsSpec, BiasVarianceSpec)
PLOT_KINDS: dict[str, type[PlotSpec]] = {each.kind: each for each in _CLASSES}
ONE_OR_MORE = ("y", "series")  # keys for which the yaml may give one name instead of a list


def parse_plots(content: Any) -> tuple[PlotSpec, ...]:
    """The entries of a table's `plot`, which is one entry, a list of them, or None.

    Raises:
        ValueError: for a kind that does not exist, a key that its kind does not have, one that is missing, or a value
            of another type or outside its interval.
    """
    entries = content if isinstance(content, list | tuple) else [] if content is None else [content]
    return tuple(map(_parse_plot, entries))


def _parse_plot(entry: Any) -> PlotSpec:
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    if kind not in PLOT_KINDS:
        raise ValueError(f"plot: expected an entry with a kind among {', '.join(PLOT_KINDS)}, got {entry!r}.")
    cls = PLOT_KINDS[kind]
    values = {
        str(key): [value] if key in ONE_OR_MORE and isinstance(value, str) else value
        for key, value in entry.items()
        if key != "kind"
    }
    check_keys(cls, values, f"plot of kind {kind}")
    return cls(**{key: frozen(value) for key, value in values.items()})
