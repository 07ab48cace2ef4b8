"""A mechanism: an approved number of noisy releases, and the only way in which private values leave.

A release has a fixed order: draw the records, call `fn` on them, clip, add noise, write the ledger.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.privacy.allowance import Allowance, AllowanceExhausted
from dpgen_bench.privacy.bounds import Batch, Bound, DrawBound, PerRecord, PerRow, PublicRows, Whole
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.isolation import public_type
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.noise import NoiseAhead, Undecided, add_noise
from dpgen_bench.privacy.padding import PaddedDraws, Padding
from dpgen_bench.privacy.sampling import EveryShard, OneShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.shards import PerShard, answers
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.privacy.uninterrupted import Uninterrupted
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.training.precision import private_computation
from dpgen_bench.utils.files import write_atomic


class Mechanism(Allowance):
    """`times` releases of values within `bound` on draws of `sample`, each with independent noise N(0, std² I).

    `PrivateData.mechanism` makes it after the budget was checked; its `Control` stays with the harness. Calling it with
    fn returns the noisy value: a float32 tensor of the bound's shape, or for PerRecordGradient a dict of gradients by
    parameter name, and for PerRecordProducts a dict of matrices by part.

    Guarantees: release number `times` + 1 raises; noise and draws are keyed by (run, mechanism, release index), so
    no two queries of a run share noise; an empty draw is released like any other.
    """

    def __init__(
        self,
        entry: Entry,
        bound: Bound,
        services: Services,
        *,
        draw: Callable[[np.ndarray, Key], Batch],
        ids: np.ndarray,
        state: PrivateState | None = None,
        padded: tuple[Padding, Callable[[Tensor, Key], Batch]] | None = None,
    ) -> None:
        """
        Args:
            entry: the approved releases.
            bound: their bound.
            services: what the mechanisms of the run share.
            draw: the records at some positions.
            ids: the ids of all records.
            state: private state of shards.
            padded: for padded draws, their numbers of rows, and the records at padded positions.
        """
        super().__init__(entry, bound)
        self._services = services
        self._draw = draw
        self._ids = ids
        self._state = state
        self._padded_draws, self._draw_padded = None, None
        if padded is not None:
            padding, self._draw_padded = padded
            self._padded_draws = PaddedDraws(padding, self._positions, entry.event.times, services.device)
        self._noise_ahead = None
        if services.adds_on_device(entry.event.std):
            self._noise_ahead = NoiseAhead(entry.event.std, services.device)
        if state is not None:
            visits, sampling = None, entry.event.sampling
            if isinstance(sampling, OneShard):
                keys = (services.key.derive(entry.name, index) for index in range(entry.event.times))
                visits = [sampling.shard(own, index) for index, own in enumerate(keys)]
            state.bind(visits, services.key.derive(entry.name))
        services.register(self, _Control(self))

    def __call__(self, fn: Callable[..., Any], public: PublicRows | None = None) -> Any:
        """Make one release.

        Args:
            fn: a function of the drawn records that returns what the bound expects, see `dpgen_bench.privacy.bounds`.
                Only this function sees records. If it has an argument `rng`, it receives private randomness, a
                `RecordRng` whose row i belongs to record i. Draw public randomness before the call: if fn drew it from
                a global generator, it would depend on the number of records. For a mechanism with private state,
                fn(images, labels, state, rng) returns what the bound expects and the shard's next state; the arguments
                are positional, a state is float32 tensors by name, and rng is a CPU generator (`torch.Generator`) for
                the private randomness of this release. For a mechanism that samples by `EveryShard`, fn is called once
                for each group of g shards: fn(shards, rngs) returns what the bound expects of these shards, [g, ...],
                where `shards` is a list of (images, labels), of which some may be empty, and `rngs` is a list of
                generators. With private state, it is fn(shards, states, rngs) and also returns the next states, both
                float32 tensors [g, ...] by name, and a group has the `stack` shards of the state; without, one shard.
            public: rows that are added to the sum of a PerRecordGradient; their number was declared with the bound.

        Returns:
            the noisy value, a float32 tensor of the bound's shape; for PerRecordGradient a dict of gradients by
            parameter name, and for PerRecordProducts a dict of matrices by part.

        Raises:
            AllowanceExhausted: after `times` releases.
            RuntimeError: outside `ctx.steps`, for a mechanism with private state.
            ValueError: if `fn` is not a function, or not one of the arguments above for a mechanism with private
                state or shards; for public rows that were not declared; and if the run has a parent, from which the
                method has not started (`Context.warm_start`).
            Invalidated: if any private function of the run has raised before, even if the method caught the error.

        An error of `fn` is raised here after the ledger was marked on disk. A signal that stops the process waits until
        the release is made.
        """
        self._services.ledger.refuse_if_invalidated()
        self._services.loop.expect_started()
        index = self._executed
        if index >= self.times:
            raise AllowanceExhausted(
                f"mechanism {self.name!r} was approved for {self.times} releases and has made them all; release "
                f"{index + 1} is refused. Ask for a larger `times` when the mechanism is created."
            )
        if self._state is not None and not self._services.loop.inside:
            raise RuntimeError(
                f"mechanism {self.name!r} keeps private state, so its releases must be made inside ctx.steps(...): "
                "only there can a run that was killed restore the state of each release."
            )
        with Uninterrupted(), private_computation():
            # A release with private state is computed again, because its state is needed; the value is the same.
            journaled = None if self._state else self._services.journal.get(self.name, index, self._services.device)
            if self._services.processes is not None:
                self._services.processes.expect_same_release(self._description(index, journaled is not None))
            noisy = self._release(fn, public, index) if journaled is None else journaled
            self._executed = index + 1
            self._services.ledger.record_executed(self.name, self._executed)  # a journaled release counts, too
        return noisy["value"] if noisy.keys() == {"value"} else noisy

    def _description(self, index: int, journaled: bool) -> str:
        """What processes that make a release together must agree on; the key decides who is drawn."""
        key = hashlib.sha256(self._services.key.derive(self.name, index).secret).hexdigest()[:16]
        made = "made before" if journaled else "new"
        bound = f"{type(self._bound).__name__}, C = {self._bound.C}"
        return f"release {index} of {self.name!r} ({made}; {self.event}; {bound}; {len(self._ids)} records; key {key})"

    def _positions(self, index: int) -> np.ndarray:
        """The positions of the records of draw `index`."""
        return self._entry.event.sampling.draw(self._ids, self._services.key.derive(self.name, index), index)

    def _release(self, fn: Callable[..., Any], public: PublicRows | None, index: int) -> dict[str, Tensor]:
        if not callable(fn):
            raise ValueError(f"mechanism {self.name!r}: expected a function of (images, labels), got {fn!r}; give one.")
        # These checks use no records, so their errors mark nothing.
        self._bound.check_public(public)
        sampling = self._entry.event.sampling
        of_shards = isinstance(sampling, EveryShard)
        if of_shards or self._state is not None:
            _expect_arguments(self.name, fn, of_shards, self._state is not None)
        # Draw the records, and wrap fn so that it receives private state and leaves its rows for diagnostics.
        key = self._services.key.derive(self.name, index)
        if self._padded_draws is None:
            drawn, padded = self._positions(index), None
        else:
            drawn, padded = self._padded_draws.take(index)
        if isinstance(sampling, OneShard) and self._state is not None:
            fn = self._state.wrap(fn, sampling.shard(key, index), index, key)
        unbounded: list[Any] = []
        if self._services.diagnostics is not None and not of_shards:
            fn = _recording(fn, unbounded)
        if self._services.observer is not None and self._state is None and not of_shards:
            self._services.observer.before_release(self, index, fn, self._draw(drawn, key), public)
        # On disk before the noise is used: after a kill, another source must not use it for another query.
        self._services.ledger.record_executed(self.name, index + 1)
        # Call fn, clip and add noise.
        try:
            if of_shards:
                exact = self._of_shards(fn, index, key, unbounded)
            else:
                assert isinstance(self._bound, DrawBound)
                exact = self._bound.value(fn, self._batch(drawn, padded, key), public)
            exact, noisy = self._noisy(exact, key, index)
        except BaseException as error:
            # Whether a function raises may depend on records and has no noise, so no release may follow.
            self._services.ledger.invalidate(f"release {index} of {self.name!r} raised {public_type(error)}", error)
            raise
        if self._services.observer is not None:
            noisy = self._services.observer.release(self, index, self._ids[drawn], exact, noisy)
        if self._services.diagnostics is not None:
            self._diagnose(index, len(drawn), exact, unbounded)
        if self._state is None:
            self._services.journal.put(self.name, index, self.times, noisy)
        if self._padded_draws is not None:
            self._padded_draws.make(index + 1)
        return noisy

    def _noisy(self, exact: dict[str, Tensor], key: Key, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The exact value, added up over processes if they divide the draw, and the value with noise."""
        processes = self._services.processes
        if processes is not None and self._padded_draws is not None:
            exact = processes.add(exact)
        if processes is not None and processes.number > 0:
            return exact, processes.from_first(processes.nothing(exact))
        ahead, services = self._noise_ahead, self._services
        # Only a checkpoint finds out that a value is undecided, so those that are stored earlier are made on the host.
        if ahead is not None and services.loop.inside and not services.journal.stores(self.times, exact):
            noisy = ahead.add(index, key, exact)
            if index + 1 < self.times:
                sizes = {part: value.numel() for part, value in exact.items()}
                ahead.make(index + 1, services.key.derive(self.name, index + 1), sizes)
        else:
            noisy = {part: self._add_noise(value, key.derive(part)) for part, value in exact.items()}
        return exact, noisy if processes is None else processes.from_first(noisy)

    def _batch(self, drawn: np.ndarray, padded: Tensor | None, key: Key) -> Batch:
        """The records of a draw, padded if its padded positions are given."""
        if padded is None:
            return self._draw(drawn, key)
        assert self._draw_padded is not None
        return self._draw_padded(padded, key)

    def _of_shards(self, fn: Callable[..., Any], index: int, key: Key, unbounded: list[Any]) -> dict[str, Tensor]:
        """The exact value of a release to which every shard gives an answer."""
        services, sampling, bound = self._services, self._entry.event.sampling, self._bound
        assert isinstance(sampling, EveryShard)
        assert isinstance(bound, PerShard | Votes)
        rows: dict[int, Tensor] = {}

        def groups() -> Iterator[tuple[int, Tensor]]:
            drawn = lambda at: self._draw(at, key)  # noqa: E731
            asked = answers(fn, sampling, self._ids, drawn, self._state, index, key, services.asks)
            for shards, answer in asked:
                if services.observer is not None:
                    rows.update(zip(shards, answer.detach(), strict=True))
                if services.diagnostics is not None:
                    unbounded.append(answer)
                yield len(shards), answer

        exact = bound.total(groups(), services.device)
        if services.observer is not None:
            services.observer.answers(rows)
        return exact

    def _add_noise(self, exact: Tensor, key: Key) -> Tensor:
        return add_noise(exact, self.std, key)

    def _diagnose(self, index: int, drawn: int, exact: dict[str, Tensor], unbounded: list[Any]) -> None:
        """Write private values of a release, for debugging on public data; only under diagnostics=unsafe."""
        assert self._services.diagnostics is not None
        norm = float(torch.stack([value.double().norm() for value in exact.values()]).norm())
        self._services.diagnostics.parent.mkdir(parents=True, exist_ok=True)
        with open(self._services.diagnostics, "a") as out:
            row = {"mechanism": self.name, "release": index, "drawn": drawn, "exact_norm": norm}
            # Of rows as fn returned them, before they were clipped.
            norms: list[Tensor] | None = None
            if isinstance(self.bound, PerRecordProducts):
                norms = [self.bound.row_norms(factors) for factors in unbounded]
            elif isinstance(self.bound, PerRow | Whole | PerRecord | PerRecordMoments | PerShard):
                norms = [rows.detach().reshape(*rows.shape[:1], -1).norm(dim=1) for rows in unbounded if len(rows)]
            if norms is not None:
                every = [round(float(norm), 5) for part in norms for norm in part]
                row["norms_before_clipping"] = every if self._padded_draws is None else every[:drawn]
            out.write(json.dumps(row) + "\n")


class _Control:
    """The `Control` of a Mechanism."""

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism

    def resume_at(self, executed: int) -> None:
        self._mechanism._executed = executed
        self.after_checkpoint()

    def before_checkpoint(self) -> None:
        mechanism = self._mechanism
        if mechanism._noise_ahead is not None:
            try:
                mechanism._noise_ahead.expect_decided()
            except Undecided:
                if (path := mechanism._services.host_noise) is not None:
                    write_atomic(path, "", private=True)
                raise
        if self._mechanism._state is not None:
            self._mechanism._state.flush()

    def after_checkpoint(self) -> None:
        if self._mechanism._state is not None:
            self._mechanism._state.commit(self._mechanism._executed)


def _expect_arguments(name: str, fn: Callable[..., Any], of_shards: bool, state: bool) -> None:
    """Raise ValueError unless fn takes the arguments of a mechanism with shards, private state or both."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a function implemented in C has no signature
        return
    arguments = ["images", "labels", "state", "rng"]
    if of_shards:
        arguments = ["shards", "states", "rngs"] if state else ["shards", "rngs"]
    what = " and ".join(["asks every shard"] * of_shards + ["keeps private state"] * state)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"mechanism {name!r} {what}: expected a function of ({', '.join(arguments)}), got one of {signature} "
            f"({error}); take these arguments and draw from {arguments[-1]}{' (one for each shard)' * of_shards}."
        ) from error


def _recording(fn: Callable[..., Any], outputs: list[Any]) -> Callable[..., Any]:
    """A function like fn that also appends its outputs to `outputs`."""

    @functools.wraps(fn, updated=())  # keeps the signature, which says whether fn has an argument `rng`
    def recording(*args: Any, **kwargs: Any) -> Any:
        outputs.append(fn(*args, **kwargs))
        return outputs[-1]

    return recording
