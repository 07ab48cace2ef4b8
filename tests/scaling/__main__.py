"""Measures how the cost of the bench grows with the sizes of a run, and writes the values, the plot and the table.

    python -m tests.scaling [PART ...] [--out results/bench/scaling.json] [--page]

CPU times of one thread are taken, so that other work on the machine disturbs them little. PART selects the cases whose
name contains it; all others keep the values that the file has. --page only makes plot and page again from the file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import torch

from tests.bench._machine import machine
from tests.scaling.cases import CASES
from tests.scaling.laws import curve, plot, table

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, PICTURE = ROOT / "docs" / "scaling.md", ROOT / "results" / "pictures" / "scaling.png"
BEGIN, END = "<!-- table: made by make bench-scaling -->", "<!-- end of the table -->"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="cases whose name contains one of these; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "bench" / "scaling.json")
    parser.add_argument("--page", action="store_true", help="only make the plot and the page again")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    old = json.loads(arguments.out.read_text())["curves"] if arguments.out.exists() else []
    kept = {(each["part"], each["size"]): each for each in old}
    chosen = [case for case in CASES if not arguments.parts or any(part in case.part for part in arguments.parts)]
    if not chosen:
        parser.error(f"no case of {', '.join(arguments.parts)}; there are {', '.join(case.part for case in CASES)}")
    for case in [] if arguments.page else chosen:
        case.seconds(case.values[0])  # fills caches
        milliseconds = {value: 1e3 * case.seconds(value) for value in case.values}
        measured = curve(case.part, case.size, case.law, case.why, milliseconds)
        kept[case.part, case.size] = measured
        print(f"{case.part}, {case.size}: {measured['exponent_at_the_end']} (law {case.law:g})", flush=True)
        ordered = [kept[case.part, case.size] for case in CASES if (case.part, case.size) in kept]
        what = (
            "CPU time of the process against sizes, one thread, on a machine with other work. python -m tests.scaling"
        )
        arguments.out.write_text(json.dumps({"what": what, "machine": machine(), "curves": ordered}, indent=2) + "\n")
    curves = json.loads(arguments.out.read_text())["curves"]
    plot(curves, PICTURE)
    text = PAGE.read_text()
    pattern = f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})"
    PAGE.write_text(re.sub(pattern, lambda _: table(curves) + "\n", text, flags=re.DOTALL))
    print(f"written: {arguments.out}, {PICTURE}, {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
