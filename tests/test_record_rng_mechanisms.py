"""Randomness per record in mechanisms: rows depend on the record, not on the draw, and a diffusion method conforms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.generator import NetGenerator
from dpgen_bench.method import Context
from dpgen_bench.privacy.bounds import Batch, PerRecord, PerRecordGradient, PerRow, Whole, call
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Full, OneShard, Poisson
from dpgen_bench.privacy.services import Services
from dpgen_bench.testing import ConformanceError, check_method
from tests.toys import Painter, release_painter

KEY = Key.seeded("rows")


def open_data(ids=None, n=8, key="rng", journal=None, diagnostics=None, **more) -> PrivateData:
    """Records whose label is their id."""
    ids = np.arange(n) if ids is None else np.asarray(ids)
    images = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(3))[ids]
    ledger = Ledger(Budget(math.inf), n)
    return PrivateData(
        images,
        torch.arange(n)[ids],
        n,
        Services(ledger, Key.seeded(key), journal=journal or Journal(None), diagnostics=diagnostics),
        ids=ids,
        public_n=n,
        **more,
    )


BOUNDS = {
    "PerRecord": lambda: PerRecord(C=1.0, shape=(2,), microbatch=3),
    "PerRow": lambda: PerRow(C=1.0, shape=(2,)),
    "Whole": lambda: Whole(C=1.0, shape=(2,)),
}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("diagnostics", [False, True])
def test_rows_belong_to_mechanism_release_and_record(kind, diagnostics, tmp_path) -> None:
    rows: list[dict[tuple, tuple]] = [{}, {}]  # by mechanism, release and record: with record 3 and without it
    for seen, ids in zip(rows, (range(8), [0, 1, 2, 4, 5, 6, 7]), strict=True):
        data = open_data(ids, diagnostics=tmp_path / "diagnostics.jsonl" if diagnostics else None)

        def fn(where, x, y, rng, seen=seen):
            drawn = torch.cat([rng.normal(2), rng.uniform(1), rng.integers(0, 2**31)[:, None]], dim=1)
            seen.update({(*where, record): tuple(row) for record, row in zip(y.tolist(), drawn.tolist(), strict=True)})
            return torch.zeros(len(x), 2) if kind == "PerRecord" else torch.zeros(2)

        mechanisms = {name: data.mechanism(name, sample=Full(), bound=BOUNDS[kind](), times=2) for name in ("a", "b")}
        for name, release in mechanisms.items():
            for index in range(2):
                release(functools.partial(fn, (name, index)))
    everyone, without = rows
    assert len(set(everyone.values())) == len(everyone) == 2 * 2 * 8
    assert without == {place: row for place, row in everyone.items() if place[2] != 3}


class Denoiser(nn.Module):
    """Predicts the noise in [b, K, d] given its level [b, K, 1]."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, 8), nn.Tanh(), nn.Linear(8, d))

    def forward(self, noisy: Tensor, level: Tensor) -> Tensor:
        return self.net(torch.cat([noisy, level], dim=2))


def diffusion_losses(net: Denoiser, levels: int, images: Tensor, rng: RecordRng) -> Tensor:
    """The denoising loss [b] of each record, averaged over K noise levels of its own."""
    x = images.flatten(1)[:, None]
    level, noise = rng.uniform((levels, 1)), rng.normal((levels, x.shape[2]))
    noisy = (1 - level).sqrt() * x + level.sqrt() * noise
    return (net(noisy, level) - noise).square().mean(dim=(1, 2))


def gradient(data: PrivateData, net: nn.Module, fn, C: float, index: int = 0, **bound) -> Tensor:
    """The exact clipped sum of release number `index` (the budget is infinite), as one vector in float64."""
    bound = PerRecordGradient(C=C, module=net, **bound)
    release = data.mechanism("loss", sample=Full(), bound=bound, times=index + 1)
    public = None
    if bound.public_rows:
        public = torch.zeros(bound.public_rows, 1, 4, 4), torch.zeros(bound.public_rows, dtype=torch.int64)
    for _ in range(index + 1):
        total = release(fn, public=public)
    return torch.cat([part.double().flatten() for part in total.values()])


def denoiser() -> Denoiser:
    torch.manual_seed(0)
    return Denoiser(16)


@pytest.mark.parametrize("backend", ["bookkeeping", "opacus"])
@pytest.mark.parametrize("public_rows", [0, 3])
def test_the_gradient_sum_of_a_diffusion_loss_moves_by_one_clipped_row_when_a_record_leaves(
    backend, public_rows
) -> None:
    """Every gradient is longer than C, so the sum moves by C exactly, and each other record keeps its noise."""
    net, C, kept = denoiser(), 1e-3, []

    def fn(x, y, public=None, *, rng):
        kept.append(rng.normal(5))
        return diffusion_losses(net, 4, x, rng)

    options = {"backend": backend, "public_rows": public_rows}
    whole = gradient(open_data(), net, fn, C, **options)
    without = gradient(open_data([0, 1, 2, 4, 5, 6, 7]), net, fn, C, **options)
    assert float((whole - without).norm()) == pytest.approx(C, rel=1e-4)
    assert torch.equal(torch.cat([kept[0][:3], kept[0][4:]]), kept[1])
    halves = gradient(open_data(), net, fn, C, microbatch=3, **options)
    torch.testing.assert_close(halves, whole, rtol=1e-4, atol=1e-6 * C)


def test_a_generator_seeded_by_the_release_moves_the_sum_further() -> None:
    """Noise by position in the batch changes for all records after the removed one; `rng` avoids this."""
    net, C = denoiser(), 1e-3

    class ByPosition:
        def __init__(self, b: int) -> None:
            self.b, self.generator = b, torch.Generator().manual_seed(0)

        def normal(self, shape):
            return torch.randn(self.b, *shape, generator=self.generator)

        def uniform(self, shape):
            return torch.rand(self.b, *shape, generator=self.generator)

    def fn(x, y):
        return diffusion_losses(net, 4, x, ByPosition(len(x)))

    moved = gradient(open_data(), net, fn, C) - gradient(open_data(range(1, 8)), net, fn, C)
    assert float(moved.norm()) > 1.1 * C


def test_without_clipping_a_record_that_is_left_out_moves_no_other_records_rows() -> None:
    """The sum is not finite at first and is computed again on halves of the batch, down to the single record."""
    net, poison = denoiser(), torch.zeros(8, 1, 1, 1)
    poison[3] = math.nan

    def fn(x, y, rng):
        return diffusion_losses(net, 4, x + poison[y], rng)

    without = gradient(open_data([0, 1, 2, 4, 5, 6, 7]), net, fn, math.inf)
    torch.testing.assert_close(gradient(open_data(), net, fn, math.inf), without, rtol=1e-4, atol=1e-5)


def test_both_back_ends_see_the_same_rows() -> None:
    net = denoiser()

    def fn(x, y, rng):
        return diffusion_losses(net, 4, x, rng)

    one, other = (gradient(open_data(), net, fn, 0.1, backend=backend) for backend in ("bookkeeping", "opacus"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_rows_of_public_rows_do_not_depend_on_the_size_of_the_draw() -> None:
    net, seen = denoiser(), []

    def fn(x, y, public, rng):
        noise = rng.normal(3)
        seen.append(noise[public])
        return diffusion_losses(net, 2, x, rng)

    for ids in (range(8), [5], []):
        gradient(open_data(ids), net, fn, 1.0, public_rows=2)
    assert seen[0].shape == (2, 3)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[0][1])


def test_a_function_evaluated_on_one_record_sees_the_rows_of_the_whole_draw() -> None:
    """The check of row independence relies on this."""
    batch = Batch(torch.rand(6, 1, 2, 2), torch.arange(6), torch.tensor([4, 9, 2, 30, 7, 1]), KEY)

    def fn(x, y, rng):
        return x.flatten(1) + rng.normal(4) * rng.integers(1, 5)[:, None]

    whole = call(fn, batch)
    for i in range(6):
        assert torch.equal(call(fn, batch.rows(slice(i, i + 1)))[0], whole[i])


def test_a_release_made_again_or_read_from_the_journal_has_the_same_value(tmp_path) -> None:
    bound = PerRecord(C=1.0, shape=(1, 4, 4))

    def fn(x, y, rng):
        return x + rng.normal((1, 4, 4))

    def releases(journal: Journal | None) -> list[Tensor]:
        release = open_data(journal=journal).mechanism("sum", sample=Poisson(0.7), bound=bound, times=3)
        return [release(fn) for _ in range(3)]

    first, again, read = releases(None), releases(Journal(tmp_path)), releases(Journal(tmp_path))
    for one, two, three in zip(first, again, read, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: torch.zeros(2),
        lambda x, y, state: (torch.zeros(2), state),
        lambda x, y, state, generator, rng: (torch.zeros(2), state),
        lambda x, y, state, *, rng: (torch.zeros(2), state),
    ],
)
def test_a_function_with_private_state_takes_four_arguments(fn: Callable[..., Any]) -> None:
    data, sample = open_data(), OneShard(2)
    state = data.private_state("s", sample=sample, start=lambda records, rngs: {}, identity={})
    release = data.mechanism("rows", sample=sample, bound=Whole(C=1.0, shape=(2,)), times=1, state=state)
    with pytest.raises(ValueError, match=r"expected a function of \(images, labels, state, rng\)"):
        release(fn)
    assert release.executed == 0


@dataclass
class Diffusion:
    """Honest: a denoiser by DP-SGD, its loss averaged over noise levels of each record."""

    steps: int = 3
    C: float = 0.01

    def losses(self, net: Denoiser, step: int):
        return lambda x, y, rng: diffusion_losses(net, 3, x, rng)

    def fit(self, data: PrivateData, ctx: Context) -> NetGenerator:
        net = Denoiser(math.prod(data.image_shape)).to(ctx.device)
        painter = Painter(data.num_classes, list(data.image_shape)).to(ctx.device)
        bound = PerRecordGradient(C=self.C, module=net)
        release = data.mechanism("loss", sample=Full(), bound=bound, times=self.steps)
        for step in ctx.steps(self.steps, net=net):
            total = release(self.losses(net, step))
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter -= total[name] / (data.n * self.C)
        level = torch.full((1, data.num_classes, 1), 0.5, device=ctx.device)
        noise = torch.randn(1, data.num_classes, math.prod(data.image_shape), device=ctx.device)
        with torch.no_grad():
            painter.means += net(noise, level)[0].view_as(painter.means)
        return release_painter(painter, data)


KEYS = [Key.seeded(str(step)) for step in range(100)]  # made at import, because the suite refuses keys of plugins


class DiffusionSeededByStep(Diffusion):
    """Cheat: noise by position in the batch."""

    def losses(self, net: Denoiser, step: int):
        def fn(x, y):
            positions = torch.arange(len(x))
            return diffusion_losses(net, 3, x, RecordRng(KEYS[step], positions))

        return fn


def test_a_diffusion_method_conforms() -> None:
    check_method(Diffusion, image_shape=(1, 4, 4), num_classes=3)


def test_a_diffusion_method_with_noise_by_position_does_not_conform() -> None:
    with pytest.raises(ConformanceError, match="its declared sensitivity"):
        check_method(DiffusionSeededByStep, image_shape=(1, 4, 4), num_classes=3)
