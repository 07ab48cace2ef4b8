"""While the suite runs, a plugin that uses a private attribute of a harness object gets an error.

A private attribute is a name with a leading underscore (name-mangled ones included), or `__dict__` and what copies an
object's content. Reading, setting and deleting one are refused, by any route that asks the object: `x._name`,
`getattr`, `vars`, `copy`, `pickle`, `inspect`. Copying is refused whoever asks, because the harness copies objects of
the plugin, which may hold harness objects. Calling a private function of a harness class, `Class._name(x)`, is refused,
too, and so is making a `Key`, because the key of a run determines its noise.

Access that does not ask the object is not refused: `object.__getattribute__`, functions' `__closure__`, `gc`, frames,
`ctypes`; functions that were taken from a class, and keys that were made, before the fit; functions of C
(`operator.attrgetter`) that the plugin makes and the harness calls; and code that is executed in the namespace of a
library's module. `dpgen_bench.testing.source` warns of them by reading the source.
"""

from __future__ import annotations

import sys
import sysconfig
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
    return (
        name == "__dict__"
        or name in COPIES
        or (name.startswith("_") and not (name.startswith("__") and name.endswith("__")))
    )


@contextmanager
def private_access_refused(plugin: object) -> Iterator[list[PrivateAccess]]:
    """Within this context, code of neither the harness nor a library gets `PrivateAccess` for private attributes.

    What counts is the innermost frame that is not of a library, so that a library which the plugin calls gives it no
    access. The package of `plugin` is never a library, wherever it is installed. Yields the errors that were raised,
    since the plugin may catch them.
    """
    own = type(plugin).__module__.split(".")[0]
    tried: list[PrivateAccess] = []
    closed: list[tuple[type, str, Any]] = []
    for cls in _classes():
        for name, thing in list(vars(cls).items()):
            if (is_private(name) or name in _KEYS.get(cls, ())) and (inner := _function(thing)) is not None:
                closed.append((cls, name, _like(thing, _refused(inner, f"{name!r} of {cls.__name__}", own, tried))))
    closed += [(cls, name, _guard(getattr(cls, name), own, tried)) for cls in GUARDED for name in _ROUTES]
    opened = [(cls, name, vars(cls).get(name)) for cls, name, _ in closed]
    for cls, name, guard in closed:
        setattr(cls, name, guard)
    try:
        yield tried
    finally:
        for cls, name, before in opened:
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


_ROUTES = ("__getattribute__", "__setattr__", "__delattr__")
_KEYS: dict[type, tuple[str, ...]] = {Key: ("__init__", "seeded", "from_os")}  # what makes a key


def _classes() -> list[type]:
    """The closed classes and what the harness derives from them."""
    classes, left = dict[type, None](), list(GUARDED)
    while left:
        cls = left.pop()
        classes[cls] = None
        below: list[type] = type.__subclasses__(cls)
        left += [sub for sub in below if sub.__module__.split(".")[0] == HARNESS]
    return list(classes)


def _function(thing: Any) -> Callable[..., Any] | None:
    inner = thing.__func__ if isinstance(thing, staticmethod | classmethod) else thing
    return inner if isinstance(inner, FunctionType) else None


def _like(thing: Any, function: Callable[..., Any]) -> Any:
    """`function` as the kind of method that `thing` is."""
    return type(thing)(function) if isinstance(thing, staticmethod | classmethod) else function


def _refused(fn: Callable[..., Any], what: str, own: str, tried: list[PrivateAccess]) -> Callable[..., Any]:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if (where := _plugin_frame(sys._getframe(1), own)) is not None:
            raise _noted(where, what, tried)
        return fn(*args, **kwargs)

    return refused


def _guard(route: Callable[..., Any], own: str, tried: list[PrivateAccess]) -> Callable[..., Any]:
    def guarded(self: Any, name: str, *value: Any) -> Any:
        # Setting any name with an underscore is refused: another __class__ would give access to everything.
        if not (is_private(name) or (value and name.startswith("_"))):
            return route(self, name, *value)
        where = _plugin_frame(sys._getframe(1), own)
        if where is None and name in COPIES:
            # Refused whoever asks: when the harness copies an object of the plugin, it copies what that holds.
            # (`__dict__` is not in COPIES, because `functools.cached_property` reads it for the harness's own objects.)
            where = sys._getframe(1)
        if where is not None:
            raise _noted(where, f"{name!r} of a {type(self).__name__}", tried)
        return route(self, name, *value)

    return guarded


def _noted(where: FrameType, what: str, tried: list[PrivateAccess]) -> PrivateAccess:
    error = PrivateAccess(
        f"{where.f_code.co_filename}:{where.f_lineno} used {what}: names with a leading underscore, and keys, are "
        "private to the harness, because they give access to records, noise and the ledger. Use public attributes, and "
        "compute what you need from records inside the private function that a mechanism calls."
    )
    tried.append(error)
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
        if not _is_file(file):  # made by `exec`, as methods of dataclasses are, or frozen: what counts is its module
            file = str(getattr(known, "__file__", "")) if genuine else ""
        if package in (own, HARNESS) or not _of_a_library(file):
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _is_file(filename: str) -> bool:
    return Path(filename).is_file()


@lru_cache(maxsize=4096)
def _of_a_library(filename: str) -> bool:
    return filename.startswith(
        tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    )
