"""Prepares the training of a run: fitting settings, parent run, ledger, noise key, population, and the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dpgen_bench.config.identity import source_fingerprint
from dpgen_bench.config.runtime import precision_of, state_gib_of
from dpgen_bench.config.spec import RunSpec, population_of
from dpgen_bench.data.private import PrivateData
from dpgen_bench.data.records import Records
from dpgen_bench.method import Context
from dpgen_bench.pretraining.pretrained import plugin_of
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.processes import Processes
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace
from dpgen_bench.store.folders import RunFolder, Store
from dpgen_bench.utils.files import write_atomic


def expect_data_of_method(spec: RunSpec) -> None:
    """Check that the settings of the method, and of its first stage, fit what is public of the data set.

    Raises:
        ValueError: by `expect_data` of the method or of the first stage, where it has one.
    """
    for part in (plugin_of(spec.method()), spec.first_stage()):
        if check := getattr(part, "expect_data", None):
            dataset = spec.dataset()
            check(tuple(dataset.class_names), tuple(dataset.image_shape))


def open_ledger(spec: RunSpec, folder: RunFolder, records: int) -> Ledger:
    """The run's ledger: the stored one if the run is resumed, else a new one that inherits the parent's releases.

    Args:
        records: the number of training records.
    """
    path = folder.path / "ledger.json"
    if path.exists():
        return Ledger.load(path)
    ledger = new_ledger(spec, records)
    ledger.path = path
    ledger.save()
    return ledger


def expect_same_source(spec: RunSpec, folder: RunFolder, ledger: Ledger) -> None:
    """Check that a resumed run has the same source of its method as when it made its releases.

    The run's id does not depend on the source if the method has a `version`. With another source, a release could be
    repeated for another query with the same noise; the difference of the two would reveal exact values.

    Raises:
        ValueError: if releases were made and the source has changed.
    """
    path, now = folder.path / "source", source_fingerprint(spec.method_class())
    has_released = any(entry.executed for entry in ledger.own.values())
    before = path.read_text() if path.exists() else ""
    if has_released and before and before != now:
        raise ValueError(
            f"expected the source of the method with which run {spec.id} made its releases, got a changed one; noise "
            "must not be used twice: restore the source, use another seed, or increase the method's `version`."
        )
    if before != now:
        write_atomic(path, now)


def new_ledger(spec: RunSpec, records: int) -> Ledger:
    """A ledger for `records` records, with the allowances of the run's parent if it has one."""
    ledger = spec.new_ledger(records)
    if (inherited := inherited_ledger(spec)) is not None:
        ledger.inherit(inherited, _parent(spec).id)
    return ledger


def inherited_ledger(spec: RunSpec) -> Ledger | None:
    """The ledger of the run's parent; None without one. No record is touched.

    Raises:
        ValueError: if the parent is not trained, has other data, or has releases that this run's privacy settings do
            not allow.
    """
    if not spec.config.restart:
        return None
    parent = _parent(spec)
    if not parent.trained:
        # Releases that a parent makes after its ledger is read here would not be counted.
        raise ValueError(
            f"expected restart.run={parent.id} to be trained, because this run inherits its ledger; it is "
            f"{parent.status()}. Run the command of the parent again until it has finished."
        )
    parent_dataset, dataset = parent.read_json("identity.json")["dataset"], spec.training["dataset"]
    if parent_dataset != dataset:
        raise ValueError(
            f"expected a parent run on {dataset}, got restart.run={parent.id} on {parent_dataset}. A restart must use "
            "its parent's data, because it inherits the parent's ledger."
        )
    ledger = Ledger.load(parent.path / "ledger.json")
    spec.new_ledger(records=0).expect_parent(ledger, parent.id)
    return ledger


def open_data(
    spec: RunSpec,
    folder: RunFolder,
    ledger: Ledger,
    records: Records,
    device: torch.device,
    processes: Processes | None = None,
) -> tuple[PrivateData, Services]:
    """The private data of a run, and the services (ledger, key, journal, state) that its mechanisms share.

    Args:
        records: the training records.
        processes: those that divide the draws of the run. All but number 0 only read the journal.
    """
    dataset = spec.dataset()
    if dataset.unaccounted is not None:
        ledger.mark_unproven(dataset.unaccounted)
    # What no other user of the machine may read: the journal of releases, private state, errors of clients.
    private = folder.path / "private"
    private.mkdir(mode=0o700, parents=True, exist_ok=True)
    private.chmod(0o700)
    services = Services(
        ledger,
        _key(spec, folder, ledger),
        device,
        Journal(private / "journal") if processes is None or processes.number == 0 else Journal(private / "journal", 0),
        diagnostics=private / "diagnostics.jsonl" if ledger.diagnostics == "unsafe" else None,
        place=StatePlace(
            folder=private / "state",
            cache=results_of(spec) / "cache" / "private_state",
            identity={key: spec.training[key] for key in ("dataset", "seed", "version", "training_version")},
            held=int(2**30 * state_gib_of(spec.config)),
        ),
        client_folder=private / "federation",
        padded=spec.config.runtime.get("padded"),
        stack=spec.config.runtime.get("stack"),
        processes=processes,
        host_noise=private / "host_noise",
    )
    data = PrivateData(
        records.images,
        records.labels,
        dataset.num_classes,
        services,
        ids=None if records.ids is None else records.ids.numpy(),
        keep_ids=records.keep_ids,
        clients=None if records.clients is None else records.clients.numpy(),
        num_clients=dataset.num_clients,
        class_names=dataset.class_names,
        federation=spec.federation(),
    )
    return data, services


def context_of(spec: RunSpec, folder: RunFolder, device: torch.device, services: Services, **more: Any) -> Context:
    """The context of the run's `fit`, with `more` arguments that say how this process reports and stores it."""
    return Context(
        spec.seed,
        device,
        scale=spec.scale(),
        services=services,
        folder=folder.path,
        parent=parent_checkpoint(spec),
        precision=precision_of(spec.config),
        **more,
    )


def _key(spec: RunSpec, folder: RunFolder, ledger: Ledger) -> Key:
    """The key of draws and noise: derived from the run id if seeded; else random, and stored until the run finishes."""
    if spec.config.privacy.noise == "seeded":
        return Key.seeded(f"run:{spec.id}")
    path = folder.path / "private" / "noise.key"
    if not path.exists():
        if ledger.own:
            raise ValueError(
                f"expected the noise key {path}, with which run {spec.id} made releases, but it is missing; training "
                "again would spend its epsilon a second time. Restore its folder, or use another seed for a new run."
            )
        write_atomic(path, Key.from_os().secret, private=True)
    return Key.from_os(path.read_bytes())


def population_to_record(spec: RunSpec, folder: RunFolder) -> str | None:
    """The name in `privacy.population`, if it differs from the one in the run's ledger; else None."""
    path = folder.path / "ledger.json"
    if spec.config.privacy.get("population") is None or not path.exists():
        return None
    ledger, population = Ledger.load(path), population_of(spec.config)
    return population if ledger.noise == "os" and ledger.population != population else None


def record_population(spec: RunSpec, folder: RunFolder) -> None:
    """Write the population's name into the ledger. It can be corrected later, as a run's id does not depend on it."""
    if (population := population_to_record(spec, folder)) is not None:
        ledger = Ledger.load(folder.path / "ledger.json")
        print(f"run {spec.id}: its population was {ledger.population!r} and is now {population!r}")
        ledger.population = population
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
        names = sorted(file.stem for file in path.parent.glob("*.pt"))
        raise ValueError(f"expected the checkpoint {path}, found {names}; runtime.keep_steps=[...] keeps more of them.")
    return path
