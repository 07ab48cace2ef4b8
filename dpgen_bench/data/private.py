"""`PrivateData`: the training records, which a method can use through approved mechanisms only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.federation.client_mechanism import ClientMechanism
from dpgen_bench.federation.data import ClientData
from dpgen_bench.federation.settings import Settings
from dpgen_bench.privacy.allowance import Allowance
from dpgen_bench.privacy.batch import unit_range
from dpgen_bench.privacy.bounds import Batch, Bound, PerRecord, PerRecordGradient, PerRow, Whole
from dpgen_bench.privacy.events import RELATIONS, Budget, Relation
from dpgen_bench.privacy.factors import PerRecordMoments, PerRecordProducts
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.privacy.padding import FIRST_PADDED_ID, Padding
from dpgen_bench.privacy.planning import Request, plan_entry
from dpgen_bench.privacy.processes import NotDivisible
from dpgen_bench.privacy.sampling import SAMPLINGS, EveryShard, OneShard, Poisson, Sampling
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.shards import PerShard
from dpgen_bench.privacy.state import PrivateState, Start
from dpgen_bench.privacy.votes import Votes
from dpgen_bench.privacy.warn import warn_of_settings
from dpgen_bench.utils.upload import upload

_BOUNDS = (PerRecord, PerRecordGradient, PerRow, Whole, Votes, PerRecordProducts, PerRecordMoments, PerShard)


class PrivateData:
    """Training records that only functions inside approved mechanisms can read.

    Public attributes are `n` (the number of records), `num_classes`, `class_names`, `image_shape` (c, h, w), `budget`,
    `device` and `mechanisms`.

    Args:
        images: [n, c, h, w], uint8; or float in [0, 1], for unusual records of the conformance suite.
        labels: int64 [n].
        num_classes: The public number of classes.
        services: The objects that all mechanisms of a run share, such as the ledger.
        ids: Record ids [n], distinct and non-negative; the default is 0..n-1. The randomness of a record is keyed by
            its id, so it does not change when other records are added or removed.
        keep_ids: The relations under which all other records keep their ids, see `Records`; the default is both for
            `ids`, and replace-one for 0..n-1.
        public_n: The public number of records; the default is the number of labels.
        clients: The client of each record [n], for `grouped`; None if the dataset has no clients.
        num_clients: N, the public number of clients 0..N-1, of which some may have no record.
        federation: Where the programs of clients run, and which faults are simulated.
        class_names: The public names of the classes; the default is their numbers.

    Raises:
        ValueError: If the numbers of images, labels and distinct ids differ, or an id is negative.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        services: Services,
        *,
        ids: np.ndarray | None = None,
        keep_ids: Sequence[Relation] | None = None,
        public_n: int | None = None,
        clients: np.ndarray | None = None,
        num_clients: int | None = None,
        federation: Settings | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.__images = images.to(services.device)
        self.__labels = labels.to(services.device)
        self.__ids = np.arange(len(labels)) if ids is None else np.asarray(ids)
        self.__device_ids = torch.as_tensor(self.__ids, dtype=torch.int64, device=services.device)
        self._keep_ids = (RELATIONS if ids is not None else ("replace_one",)) if keep_ids is None else tuple(keep_ids)
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
        self._records_are_compared = False  # with those of other processes
        self.num_classes = num_classes
        self.class_names = tuple(map(str, range(num_classes)) if class_names is None else class_names)
        self.image_shape: tuple[int, int, int] = (images.shape[1], images.shape[2], images.shape[3])
        self._services = services
        self._state_names: set[str] = set()

    @property
    def device(self) -> torch.device:
        """The device of the records and of released values."""
        return self._services.device

    @property
    def budget(self) -> Budget:
        """The run's privacy budget."""
        return self._services.ledger.budget

    @property
    def mechanisms(self) -> Mapping[str, Allowance]:
        """The approved mechanisms by name; read-only, because two mechanisms of one name would share their noise."""
        # A copy: a comparison with a proxy passes the mapping itself to the other object's __eq__.
        return MappingProxyType(dict(self._services.mechanisms))

    @property
    def n(self) -> int:
        """The number of records, which counts as public.

        Raises:
            ValueError: If the unit of privacy is the client: the number of records depends on each client's data.
        """
        if self._services.ledger.unit == "client":
            raise ValueError(
                "the number of records is private because the unit is the client; use the number of clients."
            )
        self._n_was_read = True
        return self._n

    def grouped(self, unit: Literal["client"]) -> ClientData:
        """The same records with the client as the unit of privacy (user-level DP).

        After this call, two datasets are neighbours if the records of one client differ or are missing, and mechanisms
        for single records are refused. The ledger states the unit.

        Raises:
            ValueError: For another unit, a dataset without clients, or after a mechanism for single records was made
                or the number of records was read.
            NotDivisible: If several processes train the run.
        """
        if unit != "client":
            raise ValueError(f"expected the unit 'client', got {unit!r}.")
        if self._services.processes is not None:
            raise NotDivisible(
                "expected one process for data whose unit is the client, got "
                f"{self._services.processes.size}: rounds of clients are not divided among processes; leave out "
                "runtime.processes, and use federation=ray for several."
            )
        if self.__clients is None or self._num_clients is None:
            raise ValueError(
                "expected a dataset whose records belong to clients, got one without clients: set "
                "dataset=clients_mnist or another federation of conf/dataset."
            )
        if self._n_was_read:
            raise ValueError(
                "the number of records was read, which is private if the unit is the client: group the data first, and "
                "use the number of clients."
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
        """A mechanism of `times` releases with noise `std` on the bounded value, approved within the budget.

        There are four ways to set the noise. With `times` and `std`, their epsilon is compared with the budget. With
        `times` alone, the noise is the smallest that the remaining budget allows (none if the budget is infinite). With
        `std` alone, the number of releases is the largest that the remaining budget allows. With `times` and `share`,
        the mechanism gets this share of the budget. No record is read here.

        Args:
            name: Name of the mechanism in the ledger, unique within the run.
            sample: How each release samples records.
            bound: How the released value is bounded, which gives its sensitivity.
            times: The number of releases.
            std: ABSOLUTE standard deviation of the noise on the released value, in its units. A method converts the
                noise multiplier sigma of a paper.
            share: Share of the run's whole budget in (0, 1], for a method with several mechanisms; see
                `dpgen_bench.privacy.planning`. The noise depends only on the mechanisms made before. The last mechanism
                has no `share`, and gets the rest of the budget.
            state: Private state of the shards that `sample` draws; see `private_state`.

        Raises:
            BudgetExceeded: If this mechanism and those approved before would exceed the budget together, or if less
                than 1 % of the budget is left for a mechanism that gets the rest.
            ValueError: If neither `times` nor `std` is given; for a request after the run's first release; for a name
                that is used already or cannot be a file name; for a number of the wrong type or outside its range; for
                a share outside (0, 1], with `std` or without `times`; for shares that sum to more than 1; for noise
                with C = inf; or for a state that the accounting of `sample` and `bound` does not cover.
            NotDivisible: If several processes train the run and cannot divide the releases.
            RuntimeError: If they have other records, or the same in another order.
        """
        # Refuse what no proof covers before any of the budget is planned for it.
        request = Request(name, sample, bound, times, std, share)
        sample, bound = request.sample, request.bound  # copies
        self._services.ledger.expect_new(name)
        _expect_proven(sample, SAMPLINGS, "sampling")
        _expect_proven(bound, _BOUNDS, "bound")
        if isinstance(bound, PerRecordProducts | PerRecordMoments) and bound.classes not in (None, self.num_classes):
            raise ValueError(
                f"mechanism {name!r}: expected a bound of {self.num_classes} classes, as many as the data have, got "
                f"{bound.classes}; give classes=data.num_classes, or None for one block."
            )
        _expect_together(name, sample, bound)
        if self._services.ledger.unit == "client":
            raise ValueError(
                f"mechanism {name!r} would protect single records, but the unit is the client: make the mechanism from "
                "the grouped data, or do not group the data."
            )
        if state is not None:
            _expect_covered(state, sample, bound)
        # Choose the noise or the number of releases. The budget is spent by `approve`, before a record is read.
        padding = padding_of(sample, bound, self._n, self._services)
        if self._services.processes is not None and padding is None:
            raise NotDivisible(
                f"mechanism {name!r}: expected a sum over records (PerRecord or PerRecordGradient) of Poisson draws "
                f"with {self._services.processes.size} processes, each of which computes a part of it, got "
                f"{type(bound).__name__} of {type(sample).__name__}, which cannot be divided; leave out "
                "runtime.processes."
            )
        if self._services.processes is not None and not self._records_are_compared:
            self._services.processes.expect_same_records(self._fingerprint())
            self._records_are_compared = True
        entry = plan_entry(self._services.ledger, request)
        if not math.isfinite(bound.C) and entry.event.std > 0:
            raise ValueError(f"mechanism {name!r}: noise without clipping (C = inf) gives no privacy; set a finite C.")
        if state is not None:
            entry = replace(entry, bound={**entry.bound, "private_state": state.name})
        self._services.ledger.approve(entry)
        warn_of_settings(self._services.ledger, name, self._keep_ids)
        return Mechanism(
            entry,
            bound,
            self._services,
            draw=self.__batch,
            ids=self.__ids,
            state=state,
            padded=None if padding is None else (padding, partial(self.__padded_batch, padding)),
        )

    def __batch(self, index: np.ndarray, key: Key) -> Batch:
        """The records at these positions."""
        at = upload(torch.from_numpy(index), self.device)
        return Batch(self.__images[at], self.__labels[at], self.__device_ids[at], key)

    def __padded_batch(self, padding: Padding, positions: Tensor, key: Key) -> Batch:
        """The records at these positions, int64 on the device; black images of class 0 where there is padding."""
        real = positions >= 0
        if len(self.__labels) == 0:
            images, labels = (
                part.new_zeros(len(positions), *part.shape[1:]) for part in (self.__images, self.__labels)
            )
            ids = torch.zeros_like(positions)
        else:
            at = positions.clamp_min(0)
            images = self.__images[at].masked_fill_(~real.view(-1, 1, 1, 1), 0)
            labels, ids = self.__labels[at].masked_fill_(~real, 0), self.__device_ids[at]
        ids = torch.where(real, ids, FIRST_PADDED_ID - torch.arange(len(positions), device=self.device))
        return Batch(images, labels, ids, key, real=real, padding=padding)

    def close(self) -> None:
        """Close the resources of all mechanisms. The harness calls it at the end of a run."""
        for mechanism in self.mechanisms.values():
            if isinstance(mechanism, ClientMechanism):
                mechanism.close()

    def private_state(
        self,
        name: str,
        *,
        sample: OneShard | EveryShard,
        start: Start,
        identity: dict[str, Any],
        stack: int = 1,
        keyed_stack: int | None = None,
    ) -> PrivateState:
        """Hidden state of each shard of `sample`, which only the mechanism that it is passed to can use.

        Before that mechanism is approved, records are used only for a hash, which names the folder of the cache. Then
        `start(i)` of the returned object computes the first states of `stack` shards, or reads them from the cache of
        an earlier run with the same identity.

        Args:
            name: Name of the state, unique within the run.
            sample: The sampling of the mechanism.
            start: start(records, rngs) -> float32 tensors [G, ...] by name, the first states of G <= stack shards. (On
                an accelerator, a function that is given states has those with one number for each shard on the CPU.)
                `records` is a list of (images float32 [n_g, c, h, w] in [0, 1], labels int64 [n_g]) with n_g >= 0, and
                `rngs` has one CPU generator for each shard. `start` must depend only on its arguments and on what
                `identity` contains, must compute each shard's state from this shard alone, and must not raise.
            identity: Everything that `start` depends on, except the records, the run's seed and the method's source; it
                must be storable as JSON.
            stack: The number of shards whose first states are computed together and, under `EveryShard`, of shards that
                a release asks together.
            keyed_stack: The number that stands for `stack` in the key of first states, so that these do not depend on
                `stack`; None for `stack` itself. If `stack` is a matter of speed alone (`speed` of the method's
                class), give a constant.

        Raises:
            ValueError: For a sampling other than OneShard and EveryShard, a stack below 1, a name that is used already
                or cannot be a folder name, or an identity that cannot be stored as JSON.
        """
        _expect_proven(sample, (OneShard, EveryShard), "sampling with shards")
        if name in self._state_names:
            raise ValueError(f"private state named {name!r} was already made; use another name.")
        self._state_names.add(name)
        return PrivateState(
            name,
            sample,
            start,
            self._services,
            stack=stack,
            keyed_stack=keyed_stack,
            ids=self.__ids,
            draw=lambda index: (unit_range(self.__images[index]), self.__labels[index]),
            fingerprint=self._fingerprint,
            identity=identity,
        )

    def _fingerprint(self) -> str:
        """A hash of the records, which is private."""
        digest = hashlib.sha256()
        for part in (self.__images.cpu().numpy(), self.__labels.cpu().numpy(), self.__ids):
            digest.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()


def padding_of(sample: Sampling, bound: Bound, n: int, services: Services) -> Padding | None:
    """The padding of a mechanism's draws from `n` records; None where a release needs the exact draw.

    Rows of `PerRow`, and the tensor of `Whole`, are any functions of the whole draw, so padding would change them.
    """
    if not services.pads or not isinstance(sample, Poisson) or not isinstance(bound, PerRecord | PerRecordGradient):
        return None
    part = services.processes.part if services.processes else (0, 1)
    if isinstance(bound, PerRecord):
        return Padding.plan(sample.rate, n, most=bound.records_at_once, part=part)
    return Padding.plan(sample.rate, n, most=bound.microbatch, public_rows=bound.public_rows, part=part)


def _expect_proven(value: object, proven: tuple[type, ...], what: str) -> None:
    """Raise ValueError unless `value` is exactly of one of these classes: a subclass could sample or clip otherwise."""
    if type(value) not in proven:
        names = ", ".join(cls.__name__ for cls in proven)
        raise ValueError(f"expected a {what} of the harness ({names}), got {type(value).__name__}.")


def _expect_together(name: str, sample: Sampling, bound: Bound) -> None:
    """Raise ValueError unless answers of shards are bounded as such, and nothing else is."""
    of_shards = isinstance(bound, PerShard) or (isinstance(bound, Votes) and bound.voters == "shards")
    if of_shards != isinstance(sample, EveryShard):
        got = f"{type(bound).__name__} with {type(sample).__name__}"
        raise ValueError(
            f"mechanism {name!r}: expected PerShard or Votes(voters='shards') together with the sampling EveryShard, "
            f"in which each shard gives one answer, got {got}; change the bound or the sampling."
        )


def _expect_covered(state: PrivateState, sample: Sampling, bound: Bound) -> None:
    """Raise ValueError unless the accounting of `sample` and `bound` covers hidden state.

    With state, each record can change every value of its shard, at each later draw of the shard.
    """
    if sample != state.sampling:
        raise ValueError(f"expected the sampling of private state {state.name!r} ({state.sampling}), got {sample}.")
    if isinstance(sample, OneShard) and not isinstance(bound, PerRow | Whole):
        raise ValueError(
            f"expected PerRow or Whole for a mechanism with private state, got {type(bound).__name__}: its sensitivity "
            "holds for rows that depend on one record each, but with state each row depends on its whole shard."
        )
