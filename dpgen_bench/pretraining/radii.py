"""A radius that holds a share q of the records' vectors, from a noisy histogram of their lengths.

A vector of p numbers in [-1, 1] has a root mean square |v| / sqrt(p) of at most 1. Each record votes for one of `BINS`
equal bins of it. The radius is the upper end of the first bin at which the noisy votes, added up, reach q n.
"""

from __future__ import annotations

from torch import Tensor

from dpgen_bench.utils.exact import length

BINS = 40


def bins_of(vectors: Tensor, p: int) -> Tensor:
    """The bin of each of the vectors [b, ...], int64 [b, 1]; vectors that are longer than sqrt(p) are in the last."""
    return (length(vectors.flatten(1), limit=p**0.5)[:, None] / p**0.5 * BINS).clamp(max=BINS - 1).long()


def quantile_of(histogram: Tensor, q: float, n: int, p: int) -> float:
    """The radius, in (0, sqrt(p)].

    Args:
        histogram: noisy numbers of vectors [BINS], which can be negative.
        q: the share of the vectors within the radius, in (0, 1).
        n: the number of records, which is public.
        p: as above.
    """
    reached = (histogram.cumsum(dim=0) >= q * n).nonzero()
    return (int(reached[0]) + 1 if len(reached) else BINS) / BINS * p**0.5
