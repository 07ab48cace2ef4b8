"""`PrivateData`: the only door to training records. It hands out mechanisms, never tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.data import ClientData
from dpgen_bench.federation.settings import Settings
from dpgen_bench.privacy.allowance import Allowance
from dpgen_bench.privacy.bounds import Batch, Bound, PerRecord, PerRecordGradient, PerRow, Whole, unit_range
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.planning import Request, plan_entry
from dpgen_bench.privacy.sampling import SAMPLINGS, OneShard, Sampling
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import PrivateState, Start
from dpgen_bench.privacy.warn import warn_of_settings


class PrivateData:
    """Training records behind approved mechanisms.

    Public attributes: `n` (number of records), `num_classes`, `image_shape` (c, h, w), `budget`,
    `device`. There is no way to read a record but inside the function given to a mechanism.

    Args:
        images: [n, c, h, w], uint8; float in [0, 1] is accepted for the conformance suite's odd records.
        labels: int64 [n].
        ids: record ids [n], distinct and non-negative; default 0..n-1. A record keeps its id, and hence its randomness,
            when others come or go.
        services: what the run's mechanisms share.
        public_n: the number of records that is public; the number of labels if not given.
        clients: client number [n] of each record, for `grouped`; None: the data know no clients.
        num_clients: N, public; clients 0..N-1, of which some may have no record.
        federation: where the programs of clients run, and which faults are played.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        services: Services,
        *,
        ids: np.ndarray | None = None,
        public_n: int | None = None,
        clients: np.ndarray | None = None,
        num_clients: int | None = None,
        federation: Settings | None = None,
    ) -> None:
        self.__images = images.to(services.device)
        self.__labels = labels.to(services.device)
        self.__ids = np.arange(len(labels)) if ids is None else np.asarray(ids)
        self._ids_are_positions = ids is None
        if len(images) != len(labels) or len(np.unique(self.__ids)) != len(labels) or (self.__ids < 0).any():
            raise ValueError(
                "expected as many images as labels and distinct record ids >= 0, got "
                f"{len(images)}, {len(labels)} and {len(np.unique(self.__ids))}, the least {self.__ids.min(initial=0)}."
            )
        self.__clients = clients
        self._num_clients = num_clients
        self._federation = federation or Settings()
        self._n = len(labels) if public_n is None else public_n
        self._n_was_read = False
        self.num_classes = num_classes
        self.image_shape: tuple[int, int, int] = (images.shape[1], images.shape[2], images.shape[3])
        self._services = services
        self._state_names: set[str] = set()

    @property
    def device(self) -> torch.device:
        return self._services.device

    @property
    def budget(self) -> Budget:
        return self._services.ledger.budget

    @property
    def mechanisms(self) -> Mapping[str, Allowance]:
        """What was handed out, by name; read-only, because a second mechanism of a name would have the same noise."""
        return MappingProxyType(dict(self._services.mechanisms))  # a proxy shows its mapping to __eq__ of others

    @property
    def n(self) -> int:
        """Number of records, treated as public.

        Raises:
            ValueError: where the unit is the client: how many records there are depends on what one client holds.
        """
        if self._services.ledger.unit == "client":
            raise ValueError("the number of records is private where the unit is the client; use that of clients.")
        self._n_was_read = True
        return self._n

    def grouped(self, unit: Literal["client"]) -> ClientData:
        """The same records with the client as the unit of privacy (user-level DP).

        From now on a neighbouring data set is one in which one client holds other records, or none, and mechanisms for
        single records are refused. The ledger says so.

        Raises:
            ValueError: for another unit, data without clients, or releases for single records before.
        """
        if unit != "client":
            raise ValueError(f"expected the unit 'client', got {unit!r}.")
        if self.__clients is None or self._num_clients is None:
            raise ValueError(
                "expected a data set whose records belong to clients, got one without: take dataset=clients_mnist, or "
                "another of conf/dataset that is a federation."
            )
        if self._n_was_read:
            raise ValueError(
                "the number of records was read, which is private where the unit is the client: group the data first, "
                "and use the number of clients."
            )
        self._services.ledger.set_client_unit(self._num_clients)
        images, labels, clients = self.__images, self.__labels, self.__clients

        def records_of(client: int) -> tuple[Tensor, Tensor]:
            index = np.flatnonzero(clients == client)
            return images[index], labels[index]

        number = max(self._num_clients, int(clients.max(initial=-1)) + 1)
        return ClientData(
            self._services,
            self._federation,
            records_of,
            n=self._num_clients,
            number=number,
            num_classes=self.num_classes,
            image_shape=self.image_shape,
        )

    def mechanism(
        self,
        name: str,
        *,
        sample: Sampling,
        bound: Bound,
        times: int | None = None,
        std: float | None = None,
        share: float | None = None,
        state: PrivateState | None = None,
    ) -> Mechanism:
        """An allowance of `times` releases with noise `std` on the bounded value, checked against the budget.

        Give both (checked), `times` alone (the smallest noise that the remaining budget allows; none when it is
        infinite), `std` alone (the largest number of releases that it allows), or `times` and a `share` of the budget.
        No record is touched here.

        Args:
            name: unique within the run; names the allowance in the ledger.
            std: ABSOLUTE standard deviation of the noise on the released value, in its units. A paper's noise
                multiplier sigma is converted by the method, beside the formula it comes from.
            share: of the run's whole budget, in (0, 1], for a method with several mechanisms; see
                `dpgen_bench.privacy.planning`. The noise is fixed here, by what was declared before. Leave `share` out
                of the last mechanism, which then takes all that is left.
            state: private state of the shards that `sample` draws; see `private_state`.

        Raises:
            BudgetExceeded: the allowance, with what was approved before, would exceed the budget, or less than 1 % of
                it is left for a mechanism that is to take the rest.
            ValueError: neither given, a request after the run's first release, a name used twice or that can name no
                file, a number of the wrong type or out of range, a share out of (0, 1], with `std` or without `times`,
                shares that sum to more than 1, C = inf with noise, or state that the accounting of `sample` and `bound`
                does not cover.
        """
        request = Request(name, sample, bound, times, std, share)
        self._services.ledger.expect_new(name)
        _expect_proven(sample, SAMPLINGS, "sampling")
        _expect_proven(bound, (PerRecord, PerRecordGradient, PerRow, Whole), "bound")
        if self._services.ledger.unit == "client":
            raise ValueError(
                f"mechanism {name!r} would protect single records, and the ledger's unit is the client: ask the "
                "grouped data for mechanisms, or do not group them."
            )
        if state is not None:
            _expect_covered(state, sample, bound)
        entry = plan_entry(self._services.ledger, request)
        if not math.isfinite(bound.C) and entry.event.std > 0:
            raise ValueError(f"mechanism {name!r}: noise without clipping (C = inf) hides nothing; set a finite C.")
        if state is not None:
            entry = replace(entry, bound={**entry.bound, "private_state": state.name})
        self._services.ledger.approve(entry)
        warn_of_settings(self._services.ledger, name, ids_are_positions=self._ids_are_positions)
        return Mechanism(entry, bound, self._services, draw=self.__batch, ids=self.__ids, state=state)

    def __batch(self, index: np.ndarray, key: Key) -> Batch:
        ids = torch.as_tensor(self.__ids[index], dtype=torch.int64, device=self.device)
        return Batch(self.__images[index], self.__labels[index], ids, key)

    def close(self) -> None:
        """Let go of what mechanisms hold open; for the harness, at the end of a run."""
        for mechanism in self.mechanisms.values():
            if isinstance(mechanism, ClientMechanism):
                mechanism.close()

    def private_state(
        self,
        name: str,
        *,
        sample: OneShard,
        start: Start,
        identity: dict[str, Any],
        stack: int = 1,
    ) -> PrivateState:
        """State of each shard of `sample`, kept behind the handle of the mechanism that it is given to.

        No record is used here (but a hash of all, which names the cache's folder), nor before that mechanism is
        approved. Then `start(i)` of what is returned makes the first states, `stack` shards at a time, or finds them
        where an earlier run with the same identity left them.

        Args:
            start: start(records, rngs) -> float32 tensors [G, ...] by name, the first states of G <= stack shards;
                records is a list of (images float32 [n_g, c, h, w] in [0, 1], labels int64 [n_g]), n_g >= 0, rngs one
                CPU generator for each. It must depend on nothing else but what `identity` says, must treat each shard
                apart from the others, and must not raise.
            identity: what `start` depends on besides the records, the run's seed and the method's source; JSON-able.

        Raises:
            ValueError: for a sampling that is no OneShard, a stack below 1, a name that was given before or can name no
                folder, or an identity that is not JSON-able.
        """
        _expect_proven(sample, (OneShard,), "sampling with shards")
        if name in self._state_names:
            raise ValueError(f"private state named {name!r} was already made; give each its own name.")
        self._state_names.add(name)
        return PrivateState(
            name,
            sample,
            start,
            self._services,
            stack=stack,
            ids=self.__ids,
            draw=lambda index: (unit_range(self.__images[index]), self.__labels[index]),
            fingerprint=self._fingerprint,
            identity=identity,
        )

    def _fingerprint(self) -> str:
        """Of the records; itself private."""
        digest = hashlib.sha256()
        for part in (self.__images.cpu().numpy(), self.__labels.cpu().numpy(), self.__ids):
            digest.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def _expect_proven(given: object, proven: tuple[type, ...], what: str) -> None:
    """The privacy proof belongs to these exact classes: a subclass could draw or clip in another way."""
    if type(given) not in proven:
        names = ", ".join(cls.__name__ for cls in proven)
        raise ValueError(f"expected a {what} of the harness ({names}), got {type(given).__name__}.")


def _expect_covered(state: PrivateState, sample: Sampling, bound: Bound) -> None:
    """State lets each record act on every value of its shard, at every later draw of that shard."""
    if sample != state.sampling:
        raise ValueError(f"expected the sampling of private state {state.name!r} ({state.sampling}), got {sample}.")
    if not isinstance(bound, PerRow | Whole):
        raise ValueError(
            f"expected PerRow or Whole for a mechanism with private state, got {type(bound).__name__}: its sensitivity "
            "holds for rows that depend on one record each, and state makes them depend on all of a shard."
        )
