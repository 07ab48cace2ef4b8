"""Perturbs a Python process that a perturbed test starts, as soon as the process imports torch."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType


class _WhenTorchIsImported(importlib.abc.MetaPathFinder):
    """Waits for the import of torch, because most of the processes that Ray starts never import it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_perturb(module: ModuleType) -> None:
            execute(module)
            sys.path.insert(0, os.path.dirname(__file__))  # multiprocessing and others replace the path
            import perturbation

            sys.path.remove(os.path.dirname(__file__))
            perturbation.install(int(os.environ[perturbation.SEED]))

        spec.loader.exec_module = execute_and_perturb  # type: ignore[method-assign]
        return spec


if "DPGEN_TEST_PERTURB" in os.environ:
    sys.meta_path.insert(0, _WhenTorchIsImported())
