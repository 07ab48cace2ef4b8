"""Private state: what a mechanism keeps of each shard of records between releases, hidden from the method."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from dpgen_bench.privacy.expect import expect_name
from dpgen_bench.privacy.held_states import HeldStates
from dpgen_bench.privacy.isolation import expect_plain, public_type
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.sampling import EveryShard, OneShard
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import Parts, StateFile
from dpgen_bench.privacy.uninterrupted import Uninterrupted
from dpgen_bench.training.precision import private_computation
from dpgen_bench.utils.files import make_private, write_atomic
from dpgen_bench.utils.randomness import kept

Start = Callable[[list[tuple[Tensor, Tensor]], list[torch.Generator]], Parts]


class GlobalRandomness(ValueError):
    """Raised if code that sees records drew from a global random generator, which public randomness also uses."""


class PrivateState:
    """State of each shard of a `OneShard` or `EveryShard` sampling, made from its records and changed by its releases.

    `PrivateData.private_state` makes it, and `PrivateData.mechanism(state=...)` uses it. A method reads it only inside
    the functions that it passes to either.

    Guarantees: the state of a shard is a function of that shard's records, of public values and of earlier releases
    (assumption A8 of docs/accounting.md), provided that `start`, and a function that is asked for several shards, treat
    the shards of a group separately. Groups have fixed members, so the result of `start` does not depend on which
    shards are needed. After a kill each shard has the state of the last checkpoint.

    Attributes:
        stack: number of shards in a group.
        groups: number of groups of shards that the approved releases need; `start(i)` makes the states of group i.
    """

    def __init__(
        self,
        name: str,
        sampling: OneShard | EveryShard,
        make: Start,
        services: Services,
        *,
        stack: int,
        keyed_stack: int | None,
        ids: np.ndarray,
        draw: Callable[[np.ndarray], tuple[Tensor, Tensor]],
        fingerprint: Callable[[], str],
        identity: dict[str, Any],
    ) -> None:
        """
        Args:
            name: a name that can name a file, unique within the run.
            sampling: the partition of the records into shards.
            make: makes the first states of the shards of a group; the method's `start`.
            services: what the mechanisms of the run share.
            stack: the number of shards in a group, which `services.stack` may raise.
            keyed_stack: the number in the key of first states, if it is not `stack`.
            ids: int64 [n], the ids of all records.
            draw: returns the images and labels at the given positions.
            fingerprint: returns a hash of all records, which is private.
            identity: everything else that first states depend on, as JSON values.
        """
        place = services.place
        expect_name(name, "private state")
        if isinstance(stack, bool) or not isinstance(stack, int) or stack < 1:
            raise ValueError(
                f"private state {name!r}: expected `stack`, the number of shards made together, as an integer >= 1, "
                f"got {stack!r}."
            )
        sampling = copy.copy(sampling)  # the caller's, or what `sampling` returns, could be changed afterwards
        self.name, self._sampling, self.groups = name, sampling, 0
        self._make, self.stack = make, min(max(stack, services.stack or 0), sampling.shards)
        self._draw, self._services = draw, services
        self._members = sampling.members(ids)
        of_shards = {"shards": sampling.shards, "partition": sampling.seed}
        if reserved := of_shards.keys() & identity.keys():
            raise ValueError(
                f"private state {name!r}: expected an identity without {sorted(reserved)}, which the harness adds; "
                "remove these keys."
            )
        # First states have a key and a place in the cache that depend on everything that they are computed from.
        keyed = min(stack, sampling.shards) if keyed_stack is None else keyed_stack
        whole = {"name": name, "stack": keyed, "own": {**of_shards, **identity}, **place.identity}
        try:
            text = json.dumps(whole, sort_keys=True)
        except TypeError as error:
            raise ValueError(
                f"private state {name!r}: expected an identity of JSON values (numbers, strings, lists, dictionaries), "
                f"which identifies the states, got other values ({error})."
            ) from None
        self._key = Key.seeded(f"private state:{text}")
        self._cache = None
        if place.cache is not None:
            # The last bits of a state depend on these, too. The name is a hash of records, and its place is private.
            rounding = "" if keyed == self.stack else f"{self.stack}:"
            where = f"{services.device.type}:{torch.get_num_threads()}:{rounding}{fingerprint()}:{text}"
            self._cache = place.cache / hashlib.sha256(where.encode()).hexdigest()[:16]
        self._text = text
        self._first = StateFile(self._cache, sampling.shards, slots=1)
        self._later = StateFile(place.folder and place.folder / name, sampling.shards, slots=2)
        self._held = HeldStates(place.held, services.device)
        self._visits: np.ndarray | None = None  # None: every release asks all shards
        self._bound = False
        self._needed: list[int] = []
        self._committed = 0
        self._unfinished: tuple[range, int, Callable[[], np.ndarray]] | None = None

    @property
    def sampling(self) -> OneShard | EveryShard:
        """The partition of the records into shards, as a copy."""
        return copy.copy(self._sampling)

    def bind(self, visits: list[int] | None, key: Key) -> None:
        """Set the shard that each release of the mechanism will draw (None: each asks all) and the mechanism's key."""
        if self._bound:
            raise ValueError(
                f"private state {self.name!r}: expected one mechanism, got a second one; make another private state "
                "for it."
            )
        self._bound, self._visits = True, None if visits is None else np.array(visits, np.int64)
        drawn = np.arange(self._sampling.shards) if self._visits is None else np.unique(self._visits)
        needed = sorted({int(shard) // self.stack for shard in drawn})
        self.groups = len(needed)
        # Each run begins with another group, so that runs with one cache divide the work among them.
        first = int(key.generator("first group").integers(max(self.groups, 1)))
        self._needed = needed[first:] + needed[:first]

    def start(self, number: int) -> None:
        """Make the first states of the shards of needed group `number` in 0..groups-1, unless they are stored already.

        Raises:
            ValueError: if no mechanism was approved for this state yet, because no record may be used before.
        """
        if not self._bound:
            raise ValueError(
                f"private state {self.name!r}: expected a mechanism before `start`, got none; request the mechanism "
                "with state=... first."
            )
        first = self._needed[number] * self.stack
        if self._services.asks(self._sampling, range(first, min(first + self.stack, self._sampling.shards))):
            self._start_group(self._needed[number])

    def _start_group(self, group: int) -> None:
        """Make the first states of a group's shards, unless this or another process has stored them."""
        self._services.before_records()
        shards = range(group * self.stack, min((group + 1) * self.stack, self._sampling.shards))
        with self._lock(f"group-{group}"):
            self._reopen_cache()
            if all(self._first.find(shard, 1) is not None for shard in shards):
                return
            with Uninterrupted(), private_computation():
                self._make_group(shards)
            self._first.flush()
            if self._cache is not None and not (self._cache / "identity.json").exists():
                write_atomic(self._cache / "identity.json", self._text)

    def _make_group(self, shards: range) -> None:
        """Call the method's function on the records of the shards, and store what it returns."""
        records = [self._draw(self._members[shard]) for shard in shards]
        try:
            with public_randomness_untouched("`start` of private state"):
                parts = self._make(records, [private_rng(self._key.derive(shard)) for shard in shards])
            expect_parts(parts, leading=len(shards))
            with self._lock("file"):
                self._reopen_cache()
                self._first.create({name: tuple(part.shape[1:]) for name, part in parts.items()})
            for shard, row in zip(shards, self._first.pack(parts)(), strict=True):
                self._first.write_row(shard, 0, 1, row)
        except BaseException as error:
            self._services.ledger.invalidate(f"making private state {self.name!r} raised {public_type(error)}", error)
            raise

    def _reopen_cache(self) -> None:
        """Open the cache's file if another process has made it in the meantime."""
        if self._first.layout is None:
            self._first = StateFile(self._cache, self._sampling.shards, slots=1)

    def _lock(self, what: str) -> AbstractContextManager[Any]:
        if self._cache is None:
            return nullcontext()
        locks = self._cache / "locks"
        make_private(self._cache)
        locks.mkdir(exist_ok=True)
        return FileLock(locks / what)

    def wrap(self, fn: Callable[..., Any], shard: int, index: int, key: Key) -> Callable[[Tensor, Tensor], Tensor]:
        """fn(images, labels) of release `index`, which reads the state of its shard and writes the next one."""

        def with_state(images: Tensor, labels: Tensor) -> Tensor:
            group = range(shard, shard + 1)
            state = {name: part[0] for name, part in self._before_group(group, index).items()}
            with public_randomness_untouched("a function with private state"):
                returned = fn(images, labels, state, private_rng(key))
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise ValueError(
                    "expected a function with private state to return (what the bound expects, the next state), got "
                    f"{type(returned).__name__}."
                )
            value, after = returned
            expect_parts(after)
            self._keep_group(group, index, {name: part[None] for name, part in after.items()})
            return value

        return with_state

    def _before_group(self, shards: range, index: int) -> Parts:
        """The states of these shards before release `index`, [g, ...] by name."""
        found = self._held.find(shards, self._version(shards.start, index))  # all shards of a group have one version
        if found is None:
            self._finish()
            stored = [self._before(shard, index) for shard in shards]
            found = stored[0][0].unpack(np.stack([row for _, row in stored]), self._services.device)
        self._services.observe_states(shards, found)
        return found

    def _keep_group(self, shards: range, index: int, after: Parts) -> None:
        """Store the states that release `index` leaves to these shards, [g, ...] by name.

        Unless they are held in memory, their copy to the host begins here. It is waited for before states are read or
        written again, when the device has other work.
        """
        expect_parts(after, leading=len(shards))
        self._later.expect_layout(after)
        self._services.observe_states(shards, after)
        if self._held.keep(shards, index + 1, after):
            return
        rows = self._later.pack(after)
        self._finish()
        self._unfinished = shards, index + 1, rows

    def _finish(self) -> None:
        """Write the states whose copy to the host has begun."""
        if self._unfinished is None:
            return
        (shards, version, rows), self._unfinished = self._unfinished, None
        self._write(shards, version, rows())

    def _write(self, shards: range, version: int, rows: np.ndarray) -> None:
        for shard, row in zip(shards, rows, strict=True):
            # Overwrite the version that is not the last checkpoint's, which is needed after a kill.
            versions = self._later.versions(shard)
            kept = int(np.argmax(np.where(versions <= self._committed, versions, -1)))
            self._later.write_row(shard, 1 - kept, version, row)

    def _version(self, shard: int, index: int) -> int:
        """The version that release `index` needs: 1 + the number of the last earlier one that drew this shard, or 0."""
        if self._visits is None:
            return index
        return int(np.flatnonzero(np.append(True, self._visits[:index] == shard))[-1])

    def _before(self, shard: int, index: int) -> tuple[StateFile, np.ndarray]:
        """The state of a shard before release `index`, after the last earlier release that drew it, or the first one.

        Returns:
            the file and the row.
        """
        version = self._version(shard, index)
        if version == 0:
            file, found = self._first, self._first.find(shard, 1)
            if found is None:
                self._start_group(shard // self.stack)
                file, found = self._first, self._first.find(shard, 1)
        else:
            file, found = self._later, self._later.find(shard, version)
        if found is None:
            raise RuntimeError(
                f"private state {self.name!r}: expected the state of shard {shard} after release {version - 1}, "
                "got none: the run's private/ folder does not fit its checkpoint. Restore the folder, or delete the "
                "run's folder and start again, which with privacy.noise=os spends its epsilon a second time."
            )
        return file, found[1]

    def flush(self) -> None:
        """Write everything to disk, before a checkpoint that needs it."""
        self._finish()
        for shards, version, parts in self._held.unwritten():
            self._write(shards, version, self._later.pack(parts)())
        self._later.flush()

    def commit(self, executed: int) -> None:
        """Register a checkpoint after `executed` releases, whose states are kept until the next checkpoint."""
        self._committed = executed


@contextmanager
def public_randomness_untouched(what: str) -> Iterator[None]:
    """Raise GlobalRandomness if the block draws from a global generator of PyTorch, NumPy or Python.

    All later draws of that generator would depend on records, so its state is restored first, also if the block raises
    another error.
    """
    with kept() as changed:
        yield
    if changed[0]:
        raise GlobalRandomness(f"{what} drew from a global random generator; draw from the argument `rng` instead.")


def expect_parts(parts: Any, leading: int | None = None) -> None:
    """Check what a function returned as private state.

    Args:
        parts: expected to be tensors by name, at least one.
        leading: the first dimension that each tensor must have; None accepts any.

    Raises:
        ValueError: for anything else.
    """
    for part in parts.values() if isinstance(parts, dict) else ():
        expect_plain(part, "private state")
    whole = isinstance(parts, dict) and len(parts) > 0 and all(isinstance(part, Tensor) for part in parts.values())
    if not whole or (leading is not None and any(part.shape[:1] != (leading,) for part in parts.values())):
        of = "" if leading is None else f", each with a first dimension of {leading}, one entry for each shard"
        raise ValueError(f"expected private state as float32 tensors by name{of}, got {type(parts).__name__}.")


def private_rng(key: Key) -> torch.Generator:
    """Private randomness of a shard or a release (minibatches, latents); never noise."""
    return torch.Generator().manual_seed(int.from_bytes(key.derive("private coins").secret[:7], "big"))
