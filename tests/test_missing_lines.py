"""Tests the multirun lines that make the missing jobs of a line and no others."""

from __future__ import annotations

import pytest

from dpgen_bench.tables.expand import expand, lines_that_make

GRID = "a=1,2 +b={c:[1,2]} seed=0,1,2 ~d"


@pytest.mark.parametrize(
    ("line", "finished", "lines"),
    [
        (GRID, [], [GRID]),
        (GRID, ["a=1 seed=0", "a=2 seed=0"], ["a=1,2 +b={c:[1,2]} seed=1,2 ~d"]),
        (GRID, ["a=1 seed=0"], ["a=1 +b={c:[1,2]} seed=1,2 ~d", "a=2 +b={c:[1,2]} seed=0,1,2 ~d"]),
        # Joined by a first, these are two lines; by b first, three.
        ("a=1,2,3 b=1,2", ["a=1 b=2", "a=2 b=1"], ["a=1,3 b=1", "a=2,3 b=2"]),
        ("a=[1,2],{x:3},'p,\"q',r\\,s b=1", ["a={x:3} b=1"], ["a=[1,2],'p,\"q',r\\,s b=1"]),
        ("a='p,q',[] b='x=1,2','y'", ["a=[] b='y'"], ["a='p,q' b='x=1,2','y'", "a=[] b='x=1,2'"]),
    ],
)
def test_the_missing_jobs_of_a_line_are_few_lines(line, finished, lines):
    missing = [tuple(job) for job in expand(line) if not any({*each.split()} <= {*job} for each in finished)]
    found = [" ".join(each) for each in lines_that_make(missing)]
    assert found == lines
    assert sorted(tuple(job) for each in found for job in expand(each)) == sorted(missing)
