"""The conformance suite that every method gets for free: `check_method`; `dpgen check method=NAME` runs it.

The core is a replay. The method is fitted once, and every release is taped: the records that were drawn, the exact
value and the noisy value. The method is then fitted again on other data with the same randomness, and the noisy values
of the first fit are returned to it. A method that depends on the data through its releases alone makes the same
releases in the same order, writes the same log and counters, passes the same bits to `ctx.steps`, returns the same
generator and draws the same samples. Where the other data are neighbours, which differ in one record or client, the
exact value of each release must differ by at most the declared sensitivity, and not at all if the changed unit was not
drawn.

The suite also checks that rows of private functions depend on their own record alone, also where clipping hides it
(`independence`), that a fit which is killed and resumed equals one that is not (`resume`), that a saved generator draws
the same samples in a new process without data or network (`fresh`), and that private attributes of harness objects are
not used (`private_access`). A replay cannot detect a wrong noise scale, a wrong sampling rate or a draw that is used
twice. Statistical tests can, each of which rejects an honest method with probability below 1e-6 (`draws`).

"The same" means bit by bit, on a CPU with a fixed number of threads, for data of the same ids and clients. Times are
exempt: those that the harness measures, and entries of a log or a state dict whose name says that they are times and
which differ in a second fit on the same data. `dpgen_bench.runs.check.LIMITS` lists what the suite cannot detect.
"""

from __future__ import annotations

from dpgen_bench.testing.bench import DataSet
from dpgen_bench.testing.errors import ConformanceError, PrivateAccess
from dpgen_bench.testing.suite import check_method

__all__ = ["ConformanceError", "DataSet", "PrivateAccess", "check_method"]
