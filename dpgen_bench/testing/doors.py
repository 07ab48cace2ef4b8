"""While the suite runs, private attributes of harness objects are closed to the plugin: using one raises.

A private attribute is a name with a leading underscore (name-mangled ones included), or `__dict__` and what copies an
object's content. Reading, setting and deleting one are refused, by any route that asks the object: `x._name`,
`getattr`, `vars`, `copy`, `pickle`, `inspect`. Out of reach are routes that do not ask the object:
`object.__getattribute__`, functions' `__closure__`, `gc`, frames, `ctypes`. `dpgen_bench.testing.source` warns of those
by reading the source.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from dpgen_bench.data.clients import ClientData
from dpgen_bench.data.private import PrivateData
from dpgen_bench.log import Log
from dpgen_bench.method import Context
from dpgen_bench.privacy.ledger import Ledger
from dpgen_bench.privacy.mechanism import Allowance, Journal
from dpgen_bench.privacy.noise import Key
from dpgen_bench.privacy.rows import Rows
from dpgen_bench.privacy.state import PrivateState
from dpgen_bench.testing.errors import ClosedDoor

# Every object of the harness that leads to records, noise or the ledger; subclasses are closed with them.
CLOSED: tuple[type, ...] = (PrivateData, ClientData, Allowance, PrivateState, Rows, Journal, Ledger, Key, Context, Log)
HARNESS = "dpgen_bench"
COPIES = {"__dict__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"}


def is_private(name: str) -> bool:
    return name in COPIES or (name.startswith("_") and not (name.startswith("__") and name.endswith("__")))


@contextmanager
def closed_doors(plugin: object) -> Iterator[list[ClosedDoor]]:
    """Within it, code that is neither the harness nor a library gets `ClosedDoor` for private attributes.

    The code that counts is the innermost frame that is no library's, so that a library which the plugin calls opens
    nothing. The package of `plugin` is never a library, wherever it is installed. Yields the errors that were raised,
    since the plugin may catch them.
    """
    own = type(plugin).__module__.split(".")[0]
    opened = [(cls, name, cls.__dict__.get(name)) for cls in CLOSED for name in _ROUTES]
    tried: list[ClosedDoor] = []
    for cls, name, _ in opened:
        setattr(cls, name, _guard(getattr(cls, name), own, tried))
    try:
        yield tried
    finally:
        for cls, name, before in opened:
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


_ROUTES = ("__getattribute__", "__setattr__", "__delattr__")


def _guard(route: Callable[..., Any], own: str, tried: list[ClosedDoor]) -> Callable[..., Any]:
    def guarded(self: Any, name: str, *value: Any) -> Any:
        closed = is_private(name) or (bool(value) and name.startswith("_"))  # another __class__ opens all doors
        if closed and (where := _plugin_frame(sys._getframe(1), own)) is not None:
            error = ClosedDoor(
                f"{where.f_code.co_filename}:{where.f_lineno} used {name!r} of a {type(self).__name__}: names with a "
                "leading underscore belong to the harness, and are a door to records, noise and the ledger. Use the "
                "public attributes, and take what you need of the records inside the function that a mechanism calls."
            )
            tried.append(error)
            raise error
        return route(self, name, *value)

    return guarded


def _plugin_frame(frame: FrameType | None, own: str) -> FrameType | None:
    """The innermost frame that is no library's, if it is not the harness's."""
    while frame is not None:
        names = frame.f_globals
        module = str(names.get("__name__", ""))
        # A module's name alone can be claimed by anybody; its globals are one object.
        known = sys.modules.get(module)
        if module.split(".")[0] == HARNESS and known is not None and vars(known) is names:
            return None
        if module.split(".")[0] == own or not _of_a_library(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _of_a_library(filename: str) -> bool:
    roots = (*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen ")
    return filename.startswith(roots) or filename == "<string>"
