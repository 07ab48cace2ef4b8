"""Statistical tests of the scale of noise, and of draws of records or clients, which a replay cannot check."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from scipy import stats

from dpgen_bench.privacy.sampling import FixedSize, OneClient, OneShard, Poisson
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.testing.bench import Fit
from dpgen_bench.testing.errors import expect
from dpgen_bench.testing.tape import flat

FALSE_ALARM = 1e-6  # the probability with which each test rejects an honest method


def check_noise(fit: Fit) -> None:
    """Test that the noise of each mechanism has the ledger's standard deviation and is independent between releases.

    The scale is tested by a two-sided chi-square test of (noisy - exact) / std, and each pair of releases by its
    correlation.

    Raises:
        ConformanceError: if a test rejects.
    """
    for name, entry in fit.ledger.entries.items():
        noises = [flat(r.noisy) - flat(r.exact) for r in fit.tape.releases if r.mechanism == name]
        if not noises or entry.event.std == 0:
            continue
        scaled = torch.stack(noises) / entry.event.std
        total, count = float(scaled.square().sum()), scaled.numel()
        p = 2 * min(stats.chi2.cdf(total, count), stats.chi2.sf(total, count))
        expect(
            p >= FALSE_ALARM,
            f"{name!r}: the noise has {math.sqrt(total / count):.4f} of the standard deviation in the ledger "
            f"({count} values, p = {p:.1e}).",
        )
        if len(noises) > 1:
            directions = scaled / scaled.norm(dim=1, keepdim=True)
            largest = float((directions @ directions.T).fill_diagonal_(0.0).abs().max())
            pairs = len(noises) * (len(noises) - 1) / 2
            limit = stats.norm.isf(FALSE_ALARM / (2 * pairs)) / math.sqrt(scaled.shape[1])
            expect(
                largest < max(limit, 1e-6) or limit >= 1,
                f"{name!r}: the noise of two releases is correlated ({largest:.3f}, at most {limit:.3f} by chance); "
                "the same noise must never be added to two queries.",
            )


def check_draws(fit: Fit) -> None:
    """Test that records or clients are drawn as the ledger states, independently for each release.

    For Poisson sampling, binomial tests compare how often a unit is drawn with the rate, and how often it is drawn in
    two consecutive releases with the square of the rate.

    Raises:
        ConformanceError: if a test rejects, or if a draw cannot come from the ledger's sampling.
    """
    records = fit.units
    for name, entry in fit.ledger.entries.items():
        sampling = entry.event.sampling
        draws = [r.drawn for r in fit.tape.releases if r.mechanism == name]
        if isinstance(sampling, OneShard):
            _check_shards(name, sampling, draws, records)
            continue
        if isinstance(sampling, OneClient):
            _check_one_client(name, sampling, draws)
            continue
        if isinstance(sampling, FixedSize):
            _check_fixed_size(name, sampling, draws)
            continue
        if not isinstance(sampling, Poisson):
            expect(all(len(d) == records for d in draws), f"{name!r}: full sampling, but a draw missed records.")
            continue
        total = sum(len(d) for d in draws)
        p = stats.binomtest(total, records * len(draws), sampling.rate).pvalue if draws else 1.0
        expect(
            p >= FALSE_ALARM,
            f"{name!r}: {total} records in {len(draws)} draws of {records} do not fit the rate {sampling.rate:.4g} in "
            f"the ledger (p = {p:.1e}).",
        )
        if len(draws) < 2 or sampling.rate == 1.0:
            continue
        both = sum(len(np.intersect1d(a, b)) for a, b in itertools.pairwise(draws))
        p = stats.binomtest(both, records * (len(draws) - 1), sampling.rate**2).pvalue
        expect(
            p >= FALSE_ALARM,
            f"{name!r}: {both} records were drawn twice in a row; fresh draws at rate {sampling.rate:.4g} would give "
            f"about {records * (len(draws) - 1) * sampling.rate**2:.0f} (p = {p:.1e}). A draw must not be used again.",
        )


def check_votes_of_shards(fit: Fit) -> None:
    """Check that no shard names a bin twice, or one that is neither a bin nor -1; neither would be counted.

    Raises:
        ConformanceError: if one does.
    """
    for release in fit.tape.releases:
        bound = fit.data.mechanisms[release.mechanism].bound
        if not isinstance(bound, Votes):
            continue
        for shard, row in release.rows.items():
            votes = row.sort().values
            twice = bool(((votes[1:] == votes[:-1]) & (votes[1:] >= 0)).any())
            expect(
                not twice and int(votes.min()) >= -1 and int(votes.max()) < bound.bins,
                f"release {release.index} of {release.mechanism!r}: shard {shard} votes twice for one bin, or for a "
                f"number outside 0..{bound.bins - 1}. Such votes are not counted: return different numbers of bins, "
                "and -1 for each vote that is not cast.",
            )


def _check_shards(name: str, sampling: OneShard, draws: list[np.ndarray], records: int) -> None:
    """Test that draws are whole shards of one partition into parts of equal size, drawn by the ledger's schedule."""
    shards = {tuple(draw) for draw in draws}
    members = [record for shard in shards for record in shard]
    expect(
        len(members) == len(set(members)),
        f"{name!r}: a record was drawn with two different shards; shards must not overlap.",
    )
    sizes = {records // sampling.shards, -(-records // sampling.shards)}
    expect(
        {len(shard) for shard in shards} <= sizes,
        f"{name!r}: draws of {sorted({len(shard) for shard in shards})} records do not fit {records} records in "
        f"{sampling.shards} shards, as the ledger states.",
    )
    visits = [sum(tuple(draw) == shard for draw in draws) for shard in shards]
    _check_schedule(name, "shard", sampling.schedule, sampling.shards, max(visits, default=0), len(draws))


def _check_schedule(name: str, what: str, schedule: str, parts: int, visits: int, draws: int) -> None:
    """Test that `visits` draws of one shard or client, the largest number of any, fit the ledger's schedule."""
    if schedule == "public_balanced":
        most = -(-draws // parts)
        expect(
            visits <= most,
            f"{name!r}: one {what} was drawn {visits} times in {draws} releases; a balanced schedule of {parts} "
            f"{what}s draws none more than {most} times.",
        )
        return
    p = parts * stats.binom.sf(visits - 1, draws, 1.0 / parts)
    expect(
        p >= FALSE_ALARM,
        f"{name!r}: one {what} was drawn {visits} times in {draws} releases, which does not fit {parts} {what}s drawn "
        f"uniformly, as the ledger states (p = {p:.1e}).",
    )


def _check_one_client(name: str, sampling: OneClient, draws: list[np.ndarray]) -> None:
    """Test that a draw is one client, drawn no more often than its cap and the ledger's schedule allow."""
    expect(
        all(len(draw) == 1 for draw in draws),
        f"{name!r}: expected one client in each draw, got {sorted({len(draw) for draw in draws})}.",
    )
    visits = int(np.bincount(np.concatenate(draws)).max()) if draws else 0
    most = sampling.max_answers
    expect(
        most is None or visits <= most,
        f"{name!r}: one client gave {visits} answers, but the ledger allows {most}.",
    )
    _check_schedule(name, "client", sampling.schedule, sampling.clients, visits, len(draws))


def _check_fixed_size(name: str, sampling: FixedSize, draws: list[np.ndarray]) -> None:
    """Test that draws have the ledger's size, contain no client twice, and are independent of each other."""
    for draw in draws:
        expect(
            len(set(draw.tolist())) == len(draw) == sampling.size,
            f"{name!r}: expected {sampling.size} different clients in each draw, got {sorted(draw.tolist())}.",
        )
    again = sum(len(np.intersect1d(a, b)) for a, b in itertools.pairwise(draws))
    common = stats.hypergeom.pmf(np.arange(sampling.size + 1), sampling.of, sampling.size, sampling.size)
    # The size of the intersection of two draws is hypergeometric, and independent for each consecutive pair.
    law = np.ones(1)  # the distribution of `again`
    for _ in draws[1:]:
        law = np.convolve(law, common)
    p = float(law[again:].sum())
    expect(
        p >= FALSE_ALARM,
        f"{name!r}: {again} clients were drawn twice in a row in {len(draws)} draws, which does not fit independent "
        f"draws of {sampling.size} out of {sampling.of} (p = {p:.1e}). A draw must not be used again.",
    )
