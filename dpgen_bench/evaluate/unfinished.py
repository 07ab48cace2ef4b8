"""Unfinished trainings of networks, kept in files, from which a measurement that was killed continues."""

from __future__ import annotations

import hashlib
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpgen_bench.training.checkpoint import public_randomness, restore_randomness
from dpgen_bench.training.plain import fingerprint, plain
from dpgen_bench.utils.files import atomic

# Seconds between two savings of one training. They are made after epochs, so that a longer epoch may be lost.
SAVE_S = 60.0


@dataclass
class Training:
    """A network in training, with all that its next epochs depend on besides the images.

    Attributes:
        net, optimiser: the network and its optimiser.
        rng: the CPU generator of the order of images and of their augmentation.
        epochs: epochs that are complete.
        best: correct predictions for held-out samples of the best epoch; -1 before the first.
        epochs_since: complete epochs since then.
        kept: the network's state after the best epoch, if that is kept.
    """

    net: nn.Module
    optimiser: torch.optim.Optimizer
    rng: torch.Generator
    epochs: int = 0
    best: int = -1
    epochs_since: int = 0
    kept: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """A copy of the whole state, also of the global generators, which draw dropout."""
        return plain(
            {
                "net": self.net.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "randomness": public_randomness(self.rng),
                "counts": (self.epochs, self.best, self.epochs_since),
                "kept": self.kept,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimiser.load_state_dict(state["optimiser"])
        restore_randomness(state["randomness"], self.rng)
        self.epochs, self.best, self.epochs_since = state["counts"]
        self.kept = state["kept"]


@dataclass
class Unfinished:
    """The file of one training. The network is bit for bit that of an uninterrupted training on the same machine.

    Reading the file executes no code. A warning reports a damaged file, and the network is then trained from the start.
    A warning reports a file that cannot be written, and the training continues.

    Args:
        folder: where the file is kept; None keeps nothing.
        key: names all that the training depends on. Its hash is a part of the file's name, and the file has it, too.
    """

    folder: Path | None
    key: str
    saved_at: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path | None:
        return self.folder and self.folder / f"unfinished-{hashlib.sha256(self.key.encode()).hexdigest()[:32]}.pt"

    def load_into(self, training: Training) -> None:
        """Set `training` to the saved state, if there is one."""
        if self.path is None:
            return
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
            if saved["key"] != self.key:
                raise ValueError("it is of another training")
            if saved["fingerprint"] != fingerprint(saved["state"]):
                raise ValueError("its checksum differs")
        except (FileNotFoundError, NotADirectoryError):
            return
        except Exception as error:  # torch.load raises errors of many classes for a damaged file.
            # PyTorch's own text advises to load the file in a way that can execute its code.
            reason = error if type(error) is ValueError else type(error).__name__
            _warn(f"{self.path} cannot be read ({reason}); the network is trained from the start.")
            return
        training.load_state_dict(saved["state"])

    def save(self, training: Training) -> None:
        """Write the state of `training`, if the last time was `SAVE_S` ago."""
        if self.path is None or time.monotonic() - self.saved_at < SAVE_S:
            return
        self.saved_at = time.monotonic()
        state = training.state_dict()
        try:
            with atomic(self.path) as temporary:
                torch.save({"key": self.key, "state": state, "fingerprint": fingerprint(state)}, temporary)
        except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as RuntimeError.
            _warn(f"{self.path} cannot be written ({error}); if the training is killed now, it must start again.")

    def remove(self) -> None:
        """Remove the file, after the training is finished."""
        if self.path is not None:
            with suppress(OSError):  # The network is trained; a file that cannot be removed must not lose it.
                self.path.unlink(missing_ok=True)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
