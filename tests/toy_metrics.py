"""Small metrics for tests of the harness: some work and some fail."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, Unmeasurable

KEPT: list[bytes] = []  # by `Keeps`


@dataclass
class Mean:
    """The samples' mean pixel, as `name`; each call adds a line to `tally`."""

    name: str = "mean_pixel"
    tally: str | None = None
    apart: bool = False

    def one_core(self, device: object) -> bool:
        return self.apart

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        if self.tally:
            with open(self.tally, "a") as file:
                file.write(f"{self.name}\n")
        return {self.name: float(samples.images.float().mean())}


@dataclass
class Noise:
    """A draw from the metric's seeded generator."""

    name: str = "noise"

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        return {self.name: torch.rand(()).item()}


@dataclass
class Process(Mean):
    """The id of the process that measures, and its number of threads."""

    apart: bool = True

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        ctx.note(f"device {ctx.device}")
        return {f"{self.name}_pid": float(os.getpid()), f"{self.name}_threads": float(torch.get_num_threads())}


@dataclass
class Keeps(Mean):
    """Keeps half a gibibyte in its process, as metrics keep data sets, and takes longer than loky's next look at it."""

    apart: bool = True

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        KEPT.append(bytes(1 << 29).replace(b"\0", b"\1"))  # of pages that are written to
        time.sleep(1.5)
        return super().__call__(samples, real_test, ctx)


@dataclass
class Dies(Mean):
    """Kills its process; if `once` names a file, only until that file exists."""

    apart: bool = True
    once: str | None = None

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        if self.once is None or not Path(self.once).exists():
            if self.once:
                Path(self.once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {self.name: 1.0}


@dataclass
class Sleeps(Mean):
    """Writes its process id to `tally` and sleeps."""

    apart: bool = True
    seconds: float = 600.0

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        assert self.tally is not None
        Path(self.tally).write_text(str(os.getpid()))
        time.sleep(self.seconds)
        return {self.name: 1.0}


@dataclass
class Fails(Mean):
    """Raises if the file `unless` does not exist."""

    unless: str | None = None

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        if self.unless is None or not Path(self.unless).exists():
            raise ZeroDivisionError("one over nothing")
        return {self.name: 1.0}


@dataclass
class NeedsTrain:
    """The number of real training records."""

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        return {"train_size": float(len(ctx.train()))}


@dataclass
class NeedsFile:
    """Adds a note with the path of a file, and raises because the file is missing."""

    file: str = ""

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        ctx.note(f"weights of {self.file}")
        raise NotMeasured(f"needs {self.file}; copy it there")


@dataclass
class Never(Mean):
    """Has no value for a run on any machine; each call adds a line to `tally`."""

    name: str = "never"

    def __call__(self, samples: Records, real_test: Records, ctx: EvalContext) -> dict[str, float]:
        super().__call__(samples, real_test, ctx)
        raise Unmeasurable("it has no value for a set")


@dataclass
class Sum:
    """The sum of other metrics' values."""

    of: list[str] = field(default_factory=list)

    def combine(self, values: dict[str, float], notes: list[str]) -> dict[str, float]:
        if missing := [name for name in self.of if name not in values]:
            raise NotMeasured(f"missing {', '.join(missing)}")
        notes.append(f"of {len(self.of)}")
        return {"sum": sum(values[name] for name in self.of)}
