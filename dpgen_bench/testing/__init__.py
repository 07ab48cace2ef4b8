"""The conformance suite that every method gets for free: `check_method`, and `dpgen check method=NAME`.

The heart is a replay. The method is fitted once, and every release is taped: who was drawn, the exact value, the noisy
value. Then it is fitted again on other data with the same randomness, and is given the noisy values of the first fit
back. A method that is private by construction must then make the same releases in the same order, write the same log
and counters, hand the same bits to `ctx.steps`, end with the same generator and draw the same samples: it knows the
data through its releases alone. Where the other data are neighbours, which differ in one record or client, the exact
value of each release must have moved by at most the declared sensitivity, and not at all when the changed unit was not
drawn.

What else is checked: rows of private functions depend on their own record alone, also where clipping hides it
(`independence`); a fit that is killed and resumed is the fit that was not (`resume`); a saved generator draws the same
samples in a fresh process without data or network (`fresh`); private attributes of harness objects are not used
(`doors`). A replay cannot see a wrong noise scale, a wrong sampling rate or a draw used twice; those have statistical
tests, which reject an honest method with probability below 1e-6 (`draws`).

"The same" means bit by bit, on a CPU with a fixed number of threads, for data of the same ids and clients. Times are
exempt: those that the harness keeps, and entries of a log or a state dict that are named so and differ in a second fit
on the same data. `LIMITS` says what no replay can see.
"""

from __future__ import annotations

from dpgen_bench.testing.bench import DataSet
from dpgen_bench.testing.command import LIMITS, check_configured_method
from dpgen_bench.testing.errors import ClosedDoor, ConformanceError
from dpgen_bench.testing.suite import check_method

__all__ = ["LIMITS", "ClosedDoor", "ConformanceError", "DataSet", "check_configured_method", "check_method"]
