"""The x axis of plots: places of numbers, texts, 0 and infinity, and its ticks."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from dpgen_bench.plots.parts import XAxis


def test_places_on_an_axis() -> None:
    axis = XAxis([10, "adaptive", 1.0, math.inf, 100], log=True)
    assert axis.numbers == [1.0, 10.0, 100.0]
    assert [axis.place(value) for value in (1, 10, 100)] == [1.0, 10.0, 100.0]
    assert 100.0 < axis.parted < axis.place("adaptive") < axis.place(math.inf)
    assert XAxis([3.0]).parted is None
    only_words = XAxis(["a", "b"])
    assert (only_words.place("a"), only_words.place("b")) == (0.0, 1.0)
    with_zero = XAxis([0.0, 1.0, 10.0, math.inf], log=True)
    assert 0.0 < with_zero.place(0) < with_zero.parted_zero < with_zero.place(1.0)
    assert [with_zero.joins(with_zero.place(value)) for value in (0, 1.0, 10.0, math.inf)] == [False, True, True, False]
    with pytest.raises(ValueError, match="no negative numbers on a logarithmic axis, got -1"):
        XAxis([-1.0, 1.0], log=True)


def test_numbers_that_are_nearly_the_same_share_a_tick() -> None:
    """Epsilons calibrated to 10 come out as 9.99990, 9.99991 and 9.9998; an axis must not spread them."""
    axis = XAxis([9.9999, 9.99991, 9.9998, math.inf, 1.0], log=True)
    assert axis.numbers == [1.0, 9.99991]
    assert axis.others["∞"] == pytest.approx(9.99991**1.24)
    assert XAxis([9.9999, 9.9998], log=True).numbers == [9.9999]
    assert XAxis([9.9, 9.99], log=True).numbers == [9.9, 9.99]


def test_ticks_are_apart_on_the_whole_axis() -> None:
    """The places of 0 and infinity lengthen the axis, so that 0.738 and 1 are closer than a tenth of it."""
    axis = XAxis([0.0, 0.738, 1.0, 8.5, 10.0, math.inf], log=True)
    figure = Figure()
    panel = figure.add_subplot()
    axis.apply(panel)
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["1", "10", "0", "∞"]
