"""The measuring phase of a run: draw its samples, evaluate the metrics of its protocol, write down every value.

One repeat is one drawing of samples from the same generator, with classifiers trained on it again.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import DictConfig

from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.evaluate.protocol import build_metrics, evaluate_each, is_combined
from dpgen_bench.runs.config import RunSpec
from dpgen_bench.runs.measurements import Measurement
from dpgen_bench.runs.samples import describe_samples, draw_samples
from dpgen_bench.runs.store import RunFolder
from dpgen_bench.utils.errors import without_paths

FOR_RELEASE = (
    "this run's images are for release (privacy.noise=os), and the figure would be computed from its training records "
    "beside the privacy accounting; measure a run with privacy.noise=seeded instead"
)


def measure(
    spec: RunSpec, folder: RunFolder, device: torch.device, again: bool = False, cache: Path | None = None
) -> Measurement:
    """Write the run's report by its config's protocol, metric by metric: killed, it goes on where it was.

    What a complete report of the same protocol has already measured is kept, and the rest tried again; with `anew`
    everything is measured again, and the old report stays until the new one is complete. Test records are loaded here,
    after training, and go nowhere but into the metrics.

    Args:
        folder: where the generator lies and the report goes: a run's folder, or that of one of its kept steps.
        cache: see `EvalContext`; None is the one beside the runs.
    """
    protocol, wanted = spec.config.protocol, spec.protocol_record()
    if folder.measurements.fully_measured(wanted) and not again:
        return folder.measurements.of(wanted)
    metrics = build_metrics(protocol)
    measurement = folder.measurements.unfinished(wanted) or ({} if again else folder.measurements.of(wanted))
    measurement = {"protocol": wanted, "repeats": measurement.get("repeats", [])}
    dataset = spec.dataset()
    test = dataset.load("test")
    scratch = folder.path / "scratch"
    repeats = int(protocol.get("repeats", 1))
    for repeat in range(repeats):
        seed = repeat_seed(spec.seed, repeat)
        if repeat == len(measurement["repeats"]):
            measurement["repeats"].append({"seed": seed, "samples": {}, "metrics": {}})
        entry = measurement["repeats"][repeat]
        results = entry["metrics"]
        if metrics.keys() == results.keys() and all(kept["status"] == "measured" for kept in results.values()):
            continue
        # What failed or could not be measured is tried again, and with it what is combined of it.
        for key in [key for key, kept in results.items() if kept["status"] != "measured" or is_combined(metrics[key])]:
            del results[key]
        left = {key: metric for key, metric in metrics.items() if key not in results}
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
        )
        title = f"{spec.id} {protocol.name}" + (f" repeat {repeat + 1}/{repeats}" if repeats > 1 else "")
        for note in entry["samples"]["notes"]:
            print(f"  {title}: {note}", flush=True)
        for key, result in evaluate_each(left, samples, test, ctx, spec.config.runtime.workers, results, title):
            notes = [without_paths(note) for note in result.notes]
            reason = None if result.reason is None else without_paths(result.reason)
            results[key] = {**asdict(result), "notes": notes, "reason": reason}
            folder.measurements.write(measurement)
            if result.status != "measured":
                print(f"  {title} {key}: {result.status}: {result.reason}", flush=True)
            for note in result.notes:
                print(f"  {title} {key}: {note}", flush=True)
    measurement["complete"] = True
    folder.measurements.write(measurement)
    shutil.rmtree(scratch, ignore_errors=True)
    return measurement


def is_for_release(config: DictConfig) -> bool:
    """Whether a run's images may be given away as private, so that nothing else may be told of its records."""
    return config.privacy.noise == "os" and config.privacy.diagnostics == "off"


def repeat_seed(seed: int, repeat: int) -> int:
    """Seed of one repeat's samples and classifiers, below 2^31: the run's own for the first."""
    if repeat == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"repeat {repeat} of seed {seed}".encode()).digest()[:4]) % 2**31
