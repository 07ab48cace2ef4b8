"""The evaluation phase of a run: draws samples, evaluates the metrics of a protocol, and writes the measurement.

A repeat draws other samples from the same generator and trains the metrics' classifiers again.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig

from dpgen_bench.config.spec import RunSpec
from dpgen_bench.evaluate.features import weights_hash, weights_path
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.protocol import build_metrics, evaluate_each, is_combined
from dpgen_bench.runs.samples import describe_samples, draw_samples, set_size
from dpgen_bench.store.folders import RunFailed, RunFolder
from dpgen_bench.store.measurements import SETTLED, Measurement, protocol_hash
from dpgen_bench.store.values import lost
from dpgen_bench.utils.environment import package_versions
from dpgen_bench.utils.errors import without_paths

FOR_RELEASE = (
    "this run's images are for release (privacy.noise=os), and the value would be computed from its training records "
    "without privacy accounting; measure a run with privacy.noise=seeded instead"
)


def measure(
    spec: RunSpec, folder: RunFolder, device: torch.device, again: bool = False, cache: Path | None = None
) -> Measurement:
    """Measure a generator by the config's protocol, and write the measurement after each metric.

    An interrupted evaluation continues after the last metric that was written. Test records are loaded here, after
    training, and are used by the metrics only.

    Args:
        folder: the folder with the generator, of a run or of one of its kept steps; the measurement is written to it.
        again: measure every metric again; the earlier measurement stays until the new one is complete and has all
            values that it has. If false, metrics that were measured before are kept, also those of another protocol
            that measures them in the same way (`Measurements.begun`), and failed ones are tried again.
        cache: see `EvalContext`; None is the folder `cache` next to `runs`.

    Returns:
        The complete measurement: the earlier one if the new one lacks some of its values.

    Raises:
        RunFailed: if `again`, and a metric of the earlier measurement could not be measured now. What was measured
            stays unfinished, so that only the others are tried by the next call.
    """
    protocol, record = spec.config.protocol, spec.protocol_record()
    if folder.measurements.fully_measured(record) and not again:
        return folder.measurements.of(record)
    metrics = build_metrics(protocol)
    # Continue an interrupted measurement; otherwise start from what this and other protocols have measured of it, or
    # from nothing if `again`.
    measurement = folder.measurements.unfinished(record) if again else folder.measurements.begun(record)
    measurement = {"protocol": record, "repeats": measurement.get("repeats", [])}
    dataset = spec.dataset()
    test = dataset.load("test")
    scratch = folder.path / "scratch" / protocol_hash(record)  # other protocols may be unfinished, too
    repeats = int(protocol.get("repeats", 1))
    for repeat in range(repeats):
        seed = repeat_seed(spec.seed, repeat)
        if repeat == len(measurement["repeats"]):
            measurement["repeats"].append({"seed": seed, "samples": {}, "metrics": {}})
        entry = measurement["repeats"][repeat]
        results = entry["metrics"]
        if metrics.keys() == results.keys() and all(result["status"] in SETTLED for result in results.values()):
            continue
        # Metrics that failed or could not be measured are tried again, as are those that combine others.
        retried = [key for key, r in results.items() if r["status"] not in SETTLED or is_combined(metrics[key])]
        for key in retried:
            del results[key]
        remaining = {key: metric for key, metric in metrics.items() if key not in results}
        # Only the samples of the first repeat are kept in the run's folder.
        samples = draw_samples(folder, protocol, seed, keep=repeat == 0)
        entry["samples"] = describe_samples(samples, dataset.num_classes, int(protocol.num_samples))
        ctx = EvalContext(
            seed=seed,
            device=device,
            num_classes=dataset.num_classes,
            cache=cache or folder.path.parent.parent / "cache",
            dataset=dataset,
            train_closed=FOR_RELEASE if is_for_release(spec.config) else None,
            scratch=scratch,
            set_size=set_size(folder),
        )
        title = f"{spec.id} {protocol.name}" + (f" repeat {repeat + 1}/{repeats}" if repeats > 1 else "")
        for note in entry["samples"]["notes"]:
            print(f"  {title}: {note}", flush=True)
        for key, result in evaluate_each(remaining, samples, test, ctx, spec.config.runtime.workers, results, title):
            notes = [without_paths(note) for note in result.notes]
            reason = None if result.reason is None else without_paths(result.reason)
            results[key] = {**asdict(result), "notes": notes, "reason": reason}
            # Write after each metric, because metrics may take hours and the evaluation may be interrupted.
            folder.measurements.write(measurement)
            if result.status != "measured":
                print(f"  {title} {key}: {result.status}: {result.reason}", flush=True)
            for note in result.notes:
                print(f"  {title} {key}: {note}", flush=True)
    shutil.rmtree(scratch, ignore_errors=True)
    with suppress(OSError):  # it does not exist, or belongs to other protocols, too
        scratch.parent.rmdir()
    earlier = folder.measurements.of(record)
    if missing := lost(earlier, measurement):
        if again:
            raise RunFailed(
                f"expected values of {', '.join(missing)} from measuring again, got none for the reasons above, so "
                "that all values of the earlier measurement are kept; remove the causes and give the same command, "
                "which measures what is missing."
            )
        return earlier
    weights = weights_path()
    measurement["made_with"] = {
        "packages": package_versions(),
        "inception_weights": weights_hash(weights) if weights.is_file() else None,
    }
    measurement["complete"] = True
    folder.measurements.write(measurement)
    return measurement


def is_for_release(config: DictConfig) -> bool:
    """Whether a run's images may be released as private, so that nothing else may be computed from its records."""
    return config.privacy.noise == "os" and config.privacy.diagnostics == "off"


def repeat_seed(seed: int, repeat: int) -> int:
    """Seed of the samples and classifiers of one repeat, below 2^31; that of repeat 0 is the run's seed."""
    if repeat == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"repeat {repeat} of seed {seed}".encode()).digest()[:4]) % 2**31
