"""One bench for differentially private image generators: a method is one file and one yaml, all else is shared.

The functions of `dpgen_bench.api` can be imported from here: `run`, `load_generator`, `check_method`, `account`,
`evaluate_images`, `export`, `results`. They are loaded when they are first used, because PyTorch takes seconds to
import.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

from dpgen_bench.utils.paths import set_up

set_up()
__version__ = version("dpgen-bench")
__all__ = [
    "Evaluation",
    "__version__",
    "account",
    "check_method",
    "evaluate_images",
    "export",
    "load_generator",
    "results",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("dpgen_bench.api"), name)
    raise AttributeError(f"module 'dpgen_bench' has no attribute {name!r}; it has {', '.join(__all__)}.")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
