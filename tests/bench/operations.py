"""Floating-point operations of the fits that records of the league have.

They are counted in fits of the records' configs to 60,000 made-up records, whose loops make few steps (STEPS, or one
period of the method's steps): the count is that of the fit outside its loops, and of the mean step of each loop times
the steps that the record has. Of GS-WGAN's warm start all steps are made, each with few iterations. A multiplication
and an addition are two operations. Matrix products, convolutions and attention of PyTorch are counted, with those of
clipping and pretraining; elementwise operations, decompositions and what other libraries compute are not.

The counts of a line name the run that they are of. They are kept while the line has this run, and made again after its
preset has changed. Each is in the file as soon as it is made. A fit that needs more memory or other data than there is
has none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from docs.make_results import LEAGUE, OPERATIONS, cost_line, counts_of
from docs.page_records import records
from dpgen_bench.config.building import build_dataset
from dpgen_bench.config.compose import compose_config
from dpgen_bench.store.records import Record
from dpgen_bench.utils.files import write_atomic
from tests.bench._counts import Counter
from tests.bench._fit import fit_observed
from tests.bench._machine import machine

RECORDS, STEPS = 60_000, 3
PERIODS = {"dpgan": "n_d", "psg": "updates"}  # settings that are the period of a method's steps
WARM_START = "warm_start"  # a loop that starts a group of critics in each step, with as many iterations as the setting


def of_record(record: Record) -> dict[str, Any]:
    """The counted operations of a record's fit: `outside` its loops, in the mean `step` of each, and in `all`."""
    config, counter = compose_config(record.content["command"]), Counter()  # with the folders of this machine
    in_steps: dict[str, list[int]] = defaultdict(list)

    @contextmanager
    def counted(t: int, phase: str) -> Iterator[None]:
        before = counter.flops
        yield
        in_steps[phase].append(counter.flops - before)

    period = int(config.method.get(PERIODS.get(config.method.name, ""), 1))
    steps = -(-STEPS // period) * period
    iterations = int(config.method.get(WARM_START, 0))
    if iterations:
        config.method[WARM_START] = STEPS

    def limit(total: int, phase: str) -> int:
        return total if phase == WARM_START else min(total, steps)

    fit_observed(config, RECORDS, None, "cpu", counted, padded=False, whole=counter, limit=limit)
    outside = counter.flops - sum(sum(counts) for counts in in_steps.values())
    step = {phase: sum(counts) / len(counts) for phase, counts in in_steps.items()}
    if iterations:
        step[WARM_START] *= iterations / STEPS
    made = record.content["cost"]["steps"]
    return {"outside": outside, "step": step, "all": outside + sum(made[phase] * step[phase] for phase in step)}


def measure() -> dict[str, Any]:
    """All values of this benchmark, by the lines of the table of costs."""
    torch.set_num_threads(1)
    runs: dict[str, list[Record]] = defaultdict(list)
    for record in records():
        if any(each["protocol"]["name"] == LEAGUE for each in record.measurements.all()):
            runs[" | ".join(cost_line(record))].append(record)
    counted = json.loads(OPERATIONS.read_text())["lines"] if OPERATIONS.exists() else {}
    lines: dict[str, dict[str, Any]] = {}
    known: dict[str, dict[str, Any]] = {}
    about = {"what": " ".join((__doc__ or "").split()), "machine": machine()}
    for line, (record, *others) in sorted(runs.items()):
        config, steps = record.config, record.content["cost"]["steps"]
        settings = str((config.method, config.get("init"), steps, build_dataset(config).image_shape))
        if kept := counts_of(counted, line, [record, *others]):
            lines[line] = known[settings] = kept
            continue
        if settings not in known:  # data sets with images of one size cost the same
            try:
                known[settings] = of_record(record)
            except (MemoryError, ValueError) as error:  # too little memory, or fonts that are not on the machine
                print(line, f"is not counted: {error}", flush=True)
                continue
            print(line, f"{known[settings]['all']:.3g}", flush=True)
        lines[line] = {**known[settings], "run": record.id}
        write_atomic(OPERATIONS, json.dumps({**about, "lines": {**counted, **lines}}, indent=2) + "\n")
    return {**about, "lines": lines}
