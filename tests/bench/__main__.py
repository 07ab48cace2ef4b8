"""Runs every benchmark of this package (or those named) and writes one JSON file each.

    python -m tests.bench [NAME ...] [--out results/bench] [--device cpu|cuda]

A benchmark is a module with `measure() -> dict`, whose values are plain numbers, strings, lists and dicts. One that
cannot be measured here, for example because the Inception weights are missing, is named with its reason, and one that
fails with its error. The others are measured nevertheless; the command ends with status 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import traceback
from pathlib import Path

import tests.bench
from dpgen_bench.evaluate.metric import NotMeasured
from tests.bench._machine import DEVICES


def main() -> None:
    names = [module.name for module in pkgutil.iter_modules(tests.bench.__path__) if not module.name.startswith("_")]
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all if none is given")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="directory of the JSON files")
    parser.add_argument("--device", choices=DEVICES, help="the only one, for benchmarks that compare kinds of device")
    arguments = parser.parse_args()
    if arguments.device:
        DEVICES[:] = [arguments.device]
    if unknown := [name for name in arguments.names if name not in names]:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    missing: dict[str, NotMeasured] = {}
    failed: dict[str, BaseException] = {}
    for name in arguments.names or names:
        print(f"measuring {name} ...", flush=True)
        try:
            text = json.dumps(importlib.import_module(f"tests.bench.{name}").measure(), indent=2)
            arguments.out.mkdir(parents=True, exist_ok=True)
            path = arguments.out / f"{name}.json"
            path.write_text(text + "\n")
            print(f"{text}\nwritten to {path}", flush=True)
        except NotMeasured as reason:
            print(f"not measured: {reason}", flush=True)
            missing[name] = reason
        except (Exception, SystemExit) as error:  # SystemExit of a part would end the others
            traceback.print_exc()
            failed[name] = error
    for name, reason in missing.items():
        print(f"{name} was not measured: {reason}")
    if failed:
        sys.exit("\n".join(f"{name} failed: {error!r}; its traceback is above" for name, error in failed.items()))


if __name__ == "__main__":
    main()
