"""Edits of a toy run's record for which it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from dpgen_bench.outcomes import record_checks

Edit = Callable[[dict[str, Any]], None]


def entry_of(content: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = content["ledger"]["entries"][0]
    return entry


def epsilon_of(content: dict[str, Any]) -> dict[str, Any]:
    epsilon: dict[str, Any] = content["ledger"]["epsilon"]
    return epsilon


def step_of(content: dict[str, Any], **protocol: Any) -> dict[str, Any]:
    """A kept step with the run's measurement, whose protocol is edited."""
    measurement = copy.deepcopy(content["measurements"][0])
    measurement["protocol"].update(protocol)
    return {"step": {"step": 3, "epsilon": 1.0}, "measurements": [measurement]}


def metrics_of(content: dict[str, Any]) -> dict[str, Any]:
    metrics: dict[str, Any] = content["measurements"][0]["repeats"][0]["metrics"]
    return metrics


# What an outsider may have edited -> a part of the reason for which the record is refused.
EDITS: dict[str, tuple[Edit, str]] = {
    "another schema": (lambda record: record.update(schema=2), "schema"),
    "an entry is missing": (lambda record: record.pop("ledger"), "'ledger' is a required property"),
    "an unknown entry": (lambda record: record.update(remark="good"), "'remark' was unexpected"),
    "a value that is text": (
        lambda record: metrics_of(record)["brightness"]["values"].update(brightness="0.9"),
        "'0.9' is not of type 'number'",
    ),
    "a value that is no number": (
        lambda record: metrics_of(record)["brightness"]["values"].update(brightness=float("nan")),
        "no number (NaN)",
    ),
    "another id": (lambda record: record.update(id="0" * 12), "its identity is that of run"),
    "an edited identity": (lambda record: record["identity"].update(seed=5), "its identity is that of run"),
    "an edited config": (lambda record: record["config"].update(seed=5), "its config describes run"),
    "a smaller epsilon": (lambda record: epsilon_of(record).update(proven=0.5), "epsilon.proven is 0.5, expected 9."),
    "an epsilon that is text": (lambda record: epsilon_of(record).update(proven="small"), "ledger/epsilon/proven"),
    "a claim that the method does not make": (
        lambda record: epsilon_of(record).update(claimed=0.5),
        "epsilon.claimed is 0.5, expected none",
    ),
    "a condition that the method does not state": (
        lambda record: epsilon_of(record).update(conditional={"epsilon": 0.5, "assumption": "if so"}),
        "epsilon.conditional is ",
    ),
    "an epsilon against a server": (
        lambda record: epsilon_of(record).update(server={"epsilon": 0.5}),
        "epsilon.server is ",
    ),
    "a smaller epsilon in the table": (
        lambda record: epsilon_of(record)["table"]["add_remove"].update(rdp=0.5),
        "epsilon.table.add_remove.rdp is 0.5, expected ",
    ),
    "an epsilon of an accountant that the bench does not have": (
        lambda record: epsilon_of(record)["table"]["add_remove"].update(better=0.5),
        "epsilon.table.add_remove.better is 0.5, expected none",
    ),
    "no table of epsilons": (lambda record: epsilon_of(record).pop("table"), "'table' is a required property"),
    "a step that spends more than the run": (
        lambda record: record.update(steps={"3": {"step": {"step": 3, "epsilon": 1e3}, "measurements": []}}),
        "step 3 has ε = 1000.0, expected at most 9.",
    ),
    "a step that is measured by another protocol of the same name": (
        lambda record: record.update(steps={"3": step_of(record, num_samples=41)}),
        "settings of protocol toy have changed since (num_samples)",
    ),
    "more noise than was added": (lambda record: entry_of(record).update(std=1e6), "epsilon.proven is 9."),
    "fewer releases": (lambda record: entry_of(record).update(times=0), "6 releases were made, but 0 were approved"),
    "no releases at all": (lambda record: record["ledger"].update(entries=[]), "expected 0, computed again"),
    "a mark that nothing is proven": (lambda record: record["ledger"].update(unproven=["x"]), "nothing is proven: x"),
    "another relation": (
        lambda record: epsilon_of(record).update(relation="replace_one"),
        "counts by relation replace-one",
    ),
    "a path": (lambda record: record["measured_by"].update(name="/home/ada/x"), "path of a machine"),
    "another protocol of the same name": (
        lambda record: record["measurements"][0]["protocol"].update(num_samples=41),
        "settings of protocol toy have changed since (num_samples)",
    ),
    "a wrong hash of the protocol": (
        lambda record: record["measurements"][0].update(protocol_hash="0" * 8),
        "the hash of protocol toy",
    ),
    "a release of another name": (
        lambda record: entry_of(record).update(name="another"),
        "lacks the release 'sum', which its config requests",
    ),
    "an entry that is none": (lambda record: entry_of(record).pop("std"), "std"),
    "a config of no method": (
        lambda record: record["config"]["method"].update(_target_="methods.nothing.Nothing"),
        "its config describes no run here",
    ),
    "too much text": (
        lambda record: record["environment"].update(note="x" * record_checks.MOST_TEXT),
        "characters; at most",
    ),
    "fewer repeats": (
        lambda record: record["measurements"][0]["repeats"].append(record["measurements"][0]["repeats"][0]),
        "protocol toy has 1 repeats, the record 2",
    ),
    "a metric is missing": (lambda record: metrics_of(record).clear(), "other metrics than protocol toy: brightness"),
    "an impossible accuracy": (
        lambda record: metrics_of(record)["brightness"]["values"].update(acc_cnn_pct=120.0),
        "acc_cnn_pct is 120, but it lies between 0 and 100",
    ),
    "a negative cost": (lambda record: record["cost"]["seconds"].update(train=-50.0), "negative cost"),
    "public data that the method does not use": (
        lambda record: record["ledger"].update(public_data="fonts"),
        "states fonts public data",
    ),
    "the command of another run": (
        lambda record: record.update(command=["method=dp_merf", "dataset=digits"]),
        "its command method=dp_merf dataset=digits makes run",
    ),
    "a command of no run": (
        lambda record: record.update(command=["method=dp_merf; rm -rf x"]),
        "its command describes no run here",
    ),
    "a verification by who measured it": (
        lambda record: record["verified"].append(signed("ada ")),
        "names ada  twice",
    ),
    "a blank name": (lambda record: record["measured_by"].update(name=" "), "blank name"),
    "a date in the future": (lambda record: record["measured_by"].update(date="2999-01-01"), "in the future"),
}


def signed(name: str) -> dict[str, Any]:
    environment = {"python": "3", "packages": {}, "machine": {}}
    return {"name": name, "date": "2026-01-01", "differences": {"toy": {"brightness": 0.0}}, "environment": environment}
