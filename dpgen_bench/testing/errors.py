"""The errors that the suite raises."""

from __future__ import annotations


class ConformanceError(AssertionError):
    """A method (or the harness itself) broke a rule on which privacy depends."""


class PrivateAccess(ConformanceError):
    """A plugin used a private attribute of a harness object."""


def expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ConformanceError(otherwise)
