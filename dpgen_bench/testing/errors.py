"""The errors that the suite raises."""

from __future__ import annotations


class ConformanceError(AssertionError):
    """Raised when a method, or the harness itself, breaks a rule on which privacy depends."""


class PrivateAccess(ConformanceError):
    """Raised when a plugin uses a private attribute of a harness object."""


def expect(condition: bool, message: str) -> None:
    """Raise a `ConformanceError` with this message unless the condition holds."""
    if not condition:
        raise ConformanceError(message)
