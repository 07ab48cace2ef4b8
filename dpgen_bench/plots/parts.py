"""Parts of all plots: colours and markers, values of a table's row, an x axis with texts, and logs of runs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import OmegaConf

from dpgen_bench.config import display
from dpgen_bench.config.display import dataset_name, method_name
from dpgen_bench.outcomes.listing import describe_dataset, epsilon_number, first_stage, format_epsilon, setting_key
from dpgen_bench.privacy.events import budget_text
from dpgen_bench.store.folders import ReadableRun
from dpgen_bench.tables.rows import TableRow
from dpgen_bench.tables.spec import TableSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Okabe and Ito's colours, which people with any kind of colour vision tell apart; their yellow is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ONE_COLUMN, TWO_COLUMNS = 3.4, 7.0  # inches, the widths of plots in a page of two columns
COSTS = ("cpu_seconds", "seconds_total", "peak_memory_mib")  # what a metric can be drawn over, besides settings
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")


def label_of(name: str, plain: bool = False) -> str:
    """`display.label_of` without script letters, for which a reader of an SVG needs a font that most lack."""
    return display.label_of(name, plain).replace(r"\mathcal", "")


def y_label(text: str) -> str:
    """The text of a y axis, wrapped to the height of a panel."""
    return textwrap.fill(text, 26)


def draw_legend(figure: Figure, handles: Mapping[str, Any], title: str | None = None) -> None:
    """Draw a legend above the panels, in as many columns as fit: a letter of it is about 0.065 inches wide.

    The figure has room for two rows of it, and becomes higher if there are more.
    """
    columns = int(float(figure.get_figwidth()) / (0.5 + 0.065 * max(map(len, handles))))
    columns = max(1, min(len(handles), columns))
    more_rows = max(0, math.ceil(len(handles) / columns) - 2)
    figure.set_figheight(float(figure.get_figheight()) + 0.15 * more_rows)
    figure.legend(list(handles.values()), list(handles), title=title, loc="outside upper center", ncols=columns)


def value_of(row: TableRow, key: str) -> Any:
    """The row's value of a dotted config key, of epsilon_proven or epsilon_claimed, or the mean of one of `COSTS`."""
    if key in ("epsilon_proven", "epsilon_claimed"):
        return row.epsilon_value(key.removeprefix("epsilon_"))
    if key in COSTS:
        return None if (cost := row.summary(key)) is None else cost.mean
    value = OmegaConf.select(row.specs[0].config, key)
    return budget_text(value) if key == "privacy.epsilon" and value is None else value


def check_keys(rows: Sequence[TableRow], keys: Iterable[str]) -> None:
    """
    Raises:
        ValueError: if no row's config has one of the keys.
    """
    for key in keys:
        if (
            rows
            and not key.startswith("epsilon_")
            and key not in COSTS
            and all(value_of(row, key) is None for row in rows)
        ):
            raise ValueError(
                f"expected in a plot a config key that a row has, such as method.n_d or privacy.epsilon, got {key!r}."
            )


def text_of(value: Any) -> str:
    """The text of a value in a legend: ∞ for infinity, a dash for None, and the last part of a path."""
    if value is None:
        return "–"
    if isinstance(value, float | int) and not isinstance(value, bool):
        return "∞" if math.isinf(value) else f"{value:g}"
    return str(value).rsplit("/", 1)[-1]


def text_at(row: TableRow, key: str) -> str:
    """The row's value of a key for readers; methods and data sets have their names."""
    value = value_of(row, key)
    named = {"method.name": method_name, "dataset.name": dataset_name}
    return named[key](str(value)) if key in named else text_of(value)


def order_of(values: Iterable[Any]) -> list[Any]:
    """The distinct values: numbers in increasing order, with infinity last, and then texts."""
    return sorted({same(value): value for value in values}.values(), key=rank)


def rank(value: Any) -> tuple[int, float, str]:
    """The key by which values are sorted: numbers before texts."""
    number = isinstance(value, float | int) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, text_of(value))


def same(value: Any) -> float | str:
    """A key that is equal for equal values: for 1 and 1.0, but not for 1 and "1.0"."""
    return float(value) if isinstance(value, float | int) and not isinstance(value, bool) else f"word {value}"


@dataclass
class Style:
    """Colour, marker and dashes of a plot's lines by name, in the order in which the names are first used."""

    names: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> dict[str, str]:
        if name not in self.names:
            self.names.append(name)
        i = self.names.index(name)
        dashes = DASHES[i // len(COLOURS) % len(DASHES)]
        return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linestyle": dashes}


SAME_TICK = 0.005  # values this close share a tick: epsilons calibrated to one budget differ in the fourth digit


def _distinct(ordered: Sequence[float]) -> list[float]:
    """Sorted numbers without those that nearly equal the next one."""
    kept: list[float] = []
    for value in ordered:
        if kept and abs(value - kept[-1]) <= SAME_TICK * abs(value):
            kept[-1] = value
        else:
            kept.append(value)
    return kept


SPACE = 0.1  # the least distance between two ticks, as a share of the axis, so that labels do not touch


class XAxis:
    """The x axis of a plot: numbers at their place, and right of them texts and then infinity, at places of their own.

    On a logarithmic axis 0 has a place of its own, too, left of the other numbers.

    Args:
        values: all values that will be drawn.
        log: whether the axis is logarithmic; numbers must then be 0 or more.
        format_tick: the text of a number's tick.

    Raises:
        ValueError: for a number below 0 on a logarithmic axis.
    """

    def __init__(
        self, values: Iterable[Any], log: bool = False, format_tick: Callable[[float], str] = "{:g}".format
    ) -> None:
        self.log, self.format_tick = log, format_tick
        ordered = order_of(values)
        self.numbers = _distinct([float(value) for value in ordered if self._is_number(value)])
        if log and self.numbers and self.numbers[0] < 0:
            raise ValueError(
                f"expected no negative numbers on a logarithmic axis, got {self.numbers[0]:g}; remove log_x."
            )
        with_zero = log and self.numbers[:1] == [0.0]
        self.numbers = self.numbers[1:] if with_zero else self.numbers
        texts = [text_of(value) for value in ordered if not self._is_number(value)]
        others = sorted(texts, key=lambda text: text == "∞")
        place = self._scaled(self.numbers[-1]) if self.numbers else 0.0
        span = place - self._scaled(self.numbers[0]) if self.numbers else 0.0
        gap = 0.24 * span or (math.log10(3.0) if log else max(abs(place), 1.0))
        self.others = {text: self._unscaled(place + gap * (i + bool(self.numbers))) for i, text in enumerate(others)}
        self.parted = self._unscaled(place + gap / 2) if self.numbers and others else None
        first = self._scaled(self.numbers[0]) if self.numbers else place
        self.zero = self._unscaled(first - gap) if with_zero else None
        self.parted_zero = self._unscaled(first - gap / 2) if with_zero and self.numbers else None

    @staticmethod
    def _is_number(value: Any) -> bool:
        return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)

    def _unit(self) -> float:
        """The least extent of the axis on either side: a factor of 2, or the largest number itself."""
        return math.log10(2.0) if self.log else abs(self.numbers[-1]) or 1.0

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def _unscaled(self, place: float) -> float:
        return 10.0**place if self.log else place

    def place(self, value: Any) -> float:
        if self.zero is not None and self._is_number(value) and value == 0:
            return self.zero
        return float(value) if self._is_number(value) else self.others[text_of(value)]

    def apply(self, panel: Axes) -> None:
        """Set scale and ticks; a dotted line separates the numbers from texts and infinity."""
        from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

        if self.log:
            panel.set_xscale("log")
        spaced = [self._scaled(value) for value in self.numbers]
        alone = not self.others and self.zero is None
        if spaced and spaced[-1] - spaced[0] < self._unit() and alone:
            panel.set_xlim(*(self._unscaled(place) for place in (spaced[0] - self._unit(), spaced[-1] + self._unit())))
        near = min(np.diff(spaced), default=math.inf) < self._least_distance()
        if near and not self.log and alone:
            return
        ticks = self.numbers
        if near:
            ticks = self._apart() if self.log else list(MaxNLocator(6).tick_values(spaced[0], spaced[-1]))
            ticks = [tick for tick in ticks if self.numbers[0] <= tick <= self.numbers[-1]]
        apart = {**({} if self.zero is None else {"0": self.zero}), **self.others}
        panel.xaxis.set_major_locator(FixedLocator([*ticks, *apart.values()]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticklabels([*(self.format_tick(tick) for tick in ticks), *apart])
        if self.zero is not None:  # all panels show the places of 0 and infinity, also those that have no value there
            places = [self._scaled(place) for place in (self.zero, *self.numbers, *self.others.values())]
            margin = 0.05 * (max(places) - min(places))
            panel.set_xlim(self._unscaled(min(places) - margin), self._unscaled(max(places) + margin))
        for place in (self.parted, self.parted_zero):
            if place is not None:
                panel.axvline(place, color="0.6", linestyle=":", linewidth=0.8)

    def joins(self, place: float) -> bool:
        """Whether a line leads through a place: not through those of 0, texts and infinity."""
        return (self.parted is None or place < self.parted) and place != self.zero

    def _least_distance(self) -> float:
        """The least distance between two ticks; the axis extends to the places of 0, texts and infinity."""
        places = [*([] if self.zero is None else [self.zero]), *self.numbers, *self.others.values()]
        scaled = [self._scaled(place) for place in places]
        return SPACE * (max(scaled) - min(scaled)) if scaled else 0.0

    def _apart(self) -> list[float]:
        """The numbers whose ticks fit on a logarithmic axis, chosen from the right."""
        least = self._least_distance()
        kept = [self.numbers[-1]]
        for value in reversed(self.numbers[:-1]):
            if self._scaled(kept[0]) - self._scaled(value) >= least:
                kept.insert(0, value)
        return kept


def round_ticks(panel: Axes, log: bool) -> None:
    """An x axis of measured numbers, with ticks at round ones: at 1, 3, 10, 30, ... on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullLocator

    if log:
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter("{x:,g}")


def averaged(values: np.ndarray, decay: float) -> np.ndarray:
    """Exponential moving average that starts at the first value: a_t = decay a_(t-1) + (1 - decay) v_t."""
    out = np.empty_like(values)
    for t, value in enumerate(values):  # pandas would leave out NaN and infinity, and so hide that a loss diverged
        out[t] = value if t == 0 else decay * out[t - 1] + (1.0 - decay) * value
    return out


def row_name(row: TableRow, table: TableSpec, apart: Iterable[str] = ()) -> str:
    """The name of a row: method, data set, and the values of the table's `settings` and of the config keys `apart`.

    A first stage is named where there is one. Spaces within `T = 3` do not break.
    """
    config = row.specs[0].config
    parts = [method_name(str(config.method.name)), dataset_name(describe_dataset(config))]
    if "init" in table.settings and (stage := first_stage(config)) != "none":
        parts.append(f"init\u00a0=\u00a0{stage}")
    keys = [*map(setting_key, table.settings), *apart]
    parts += [
        f"{label_of(key, plain=True)}\u00a0=\u00a0{text_of(value)}"
        for key in keys
        if (value := value_of(row, key)) is not None
    ]
    return ", ".join(parts)


def proven_text(folder: ReadableRun) -> str:
    """The epsilons of a run, such as `ε proven 10`, or with a claim `ε proven 610 (claimed 9.99)`."""
    epsilon = folder.read_json("ledger.json").get("epsilon")
    proven, claimed = epsilon_number(epsilon, "proven"), epsilon_number(epsilon, "claimed")
    if proven is None or math.isinf(proven):
        return f"ε proven {text_of(proven)}"
    return f"ε proven {epsilon_text(proven)}" + ("" if claimed is None else f" (claimed {epsilon_text(claimed)})")


def epsilon_text(value: float) -> str:
    """An epsilon as in tables, such as `9.96` or `1,353`, with ∞ for infinity."""
    return "∞" if math.isinf(value) else format_epsilon(value)
