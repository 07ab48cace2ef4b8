"""`ClientData`: training records behind mechanisms whose unit of privacy is the client; see `PrivateData.grouped`."""

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
from dpgen_bench.privacy.cautions import caution
from dpgen_bench.privacy.events import Budget, Event
from dpgen_bench.privacy.ledger import Entry
from dpgen_bench.privacy.planning import Request, planned
from dpgen_bench.privacy.sampling import FixedSize, Full, OneClient, Poisson, Sampling
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import GlobalRandomness
from dpgen_bench.privacy.state_file import Parts

# Who adds the noise decides which samplings and bounds are proven with it; see `ClientData.mechanism`.
COVERED: dict[str, tuple[tuple[type, ...], tuple[type, ...]]] = {
    "client": ((OneClient,), (PerRow, Whole)),
    "server": ((Poisson, FixedSize, Full), (PerRecord,)),
}

KEEP = 64  # clients whose files are open at the same time, where their state lies in files


class ClientData:
    """Clients behind approved mechanisms.

    Public attributes: `n` (N, the number of clients, public), `num_classes`, `image_shape` (c, h, w), `budget`,
    `device`. A client's records are read by the program that a mechanism runs on that client, and nowhere else.
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
            federation: where the programs of clients run.
            records_of: the images and labels of one client.
            number: N, or one more where the conformance suite adds a client.
        """
        self.__records_of = records_of
        self._services, self._federation, self._number = services, federation, number
        self.n, self.num_classes, self.image_shape = n, num_classes, image_shape

    @property
    def device(self) -> torch.device:
        return self._services.device

    @property
    def budget(self) -> Budget:
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
        """An allowance of `times` rounds by clients, checked against the budget; no record is touched here.

        Give `times` and `std` both (checked), `times` alone (the smallest noise within the budget; none when that is
        infinite), `std` alone (the most rounds within it), or `times` and a `share` of the budget.

        Args:
            name: unique within the run; names the allowance in the ledger.
            program: what runs on each client. It is pickled; clients get copies.
            sample: whom a round asks. With noise at the client: OneClient. At the server: Poisson, FixedSize or Full.
            bound: of an answer. With noise at the client: PerRow or Whole, of the one answer. At the server: PerRecord,
                of the one row that each client adds to the sum.
            noise_at: "client": answers leave it with noise, and clients may keep state. "server": it sees the answers,
                adds them up and adds the noise, so it is trusted; clients must keep no state, because amplification by
                a secret draw holds for clients that remember none.
            std: ABSOLUTE standard deviation of that noise, in the units of the answer.
            share: of the run's whole budget, in (0, 1], as in `PrivateData.mechanism`.
            against: whom the budget is kept against: outsiders, who see what the run releases, or the server, which
                knows whom it asked and keeps all answers. Both figures are written down in any case.

        Raises:
            BudgetExceeded: the allowance, with what was approved before, would exceed the budget, or too little of it
                is left.
            ValueError: for a combination that nothing is proven of, or a name used twice.
        """
        ledger = self._services.ledger
        request = Request(name, sample, bound, times, std, share)
        ledger.expect_new(name)
        self._expect_covered(sample, bound, noise_at, against)
        entry = self._planned(request, noise_at, against)
        if entry.noise_at != noise_at:
            raise ValueError(f"mechanism {name!r} was approved with noise at the {entry.noise_at}, not the {noise_at}.")
        if not math.isfinite(bound.C) and entry.event.std > 0:
            raise ValueError(f"mechanism {name!r}: noise without clipping (C = inf) hides nothing; set a finite C.")
        try:
            pickled = pickle.dumps(program)
        except Exception as error:
            raise ValueError(
                f"expected a client program that can be pickled, so that it can travel to clients; {type(program)} "
                f"cannot ({error}). Define its class at the top of a module and keep settings in it, no networks."
            ) from error
        ledger.approve(entry)
        caution(ledger, name)
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
        """The entry, found in the ledger on resume."""
        ledger = self._services.ledger
        known = ledger.entries.get(request.name)
        if against == "outsiders" or known is not None:
            entry = planned(ledger, request)
            return entry if known is not None else replace(entry, noise_at=noise_at)
        assert isinstance(request.sample, OneClient)
        seen = ledger.events_seen_by_server()
        if request.times is None or seen is None:
            raise ValueError(
                f"mechanism {request.name!r}: a budget against the server needs `times`, and no other mechanism with "
                "noise at the server."
            )
        answers = request.sample.most_answers(request.times)
        unsampled = planned(ledger, replace(request, sample=Full(), times=answers), spent=seen)
        event = Event(request.sample, request.bound.sensitivity, unsampled.event.std, request.times)
        return replace(unsampled, event=event, noise_at=noise_at)

    def _expect_covered(self, sample: Sampling, bound: Bound, noise_at: str, against: str) -> None:
        if noise_at not in COVERED or against not in ("outsiders", "server"):
            raise ValueError(
                f"expected noise_at client or server and against outsiders or server, got {noise_at!r}, {against!r}."
            )
        samplings, bounds = COVERED[noise_at]
        for given, known, what in ((sample, samplings, "sampling"), (bound, bounds, "bound")):
            if type(given) not in known:  # the proof is of these exact classes
                names = ", ".join(cls.__name__ for cls in known)
                raise ValueError(f"expected {what} {names} with noise at the {noise_at}, got {type(given).__name__}.")
        if against == "server" and noise_at == "server":
            raise ValueError(
                "expected noise at the client for a budget against the server, which sees what it adds it to."
            )
        of = {OneClient: "clients", FixedSize: "of"}.get(type(sample))
        if of is not None and getattr(sample, of) != self.n:
            raise ValueError(f"expected a sampling of the N = {self.n} clients, got {sample}.")

    def _setup(self, entry: Entry, bound: Bound, program: bytes, client: int) -> ClientSetup:
        services, sampling = self._services, entry.event.sampling
        images, labels = self.__records_of(client)
        place = services.place
        observer, seen = services.observer, None
        at_client = entry.noise_at == "client"
        if observer is not None and at_client:

            def seen(round_: int, client: int, exact: Parts, noisy: Parts) -> Parts:
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
            sampling.most_answers(entry.event.times) if isinstance(sampling, OneClient) else entry.event.times,
            keeps_state=at_client,
            place=replace(place, folder=place.folder and place.folder / entry.name),
            device=self.device,
            diagnostics=services.diagnostics,
            errors=services.client_folder and services.client_folder / "errors.txt",
            strict=observer is not None,
            seen=seen,
        )

    def _open_engine(self, setup: Callable[[int], ClientSetup]) -> Engine:
        services, kept = self._services, self._services.place.folder is not None
        if self._federation.name == "ray" and not kept:
            raise ValueError(
                "expected a folder for the state of clients with federation=ray, got none: a client whose process ends "
                "would forget how often it has answered. Use federation=inproc where nothing is to be written."
            )
        if services.observer is not None:  # it must see what answers are made of, and let its own errors through
            return InProcess(setup, let_through=(BaseException,))
        return self._federation.engine(
            setup,
            services.key.derive("faults"),
            private_log=services.client_folder and services.client_folder / "raised.txt",
            keep=KEEP if kept else None,
            let_through=(BrokenProgram, GlobalRandomness),
        )
