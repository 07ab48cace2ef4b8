"""A mechanism: an approved number of noisy releases, and the one place where private values leave.

A release is made in a fixed order: draw the records, let `fn` see them, clip, add noise, write the ledger.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpgen_bench.privacy.bounds import Batch, Bound, PerRecord, PerRow, PublicRows, Whole
from dpgen_bench.privacy.events import Event
from dpgen_bench.privacy.expect import expect_name
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.noise import add_noise
from dpgen_bench.privacy.record_rng import names_rng
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.privacy.uninterrupted import Uninterrupted
from dpgen_bench.privacy.unseen import public_type
from dpgen_bench.utils.files import atomic


class AllowanceExhausted(RuntimeError):
    """A release beyond the approved number was asked for."""


class Allowance:
    """What was approved, and how much of it was used: the public face of every mechanism."""

    def __init__(self, entry: Entry, bound: Bound) -> None:
        self._entry, self._bound = entry, bound
        self._executed = 0

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def times(self) -> int:
        """Releases approved."""
        return self._entry.event.times

    @property
    def std(self) -> float:
        """Standard deviation of the noise on the released value, in its units."""
        return self._entry.event.std

    @property
    def bound(self) -> Bound:
        return self._bound

    @property
    def executed(self) -> int:
        """Releases made."""
        return self._executed

    @property
    def event(self) -> Event:
        """What was approved, as accountants see it."""
        return self._entry.event


class Observer(Protocol):
    """Sees what a release is made of. Used by the conformance suite only; a real run has none."""

    def release(
        self,
        mechanism: Allowance,
        index: int,
        drawn: np.ndarray,
        exact: dict[str, Tensor],
        noisy: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        """Called once per release; what it returns is what the method gets."""
        ...

    def before_release(
        self, mechanism: Allowance, index: int, fn: Callable[..., Tensor], batch: Batch, public: PublicRows | None
    ) -> None:
        """Called before fn sees the records of a release without private state; may call fn itself."""
        return

    def answers(self, rows: dict[int, Tensor]) -> None:
        """Called before a release that sums the clipped rows of clients, with these rows by client."""
        return

    def before_records(self) -> None:
        """Called before private state is made of records."""
        ...


class Control(Protocol):
    """What the harness alone may do with a mechanism. A method holds the mechanism, which has none of this."""

    def resume_at(self, executed: int) -> None:
        """Set the number of the next release, when a run is resumed from a checkpoint."""
        ...

    def before_checkpoint(self) -> None:
        """Push private state to disk, before a checkpoint is written."""
        ...

    def after_checkpoint(self) -> None:
        """A checkpoint stands at the releases made so far."""
        ...


class Journal:
    """Noisy values already released, so that a resumed run gets the same value back instead of a second one.

    Kept for mechanisms whose releases fit in `limit` bytes together. Larger ones (a gradient per step) are
    recomputed on resume: same state, same randomness, same noise, hence the same value, bit by bit on a CPU.

    Guarantees: the parts of a value are read back in the order in which they were released, since a method may walk
    through gradients and parameters together.
    """

    def __init__(self, folder: Path | None, limit: int = 64 * 2**20) -> None:
        self.folder = folder
        self.limit = limit

    def _path(self, name: str, index: int) -> Path | None:
        expect_name(name, "a mechanism")
        return None if self.folder is None else self.folder / f"{name}-{index}.safetensors"

    def get(self, name: str, index: int, device: torch.device) -> dict[str, Tensor] | None:
        path = self._path(name, index)
        if path is None or not path.exists():
            return None
        with safe_open(path, "pt") as kept:  # safetensors keeps an order of its own
            order = json.loads((kept.metadata() or {}).get("order", "null")) or list(kept.keys())
            return {part: kept.get_tensor(part).to(device) for part in order}

    def put(self, name: str, index: int, times: int, noisy: dict[str, Tensor]) -> None:
        path = self._path(name, index)
        size = sum(value.numel() * value.element_size() for value in noisy.values())
        if path is None or size * times > self.limit:
            return
        with atomic(path) as temporary:
            parts = {key: value.contiguous().cpu() for key, value in noisy.items()}
            save_file(parts, temporary, {"order": json.dumps(list(parts))})


class Mechanism(Allowance):
    """`times` releases of `bound`ed values on draws of `sample`, each with fresh noise N(0, std² I).

    Made by `PrivateData.mechanism` after the budget was checked; its `Control` stays with the harness. Calling it with
    fn returns the noisy value: a float32 tensor of the bound's shape, or for PerRecordGradient a dict of gradients by
    parameter name.

    Guarantees: release number `times` + 1 raises; noise and coins are keyed by (run, mechanism, release index), so
    no two queries of a run share noise; an empty draw is released like any other.
    """

    def __init__(
        self,
        entry: Entry,
        bound: Bound,
        *,
        draw: Callable[[np.ndarray, Key], Batch],
        ids: np.ndarray,
        device: torch.device,
        key: Key,
        ledger: Ledger,
        journal: Journal,
        observer: Observer | None,
        diagnostics: Path | None,
        controls: dict[str, Control],
        state: PrivateState | None = None,
        in_loop: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(entry, bound)
        self._draw = draw
        self._device = device
        self._ids = ids
        self._key = key
        self._ledger = ledger
        self._journal = journal
        self._observer = observer
        self._diagnostics = diagnostics
        self._state = state
        self._in_loop = in_loop
        if state is not None:
            keys = (key.derive(entry.name, index) for index in range(entry.event.times))
            visits = [state.sampling.shard(own, index) for index, own in enumerate(keys)]
            state.bind(visits, key.derive(entry.name))
        controls[entry.name] = _Control(self)

    def __call__(self, fn: Callable[..., Tensor], public: PublicRows | None = None) -> Any:
        """One release.

        Args:
            fn: what the bound expects, see `dpgen_bench.privacy.bounds`. It alone sees records. If it names an
                argument `rng`, it is given private randomness, a `RecordRng`, of which row i belongs to record i. Draw
                public randomness before the call: drawn inside fn from a global generator, it would depend on how many
                records there are. Of a mechanism with private state: fn(images, labels, state, coins) -> (what the
                bound expects, the shard's next state), state float32 tensors by name, coins a CPU generator for private
                randomness of this release, and no `rng`.
            public: rows that join a PerRecordGradient's sum; their number was fixed with the bound.

        Raises:
            AllowanceExhausted: after `times` releases.
            RuntimeError: outside `ctx.steps`, for a mechanism with private state.
            ValueError: for what is no function, public rows that were not declared, or `rng` where there is private
                state.
            Spoiled: if any private function of the run has raised before, even if the method caught that.

        What `fn` raises is raised here, too, after the ledger was marked on disk. A signal that stops the process waits
        until the release is made.
        """
        self._ledger.refuse_if_spoiled()
        index = self._executed
        if index >= self.times:
            raise AllowanceExhausted(
                f"mechanism {self.name!r} was approved for {self.times} releases and has made them all; release "
                f"{index + 1} is refused. Ask for a larger `times` when the mechanism is created."
            )
        if self._state is not None and not self._in_loop():
            raise RuntimeError(
                f"mechanism {self.name!r} keeps private state, so its releases must be made inside ctx.steps(...): "
                "only there can a killed run find the state that each of them had."
            )
        with Uninterrupted():
            # A release that leaves private state is made again instead: its state must be, and it is the same value.
            journaled = None if self._state else self._journal.get(self.name, index, self._device)
            noisy = self._release(fn, public, index) if journaled is None else journaled
            self._executed = index + 1
            self._ledger.record(self.name, self._executed)
        return noisy["value"] if noisy.keys() == {"value"} else noisy

    def _release(self, fn: Callable[..., Tensor], public: PublicRows | None, index: int) -> dict[str, Tensor]:
        if not callable(fn):
            raise ValueError(f"mechanism {self.name!r}: expected a function of (images, labels), got {fn!r}; give one.")
        self._bound.check_public(public)
        if self._state is not None and names_rng(fn):
            raise ValueError(
                f"mechanism {self.name!r} keeps private state, so its functions are given (images, labels, state, "
                "coins) and no `rng`: draw from coins, and give the argument another name."
            )
        key = self._key.derive(self.name, index)
        drawn = self.event.sampling.draw(self._ids, key, index)
        if self._state is not None:
            fn = self._state.lend(fn, self._state.sampling.shard(key, index), index, key)
        unbounded: list[Tensor] = []
        if self._diagnostics is not None:
            fn = _remembering(fn, unbounded)
        if self._observer is not None and self._state is None:
            self._observer.before_release(self, index, fn, self._draw(drawn, key), public)
        try:
            exact = self._bound.value(fn, self._draw(drawn, key), public)
            noisy = {part: self._add_noise(value, key.derive(part)) for part, value in exact.items()}
        except BaseException as error:
            # Whether records make a function raise is an answer without noise: nothing may follow it.
            self._ledger.spoil(f"release {index} of {self.name!r} raised {public_type(error)}", error)
            raise
        if self._observer is not None:
            noisy = self._observer.release(self, index, self._ids[drawn], exact, noisy)
        if self._diagnostics is not None:
            self._diagnose(index, len(drawn), exact, unbounded)
        if self._state is None:
            self._journal.put(self.name, index, self.times, noisy)
        return noisy

    def _add_noise(self, exact: Tensor, key: Key) -> Tensor:
        return add_noise(exact, self.std, key)

    def _diagnose(self, index: int, drawn: int, exact: dict[str, Tensor], unbounded: list[Tensor]) -> None:
        """Private facts about a release, for debugging on public data; written only under diagnostics=unsafe."""
        assert self._diagnostics is not None
        norm = float(torch.stack([value.double().norm() for value in exact.values()]).norm())
        self._diagnostics.parent.mkdir(parents=True, exist_ok=True)
        with open(self._diagnostics, "a") as out:
            row = {"mechanism": self.name, "release": index, "drawn": drawn, "exact_norm": norm}
            if isinstance(self.bound, PerRow | Whole | PerRecord):  # rows as fn gave them, before they were clipped
                norms = [rows.detach().reshape(*rows.shape[:1], -1).norm(dim=1) for rows in unbounded if len(rows)]
                row["norms_before_clipping"] = [round(float(norm), 5) for part in norms for norm in part]
            out.write(json.dumps(row) + "\n")


class _Control:
    """The `Control` of a Mechanism."""

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism

    def resume_at(self, executed: int) -> None:
        self._mechanism._executed = executed
        self.after_checkpoint()

    def before_checkpoint(self) -> None:
        if self._mechanism._state is not None:
            self._mechanism._state.flush()

    def after_checkpoint(self) -> None:
        if self._mechanism._state is not None:
            self._mechanism._state.commit(self._mechanism._executed)


def _remembering(fn: Callable[..., Tensor], given: list[Tensor]) -> Callable[..., Tensor]:
    """fn, which also appends what it gives to `given`."""

    @functools.wraps(fn, updated=())  # whether fn names `rng` is read from its signature
    def remembering(*args: Any, **kwargs: Any) -> Tensor:
        given.append(fn(*args, **kwargs))
        return given[-1]

    return remembering
