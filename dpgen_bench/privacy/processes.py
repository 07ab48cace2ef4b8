"""One clipped sum over several processes, each with a part of the padded draw: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpgen_bench.training.plain import fingerprint


class NotDivisible(ValueError):
    """Raised if several processes are to train a method whose releases cannot be divided among them.

    A method that makes its mechanisms before its first release, as it must, has not used a record by then.
    """


class Processes:
    """The processes of a group of torch.distributed that make the releases of one run together.

    Every process executes the same method with the same records, key and public randomness. In a release on a padded
    draw, process i of k computes the summands of every k-th record of the draw, from the i-th on, and of every k-th
    public row. The sums are added up in process 0, which alone has the exact value and adds noise to it, once. All
    processes receive its noisy value, bit by bit, so that they stay in the same state.

    Only sums over the records of a Poisson draw are divided (`PerRecord`, `PerRecordGradient`); with any other sampling
    or bound, each process would do the work of all, so `PrivateData.mechanism` refuses them.

    Guarantees: before a mechanism is approved, all processes agree on the records, their order and their ids, and
    before a release uses a record, on the mechanism, its event and bound, the number of the release and the draw. So a
    record has one summand in one process, and the sum has the sensitivity in the ledger.

    An exception in one process must end the others: `dpgen run runtime.processes=2` and torchrun do so.

    Args:
        group: the group; None for the default one, which `torch.distributed.init_process_group` makes.

    Raises:
        ValueError: if there is no such group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "expected a group of processes, got none: call torch.distributed.init_process_group first."
            )
        self._group = group
        # Texts are compared by the hosts, so that accelerators need not wait for each other.
        self._hosts: Any = group
        if dist.get_backend(group) != "gloo":
            ranks = None if group is None else dist.get_process_group_ranks(group)
            self._hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=group is not None)
        self.number, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def part(self) -> tuple[int, int]:
        """(number of this process, number of processes)."""
        return self.number, self.size

    def add(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """In process 0 the sums over all processes of values by part; in others, values that are not to be used."""
        sums = {part: value.contiguous() for part, value in values.items()}
        for value in sums.values():
            dist.reduce(value, group_dst=0, group=self._group)
        return sums

    def from_first(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The float32 values by part of process 0, in every process."""
        received = {part: value.contiguous() for part, value in values.items()}
        for value in received.values():
            dist.broadcast(value, group_src=0, group=self._group)
        return received

    def expect_same_records(self, fingerprint: str) -> None:
        """Check that all processes have the same records in the same order; `fingerprint` is a hash of them.

        Raises:
            RuntimeError: if they have not, in every process; it does not name the private hash.
        """
        _, different = self._compared(fingerprint)
        if different:
            raise RuntimeError(
                f"expected {self.size} processes with the same records in the same order, got others in {different} "
                "than in process 0: a record could be in the parts of two processes. Let the dataset load them in a "
                "fixed order, from the same files, or leave out runtime.processes."
            )

    def expect_same_release(self, description: str) -> None:
        """Check that all processes are about to make the same release; `description` says which.

        Raises:
            RuntimeError: if they are not, in every process.
        """
        everywhere, different = self._compared(description)
        if different:
            raise RuntimeError(
                f"expected {self.size} processes that make the same release, got {everywhere[0]} in process 0 and "
                f"{everywhere[different[0]]} in process {different[0]}: the method draws random numbers that are not "
                "public, or reads the number of its process. Make its requests and releases the same in all of them."
            )

    def wait(self) -> None:
        """Wait until all processes are here."""
        dist.barrier(group=self._group)

    def expect_equal(self, state: Any, when: str) -> None:
        """Check that all processes have the same public state, bit by bit.

        Raises:
            RuntimeError: if they do not, in every process.
        """
        _, different = self._compared(fingerprint(state))
        if different:
            raise RuntimeError(
                f"expected {self.size} processes with the same networks {when}, got others in {different} than in "
                "process 0: the method draws random numbers that are not public, or the devices round differently. "
                "Continue the run with runtime.processes=1."
            )

    def _compared(self, text: str) -> tuple[list[str], list[int]]:
        """The texts of all processes, and the numbers of those whose text is not that of process 0."""
        everywhere = [""] * self.size
        dist.all_gather_object(everywhere, text, group=self._hosts)
        return everywhere, [number for number, own in enumerate(everywhere) if own != everywhere[0]]

    def nothing(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Zeros in the place of noisy values, which `from_first` overwrites."""
        return {part: torch.zeros_like(value, dtype=torch.float32) for part, value in values.items()}
