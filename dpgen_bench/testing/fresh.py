"""Loads and samples a saved generator in a new process that has neither data nor network.

Statistics that a method keeps outside of its generator's state (in a global, a class attribute, a default argument, a
file) do not exist in that process. Importing PyTorch takes seconds, so one server process imports the harness once and
forks for each generator. Only the fork imports plugins.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpgen_bench.generator import Generator
from dpgen_bench.utils.paths import METHODS, PACKAGE, environment_of_children
from dpgen_bench.utils.source import of_a_library

TIMEOUT_S = 600.0  # for one generator; long enough for a busy machine


class NotSampled(RuntimeError):
    """Raised if a generator cannot be loaded or sampled in a fresh process; the message states the reason."""


class FreshSamples:
    """Draws samples of a generator in a fresh process while the caller continues; `result` waits for them.

    Args:
        generator: is saved to a temporary folder and loaded from there.
        labels: int64 [n], of the samples.
        seed: of the samples.
        started: time (seconds since the epoch) at which the first fit began; newer files must not be read.
        closed: folders that contain data, from which no file must be read.
        sources: the source files of the plugin, which may be newer.
    """

    def __init__(
        self,
        generator: Generator,
        labels: Tensor,
        seed: int,
        started: float,
        closed: list[str],
        sources: Sequence[Path] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        generator.save(folder / "generator")
        save_file({"labels": labels}, folder / "labels.safetensors")
        self._request = {
            "folder": str(folder),
            "seed": seed,
            "path": [entry or os.getcwd() for entry in sys.path],
            "cwd": os.getcwd(),
            "threads": torch.get_num_threads(),
            "started": started,
            "closed": [str(Path(place).resolve()) for place in closed],
            "sources": [str(path.absolute()) for path in sources],
        }
        self._reply: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            self._reply = _SERVER.reply(self._request)
        except Exception as error:
            self._reply = {"error": f"{type(error).__name__}: {error}"}

    def result(self) -> Tensor:
        """The samples, uint8 [n, c, h, w].

        Raises:
            NotSampled: if the generator cannot be loaded or sampled in the new process.
        """
        self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            raise NotSampled(f"sampling did not end within {TIMEOUT_S:g} s")
        if "error" in self._reply:
            raise NotSampled(str(self._reply["error"]))
        return load_file(Path(self._folder.name) / "samples.safetensors")["samples"]

    def close(self) -> None:
        """Remove the saved files, without waiting for samples that are still being drawn."""
        self._folder.cleanup()


class _Server:
    """A process that forks for each request; the first request starts it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request: empty, or a dict with the text of an "error"."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", "from dpgen_bench.testing.fresh import serve; serve()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment_of_children(),
                )
                atexit.register(self.close)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended without a reply"}

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the server ends when its input does
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:  # it works on a request whose reply is no longer needed
                self._process.kill()
                self._process.wait()
            self._process = None


_SERVER = _Server()


def serve() -> None:
    """Read requests from standard input, one JSON text a line, and write a reply to each to standard output.

    A fork handles each request. Where `os.fork` does not exist (Windows), the process handles one request and ends.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of plugins must not be read as a reply
    for line in sys.stdin:
        if not hasattr(os, "fork"):
            print(json.dumps(_handle(json.loads(line))), file=replies, flush=True)
            return
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(_handle(json.loads(line))), file=replies, flush=True)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(json.dumps({"error": f"its process ended with status {status}"}), file=replies, flush=True)


def _handle(request: dict[str, Any]) -> dict[str, Any]:
    """Load and sample the generator of a request, and write the samples; returns the reply."""
    folder = Path(request["folder"])
    try:
        sys.path[:] = request["path"]
        os.chdir(request["cwd"])
        torch.set_num_threads(request["threads"])
        sys.addaudithook(access_refused(folder, request["started"], request["closed"], request["sources"]))
        generator = Generator.load(folder / "generator")
        labels = load_file(folder / "labels.safetensors")["labels"]
        save_file({"samples": generator.sample(labels, request["seed"])}, folder / "samples.safetensors")
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def access_refused(
    own: Path, started: float, closed: list[str], sources: Sequence[str] = ()
) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses the network, other processes, data folders, and files written since `started`.

    A file counts as written when its content or its status last changed: the time of its content alone can be set.

    Args:
        own: the folder of the request, whose files may be read and written.
        started: seconds since the epoch.
        closed: the data folders.
        sources: source files of the plugin.

    Returns:
        The hook, which raises PermissionError. It lets the code of libraries, of the bench and of `sources` pass, whose
        compiled files may be new.
    """
    refused = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
    code = (".py", ".pyc", ".so", ".pyd", ".dll")
    inside = threading.local()  # the hook itself may open files, which must not call it again

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in refused:
            raise PermissionError(f"sampling used {event}: a generator must need no network and no other process.")
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if getattr(inside, "hook", False):
            return
        inside.hook = True
        try:
            path = Path(os.fsdecode(arguments[0])).absolute()
            if path.is_relative_to(own) or not path.is_file():
                return
            source = _source_of(path)
            of_bench = source.is_relative_to(PACKAGE) or source.is_relative_to(METHODS)
            if path.suffix in code and (of_bench or str(source) in sources or of_a_library(str(source))):
                return
            status = path.stat()
            newer = max(status.st_mtime, status.st_ctime) >= started
            data = [place for place in closed if path.resolve().is_relative_to(place)]
        finally:
            inside.hook = False
        if data or newer:
            what = "of the data" if data else "written since the fit began"
            raise PermissionError(f"sampling opened {path}, a file {what}: a generator must contain all that it needs.")

    return hook


def _source_of(path: Path) -> Path:
    """The source of a compiled file in __pycache__; another file itself."""
    try:
        return Path(importlib.util.source_from_cache(path))
    except (ValueError, NotImplementedError):
        return path


def now() -> float:
    """Seconds since the epoch, minus one second by which the clock of a file system may be behind."""
    return time.time() - 1.0
