"""One clipped sum over two processes is that of one process, with noise once."""

from __future__ import annotations

import math
import multiprocessing
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dpgen_bench.data.private import PrivateData
from dpgen_bench.privacy import mechanism as mechanisms
from dpgen_bench.privacy.bounds import PerRecord, PerRecordGradient
from dpgen_bench.privacy.events import Budget
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.processes import Processes
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.sampling import Poisson
from dpgen_bench.privacy.services import Services
from tests import toys

N, TIMES = 41, 3


def releases(processes: Processes | None) -> dict[str, list]:
    """By case, the exact values, the noisy values, and the ledger's events."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    images, labels = toys.records(N, (1, 8, 8))
    public = (torch.rand(5, 1, 8, 8, generator=toys.seeded(1)), torch.arange(5))

    def losses(x: Tensor, y: Tensor, mask: Tensor, rng: RecordRng) -> Tensor:
        x = x.double() + 0.1 * rng.normal((1, 8, 8)).double()
        return F.cross_entropy(net(x), torch.where(mask, 9 - y, y), reduction="none")

    cases = {
        "gradients": (PerRecordGradient(C=0.1, module=net, public_rows=5, microbatch=4, copies=2), losses, public),
        "rows": (PerRecord(C=1.0, shape=(1, 8, 8)), lambda x, y: 1.0 - x.double(), None),
    }
    results = {}
    for name, (bound, fn, rows) in cases.items():
        values: list = []

        class Watcher(toys.Watcher):
            def release(self, mechanism, index, drawn, exact, noisy, values=values):
                values.append((exact, noisy))
                return noisy

            def before_release(self, *args):
                pass

        services = Services(
            Ledger(Budget(math.inf), N), Key.seeded("p"), observer=Watcher(), padded=True, processes=processes
        )
        data = PrivateData(images, labels, 10, services)
        release = data.mechanism("m", sample=Poisson(0.4), bound=bound, times=TIMES, std=0.3)
        for _ in range(TIMES):
            release(fn, public=rows)
        events = [(entry.event, entry.executed) for entry in services.ledger.entries.values()]
        results[name] = [values, events]
    return results


def disagreeing(processes: Processes, different: str) -> None:
    """One release of two processes, of which the second asks for another one."""
    other = processes.number == 1
    services = Services(
        Ledger(Budget(math.inf), N),
        Key.seeded("q" if other and different == "key" else "p"),
        padded=True,
        processes=processes,
    )
    images, labels = toys.records(N, (1, 8, 8))
    if other and different in ("order of records", "a record"):
        order = torch.arange(N).roll(1) if different == "order of records" else torch.arange(N)
        images, labels = images[order].clone(), labels[order]
        images[0] = 1 - images[0] if different == "a record" else images[0]
    ids = np.arange(N) + 1 if other and different == "ids" else None
    data = PrivateData(images, labels, 10, services, ids=ids)
    bound = PerRecord(C=100.0 if other and different == "C" else 1.0, shape=(1, 8, 8))
    sample = Poisson(0.9 if other and different == "rate" else 0.4)
    first, second = (data.mechanism(name, sample=sample, bound=bound, times=1, std=0.0) for name in ("a", "b"))

    def never(x: Tensor, y: Tensor) -> Tensor:
        raise AssertionError("the private function was called")

    (second if other and different == "order" else first)(never)


def work(number: int, path: str, queue: multiprocessing.Queue) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=2)
        noises = []
        add = mechanisms.add_noise
        mechanisms.add_noise = lambda *args: noises.append(1) or add(*args)  # type: ignore[assignment]
        results = releases(Processes())
        plain = {
            name: [
                [({p: v.tolist() for p, v in e.items()}, {p: v.tolist() for p, v in n.items()}) for e, n in values],
                ev,
            ]
            for name, (values, ev) in results.items()
        }
        queue.put((number, plain, len(noises)))
        Processes().expect_equal({"net": [torch.ones(2), 0.5]}, "now")
        with pytest.raises(RuntimeError, match=r"expected 2 processes with the same networks now, got others in \[1\]"):
            Processes().expect_equal({"net": [torch.full((2,), 1.0 + 1e-7 * number), 0.5]}, "now")
        for different in ("C", "rate", "order", "key"):
            with pytest.raises(RuntimeError, match="expected 2 processes that make the same release"):
                disagreeing(Processes(), different)
        for different in ("order of records", "a record", "ids"):
            with pytest.raises(
                RuntimeError, match=r"expected 2 processes with the same records .* got others in \[1\]"
            ):
                disagreeing(Processes(), different)
        queue.put(("agreed", number, None))
        dist.barrier()
    except BaseException:
        queue.put((number, traceback.format_exc(), 0))


def test_two_processes_release_what_one_releases(tmp_path):
    one = releases(None)
    context = multiprocessing.get_context("fork")  # torch is imported already
    queue = context.Queue()
    workers = [context.Process(target=work, args=(i, str(tmp_path / "group"), queue)) for i in range(2)]
    for worker in workers:
        worker.start()
    answers = {}
    agreed = set()
    for _ in range(4):
        number, results, noises = queue.get(timeout=300)
        assert not isinstance(results, str), results
        if number == "agreed":
            agreed.add(results)
        else:
            answers[number] = results, noises
    assert agreed == {0, 1}
    for worker in workers:
        worker.join(60)
    first, second = (answers[i][0] for i in range(2))
    assert answers[0][1] == sum(len(parts) for values, _ in one.values() for parts, _ in values)
    assert answers[1][1] == 0  # noise is added once
    for name, (values, events) in one.items():
        assert first[name][1] == second[name][1] == events
        for (exact, noisy), (added, released), (own, received) in zip(
            values, first[name][0], second[name][0], strict=True
        ):
            assert received == released  # bit by bit
            for part, value in exact.items():
                together = torch.tensor(added[part], dtype=torch.float64)
                assert value.dtype == torch.float64
                assert torch.allclose(together, value, rtol=0.0, atol=1e-12)
                assert torch.allclose(torch.tensor(released[part]), noisy[part], rtol=0.0, atol=1e-6)
                assert own[part] != value.tolist()  # a part of the sum only


def test_a_group_of_processes_is_needed():
    with pytest.raises(ValueError, match="expected a group of processes, got none"):
        Processes()
