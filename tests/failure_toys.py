"""Methods whose private functions raise, or are interrupted, as long as a flag file exists."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.mechanism import Mechanism
from tests.toys import MeanImage, Painter

SECRET = "the mean brightness is"  # how each private error's text begins


class Unusual(Exception):
    pass


@dataclass
class Raises(MeanImage):
    """The third release raises as long as the file `flag` exists; `then` says how the method reacts."""

    flag: str = ""
    then: str = "nothing"

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3 and Path(self.flag).exists():
            if self.then == "interrupts":
                os.kill(os.getpid(), signal.SIGINT)
            text = f"{SECRET} {float(images.mean()):.6f}"
            raise (SystemExit if self.then == "exits" else Unusual)(text)
        return images

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        try:
            return super().fit(data, ctx)
        except Unusual as error:
            if self.then == "wraps":
                raise KeyError(str(error)) from error
            if self.then == "logs":
                ctx.log(error=str(error))
            if self.then == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.then == "goes on":
                return MeanImage(steps=1).fit(data, ctx)
            raise


@dataclass
class DeviceFails(MeanImage):
    """As long as the file `flag` exists, an accelerator's error is raised outside of releases: `when` says where."""

    flag: str = ""
    when: str = "after"  # the releases; or "wrapped", as the cause of another error after them; or "before" them

    def fail(self) -> None:
        if Path(self.flag).exists() and self.when == "of another kind":
            raise OSError("no accelerator")
        if Path(self.flag).exists():
            raise torch.AcceleratorError(f"CUDA error: device-side assert triggered, {SECRET} 0.5")

    def prepare(self, mechanism: Mechanism) -> None:
        if self.when == "before":
            self.fail()

    def after(self, data: PrivateData, ctx: Context, net: Painter) -> None:
        try:
            self.fail()
        except torch.AcceleratorError as error:
            if self.when == "wrapped":
                raise KeyError(str(error)) from error
            raise
        except OSError as error:  # an error that is its own cause ends the search, too
            raise error from error


@dataclass
class Stopped(MeanImage):
    """As long as the file `flag` exists, the third release receives the signal named there while it sees records."""

    flag: str = ""

    def row(self, images: Tensor, labels: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        flag = Path(self.flag)
        if self.calls == 3 and flag.exists():
            number = int(flag.read_text())
            flag.unlink()
            os.kill(os.getpid(), number)
            flag.with_suffix(".after").touch()  # reached only if the function continues
        return images
