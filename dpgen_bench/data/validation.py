"""`Validation`: a dataset to choose settings on. Its test records are training records of another dataset."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from dpgen_bench.data.federations import Derived, base_of
from dpgen_bench.data.records import DatasetSpec, Records, Split, check_split, split_by_pixels

REVISION = 2  # Raise it when another record would be a test record: it enters the run id.


@dataclass(frozen=True)
class Validation(Derived):
    """The training records of another dataset, of which about a `fraction` are test records here.

    The accuracy of the best of many settings on test records is too high for that setting. So choose settings on this
    dataset, and measure the chosen one on `base`. A hash of its pixels decides to which split a record belongs: equal
    images are in one split, and no record changes its split if another one joins or leaves.

    A choice by accuracies on training records is itself computed from them, and the ledgers of runs do not cover it.
    The records of public data sets need no protection; for private ones choose settings on similar public data.

    Args:
        base: "mnist", "fashion_mnist", "digits", "cifar10" or "emnist" with its default settings, or another dataset.
        root: Folder of the base's files; if empty, the root of `base`.
        fraction: In (0, 1).

    Raises:
        ValueError: For an unknown base, one with clients, or a fraction outside its range.
    """

    base: DatasetSpec | str
    name: str = "validation"
    root: str = ""
    fraction: float = 1 / 6

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", base_of(self.base, self.root))
        object.__setattr__(self, "root", self.source.root)
        if self.source.num_clients is not None:
            raise ValueError(
                f"expected dataset.base without clients, got {self.source.name!r}, whose records have some."
            )
        if not 0.0 < self.fraction < 1.0:
            raise ValueError(f"expected dataset.fraction in (0, 1), got {self.fraction!r}.")

    @property
    def source(self) -> DatasetSpec:
        return cast(DatasetSpec, self.base)

    def load(self, split: Split) -> Records:
        """All records of one split, in their order in the training records of `base`.

        Raises:
            ValueError: If the split has no record, as `fraction` of a small dataset may lead to.
        """
        check_split(split)
        records = split_by_pixels(self.source.load("train"), self.fraction, salt="validation")[split]
        if not len(records):
            raise ValueError(
                f"expected {split} records, got none: choose another dataset.fraction than {self.fraction}."
            )
        return records

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "base": self.source.identity(),
            "fraction": self.fraction,
            "revision": REVISION,
        }
