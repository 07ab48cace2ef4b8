"""The ledger: every allowance that a run was approved for and how much of it was used, as accountants read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, OneClient, sampling_from_dict
from dpgen_bench.utils.files import write_atomic
from dpgen_bench.utils.json_numbers import to_json

_IN_EACH_MODE = (
    "the number of records (of clients, if the unit is the client) is treated as public",
    "test records: metrics compare samples with them, and metric values have no noise",
    "side channels such as running time and memory use",
    "hyperparameters chosen by looking at the results of other runs on the same records are not accounted for",
    "the sensitivity is that of sums in exact arithmetic; what floating-point summation of the clipped rows may add to "
    "it is bounded in docs/privacy.md and is not accounted for",
)
# What the proofs of docs/accounting.md do not cover, by noise mode.
OUT_OF_SCOPE = {
    "seeded": (
        "floating-point attacks: noise is drawn and added in float32, and its low bits reveal what it was added to",
        "randomness: draws and noise come from NumPy's Philox (on an accelerator, noise from its own Philox), which is "
        "not a cryptographic generator",
        *_IN_EACH_MODE,
    ),
    "os": (
        "randomness: draws and noise come from SHAKE-256, keyed by 256 bits from the operating system; the proofs "
        "treat its output as uniform, since no feasible computation is known that distinguishes them",
        *_IN_EACH_MODE,
    ),
}

NOISE_MODES = {
    "seeded": "NOT FOR RELEASE: noise is a function of the run id, so anyone can subtract it, and it is float32 noise, "
    "whose low bits reveal what it was added to even without the run id; benchmark use on public data only",
    "os": "the exact value plus Gaussian noise, rounded to a fixed grid near std / 1024 and sampled without error, "
    "so nothing is added to delta; keyed by entropy from the operating system; the key is deleted when the run is done",
}

UNKNOWN = "unknown"  # noise mode of inherited entries in older ledgers, which state the mode of their own run only


class Invalidated(RuntimeError):
    """Raised after a private function has raised an error: whether it does may depend on records."""


@dataclass(frozen=True)
class Failure:
    """A private function that raised an error, which may depend on records and is covered by no accountant.

    Attributes:
        what: the function and the type of the error; never the error's text, which may contain records.
        statement: the operator's statement that this failure did not depend on records; None if there is none.
    """

    what: str
    statement: str | None = None

    @property
    def reason(self) -> str:
        """Why nothing is proven of a run with this failure, as `Ledger.unproven` holds it."""
        return (
            f"{self.what}, and whether it raises may depend on the records, which is an answer without noise "
            "(runtime.failures_independent_of_records=true states that it did not depend on them)"
        )


@dataclass(frozen=True)
class Entry:
    """One approved allowance: `times` releases of one bounded query, of which `executed` were made.

    Attributes:
        name: the mechanism's name, unique within the run.
        bound: the kind of bound and its numbers, as `Bound.describe` returns them.
        event: sampling, sensitivity, noise and number of releases, as accountants read them.
        executed: the number of releases that were made.
        calibrated: what was calibrated to the budget: "std", "times", or "nothing".
        inherited_from: the id of the run that made the releases, for an entry of a parent; else None.
        noise_at: "server" if the server adds the noise, and therefore sees the exact value; "client" if clients add it
            before they send.
        share: the requested share of the budget, or None.
        noise, diagnostics: the modes of the run that was approved, as in `Ledger`; None before the approval. In a
            ledger without them, own entries have the modes of the ledger, and inherited ones are "unknown".
    """

    name: str
    bound: dict[str, Any]
    event: Event
    executed: int = 0
    calibrated: str = "nothing"
    inherited_from: str | None = None
    noise_at: Literal["server", "client"] = "server"
    share: float | None = None
    noise: str | None = None
    diagnostics: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bound": to_json(self.bound),
            "sensitivity": to_json(asdict(self.event.sensitivity)),
            "sampling": self.event.sampling.to_dict(),
            "std": self.event.std,
            "times": self.event.times,
            "executed": self.executed,
            "calibrated": self.calibrated,
            "inherited_from": self.inherited_from,
            "noise_at": self.noise_at,
            "share": self.share,
            "noise": self.noise,
            "diagnostics": self.diagnostics,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Entry:
        sampling = sampling_from_dict(data["sampling"])
        sensitivity = Sensitivity(**{k: float(v) for k, v in data["sensitivity"].items()})
        event = Event(sampling, sensitivity, float(data["std"]), int(data["times"]))
        bound = {**data["bound"], "C": float(data["bound"]["C"])}
        return cls(
            data["name"],
            bound,
            event,
            data["executed"],
            data["calibrated"],
            data["inherited_from"],
            data.get("noise_at", "server"),  # older ledgers have none
            data.get("share"),
            data.get("noise"),
            data.get("diagnostics"),
        )


def entry_modes(row: Mapping[str, Any], ledger: Mapping[str, Any]) -> tuple[str, str]:
    """Noise mode and diagnostics of an entry of `ledger`, both as read from JSON; see `Entry` for older files."""
    own = (str(ledger["noise"]["mode"]), str(ledger["diagnostics"]))
    if row.get("noise") is not None:
        return str(row["noise"]), str(row["diagnostics"])
    # For a run that is not for release itself, the modes of inherited entries make no difference.
    return own if row.get("inherited_from") is None or own[0] != "os" else (UNKNOWN, UNKNOWN)


def unproven_reasons(ledger: Mapping[str, Any]) -> list[str]:
    """The reasons why nothing is proven of a run, from the content of its ledger.json; [] if there are none.

    Older ledgers have them under the key "doubts". Both keys count, and so does a value that is no list: a run that was
    marked in any version of the bench is not proven.
    """
    values = [ledger.get(key) or [] for key in ("unproven", "doubts")]
    return list(
        dict.fromkeys(str(reason) for value in values for reason in (value if isinstance(value, list) else [value]))
    )


@dataclass
class Ledger:
    """All allowances of a run, its own and those inherited from the run it was restarted from.

    Attributes:
        unit: the privacy unit, in which neighbouring data sets differ: a "record", or a "client" with all its records.
        records: number of units, which is treated as public.
        population: the operator's name of the people or objects whose records these are, for a run with noise from the
            operating system.
        unproven: reasons why nothing is proven; if there is one, the proven epsilon is infinite.
        warnings: what a reader of epsilon has to know and epsilon does not show; `announce` is called with a new one.
        public_data: what the method uses besides the records, such as "fonts", as it declares; None for nothing.
        failures: private functions that raised; each is a reason in `unproven` until the operator states that records
            did not cause it.

    Guarantees: the events composed for epsilon are the approved allowances in full (`times`), never the executed
    count: a stop decided by looking at results is not covered by the accountants.
    """

    budget: Budget
    records: int
    noise: str = "seeded"
    unit: str = "record"
    diagnostics: str = "off"
    entries: dict[str, Entry] = field(default_factory=dict)
    epsilon: dict[str, Any] | None = None
    population: str | None = None
    path: Path | None = None
    invalidated: str | None = None
    raised: BaseException | None = None
    unproven: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    announce: Callable[[str], None] = lambda _: None
    failures: list[Failure] = field(default_factory=list)
    public_data: str | None = None
    names_in_use: set[str] = field(default_factory=set)  # of mechanisms, in this process; not on disk

    def __post_init__(self) -> None:
        if self.noise not in NOISE_MODES:
            raise ValueError(f"expected privacy.noise in {sorted(NOISE_MODES)}, got {self.noise!r}.")
        if self.diagnostics not in ("off", "unsafe"):
            raise ValueError(f"expected privacy.diagnostics off or unsafe, got {self.diagnostics!r}.")

    @property
    def own(self) -> dict[str, Entry]:
        """The entries that were not inherited, by name."""
        return {name: entry for name, entry in self.entries.items() if entry.inherited_from is None}

    @property
    def events(self) -> list[Event]:
        """Approved allowances in full, in order of approval."""
        return [entry.event for entry in self.entries.values()]

    def events_seen_by_server(self) -> list[Event] | None:
        """The events in the view of a server that knows which clients it asked and keeps every answer.

        A client answers at most `max_participations` times, with independent noise, so these are `max_participations`
        unsampled releases (docs/accounting.md, "One client in each round"). None if the server adds the noise itself.
        """
        if any(entry.noise_at == "server" for entry in self.entries.values()):
            return None
        asked = [(event, event.sampling) for event in self.events if isinstance(event.sampling, OneClient)]
        return [replace(each, sampling=Full(), times=rounds.max_participations(each.times)) for each, rounds in asked]

    def set_client_unit(self, clients: int) -> None:
        """Make the client the privacy unit. The ledger states the number of clients, and not the number of records.

        Args:
            clients: the number of clients.

        Raises:
            ValueError: if releases that protect single records were approved before.
        """
        if self.unit != "client" and self.entries:
            raise ValueError(
                "expected no release for single records before those for clients, got "
                f"{', '.join(self.entries)}: one ledger has one unit. Group the records first, or restart from a run "
                "whose unit is the client."
            )
        self.unit, self.records = "client", clients
        self.save()

    def mark_unproven(self, reason: str) -> None:
        """Add a reason why nothing is proven of this run, and save it; a reason that is there is not added again."""
        if reason not in self.unproven:
            self.unproven.append(reason)
            self.save()

    def warn(self, warning: str) -> None:
        """Write down a warning, also on disk, and announce it; repeating it changes nothing."""
        if warning not in self.warnings:
            self.warnings.append(warning)
            self.save()
            self.announce(warning)

    def expect_new(self, name: str) -> None:
        """Refuse a name that is in use in this process: noise is keyed by names and would be the same again."""
        if name in self.names_in_use:
            raise ValueError(
                f"expected a new name for a mechanism, got {name!r}, which is in use; give each mechanism its own name."
            )

    def approve(self, entry: Entry) -> None:
        """Write down an allowance, also on disk, before the first release of the run."""
        self.entries[entry.name] = replace(entry, noise=self.noise, diagnostics=self.diagnostics)
        self.save()

    def expect_parent(self, parent: Ledger, run_id: str) -> None:
        """Refuse a parent whose releases are not private, if this run is for release: it would inherit them.

        Raises:
            ValueError: if this run's noise is "os" and the noise of a release of the parent's, or of a run that the
                parent itself inherited from, is public or unknown, or diagnostics were kept of it.
        """
        if self.noise != "os":
            return
        for entry in parent.entries.values():
            if entry.noise == "os" and entry.diagnostics == "off":
                continue
            release = f"the release {entry.name!r} of run {entry.inherited_from or run_id}"
            modes = f"privacy.noise={entry.noise} and privacy.diagnostics={entry.diagnostics}"
            raise ValueError(
                f"expected as the parent of a run with privacy.noise=os one whose releases were all made with "
                f"privacy.noise=os and privacy.diagnostics=off, got run {run_id}: {release} was made with {modes}, so "
                "this run would inherit a release that is not private. Train the parent again with these settings, "
                "start without restart=..., or set privacy.noise=seeded for a benchmark on public data."
            )

    def inherit(self, parent: Ledger, run_id: str) -> None:
        """Take over all allowances of a parent run, because this run starts from a state that depends on its releases.

        Raises:
            ValueError: for a parent that `expect_parent` refuses.
        """
        self.expect_parent(parent, run_id)
        if parent.entries:
            self.unit, self.records = parent.unit, parent.records
        self.public_data = ", ".join(dict.fromkeys(filter(None, (self.public_data, parent.public_data)))) or None
        for reason in parent.unproven:
            self.mark_unproven(f"{run_id}, from which it was restarted: {reason}")
        stated = [failure for failure in parent.failures if failure.statement is not None]
        self.failures += [replace(failure, what=f"{run_id}: {failure.what}") for failure in stated]
        for entry in parent.entries.values():
            name = f"{run_id}/{entry.name}"
            self.entries[name] = replace(entry, name=name, inherited_from=entry.inherited_from or run_id)

    def record_failure(self, what: str) -> None:
        """Write down, also on disk, that a private function raised; equal failures are written once."""
        failure = Failure(what)
        if failure not in self.failures:
            self.failures.append(failure)
        self.mark_unproven(failure.reason)

    def invalidate(self, what: str, error: BaseException) -> None:
        """As `record_failure`, and refuse all later releases of this process. `error` is kept in memory only."""
        self.invalidated, self.raised = what, error
        self.record_failure(what)

    def state_failures_independent(self, statement: str) -> list[Failure]:
        """Write down the operator's statement that the failures so far did not depend on records.

        Epsilon has to be computed again. A parent's failure is not settled here, but at the parent.

        Returns:
            the failures to which the statement applies.
        """
        settled = [failure for failure in self.failures if failure.statement is None]
        if settled:
            self.failures = [replace(each, statement=each.statement or statement) for each in self.failures]
            old = {failure.reason for failure in settled}
            self.unproven, self.epsilon = [reason for reason in self.unproven if reason not in old], None
            self.save()
        return settled

    def refuse_if_invalidated(self) -> None:
        """Raise Invalidated if a private function has raised in this process, whether or not the method caught it."""
        if self.invalidated is not None:
            raise Invalidated(
                f"{self.invalidated} while it saw records, which is an answer without noise. A private function must "
                "never raise, for any records; correct it and start a new run."
            )

    def record_executed(self, name: str, executed: int) -> None:
        """Write down that `executed` releases of `name` were made, the first one also on disk; it never decreases."""
        entry = self.entries[name]
        if executed > entry.executed:
            self.entries[name] = replace(entry, executed=executed)
            if entry.executed == 0:
                self.save()

    def to_dict(self) -> dict[str, Any]:
        """The content of ledger.json."""
        return {
            "unit": self.unit,
            "budget": to_json(asdict(self.budget)),
            "records": self.records,
            "noise": {"mode": self.noise, "meaning": NOISE_MODES[self.noise]},
            "diagnostics": self.diagnostics,
            "population": self.population,
            **({"public_data": self.public_data} if self.public_data else {}),
            "entries": [entry.to_dict() for entry in self.entries.values()],
            "unproven": self.unproven,
            "warnings": self.warnings,
            "failures": [asdict(failure) for failure in self.failures],
            "epsilon": self.epsilon,
            "out_of_scope": list(OUT_OF_SCOPE[self.noise]),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        epsilon = data["budget"]["epsilon"]
        budget = Budget(**{**data["budget"], "epsilon": None if epsilon is None else float(epsilon)})
        entries = {}
        for row in data["entries"]:
            noise, diagnostics = entry_modes(row, data)
            entries[row["name"]] = replace(Entry.from_dict(row), noise=noise, diagnostics=diagnostics)
        return cls(
            budget,
            data["records"],
            data["noise"]["mode"],
            data["unit"],
            data["diagnostics"],
            entries,
            data["epsilon"],
            data.get("population"),
            unproven=unproven_reasons(data),
            warnings=data.get("warnings", []),
            failures=[Failure(**failure) for failure in data.get("failures", [])],
            public_data=data.get("public_data"),
        )

    @classmethod
    def load(cls, path: Path) -> Ledger:
        """Read the ledger of a file, to which `save` then writes."""
        return replace(cls.from_dict(json.loads(path.read_text())), path=path)

    def save(self) -> None:
        """Write the ledger to its file, atomically; a ledger without a path is in memory only."""
        if self.path is not None:
            write_atomic(self.path, json.dumps(self.to_dict(), indent=2))
