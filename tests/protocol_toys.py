"""Helpers of the tests of protocols: protocols of toy metrics, a generator and its run folder."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import OmegaConf

from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import RunSpec, build_spec
from dpgen_bench.generator import NetGenerator
from dpgen_bench.runs.measure import measure
from dpgen_bench.store.folders import RunFolder, Store
from tests.toys import Painter

TOYS = "tests.toy_metrics"


def metric(kind: str, **fields) -> dict:
    return {"_target_": f"{TOYS}.{kind}", **fields}


def spec_for(results: Path, metrics: dict, *overrides: str, **protocol) -> RunSpec:
    config = compose_config([f"results={results}", "dataset=digits", "method=dp_merf", *overrides])
    OmegaConf.set_struct(config, False)
    config.protocol = {"name": "toy", "num_samples": 40, "labels": "balanced", **protocol, "metrics": metrics}
    return build_spec(config)


def generator(brightness: float = 0.5) -> NetGenerator:
    net = Painter(10, [1, 28, 28])
    torch.nn.init.constant_(net.means, brightness)
    config = {"_target_": "tests.toys.Painter", "num_classes": 10, "image_shape": [1, 28, 28]}
    return NetGenerator(net, config, 4, 10, (1, 28, 28))


def released(results: Path) -> RunFolder:
    """The folder of a run that has a generator and no measurements."""
    folder = Store(results).folder("run")
    folder.path.mkdir(parents=True)
    generator().save(folder.path)
    return folder


def run(spec: RunSpec, folder: RunFolder, **how) -> dict:
    return measure(spec, folder, torch.device("cpu"), **how)


def the_measurement(folder: RunFolder) -> dict:
    """The one complete measurement of the run."""
    (measurement,) = folder.measurements.all()
    return measurement
