"""Load and sample a saved generator in a new process, which has neither data nor network.

Statistics that a method keeps outside of its generator's state (in a global, a class attribute, a default argument, a
file) do not exist in that process. Python and PyTorch take seconds to import, so one server process imports the harness
once, and forks for each generator; plugins are imported in the fork alone.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpgen_bench.generator import Generator

PATIENCE_S = 600.0  # for one generator, on a machine that is busy with other things


class NotSampled(RuntimeError):
    """A generator could not be loaded or sampled in a fresh process; the message says why."""


class FreshSamples:
    """Samples of a generator from a fresh process, made while the caller goes on; `result` waits for them.

    Args:
        started: time (seconds since the epoch) at which the first fit began; files that are newer are not read.
        closed: folders that hold data, from which nothing is read.
    """

    def __init__(self, generator: Generator, labels: Tensor, seed: int, started: float, closed: list[str]) -> None:
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
        }
        self._answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self._answer = _SERVER.ask(self._request)
        except Exception as error:
            self._answer = {"error": f"{type(error).__name__}: {error}"}

    def result(self) -> Tensor:
        """uint8 [n, c, h, w].

        Raises:
            NotSampled: if the generator cannot be loaded or sampled there.
        """
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            raise NotSampled(f"sampling did not end within {PATIENCE_S:g} s")
        if "error" in self._answer:
            raise NotSampled(str(self._answer["error"]))
        return load_file(Path(self._folder.name) / "samples.safetensors")["samples"]

    def close(self) -> None:
        """Remove the saved files, without waiting for an answer that is still being computed."""
        self._folder.cleanup()


class _Server:
    """A process that forks for each request; started at the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                # The harness must be the one that is running, not another that is installed.
                home = str(Path(__file__).resolve().parents[2])
                path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
                self._process = subprocess.Popen(
                    [sys.executable, "-c", "from dpgen_bench.testing.fresh import serve; serve()"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": path},
                )
                atexit.register(self.close)
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended without an answer"}

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # the server ends where its requests do
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:  # it works on a request whose answer is no longer needed
                self._process.kill()
                self._process.wait()
            self._process = None


_SERVER = _Server()


def serve() -> None:
    """The server's loop: a request in, a fork that answers it. Without `fork` (Windows) it answers one and ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of plugins must not be read as an answer
    for line in sys.stdin:
        if not hasattr(os, "fork"):
            print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)
            return
        child = os.fork()
        if child == 0:
            try:
                print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            print(json.dumps({"error": f"its process ended with status {status}"}), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    try:
        sys.path[:] = request["path"]
        os.chdir(request["cwd"])
        torch.set_num_threads(request["threads"])
        sys.addaudithook(closed_world(folder, request["started"], request["closed"]))
        generator = Generator.load(folder / "generator")
        labels = load_file(folder / "labels.safetensors")["labels"]
        save_file({"samples": generator.sample(labels, request["seed"])}, folder / "samples.safetensors")
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {}


def closed_world(own: Path, started: float, closed: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses the network, other processes, data folders, and files written since `started`."""
    refused = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
    code = (".py", ".pyc", ".so", ".pyd", ".dll")
    busy = threading.local()

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event in refused:
            raise PermissionError(f"sampling used {event}: a generator must need no network and no other process.")
        if event != "open" or not isinstance(given[0], str | bytes | os.PathLike) or getattr(busy, "now", False):
            return
        busy.now = True
        try:
            path = Path(os.fsdecode(given[0])).absolute()
            if path.is_relative_to(own) or path.suffix in code or not path.is_file():
                return
            newer = path.stat().st_mtime >= started
            data = [place for place in closed if path.resolve().is_relative_to(place)]
        finally:
            busy.now = False
        if data or newer:
            what = "of the data" if data else "written since the fit began"
            raise PermissionError(f"sampling opened {path}, a file {what}: a generator must contain all that it needs.")

    return hook


def now() -> float:
    """Seconds since the epoch, less one by which the clock of a file system may lag behind."""
    return time.time() - 1.0
