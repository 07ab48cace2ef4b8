"""Reads the source of a plugin and warns about uses that a replay cannot detect, such as files, output and the network.

Each of these uses can be honest, and code that is written to hide something can avoid them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpgen_bench.utils.source import own_modules

# The reason for a warning, by the name that is used or imported; none for a part of a suspect package that is harmless.
SUSPECTS = {
    "open": "reads or writes files",
    "print": "prints, and output is public",
    "exec": "runs code that this check does not see",
    "eval": "runs code that this check does not see",
    "compile": "runs code that this check does not see",
    "__import__": "imports code that this check does not see",
    "importlib": "imports code that this check does not see",
    "torchvision.datasets": "loads data of its own",
    "sklearn.datasets": "loads data of its own",
    "datasets": "loads data of its own",
    "tensorflow_datasets": "loads data of its own",
    "dpgen_bench.data": "loads data of its own",
    **dict.fromkeys(("dpgen_bench.data.private", "dpgen_bench.data.records", "dpgen_bench.data.fonts"), ""),
    **dict.fromkeys(
        (f"dpgen_bench.{name}" for name in ("config", "store", "runs", "outcomes", "api", "run")),
        "loads data, or reads and makes runs",
    ),
    "pickle": "reads or writes objects",
    "joblib": "reads or writes objects",
    "shelve": "reads or writes objects",
    "sqlite3": "reads or writes objects",
    "h5py": "reads or writes objects",
    "torch.load": "reads or writes objects",
    "torch.save": "reads or writes objects",
    "torch.utils.data": "loads data of its own",
    "torch.hub": "uses the network",
    "safetensors": "reads or writes objects",
    **dict.fromkeys(("numpy.load", "numpy.save", "numpy.savez", "numpy.savez_compressed"), "reads or writes files"),
    **dict.fromkeys(("numpy.loadtxt", "numpy.savetxt", "numpy.fromfile", "numpy.memmap"), "reads or writes files"),
    **dict.fromkeys(("numpy.genfromtxt", "pandas", "PIL.Image.open", "torchvision.io"), "reads or writes files"),
    **dict.fromkeys(("io.open", "codecs", "gzip", "zipfile", "tarfile", "scipy.io"), "reads or writes files"),
    **dict.fromkeys(("torch.from_file", "torchvision.utils.save_image"), "reads or writes files"),
    **dict.fromkeys(
        ("torchvision.models", "timm", "transformers", "huggingface_hub"), "loads weights that others trained"
    ),
    "keras": "loads data of its own",
    "tempfile": "reads or writes files",
    "shutil": "reads or writes files",
    "logging": "writes messages, and output is public",
    "warnings.warn": "writes messages, and output is public",
    "sys.stdout": "prints, and output is public",
    "sys.stderr": "prints, and output is public",
    "os.environ": "reads or writes the environment",
    "os.getenv": "reads or writes the environment",
    "os.putenv": "reads or writes the environment",
    "os.system": "starts another process",
    "os.open": "reads or writes files",
    "os.write": "reads or writes files",
    "os.utime": "changes the times of files",
    "subprocess": "starts another process",
    **dict.fromkeys(("multiprocessing", "torch.multiprocessing", "concurrent.futures"), "starts another process"),
    "threading": "starts a thread, which may outlive the fit",
    **dict.fromkeys(("socket", "urllib", "requests", "http", "httpx", "ftplib", "smtplib"), "uses the network"),
    "ctypes": "accesses any memory",
    "gc": "accesses any object",
    "inspect": "accesses frames and closures",
    "sys._getframe": "accesses frames and closures",
    "time.sleep": "can make running time depend on records",
    "atexit": "runs code after the fit",
    "torch.utils._python_dispatch": "sees what the harness computes",
    "torch.overrides": "sees what the harness computes",
    "operator.attrgetter": "reads attributes that this check does not see",
    "unittest.mock": "changes other code",
    "dpgen_bench.privacy.key": "computes noise",
    "dpgen_bench.privacy.noise": "computes noise",
    "numpy.random.Philox": "computes noise",
}
METHODS = {  # attributes of any object
    **dict.fromkeys(("read_text", "read_bytes", "write_text", "write_bytes", "tofile"), "reads or writes files"),
    **dict.fromkeys(("open", "save"), "reads or writes files"),
    "from_pretrained": "loads weights that others trained",
}
INTERNALS = {  # attributes of any object
    **dict.fromkeys(("__closure__", "__globals__", "__code__", "__getattribute__"), "accesses closures and frames"),
    **dict.fromkeys(("cell_contents", "f_locals", "f_back", "tb_frame", "gi_frame"), "accesses closures and frames"),
    **dict.fromkeys(("__subclasses__", "__dict__"), "accesses private names"),
}


@dataclass(frozen=True)
class Finding:
    """One line of a plugin's source that a reader should check.

    Attributes:
        path: the file.
        line: the number of the line.
        what: the name or construct that is used there.
        why: the reason for the warning.
    """

    path: Path
    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what} ({self.why})"


def read_plugin(plugin: type) -> list[Finding]:
    """The findings in a plugin's own modules (see `own_modules`), sorted by file and line.

    A module that has no source, or cannot be read, has no findings.

    Args:
        plugin: the class of the method.
    """
    findings: set[Finding] = set()
    for path, tree in own_modules(plugin.__module__).values():
        findings |= {Finding(path, line, what, why) for line, what, why in _Reader(tree).findings()}
    return sorted(findings, key=lambda finding: (finding.path, finding.line, finding.what))


class _Reader:
    """Finds suspect uses in one module; names are resolved through `import a.b as c` and `from a import b as c`."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module:
                self._names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def findings(self) -> Iterator[tuple[int, str, str]]:
        """(line, what, why) of each finding."""
        inner = {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Global | ast.Nonlocal):
                kind = "global" if isinstance(node, ast.Global) else "nonlocal"
                yield node.lineno, f"{kind} {', '.join(node.names)}", "keeps values outside of the generator"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from self._imports(node)
            elif isinstance(node, ast.Name | ast.Attribute):
                name = self._dotted(node)
                # The `a.b` within `a.b.c` is no use of its own.
                if name and id(node) not in inner and (why := _suspect(name)):
                    yield node.lineno, name, why
                else:
                    yield from self._accesses(node)
            elif isinstance(node, ast.Call):
                yield from self._calls(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _mutable_defaults(node)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[tuple[int, str, str]]:
        module = (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if why := _suspect(module + alias.name):
                yield node.lineno, f"import {module}{alias.name}", why

    def _accesses(self, node: ast.Name | ast.Attribute) -> Iterator[tuple[int, str, str]]:
        if not isinstance(node, ast.Attribute):
            return
        if not isinstance(node.ctx, ast.Load) and self._is_imported(node):
            yield node.lineno, f"{self._dotted(node)} is set", "changes other code"
        if node.attr in METHODS:
            yield node.lineno, f".{node.attr}", METHODS[node.attr]
        elif node.attr in INTERNALS:
            yield node.lineno, f".{node.attr}", INTERNALS[node.attr]
        elif _is_private(node.attr) and not _is_own(node.value):
            yield node.lineno, f".{node.attr}", "accesses private names"

    def _calls(self, node: ast.Call) -> Iterator[tuple[int, str, str]]:
        name = self._dotted(node.func)
        if name in ("setattr", "delattr") and node.args and self._is_imported(node.args[0]):
            yield node.lineno, f"{name} of {self._dotted(node.args[0])}", "changes other code"
        if name == "type" and len(node.args) == 3:
            yield node.lineno, "type(name, bases, namespace)", "makes a class that this check does not see"

    def _is_imported(self, node: ast.expr) -> bool:
        """Whether the expression is an imported name, or an attribute of one."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._names

    def _dotted(self, node: ast.expr) -> str | None:
        """The full dotted name of an expression such as `np.save`; None if the expression is not a name."""
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join([self._names.get(node.id, node.id), *reversed(parts)])


def _suspect(name: str) -> str | None:
    """The reason for a warning about `name`, or else a module that contains it; None if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (why := SUSPECTS.get(".".join(parts[:length]))) is not None:
            return why or None
    return None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _is_own(node: ast.expr) -> bool:
    """Whether the expression is self, cls, or a call such as super()."""
    return isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def _mutable_defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
        if isinstance(default, ast.List | ast.Dict | ast.Set):
            yield default.lineno, f"a mutable default of {node.name}", "keeps values outside of the generator"
