"""`Pretrained`: a method whose networks start from a fit of the same method on images of a first stage.

The first stage makes releases with a share of the run's budget. Everything else is post-processing of them: the method
is fitted without clipping and noise on images that the first stage draws, and the networks that it trains are where its
own fit on the records starts. The mechanisms of the first stage are requested before those of the method, and its
releases are made when the method enters its first loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from torch import nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import Generator
from dpgen_bench.method import Context, Method
from dpgen_bench.pretraining.gaussians import LabelledImages
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state_file import StatePlace

VERSION = 1  # raised when the same settings pretrain differently; part of the identity of runs with a first stage


class FirstStage(Protocol):
    """A first stage, which `_target_` in conf/init/NAME.yaml names. Its names of mechanisms start with "init_"."""

    share: float

    def request(self, data: PrivateData, ctx: Context) -> Callable[[], LabelledImages]:
        """Request mechanisms, and return the function that makes the releases and draws images from them."""
        ...


class Pretrained:
    """A method with a first stage; itself a method.

    It states no claimed epsilon: no paper counts these releases together.

    Args:
        method: What is fitted to the records.
        stage: Releases images.
        pretraining: The same method with the settings with which it is fitted to those images.
    """

    def __init__(self, method: Method, stage: FirstStage, pretraining: Method) -> None:
        self.method, self.stage, self.pretraining = method, stage, pretraining
        self.public_data = getattr(method, "public_data", None)

    def fit(self, data: PrivateData, ctx: Context) -> Generator:
        """Fit the method, starting from networks that are fitted to images of the first stage.

        Raises:
            ValueError: If the method has no loop with networks, which could be pretrained, or if the run restarts from
                another one, whose networks the pretraining would replace.
        """
        if ctx._parent is not None:
            raise ValueError("expected restart=null with a first stage, got a parent run; use init=none or no parent.")
        draw, done = self.stage.request(data, ctx), []

        def pretrain(stateful: dict[str, Any]) -> None:
            trained = self._networks(draw(), data, ctx)
            started = {name: owner for name, owner in stateful.items() if issubclass(type(owner), nn.Module)}
            for name, network in started.items():
                if name not in trained:
                    raise ValueError(
                        f"expected the loop of {type(self.method).__name__} to have the networks {sorted(trained)} of "
                        f"its pretraining, got {name!r}; use init=none."
                    )
                try:
                    network.load_state_dict(trained[name].state_dict())
                except RuntimeError as error:
                    raise ValueError(
                        f"expected the same network {name!r} in the pretraining and the training of a method, got "
                        f"others ({error}); remove sizes of networks from method.pretraining."
                    ) from error
            done.append(sorted(started))

        ctx.before_training(pretrain)
        generator = self.method.fit(data, ctx)
        if not any(done):
            raise ValueError(
                f"expected a method that trains networks in ctx.steps(...), got {type(self.method).__name__}, in which "
                "nothing can be pretrained; use init=none."
            )
        return generator

    def _networks(self, images: LabelledImages, data: PrivateData, ctx: Context) -> dict[str, nn.Module]:
        """The networks of a fit without clipping and noise on these images, by their names in its last loop."""
        pixels, labels = images
        # No budget is spent here. The key is public: it draws batches of released images.
        ledger = Ledger(Budget(math.inf, data.budget.delta, data.budget.relation, data.budget.accountant), len(labels))
        folder = ctx._releases.place.folder if isinstance(ctx._releases, Services) else None
        key, place = Key.seeded(f"pretraining:{ctx.seed}"), StatePlace(folder and folder / "pretraining")
        services = Services(ledger, key, device=data.device, place=place)
        public = PrivateData(pixels, labels, data.num_classes, services, ids=np.arange(len(labels)))
        public_ctx = PretrainingContext(ctx, services)
        self.pretraining.fit(public, public_ctx)
        return public_ctx.networks


def plugin_of(method: Method) -> Method:
    """The method itself without its first stage."""
    return method.method if isinstance(method, Pretrained) else method


class PretrainingContext(Context):
    """The context of a fit to images of a first stage. Its loops are phases of the run, with checkpoints of their own.

    Args:
        outer: The context of the run.
        services: Those of the images.
    """

    def __init__(self, outer: Context, services: Services) -> None:
        self.seed, self.device, self.generator, self.scale = outer.seed, outer.device, outer.generator, outer.scale
        self.precision = outer.precision
        self._public, self._loop, self._releases = outer._public, outer._loop, outer._releases
        self._outer, self._images = outer, services
        self.networks: dict[str, nn.Module] = {}

    def warm_start(self, **stateful: Any) -> None:
        """Nothing: the parent of a run is where the fit to the records starts."""

    def log(self, **scalars: float | str) -> None:
        self._outer.log(**scalars)

    def count_bytes(self, *, server_to_client: int = 0, client_to_server: int = 0) -> None:
        """Nothing: no client takes part."""

    def count(self, **counters: int) -> None:
        """Nothing: counters are those of the fit to the records."""

    def steps(self, total: int, *, phase: str = "train", **stateful: Any) -> Iterator[int]:
        if isinstance(self._releases, Services):  # so that state of shards of images is written with checkpoints, too
            self._releases.controls.update({f"init:{name}": own for name, own in self._images.controls.items()})
        networks = {name: owner for name, owner in stateful.items() if issubclass(type(owner), nn.Module)}
        self.networks = networks or self.networks
        return self._outer.steps(total, phase=f"init_{phase}", init_releases=_Position(self._images), **stateful)


class _Position:
    """The numbers of the releases of a fit to public images, as a part of its checkpoints."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def state_dict(self) -> dict[str, int]:
        return self._services.executed()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._services.resume_at(state)
