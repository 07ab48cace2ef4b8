"""Tables of epsilon by several accountants under both neighbouring relations, with a cache.

A value that may take long is computed in a process of its own with a time limit, because nothing inside the accounting
libraries can be interrupted. This module and `proven` do not import torch, so that these processes start quickly.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpgen_bench.privacy.accountants.proven import ACCOUNTANTS, Composition, NotCovered
from dpgen_bench.privacy.events import RELATIONS, Event, Relation
from dpgen_bench.utils.cache import add_values, read_values
from dpgen_bench.utils.cores import usable_cores
from dpgen_bench.utils.json_numbers import to_json
from dpgen_bench.utils.paths import environment_of_children

Table = dict[str, dict[str, float | str]]


def epsilon_table(
    events: Sequence[Event],
    delta: float,
    timeout_s: float = 60.0,
    claims: Mapping[str, float] | None = None,
    cache: Path | None = None,
    conditional: Mapping[str, float | Sequence[Event]] | None = None,
    accountants: Sequence[str] = tuple(ACCOUNTANTS),
) -> Table:
    """epsilon of `events` at `delta` by each of the accountants under every relation, safe to write as JSON.

    Args:
        events: what was or would be released, composed in full.
        timeout_s: limit in seconds of one cell that needs a process of its own.
        claims: label -> a paper's own value, copied to the row "claimed".
        cache: JSON file that stores cells by composition, delta, relation, library version and the accountants' code.
        conditional: label that contains the assumption -> a value, or the events whose add/remove epsilon by PLD it is;
            written to the row "conditional".

    Returns:
        {relation: {accountant: cell}} where a cell is a float, "inf", "over 60 s" or "not available: why".

    Raises:
        ValueError: for a delta outside (0, 1).
    """
    if not 0.0 < delta < 1.0:
        raise ValueError(f"expected delta in (0, 1), got {delta!r}.")
    known = {} if cache is None else read_values(cache)
    jobs: dict[tuple[str, str], _Cell] = {
        (relation, name): _Cell(Composition.of(events, relation), delta, relation, name)
        for relation in RELATIONS
        for name in accountants
    }
    for label, assumed in (conditional or {}).items():
        if not isinstance(assumed, float):
            jobs["conditional", label] = _Cell(Composition.of(assumed, "add_remove"), delta, "add_remove", "pld")
    # A worker only waits for its process, so threads are enough. One per core, so that time limits mean the same.
    with ThreadPoolExecutor(max_workers=usable_cores()) as workers:
        answers = workers.map(lambda cell: cell.answer(timeout_s, known), jobs.values())
        cells = dict(zip(jobs, answers, strict=True))
    if cache is not None:
        # Failures are not kept, because the machine may have caused them.
        slow = {jobs[place].key: answer for place, answer in cells.items() if jobs[place].slow}
        add_values(cache, {key: answer for key, answer in slow.items() if "failed" not in answer})
    table: Table = {
        relation: {name: _format_cell(cells[relation, name]) for name in accountants} for relation in RELATIONS
    }
    if claims:
        table["claimed"] = {label: _format_cell({"epsilon": value}) for label, value in claims.items()}
    if conditional:
        table["conditional"] = {
            label: _format_cell(cells.get(("conditional", label), {"epsilon": value}))
            for label, value in conditional.items()
        }
    return table


def claimed_epsilon(method: Any, events: Sequence[Event], delta: float) -> float | str | None:
    """The method's `epsilon_claimed`, safe to write as JSON; None if it has none."""
    claim = getattr(method, "epsilon_claimed", None)
    value = claim(events, delta) if claim else None
    return None if value is None else _format_cell({"epsilon": value})


def conditional_epsilon(method: Any, events: Sequence[Event], delta: float) -> dict[str, Any] | None:
    """The method's `epsilon_conditional` as {"epsilon", "assumption"}, safe to write as JSON; None if it has none."""
    compute = getattr(method, "epsilon_conditional", None)
    result = compute(events, delta) if compute else None
    if result is None:
        return None
    epsilon, assumption = result
    return {"epsilon": _format_cell({"epsilon": epsilon}), "assumption": str(assumption)}


class _Cell:
    """One cell of the table. Answers are {"epsilon": x}, {"reason": why}, {"over": seconds} or {"failed": why}."""

    def __init__(self, composition: Composition | None, delta: float, relation: Relation, name: str) -> None:
        self.composition, self.delta, self.relation, self.name = composition, delta, relation, name

    @property
    def slow(self) -> bool:
        """Whether it may take more than a second; RDP, unsampled Gaussians and one random participation take less."""
        if self.composition is None or ACCOUNTANTS[self.name].uncovered(self.composition, self.relation):
            return False
        return self.name != "rdp" and (bool(self.composition.poisson) or self.composition.hidden > 1)

    @property
    def request(self) -> dict[str, Any]:
        assert self.composition is not None
        return {
            **self.composition.to_dict(),
            "delta": self.delta,
            "relation": self.relation,
            "accountant": self.name,
            "library": version(ACCOUNTANTS[self.name].library),
        }

    @property
    def key(self) -> str:
        """Of the request and of the code that answers it: an epsilon of code that was corrected since is not reused."""
        request = {**self.request, "code": own_code()}
        return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

    def answer(self, timeout_s: float, known: Mapping[str, Any]) -> dict[str, Any]:
        if self.composition is None:
            return {"epsilon": math.inf}
        if not self.slow:
            return _compute(self.composition, self.delta, self.relation, self.name)
        remembered: dict[str, Any] | None = known.get(self.key)
        if remembered is not None and remembered.get("over", math.inf) >= timeout_s:
            return remembered
        return self._in_a_process(timeout_s)

    def _in_a_process(self, timeout_s: float) -> dict[str, Any]:
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "from dpgen_bench.privacy.accountants.table import answer_request; answer_request()",
                ],
                input=json.dumps(self.request),
                capture_output=True,
                text=True,
                timeout=timeout_s,
                env=environment_of_children(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"over": timeout_s}
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"failed": f"the process ended with status {done.returncode}: {last}"}
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@cache
def own_code() -> str:
    """A hash of the source of the bench's accountants."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def answer_request() -> None:
    """Runs in the process of a cell: reads a JSON request from stdin, writes a JSON answer alone to stdout."""
    request = json.load(sys.stdin)
    composition = Composition.from_dict(request)
    with contextlib.redirect_stdout(sys.stderr):
        answer = _compute(composition, request["delta"], request["relation"], request["accountant"])
    json.dump(answer, sys.stdout)


def _compute(composition: Composition, delta: float, relation: Relation, name: str) -> dict[str, Any]:
    reason = ACCOUNTANTS[name].uncovered(composition, relation)
    if reason is not None:
        return {"reason": reason}
    try:
        return {"epsilon": ACCOUNTANTS[name].compose(composition, delta, relation)}
    except NotCovered as failure:
        return {"reason": str(failure)}


def _format_cell(answer: Mapping[str, Any]) -> float | str:
    """The answer of a `_Cell` as the table shows it: epsilon, "inf", the exceeded time limit, or why there is none."""
    if "epsilon" in answer:
        return to_json(float(answer["epsilon"]))
    if "over" in answer:
        return f"over {answer['over']:g} s"
    return f"not available: {answer.get('reason', answer.get('failed'))}"
