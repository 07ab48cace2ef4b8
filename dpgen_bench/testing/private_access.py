"""Refuses, while the suite runs, access by a plugin to private attributes of harness objects.

A private attribute is a name with a leading underscore (name-mangled names included), `__dict__`, or a method by which
an object is copied. Reading, setting and deleting one are refused by every route that calls the object's attribute
access: `x._name`, `getattr`, `vars`, `copy`, `pickle`, `inspect`. Copying is refused to the harness as well, because
the harness copies objects of the plugin, which may hold harness objects. Calling a private function of a harness class,
`Class._name(x)`, is refused, too, and so is the construction of a `Key`, because the key of a run determines its noise.

Other access is not refused: `object.__getattribute__`, functions' `__closure__`, `gc`, frames, `ctypes`; functions that
were taken from a class, and keys that were made, before the fit; functions implemented in C (`operator.attrgetter`)
that the plugin makes and the harness calls; and code that is executed in the namespace of a library's module.
`dpgen_bench.testing.source` warns of such access where it finds it in the source.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from dpgen_bench.data.private import PrivateData
from dpgen_bench.federation.data import ClientData
from dpgen_bench.method import Context
from dpgen_bench.privacy.allowance import Allowance
from dpgen_bench.privacy.journal import Journal
from dpgen_bench.privacy.key import Key
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.record_rng import RecordRng
from dpgen_bench.privacy.services import Services
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.privacy.state_file import StateFile
from dpgen_bench.testing.errors import PrivateAccess
from dpgen_bench.training.log import Log
from dpgen_bench.training.loop import Loop
from dpgen_bench.training.public import PublicRecord
from dpgen_bench.utils.source import of_a_library

# Every class of the harness that gives access to records, noise or the ledger; subclasses are included.
GUARDED: tuple[type, ...] = (
    PrivateData,
    ClientData,
    Allowance,
    PrivateState,
    StateFile,
    Journal,
    Ledger,
    Key,
    RecordRng,
    Context,
    Loop,
    Log,
    PublicRecord,
    Services,
)
HARNESS = "dpgen_bench"
COPIES = {"__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"}


def is_private(name: str) -> bool:
    """Whether an attribute of a harness object is closed to plugins."""
    return (
        name == "__dict__"
        or name in COPIES
        or (name.startswith("_") and not (name.startswith("__") and name.endswith("__")))
    )


@contextmanager
def private_access_refused(plugin: object) -> Iterator[list[PrivateAccess]]:
    """Raise `PrivateAccess` within this context when other code than the harness or a library uses a private attribute.

    The innermost frame that is not of a library decides, so that a plugin gains no access by calling a library. The
    package of `plugin` is never a library, wherever it is installed.

    Args:
        plugin: an object of the plugin, such as the method.

    Yields:
        The list of errors that were raised, because the plugin may catch them.
    """
    own = type(plugin).__module__.split(".")[0]
    errors: list[PrivateAccess] = []
    guards: list[tuple[type, str, Any]] = []
    # Private functions of the classes, and functions that make a key.
    for cls in _classes():
        for name, value in list(vars(cls).items()):
            if (is_private(name) or name in _KEYS.get(cls, ())) and (inner := _function(value)) is not None:
                guard = _guard_function(inner, f"{name!r} of {cls.__name__}", own, errors)
                guards.append((cls, name, _same_kind(value, guard)))
    # Access to attributes of objects.
    guards += [(cls, name, _guard_route(getattr(cls, name), own, errors)) for cls in GUARDED for name in _ROUTES]
    originals = [(cls, name, vars(cls).get(name)) for cls, name, _ in guards]
    for cls, name, guard in guards:
        setattr(cls, name, guard)
    try:
        yield errors
    finally:
        for cls, name, original in originals:
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)


_ROUTES = ("__getattribute__", "__setattr__", "__delattr__")
_KEYS: dict[type, tuple[str, ...]] = {Key: ("__init__", "seeded", "from_os")}  # functions that make a key


def _classes() -> list[type]:
    """The guarded classes and the classes that the harness derives from them."""
    classes, left = dict[type, None](), list(GUARDED)  # a dict, to keep their order
    while left:
        cls = left.pop()
        classes[cls] = None
        below: list[type] = type.__subclasses__(cls)
        left += [sub for sub in below if sub.__module__.split(".")[0] == HARNESS]
    return list(classes)


def _function(attribute: Any) -> Callable[..., Any] | None:
    """The function of a method, static method or class method; None for any other attribute of a class."""
    inner = attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
    return inner if isinstance(inner, FunctionType) else None


def _same_kind(attribute: Any, function: Callable[..., Any]) -> Any:
    """`function` as a static method or class method if `attribute` is one."""
    return type(attribute)(function) if isinstance(attribute, staticmethod | classmethod) else function


def _guard_function(fn: Callable[..., Any], what: str, own: str, errors: list[PrivateAccess]) -> Callable[..., Any]:
    """`fn`, which raises if the plugin calls it."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        if (where := _plugin_frame(sys._getframe(1), own)) is not None:
            raise _access_error(where, what, errors)
        return fn(*args, **kwargs)

    return guarded


def _guard_route(route: Callable[..., Any], own: str, errors: list[PrivateAccess]) -> Callable[..., Any]:
    """`route`, one of _ROUTES of a class, which raises if the plugin uses it on a private name."""

    def guarded(self: Any, name: str, *value: Any) -> Any:
        # Setting any name with an underscore is refused: another __class__ would give access to everything.
        if not (is_private(name) or (value and name.startswith("_"))):
            return route(self, name, *value)
        where = _plugin_frame(sys._getframe(1), own)
        if where is None and name in COPIES:
            # Refused to the harness, too: when it copies an object of the plugin, it copies all that the object holds.
            # (`__dict__` is not in COPIES, because `functools.cached_property` reads it for the harness's own objects.)
            where = sys._getframe(1)
        if where is not None:
            raise _access_error(where, f"{name!r} of a {type(self).__name__}", errors)
        return route(self, name, *value)

    return guarded


def _access_error(where: FrameType, what: str, errors: list[PrivateAccess]) -> PrivateAccess:
    """The error for the use of `what` in the frame `where`, which is also appended to `errors`."""
    error = PrivateAccess(
        f"{where.f_code.co_filename}:{where.f_lineno} used {what}: names with a leading underscore, and keys, are "
        "private to the harness, because they give access to records, noise and the ledger. Use public attributes, and "
        "compute what you need from records inside the private function that a mechanism calls."
    )
    errors.append(error)
    return error


def _plugin_frame(frame: FrameType | None, own: str) -> FrameType | None:
    """The innermost frame that is not of a library, unless it is of the harness."""
    while frame is not None:
        names, file = frame.f_globals, frame.f_code.co_filename
        module = str(names.get("__name__", ""))
        package = module.split(".")[0]
        # Any code can claim a module's name, but the module's globals are a single object.
        known = sys.modules.get(module)
        genuine = known is not None and vars(known) is names
        if package == HARNESS and genuine and _is_file(file):
            return None
        # Code that was made by `exec`, as the methods of dataclasses are, or frozen has no file: its module decides.
        if not _is_file(file):
            file = str(getattr(known, "__file__", "")) if genuine else ""
        if package in (own, HARNESS) or not of_a_library(file):
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _is_file(filename: str) -> bool:
    return Path(filename).is_file()
