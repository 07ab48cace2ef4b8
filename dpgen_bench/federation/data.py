"""`ClientData`, which gives methods mechanisms whose privacy unit is the client; see `PrivateData.grouped`."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dpgen_bench.federation.client import BrokenProgram, ClientProgram, ClientSetup
from dpgen_bench.federation.client_mechanism import ClientMechanism, NoiseAt
from dpgen_bench.federation.engines import Engine, InProcess
from dpgen_bench.federation.settings import Settings
from dpgen_bench.privacy.bounds import Bound, PerRecord, PerRow, Whole
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.planning import Request, plan_entry
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, Poisson, Sampling
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import GlobalRandomness
from dpgen_bench.privacy.state_file import Parts
from dpgen_bench.privacy.warn import warn_of_settings

# The samplings and bounds that the proofs cover, by who adds the noise; see `ClientData.mechanism`.
COVERED: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "client": ((OneClient,), (PerRow, Whole)),
    "server": ((Poisson, FixedSize, Full), (PerRecord,)),
}

KEEP = 64  # clients that stay open in one process if their state is in files


class ClientData:
    """The clients of a federation, which a method can use through approved mechanisms only.

    Only the program that a mechanism runs on a client reads that client's records.

    Attributes:
        n: N, the number of clients, which is public.
        num_classes: the number of classes.
        image_shape: (channels, height, width).
        budget: the run's budget.
        device: the device of the run.
    """

    def __init__(
        self,
        services: Services,
        federation: Settings,
        records_of: Callable[[int], tuple[Tensor, Tensor]],
        *,
        n: int,
        number: int,
        num_classes: int,
        image_shape: tuple[int, int, int],
    ) -> None:
        """
        Args:
            services: what the mechanisms of the run share.
            federation: the settings of the federation.
            records_of: returns the images and labels of a client, given its number.
            n: N, the public number of clients.
            number: the number of clients that there are: N, or N + 1 where the conformance suite adds a client.
            num_classes: the number of classes.
            image_shape: (channels, height, width).
        """
        self.__records_of = records_of
        self._services, self._federation, self._number = services, federation, number
        self.n, self.num_classes, self.image_shape = n, num_classes, image_shape

    @property
    def device(self) -> torch.device:
        """The device of the run."""
        return self._services.device

    @property
    def budget(self) -> Budget:
        """The budget of the run."""
        return self._services.ledger.budget

    def mechanism(
        self,
        name: str,
        *,
        program: ClientProgram,
        sample: Sampling,
        bound: Bound,
        noise_at: NoiseAt,
        times: int | None = None,
        std: float | None = None,
        share: float | None = None,
        against: Literal["outsiders", "server"] = "outsiders",
    ) -> ClientMechanism:
        """Approve `times` rounds of a release by clients against the budget. No record is read here.

        Give `times` and `std` (they are checked), `times` alone (the smallest noise within the budget, or no noise if
        the budget is infinite), `std` alone (the largest number of rounds within the budget), or `times` and a `share`
        of the budget.

        Args:
            name: the name of the mechanism in the ledger, unique within the run.
            program: the program that runs on each client. It is pickled, and each client gets copies.
            sample: the draw of the clients of a round. With noise at the client: OneClient. With noise at the server:
                Poisson, FixedSize or Full.
            bound: the bound on an answer. With noise at the client: PerRow or Whole, on the one answer. With noise at
                the server: PerRecord, on the row that each client adds to the sum.
            noise_at: "client": the client adds noise before it sends an answer, and clients may keep state. "server":
                the server sees the answers, sums them up and adds the noise, so the server is trusted. Clients must
                not keep state then, because amplification by a secret draw is proven for clients without state only.
            times: the number of rounds.
            std: the absolute standard deviation of the noise, in the units of the answer.
            share: a part of the run's whole budget, in (0, 1], as in `PrivateData.mechanism`.
            against: the adversary of the budget: "outsiders", who see what the run releases, or "server", which knows
                the clients that it asked and keeps all answers. The ledger contains epsilon against both.

        Raises:
            BudgetExceeded: if the allowance, together with those approved before, would exceed the budget, or too
                little of the budget is left.
            ValueError: for a combination of sampling, bound and noise that no proof covers, a name that is used twice,
                a request after the first release, and a program that cannot be pickled.
        """
        ledger = self._services.ledger
        # Refuse what no proof covers before any of the budget is planned for it.
        request = Request(name, sample, bound, times, std, share)
        sample, bound = request.sample, request.bound  # copies
        ledger.expect_new(name)
        self._expect_covered(sample, bound, noise_at, against)
        # A resumed run gets the entry that was approved before, so noise_at may differ from it.
        entry = self._planned(request, noise_at, against)
        if entry.noise_at != noise_at:
            raise ValueError(
                f"mechanism {name!r}: expected noise_at={entry.noise_at!r}, with which it was approved, got "
                f"{noise_at!r}; a resumed run must make the same requests."
            )
        if not math.isfinite(bound.C) and entry.event.std > 0:
            raise ValueError(
                f"mechanism {name!r}: expected a finite C for a release with noise, got C = {bound.C}, with which "
                "nothing is clipped and noise proves nothing; set a finite C."
            )
        # Pickle the program before the approval, so that a program that cannot be sent spends no budget. All clients
        # get these bytes, so later changes of the object do not reach them.
        try:
            pickled = pickle.dumps(program)
        except Exception as error:
            raise ValueError(
                "expected a client program that can be pickled, so that it can be sent to clients, got "
                f"{type(program)}, which cannot ({error}); define its class at the top level of a module, with "
                "settings as fields and no networks."
            ) from error
        ledger.approve(entry)
        warn_of_settings(ledger, name)
        return ClientMechanism(
            entry,
            bound,
            self._services,
            clients=self._number,
            open_engine=self._open_engine,
            setup=lambda client: self._setup(entry, bound, pickled, client),
            assume_independent_dropout=self._federation.dropout == "independent",
        )

    def _planned(self, request: Request, noise_at: NoiseAt, against: str) -> Entry:
        """The entry of the ledger for a request; a resumed run finds it in the ledger."""
        ledger = self._services.ledger
        approved = ledger.entries.get(request.name)
        if against == "outsiders" or approved is not None:
            entry = plan_entry(ledger, request)
            return entry if approved is not None else replace(entry, noise_at=noise_at)
        # Against the server no draw is secret: it sees the unsampled answers of each client, at most k_max of them.
        assert isinstance(request.sample, OneClient)
        server_view = ledger.events_seen_by_server()
        if request.times is None:
            raise ValueError(
                f"mechanism {request.name!r}: expected `times` for a budget against the server, got None; give `times`."
            )
        if server_view is None:
            raise ValueError(
                f"mechanism {request.name!r}: expected noise at the client in all mechanisms of a budget against the "
                "server, got another mechanism with noise at the server; use against='outsiders'."
            )
        answers = request.sample.max_participations(request.times)
        unsampled = plan_entry(ledger, replace(request, sample=Full(), times=answers), spent=server_view)
        event = Event(request.sample, request.bound.sensitivity, unsampled.event.std, request.times)
        return replace(unsampled, event=event, noise_at=noise_at)

    def _expect_covered(self, sample: Sampling, bound: Bound, noise_at: str, against: str) -> None:
        if noise_at not in COVERED or against not in ("outsiders", "server"):
            raise ValueError(
                f"expected noise_at client or server and against outsiders or server, got {noise_at!r}, {against!r}."
            )
        samplings, bounds = COVERED[noise_at]
        for value, covered, what in ((sample, samplings, "sampling"), (bound, bounds, "bound")):
            if type(value) not in covered:  # subclasses are refused, because the proofs are about these exact classes
                names = ", ".join(cls.__name__ for cls in covered)
                raise ValueError(f"expected {what} {names} with noise at the {noise_at}, got {type(value).__name__}.")
        if against == "server" and noise_at == "server":
            raise ValueError(
                "expected noise_at='client' for a budget against the server, got noise_at='server': a server that adds "
                "the noise sees the answers without noise. Use noise_at='client', or against='outsiders'."
            )
        match sample:
            case OneClient():
                number = sample.clients
            case FixedSize():
                number = sample.of
            case _:  # the other samplings do not depend on the number of clients
                number = self.n
        if number != self.n:
            raise ValueError(f"expected a sampling of the N = {self.n} clients, got {sample}.")

    def _setup(self, entry: Entry, bound: Bound, program: bytes, client: int) -> ClientSetup:
        services, sampling = self._services, entry.event.sampling
        images, labels = self.__records_of(client)
        place = services.place
        observer, observe = services.observer, None
        at_client = entry.noise_at == "client"
        if observer is not None and at_client:

            def observe(round_: int, client: int, exact: Parts, noisy: Parts) -> Parts:
                return observer.release(services.mechanisms[entry.name], round_, np.array([client]), exact, noisy)

        return ClientSetup(
            entry.name,
            client,
            images.cpu(),
            labels.cpu(),
            program,
            bound,
            entry.event.std if at_client else 0.0,
            services.key.derive("client", client),
            sampling.max_participations(entry.event.times) if isinstance(sampling, OneClient) else entry.event.times,
            keeps_state=at_client,
            place=replace(place, folder=place.folder and place.folder / entry.name),
            device=self.device,
            diagnostics=services.diagnostics,
            errors=services.client_folder and services.client_folder / "errors.txt",
            strict=observer is not None,
            observe=observe,
        )

    def _open_engine(self, setup: Callable[[int], ClientSetup]) -> Engine:
        services, on_disk = self._services, self._services.place.folder is not None
        if self._federation.name == "ray" and not on_disk:
            raise ValueError(
                "expected a folder for the state of clients with federation=ray, got none: a client whose process ends "
                "would lose the number of its answers. Give a folder, or use federation=inproc."
            )
        if services.observer is not None:  # it needs the exact answers, and its own errors must be raised
            return InProcess(setup, let_through=(BaseException,))
        return self._federation.engine(
            setup,
            services.key.derive("faults"),
            private_log=services.client_folder and services.client_folder / "raised.txt",
            keep=KEEP if on_disk else None,
            let_through=(BrokenProgram, GlobalRandomness),
        )
