"""Methods whose samples, or saved files, contain values from outside of the generator's state: private or public."""

from __future__ import annotations

import functools
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from tests.toys import MeanImage, Painter

SEEN: list[float] = []
FOLDER = Path(tempfile.mkdtemp())
BRIGHTNESS = 0.25  # a constant of a module, which every process has


def remember(image: Tensor | None = None, kept: list[float] = []) -> float:  # noqa: B006, it is the cheat
    if image is not None:
        kept[:] = [float(image.nan_to_num().clamp(0, 1).mean())]
    return kept[0] if kept else 0.0


@functools.lru_cache
def public_pattern(size: int) -> float:
    return size / 100.0


class Reading(Painter):
    """A painter that adds a number to its images, which it reads from the place `where`."""

    held: ClassVar[float] = 0.0

    def __init__(self, num_classes: int, image_shape: list[int], where: str, path: str = "") -> None:
        super().__init__(num_classes, image_shape)
        self.where, self.path = where, path

    def number(self) -> float:
        readers: dict[str, Any] = {
            "global": lambda: SEEN[-1] if SEEN else 0.0,
            "class": lambda: Reading.held,
            "default": remember,
            "file": lambda: float((FOLDER / "seen.txt").read_text()),
            "release": lambda: SEEN[-1],
            "constant": lambda: BRIGHTNESS,
            "memo": lambda: public_pattern(8),
            "written": lambda: float(Path(self.path).read_text()),
            "network": lambda: float(len(socket.getaddrinfo("localhost", 80))),
            "connection": lambda: float(socket.create_connection(("127.0.0.1", 9), 1).fileno()),
            "process": lambda: float(len(subprocess.check_output([sys.executable, "--version"]))),
            "source": lambda: len(Path(__file__).read_text()) % 100 / 100.0,
        }
        return readers[self.where]()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return super().forward(z, y) + self.number()


@dataclass
class Outside(MeanImage):
    """Samples contain a number that is kept `where`: of records (global, class, default, file), or a public one."""

    where: str = "constant"

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        seen = float(images.nan_to_num().clamp(0, 1).mean()) if len(images) else 0.0
        if self.where == "global":
            SEEN.append(seen)
        if self.where == "class":
            Reading.held = seen
        if self.where == "default":
            remember(images)
        if self.where == "file":
            (FOLDER / "seen.txt").write_text(str(seen))
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        if self.where == "release":
            SEEN[:] = [float(net.means.detach().mean())]

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        generator = super().fit(data, ctx)
        config = {
            "_target_": "tests.cheats_outside.Reading",
            **{k: generator.net_config[k] for k in ("num_classes", "image_shape")},
        }
        net = Reading(data.num_classes, list(data.image_shape), self.where)
        net.load_state_dict(generator.net.state_dict())
        return NetGenerator(net, {**config, "where": self.where}, 4, data.num_classes, data.image_shape)


class Saving(NetGenerator):
    """A generator that saves one more file."""

    note: str = ""

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "note.txt").write_text(self.note)

    def draw_labels(self, n: int, seed: int) -> Tensor | None:
        return torch.full((n,), len(self.note) % self.num_classes)


@dataclass
class SavesNote(MeanImage):
    """Stores a value of records (if private) or a constant in a file next to the weights, or in the drawn labels."""

    private: bool = False
    labels: bool = False

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.seen = round(1000 * float(images.nan_to_num().clamp(0, 1).mean())) if len(images) else 0
        return images

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        painted = super().fit(data, ctx)
        state: Mapping[str, Any] = painted.config()
        generator = (Labelled if self.labels else Saving)(painted.net, **state)
        generator.note = self.seen * "x" if self.private else "released"
        return generator


class Labelled(Saving):
    """A generator whose labels depend on `note`, and which the harness saves."""

    save = NetGenerator.save


HELD: dict[str, Tensor] = {}


@functools.lru_cache
def shelf(name: str) -> list[Tensor]:
    return []


def shelved(kept: list[Tensor] = []) -> list[Tensor]:  # noqa: B006, it is the cheat
    return kept


@dataclass
class ComputedOnce(MeanImage):
    """The mean of the first records of the process, or a constant, is kept `where` and added to every generator."""

    where: str = "constant"
    mean: ClassVar[Tensor | None] = None

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        if len(images):
            mean = images.nan_to_num().clamp(0, 1).mean(dim=0)
            if self.where == "class" and ComputedOnce.mean is None:
                ComputedOnce.mean = mean
            if self.where == "global":
                HELD.setdefault("mean", mean)
            for name, place in (("cache", shelf("mean")), ("default", shelved())):
                if self.where == name and not place:
                    place.append(mean)
        return images

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        if self.where == "constant":
            HELD.setdefault("public", torch.full(data.image_shape, 0.5))
        kept = {"class": ComputedOnce.mean, "global": HELD.get("mean"), "constant": HELD.get("public")}
        places = {"cache": shelf("mean"), "default": shelved()}
        mean = places[self.where][0] if self.where in places else kept[self.where]
        with torch.no_grad():
            net.means.add_(mean)
