"""A protocol applied to a run: draw its samples, measure each metric, keep every figure beside the protocol's name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dpgen_bench.data.datasets import Records
from dpgen_bench.evaluate.metric import EvalContext, Metric, evaluate
from dpgen_bench.files import atomic
from dpgen_bench.generator import Generator
from dpgen_bench.results.store import RunFolder
from dpgen_bench.specify import RunSpec


def measure(spec: RunSpec, folder: RunFolder, device: torch.device) -> dict[str, Any]:
    """Write metrics/<protocol>.json, metric by metric; those measured before are kept, so it can be killed and redone.

    Test records are loaded here, after training, and go nowhere but into the metrics.
    """
    protocol = spec.config.protocol
    name = f"metrics/{protocol.name}.json"
    report = folder.read_json(name)
    wanted = OmegaConf.to_container(protocol)
    if folder.settled(wanted):
        return report
    if report.get("protocol") != wanted:  # another number of samples, another metric: nothing of it may be mixed in
        report = {"protocol": wanted, "metrics": {}}
    report["metrics"] = {key: kept for key, kept in report["metrics"].items() if kept["status"] != "failed"}
    samples = draw_samples(folder, protocol, spec.seed)
    dataset = spec.dataset()
    test = dataset.load("test")
    ctx = EvalContext(
        seed=spec.seed,
        device=device,
        num_classes=dataset.num_classes,
        cache=folder.path.parent.parent / "cache",
    )
    results = report["metrics"]
    for key, node in protocol.metrics.items():
        if key in results:
            continue
        metric: Metric = instantiate(node, _convert_="all")
        print(f"  {spec.id} measuring {key} on {len(samples)} samples ({protocol.name})", flush=True)
        results[key] = asdict(evaluate(metric, samples, test, ctx))
        if results[key]["status"] != "measured":
            print(f"  {spec.id} {key}: {results[key]['status']}: {results[key]['reason']}", flush=True)
        folder.write_json(name, report)
    report["complete"] = True
    folder.write_json(name, report)
    return report


def sample_labels(n: int, num_classes: int, how: str, seed: int) -> Tensor:
    """int64 [n]: `balanced` cycles through the classes, `uniform` draws each label independently."""
    if how == "balanced":
        return torch.arange(n) % num_classes
    if how == "uniform":
        return torch.randint(num_classes, (n,), generator=torch.Generator().manual_seed(seed))
    raise ValueError(f"expected protocol.labels balanced or uniform, got {how!r}.")


def draw_samples(folder: RunFolder, protocol: DictConfig, seed: int) -> Records:
    """The protocol's samples of a run's generator: read from samples.npz if it holds them, else drawn and kept there.

    Also writes samples.png, a grid with one column per class.
    """
    made_by = json.dumps({"n": int(protocol.num_samples), "labels": protocol.labels, "seed": seed})
    path = folder.path / "samples.npz"
    if path.exists():
        with np.load(path) as kept:
            if str(kept["made_by"]) == made_by:
                return Records(torch.from_numpy(kept["images"]), torch.from_numpy(kept["labels"]))
    generator = Generator.load(folder.path)
    labels = sample_labels(int(protocol.num_samples), generator.num_classes, protocol.labels, seed)
    samples = Records(generator.sample(labels, seed), labels)
    from torchvision.utils import save_image  # as long to import as torch, and tables need neither

    with atomic(folder.path / "samples.png") as temporary:
        save_image(class_grid(samples, generator.num_classes), temporary, format="png")
    with atomic(path) as temporary:  # last: where it is, the picture is too
        np.savez_compressed(temporary, images=samples.images.numpy(), labels=labels.numpy(), made_by=made_by)
    return samples


def class_grid(samples: Records, num_classes: int, rows: int = 8) -> Tensor:
    """A picture [3, H, W] in [0, 1] of the first `rows` samples of each class, one column per class."""
    from torchvision.utils import make_grid

    columns = []
    for label in range(num_classes):
        images = samples.images[samples.labels == label][:rows].float() / 255.0
        missing = images.new_zeros(rows - len(images), *samples.images.shape[1:])
        columns.append(torch.cat([images, missing]))
    cells = torch.stack(columns, dim=1).flatten(0, 1)
    return make_grid(cells, nrow=num_classes, padding=2, pad_value=0.5)
