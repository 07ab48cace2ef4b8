"""Planted mistakes of methods whose shards all answer, each of which the conformance suite must detect."""

from __future__ import annotations

import pytest

from dpgen_bench.testing import ConformanceError, check_method
from tests.cheats_shards import Teachers

SMALL = {"image_shape": (1, 8, 8), "num_classes": 3, "records": 24}
CHEATS = {
    "a teacher that sees two shards": ("two shards", "the row of shard . in release 0 .* differs"),
    "a first state that sees its group": ("whole group", "the row of shard . in release 0 .* differs"),
    "a first state that sees another group": ("earlier group", "the private state of shard . in release 0 .* differs"),
    "a state that sees another shard": ("next state", "the private state of shard . in release 0 .* differs"),
    "a count that follows the realised shard size": ("shard size", "state passed to ctx.steps differs|generator"),
    "a vote for each record of a shard": ("records vote", "one answer for each of the 4 shards"),
    "a vote that is released twice for one bin": ("twice", "votes twice for one bin"),
    "a vote that is released again": ("kept", "killed in step .* has another value"),
}


@pytest.mark.parametrize(("how", "reason"), CHEATS.values(), ids=CHEATS)
def test_cheating_teachers_are_detected(how, reason):
    with pytest.raises((ConformanceError, ValueError), match=reason):
        check_method(lambda: Teachers(how=how), **SMALL)


@pytest.mark.parametrize("how", ["honest", "votes"])
def test_honest_teachers_pass(how):
    check_method(lambda: Teachers(how=how), **SMALL)
