"""Short fits of every method in each of its branches, whose results are stored together with the version.

`python -m tests.behaviour` writes the stored values again. Raise the `version` of a method whose values have changed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpgen_bench.config.identity import method_version
from dpgen_bench.data.private import PrivateData
from dpgen_bench.method import Context
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.services import Services
from tests.defaults import named
from tests.perturbed import perturbation
from tests.test_learning_law import two_classes

STORED = Path(__file__).parent / "behaviour.json"
SEED, RECORDS, CLIENTS, SAMPLES, BLOCK = 0, 32, 4, 4, 7


@dataclass(frozen=True)
class Case:
    """A method with settings that use one of its branches. With epsilon inf there is noise only if they set it."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    epsilon: float = math.inf

    @property
    def name(self) -> str:
        settings_text = [f"{key}={value}" for key, value in self.settings.items()]
        return " ".join([self.method, f"epsilon={self.epsilon:g}", *settings_text])


TINY = 1e-6  # noise at clients is keyed by the message: rounding of the message changes all of the noise
_NTK: dict[str, Any] = dict(width=20, steps=12, batch_size=8, lr_decay=0.3, decay_steps=4)
_DPGAN: dict[str, Any] = dict(steps=16, batch_size=8, d_d=4, d_g=4, latent_dim=4, lr_d=5e-3, lr_g=5e-3)
_SINKHORN: dict[str, Any] = dict(steps=12, batch_size=6, width=4, lr=5e-3)
_CRITICS: dict[str, Any] = dict(
    steps=2, batch_size=4, lr=5e-3, n_critic=1, warm_start=1, generator="dcgan", width=2, critic_width=2, ema=0.5
)
_GS: dict[str, Any] = {**_CRITICS, "shards": 3}
_FEDAVG: dict[str, Any] = dict(
    clients_per_round=2, steps=6, local_steps=2, g_steps=2, batch_size=4, latent_dim=4, width=0.02, lr_d=1e-2, lr_g=5e-3
)

_LEAGUE_GAUSS: dict[str, Any] = dict(share_means=0.15, share_residuals=0.25, shrinkage=False)
_HP: dict[str, Any] = dict(
    sum_order=6, product_order=3, hidden=8, steps=12, epoch_steps=5, batch_size=8, lr_decay=0.3, length_scale2=0.15
)

_DPDM: dict[str, Any] = dict(
    batch_size=8, steps=8, noise_levels=2, lr=1e-2, ema=0.5, width=4, multipliers=[1, 1], blocks=1, patch=2, embedding=8
)
_CGAN: dict[str, Any] = dict(
    batch_size=8, hidden=6, latent_dim=4, steps=20, lr_d=0.3, lr_d_end=0.1, lr_d_steps=10, lr_g=2e-2
)
_PSG: dict[str, Any] = dict(images_per_class=2, batch_size=8, networks=2, rounds=2, updates=3, epochs=2, width=4)

_G_PATE: dict[str, Any] = dict(
    teachers=3, steps=4, batch_size=3, dims=2, bins=4, latent_dim=4, width=4, teacher_width=4, lr=5e-3, stack=2
)
_PATE: dict[str, Any] = dict(
    teachers=3,
    rounds=4,
    batch_size=4,
    votes=8,
    n_student=2,
    n_generator=2,
    hidden=8,
    student_width=4,
    teacher_width=3,
    lr=5e-3,
    stack=2,
)
_LENS: dict[str, Any] = dict(
    teachers=4, steps=4, first_d_steps=3, batch_size=4, top_k=200, sigma=0.5, width=4, teacher_width=6, stack=2, lr=4e-3
)

CASES = [
    Case("datalens", dict(teacher="dense", **_LENS)),
    Case("datalens", {**_LENS, "sigma": None, "threshold": 0.5}),
    Case("dp_cgan", _CGAN),
    Case("dp_cgan", dict(sigma=1.0, **_CGAN)),
    Case("dp_cgan", dict(clip="per_tensor", clip_norm=0.3, sigma=0.5, **_CGAN)),
    Case("dp_gauss", dict(dim=4)),
    Case("dp_gauss", dict(dim=4, clusters=2, share_radii=0.2), 10.0),
    Case("dp_gauss", dict(dim=4, **_LEAGUE_GAUSS)),
    Case(
        "dp_gauss", dict(dim=4, threshold=0.2, radius=0.2, radius_residual=0.1, radius_code=0.1, **_LEAGUE_GAUSS), 10.0
    ),
    Case("dp_gauss", dict(dim=4, clusters=2, **_LEAGUE_GAUSS)),
    Case("dp_gauss", dict(dim=4, share_radii=0.2, **_LEAGUE_GAUSS), 10.0),
    Case("dp_hp", _HP),
    Case("dp_hp", _HP, 10.0),
    Case("dp_hp", dict(generator="conv", sigma_sum=0.5, sigma_product=2.0, **_HP), 100.0),
    Case("dp_merf", dict(features=60, steps=12, batch_size=8, lr_decay=0.3, decay_steps=4, length_scale2=20.0)),
    Case("dp_merf", dict(features=60, steps=12, batch_size=8, lr_decay=0.3, decay_steps=4, length_scale2=20.0), 10.0),
    Case("dp_ntk", _NTK),
    Case("dp_ntk", dict(labels="balanced", **_NTK), 100.0),
    Case("dpgan", dict(n_d=2, **_DPGAN)),
    Case("dpgan", dict(n_d=2, sigma=1.0, **_DPGAN)),
    Case("dpgan", dict(n_d="adaptive", beta=0.7, threshold=0.6, **{**_DPGAN, "steps": 30})),
    Case("dpdm", dict(sampler="stochastic", sampler_steps=4, **_DPDM)),
    Case("dpdm", dict(sigma=0.5, sampler="ddim", sampler_steps=4, guidance=0.5, **_DPDM)),
    Case("dpdm", dict(sampler="churn", sampler_steps=4, churn=[2.0, 0.0, 100.0, 1.0], **_DPDM)),
    Case("dp_sinkhorn", _SINKHORN),
    Case("dp_sinkhorn", dict(sigma=0.1, **_SINKHORN)),
    Case("dp_sinkhorn", dict(sigma=0.1, clip="whole", debias_labels="repeated", **_SINKHORN)),
    Case("dp_sinkhorn", dict(sigma=0.1, perturb="parameter", clip="whole", **_SINKHORN)),
    Case("dp_sinkhorn", dict(cost="l1", p=0.0, activation="leaky_relu", **_SINKHORN)),
    Case("dp_sinkhorn", dict(cost="l2", p=1.0, exponent=2, lam=1.0, **_SINKHORN)),
    Case("gs_wgan", _GS),
    Case("gs_wgan", dict(sigma=0.1, **_GS)),
    Case("gs_wgan", dict(sigma=0.1, clip="whole", schedule="public_balanced", latent="normal", **_GS)),
    Case("gs_wgan", {**_GS, "generator": "resnet", "ema": 0.0}),
    Case("fed_gs_wgan", _CRITICS),
    Case("fed_gs_wgan", dict(sigma=TINY, schedule="public_balanced", max_answers=2, **_CRITICS)),
    Case("fed_gs_wgan", dict(sigma=TINY, latent="normal", **_CRITICS)),
    Case("fedavg_gan", _FEDAVG),
    Case("fedavg_gan", dict(sigma=0.01, selection="fixed", **_FEDAVG)),
    Case("fedavg_gan", dict(optimizer_d="adam", optimizer_g="adam", norm="layer", conditional=False, **_FEDAVG)),
    Case("psg", _PSG),
    Case("psg", dict(sigma=0.5, **_PSG)),
    Case("g_pate", dict(sigma=None, **_G_PATE)),
    Case("g_pate", dict(teacher="dense", sigma=0.5, threshold=0.0, **_G_PATE), 1e4),
    Case("pate_gan", dict(vote="sign", target="majority", explore=0.0, **_PATE)),
    Case("pate_gan", _PATE, 1e4),
    Case("real_data"),
    Case("sim_pe", dict(candidates=6, rounds=3)),
    Case("sim_pe", dict(candidates=6, rounds=3, threshold=1.0), 10.0),
    Case("public_fonts"),
    Case("uniform_noise"),
]


def computed(case: Case) -> dict[str, Any]:
    """The version, the ledger and the samples of a fit.

    Returns:
        version; ledger: sampling, sensitivities, std and times of each entry; grey: means of SAMPLES images, 0..255,
        over blocks of BLOCK x BLOCK pixels; steps, counters, and the integers of the log.
    """
    method = named(case.method, **case.settings)
    images, labels = two_classes(RECORDS)
    ledger = Ledger(Budget(case.epsilon, 1e-5, "replace_one", "rdp"), RECORDS)
    services = Services(ledger, Key.seeded("behaviour"))
    clients = np.arange(RECORDS) // 2 % CLIENTS
    data = PrivateData(images, labels, 2, services, clients=clients, num_clients=CLIENTS)
    context = Context(SEED, services=services)
    generator = method.fit(data, context)
    data.close()
    labels_of_samples = torch.arange(SAMPLES) % 2
    grey = torch.nn.functional.avg_pool2d(generator.sample_unrounded(labels_of_samples, SEED).double(), BLOCK)
    return {
        "version": method_version(type(method)),
        "ledger": [
            {key: entry[key] for key in ("name", "sampling", "sensitivity", "std", "times")}
            for entry in ledger.to_dict()["entries"]
        ],
        "steps": dict(context.steps_done),
        "counters": context.counters,
        "log": [[value for value in row.values() if isinstance(value, int)] for row in context.history],
        "grey": [round(float(value), 3) for value in grey.flatten()],
    }


def stored() -> dict[str, Any]:
    return dict(json.loads(STORED.read_text()))


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of the samples in grey levels."""
    return max(abs(a - b) for a, b in zip(one["grey"], other["grey"], strict=True))


def with_tolerance(case: Case) -> dict[str, Any]:
    """The values, with a tolerance for other machines: 4 times the largest difference of 5 perturbed fits."""
    plain = computed(case)
    spread = 0.0
    for seed in range(1, 6):
        with perturbation.Perturbation(seed):
            spread = max(spread, difference(plain, computed(case)))
    return {**plain, "tolerance": round(0.1 + 4.0 * spread, 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    STORED.write_text(json.dumps({case.name: with_tolerance(case) for case in CASES}, indent=1) + "\n")
