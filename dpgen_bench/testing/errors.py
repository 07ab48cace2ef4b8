"""What the suite raises."""

from __future__ import annotations


class ConformanceError(AssertionError):
    """A method (or the harness under it) broke a rule that its privacy rests on."""


class ClosedDoor(ConformanceError):
    """A plugin used a private attribute of a harness object."""


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConformanceError(otherwise)
