"""What a run starts from: its parent, its ledger, its key, and the data behind mechanisms."""

from __future__ import annotations

from pathlib import Path

import torch

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.runs.config import RunSpec, population_of
from dpgen_bench.runs.identity import source_fingerprint
from dpgen_bench.runs.store import RunFolder, Store
from dpgen_bench.utils.files import write_atomic


def open_ledger(spec: RunSpec, folder: RunFolder) -> Ledger:
    """The run's ledger: the one on disk when the run is resumed, else a new one with what its parent spent."""
    path = folder.path / "ledger.json"
    if path.exists():
        return Ledger.load(path)
    ledger = new_ledger(spec, len(spec.dataset().load("train")))
    ledger.path = path
    ledger.save()
    return ledger


def expect_same_source(spec: RunSpec, folder: RunFolder, ledger: Ledger) -> None:
    """Refuse to resume a run whose releases were made by another source of its method.

    A run's id does not tell sources of one `version` apart. Resumed with another source, a release would be made again
    for another query with the same noise, whose difference shows the exact value.

    Raises:
        ValueError: for another source, if releases were made.
    """
    path, now = folder.path / "source", source_fingerprint(type(spec.method()))
    made = any(entry.executed and entry.inherited_from is None for entry in ledger.entries.values())
    before = path.read_text() if path.exists() else ""
    if made and before and before != now:
        raise ValueError(
            f"run {spec.id} has made releases with another source of its method than the present one, whose noise must "
            "not be used twice: restore the source, take another seed, or raise the method's `version`."
        )
    if before != now:
        write_atomic(path, now)


def new_ledger(spec: RunSpec, records: int) -> Ledger:
    """An empty ledger for `records` records, or one with what the run's parent was approved for."""
    ledger = spec.new_ledger(records)
    if (inherited := inherited_ledger(spec)) is not None:
        ledger.inherit(inherited, _parent(spec).id)
    return ledger


def inherited_ledger(spec: RunSpec) -> Ledger | None:
    """The ledger of the run's parent; None without one. No record is touched.

    Raises:
        ValueError: for a parent that is not trained, or on other data, or whose releases are not private enough for
            this run.
    """
    if not spec.config.restart:
        return None
    parent = _parent(spec)
    if not parent.trained:
        # What a parent releases between this look at its ledger and the one at its checkpoint would not be counted.
        raise ValueError(
            f"expected restart.run={parent.id} to be a run that is trained, because this run inherits its ledger; "
            f"it is {parent.status()}. Give the command of the parent again until it has finished."
        )
    theirs, ours = parent.read_json("identity.json")["dataset"], spec.training["dataset"]
    if theirs != ours:
        raise ValueError(
            f"restart.run={parent.id} was trained on {theirs}; this run is on {ours}. A restart must use its "
            "parent's data, because it inherits the parent's ledger."
        )
    ledger = Ledger.load(parent.path / "ledger.json")
    spec.new_ledger(records=0).expect_parent(ledger, parent.id)
    return ledger


def open_data(spec: RunSpec, folder: RunFolder, ledger: Ledger, device: torch.device) -> tuple[PrivateData, Services]:
    dataset = spec.dataset()
    records = dataset.load("train")
    if dataset.unaccounted is not None:
        ledger.mark_unproven(dataset.unaccounted)
    private = folder.path / "private"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.chmod(0o700)
    services = Services(
        ledger,
        _key(spec, folder, ledger),
        device,
        Journal(private / "journal"),
        diagnostics=private / "diagnostics.jsonl" if ledger.diagnostics == "unsafe" else None,
        place=StatePlace(
            folder=private / "state",
            cache=results_of(spec) / "cache" / "private_state",
            identity={key: spec.training[key] for key in ("dataset", "seed", "version", "training_version")},
        ),
        client_folder=private / "federation",
    )
    data = PrivateData(
        records.images,
        records.labels,
        dataset.num_classes,
        services,
        clients=None if records.clients is None else records.clients.numpy(),
        num_clients=dataset.num_clients,
        federation=spec.federation(),
    )
    return data, services


def _key(spec: RunSpec, folder: RunFolder, ledger: Ledger) -> Key:
    """Root of draws and noise: the run id when seeded; from the operating system, kept until DONE, for release."""
    if spec.config.privacy.noise == "seeded":
        return Key.seeded(f"run:{spec.id}")
    path = folder.path / "private" / "noise.key"
    if not path.exists():
        if any(entry.inherited_from is None for entry in ledger.entries.values()):
            raise ValueError(
                f"run {spec.id} made releases with a noise key that is gone; training it again would spend its epsilon "
                "a second time. Restore its folder, or take another seed for a new run with a ledger of its own."
            )
        write_atomic(path, Key.from_os().secret)  # mkstemp's mode: readable by its owner only
    return Key.from_os(path.read_bytes())


def population_to_record(spec: RunSpec, folder: RunFolder) -> str | None:
    """The population's name, if the operator now gives one that the run's ledger does not have yet."""
    path = folder.path / "ledger.json"
    if spec.config.privacy.get("population") is None or not path.exists():
        return None
    ledger, named = Ledger.load(path), population_of(spec.config)
    return named if ledger.noise == "os" and ledger.population != named else None


def record_population(spec: RunSpec, folder: RunFolder) -> None:
    """Write that name into the ledger. It is no part of a run's identity, so it can be given or corrected later."""
    if (named := population_to_record(spec, folder)) is not None:
        ledger = Ledger.load(folder.path / "ledger.json")
        print(f"run {spec.id}: its population was {ledger.population!r} and is now {named!r}")
        ledger.population = named
        ledger.save()


def results_of(spec: RunSpec) -> Path:
    """The folder of results that the run belongs to."""
    return Path(str(spec.config.results))


def _parent(spec: RunSpec) -> RunFolder:
    return Store(results_of(spec)).find(str(spec.config.restart.run))


def parent_checkpoint(spec: RunSpec) -> Path | None:
    """The checkpoint that the run starts from; None without a parent.

    Raises:
        ValueError: if there is no checkpoint of that name.
    """
    if not spec.config.restart:
        return None
    parent, name = _parent(spec), spec.config.restart.get("checkpoint", "last")
    path = parent.path / "checkpoints" / f"{name}.pt"
    if not path.exists():
        there = sorted(p.stem for p in path.parent.glob("*.pt"))
        raise ValueError(f"expected the checkpoint {path}, found {there}; runtime.keep_steps=[...] keeps more of them.")
    return path
