"""The ledger: every allowance a run was approved for and how much of it was used, in a form accountants read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.sampling import Full, OneClient, sampling_from_dict
from dpgen_bench.utils.files import write_atomic

_IN_EACH_MODE = (
    "the number of records is treated as public, or that of clients where the unit is the client",
    "side channels such as running time and memory use",
    "hyperparameters chosen by looking at the results of other runs on the same records are not accounted for",
    "the sensitivity is that of sums in exact arithmetic; what floating-point summation of the clipped rows may add to "
    "it is bounded in docs/privacy.md and is not accounted for",
)
# What the proofs do not cover, by noise mode.
OUT_OF_SCOPE = {
    "seeded": (
        "floating-point attacks: noise is drawn and added in float32, and its low bits tell what it was added to",
        "randomness: draws and noise come from NumPy's Philox (on an accelerator, noise from its own Philox), which is "
        "not a cryptographic generator",
        *_IN_EACH_MODE,
    ),
    "os": (
        "randomness: draws and noise come from SHAKE-256, keyed by 256 bits from the operating system; the proofs "
        "take its output for uniform, which nobody can tell it from in feasible time",
        *_IN_EACH_MODE,
    ),
}

NOISE_MODES = {
    "seeded": "NOT FOR RELEASE: noise is a function of the run id, so anyone can subtract it, and it is float32 noise, "
    "whose low bits reveal what it was added to even without the run id; benchmark use on public data only",
    "os": "the exact value plus Gaussian noise, rounded to a fixed grid near std / 1024 without any error of sampling, "
    "so nothing is added to delta; keyed by entropy from the operating system; the key is deleted when the run is done",
}


UNKNOWN = "unknown"  # how an older ledger's inherited noise was made: it says so of its own run alone


class Invalidated(RuntimeError):
    """A private function raised: that alone tells something of the records, which no accountant covers."""


@dataclass(frozen=True)
class Failure:
    """A private function that raised. Whether it raises may depend on the records: an answer without noise.

    what: which function, and the type of the error; never the error's text, which may contain records.
    statement: the operator's, that this failure did not depend on records; None if there is none.
    """

    what: str
    statement: str | None = None

    @property
    def doubt(self) -> str:
        return (
            f"{self.what}, and whether it raises may depend on the records, which is an answer without noise "
            "(runtime.failures_independent_of_records=true states that it did not depend on them)"
        )


@dataclass(frozen=True)
class Entry:
    """One approved allowance: `times` releases of one bounded query. `executed` says how many were made.

    noise_at: who adds the noise, "server", which then sees what it is added to, or "client", before it sends.
    share: the share of the budget that was asked for, if one was.
    noise, diagnostics: of the run that was approved, as `Ledger` has them; None before the approval. A ledger from
        before entries had them gives its own to its own entries, and "unknown" to inherited ones.
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
            "bound": _plain(self.bound),
            "sensitivity": _plain(asdict(self.event.sensitivity)),
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
    """Noise mode and diagnostics of an entry of `ledger`, both as in its file; see `Entry` for older files."""
    own = (str(ledger["noise"]["mode"]), str(ledger["diagnostics"]))
    if row.get("noise") is not None:
        return str(row["noise"]), str(row["diagnostics"])
    # A run that is not for release itself inherits nothing that could make a difference.
    return own if row.get("inherited_from") is None or own[0] != "os" else (UNKNOWN, UNKNOWN)


@dataclass
class Ledger:
    """All allowances of a run, its own and those inherited from the run it was restarted from.

    unit: what a neighbouring data set has another of: a "record", or a "client" with all its records.
    records: how many units there are, a number that is treated as public.
    population: whose records these are, by the operator's name, for a run whose noise is from the operating system.
    doubts: why nothing is proven after all, in words; with any, the proven epsilon is infinite.
    warnings: what a reader of the figures has to know, and epsilon does not say; `announce` is called with a new one.
    failures: private functions that raised; each is a doubt until the operator states that records did not cause it.

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
    doubts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    announce: Callable[[str], None] = lambda _: None
    failures: list[Failure] = field(default_factory=list)
    handed_out: set[str] = field(default_factory=set)  # names of mechanisms made in this process; not on disk

    def __post_init__(self) -> None:
        if self.noise not in NOISE_MODES:
            raise ValueError(f"expected privacy.noise in {sorted(NOISE_MODES)}, got {self.noise!r}.")
        if self.diagnostics not in ("off", "unsafe"):
            raise ValueError(f"expected privacy.diagnostics off or unsafe, got {self.diagnostics!r}.")

    @property
    def events(self) -> list[Event]:
        """Approved allowances in full, in order of approval."""
        return [entry.event for entry in self.entries.values()]

    def events_seen_by_server(self) -> list[Event] | None:
        """What a server sees that knows whom it asked and keeps every answer; None if it adds the noise itself.

        A client answers `most_answers` times at most, each answer with noise of its own: so many unsampled Gaussian
        releases, since for the server no draw is secret.
        """
        if any(entry.noise_at == "server" for entry in self.entries.values()):
            return None
        return [
            replace(event, sampling=Full(), times=event.sampling.most_answers(event.times))
            for event in self.events
            if isinstance(event.sampling, OneClient)
        ]

    def by_client(self, clients: int) -> None:
        """From now on the unit is the client, of which there are `clients`; the number of records is not written down.

        Raises:
            ValueError: if releases were approved that protect single records.
        """
        if self.unit != "client" and self.entries:
            raise ValueError(
                "expected no release for single records before those for clients, got "
                f"{', '.join(self.entries)}: one ledger has one unit. Group the records first, or restart from a run "
                "whose unit is the client."
            )
        self.unit, self.records = "client", clients
        self.save()

    def doubt(self, why: str) -> None:
        """Note, on disk too, why nothing is proven of this run; a second time changes nothing."""
        if why not in self.doubts:
            self.doubts.append(why)
            self.save()

    def warn(self, warning: str) -> None:
        """Note a warning, on disk too, and announce it; a second time changes nothing."""
        if warning not in self.warnings:
            self.warnings.append(warning)
            self.save()
            self.announce(warning)

    def expect_new(self, name: str) -> None:
        """Refuse a name that was handed out in this process: noise is keyed by it, and would be the same again."""
        if name in self.handed_out:
            raise ValueError(f"a mechanism named {name!r} was already handed out; give each its own name.")

    def approve(self, entry: Entry) -> None:
        """Write an allowance down, on disk too, before its first release can happen."""
        self.entries[entry.name] = replace(entry, noise=self.noise, diagnostics=self.diagnostics)
        self.save()

    def expect_parent(self, parent: Ledger, run_id: str) -> None:
        """Refuse a parent whose releases would make a run for release none: this run would look private, and is not.

        Raises:
            ValueError: if this run's noise is "os" and the noise of a release of the parent's, or of a run that the
                parent itself inherited from, is public or unknown, or diagnostics were kept of it.
        """
        if self.noise != "os":
            return
        for entry in parent.entries.values():
            whose = f"the release {entry.name!r} of run {entry.inherited_from or run_id}"
            if entry.noise == "os" and entry.diagnostics == "off":
                continue
            found = f"privacy.noise={entry.noise} and privacy.diagnostics={entry.diagnostics}"
            raise ValueError(
                f"expected as the parent of a run with privacy.noise=os one whose releases were all made with "
                f"privacy.noise=os and privacy.diagnostics=off, got run {run_id}: {whose} was made with {found}, so "
                "what this run inherits is not private. Train the parent again with privacy.noise=os and "
                "privacy.diagnostics=off, start without restart=..., or take privacy.noise=seeded for a benchmark on "
                "public data."
            )

    def inherit(self, parent: Ledger, run_id: str) -> None:
        """Take over everything a parent run was approved for: its releases shaped the state we start from.

        Raises:
            ValueError: for a parent that `expect_parent` refuses.
        """
        self.expect_parent(parent, run_id)
        if parent.entries:
            self.unit, self.records = parent.unit, parent.records
        for why in parent.doubts:
            self.doubt(f"{run_id}, from which it was restarted: {why}")
        stated = [failure for failure in parent.failures if failure.statement is not None]
        self.failures += [replace(failure, what=f"{run_id}: {failure.what}") for failure in stated]
        for entry in parent.entries.values():
            name = f"{run_id}/{entry.name}"
            self.entries[name] = replace(entry, name=name, inherited_from=entry.inherited_from or run_id)

    def fail(self, what: str) -> None:
        """Note, on disk too, that a private function raised; the same failure twice in a row is one."""
        failure = Failure(what)
        if failure not in self.failures:
            self.failures.append(failure)
        self.doubt(failure.doubt)

    def invalidate(self, what: str, error: BaseException) -> None:
        """As `fail`, and `refuse_if_invalidated` raises from now on. The error is kept in memory alone."""
        self.invalidated, self.raised = what, error
        self.fail(what)

    def state_failures_independent(self, statement: str) -> list[Failure]:
        """Note the operator's statement that the failures so far did not depend on records; those that it settles.

        Epsilon is to be computed again. A failure of a parent's is not settled here: it is the parent's operator who
        can know, and a child inherits the doubt.
        """
        settled = [failure for failure in self.failures if failure.statement is None]
        if settled:
            self.failures = [replace(each, statement=each.statement or statement) for each in self.failures]
            answered = {failure.doubt for failure in settled}
            self.doubts = [why for why in self.doubts if why not in answered]
            self.epsilon = None
            self.save()
        return settled

    def refuse_if_invalidated(self) -> None:
        """Raise Invalidated if a private function has raised in this process, whether or not the method caught it."""
        if self.invalidated is not None:
            raise Invalidated(
                f"{self.invalidated} while it saw records, and that is an answer without noise. A private function "
                "must not raise, whatever the records are; mend it and start again."
            )

    def record(self, name: str, executed: int) -> None:
        """Note that `executed` releases of `name` were made. The count on record never goes down."""
        entry = self.entries[name]
        if executed > entry.executed:
            self.entries[name] = replace(entry, executed=executed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "budget": _plain(asdict(self.budget)),
            "records": self.records,
            "noise": {"mode": self.noise, "meaning": NOISE_MODES[self.noise]},
            "diagnostics": self.diagnostics,
            "population": self.population,
            "entries": [entry.to_dict() for entry in self.entries.values()],
            "doubts": self.doubts,
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
            doubts=data.get("doubts", []),
            warnings=data.get("warnings", []),
            failures=[Failure(**failure) for failure in data.get("failures", [])],
        )

    @classmethod
    def load(cls, path: Path) -> Ledger:
        ledger = cls.from_dict(json.loads(path.read_text()))
        ledger.path = path
        return ledger

    def save(self) -> None:
        """Write the ledger to its file, atomically; a ledger without a path lives in memory only."""
        if self.path is not None:
            write_atomic(self.path, json.dumps(self.to_dict(), indent=2))


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: write it as a word that float() reads back."""
    return {k: str(v) if isinstance(v, float) and math.isinf(v) else v for k, v in values.items()}
