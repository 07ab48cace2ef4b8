"""Cheats that hide records in public files in forms that `==` does not detect fail; similar honest methods pass."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import nn

from dpgen_bench.method import Context
from dpgen_bench.privacy import planning
from dpgen_bench.testing import ConformanceError, check_method
from dpgen_bench.training.checkpoint import load_checkpoint
from dpgen_bench.training.plain import plain
from tests.cheats import Box
from tests.cheats_public import (
    Claimed,
    InGenerator,
    InState,
    OrderOfCounts,
    SecondMechanism,
    SeedsPublicRandomness,
    TwoMechanisms,
)
from tests.test_cheats import SMALL

STATE, LEDGER = "passed to ctx.steps differs", "The ledger is public"

CHEATS = {
    "signs of zeros": (partial(InGenerator, where="signs"), "the generator differs in state/pad"),
    **{f"{where} in a config": (partial(InGenerator, where=where), "in config") for where in ("ones", "zeros", "keys")},
    "a count of parameters": (partial(InGenerator, where="parameters"), "training.json is public"),
    **{
        f"{form} in ctx.steps": (partial(InState, form=form), "which a checkpoint can hold, got")
        for form in ("deque", "module", "bytearray")
    },
    **{
        f"{form} in ctx.steps": (partial(InState, form=form), f"with (unrelated records|all records).*{STATE}")
        for form in ("types", "order", "strides")
    },
    "a seed of public randomness": (SeedsPublicRandomness, f"{STATE} after step 0 in public randomness/python"),
    "a claimed epsilon": (Claimed, "epsilon_claimed"),
    "text of a conditional epsilon": (partial(Claimed, conditional=True), "epsilon_claimed or epsilon_conditional"),
    "order of names in the log": (partial(OrderOfCounts, what="log"), "the log differs"),
    "order of counters": (partial(OrderOfCounts, what="counters"), "order of their names"),
    "trained parameters": (partial(OrderOfCounts, what="parameters"), "training.json is public"),
}
HONEST = {
    "a buffer of NaN": partial(InGenerator, where="nan", private=False),
    "plain values in ctx.steps": InState,
    "a public seed": partial(SeedsPublicRandomness, private=False),
    "a second mechanism": TwoMechanisms,
    "a claim": partial(Claimed, private=False),
    "counters": partial(OrderOfCounts, what="counters", private=False),
}


@pytest.mark.parametrize(("cheat", "reason"), CHEATS.values(), ids=CHEATS)
def test_cheats_are_detected(cheat, reason):
    with pytest.raises(ConformanceError, match=reason):
        check_method(cheat, **SMALL)


@pytest.mark.parametrize("honest", HONEST.values(), ids=HONEST)
def test_similar_honest_methods_pass(honest):
    check_method(honest, **SMALL)


@pytest.mark.parametrize("private", [True, False])
def test_a_mechanism_that_is_requested_after_a_release_is_refused(private):
    with pytest.raises(ValueError, match=r"before the first release, got a request for 'second-.*' after .*'sum'"):
        check_method(partial(SecondMechanism, private=private), **SMALL)


@pytest.mark.parametrize(
    ("what", "reason"),
    [*((what, LEDGER) for what in ("std", "times", "bound")), ("name", "other mechanisms were requested")],
)
def test_the_suite_compares_mechanisms_even_without_that_refusal(what, reason, monkeypatch):
    monkeypatch.setattr(planning, "expect_no_release", lambda ledger, name: None)
    with pytest.raises(ConformanceError, match=reason):
        check_method(partial(SecondMechanism, what=what), **SMALL)


def _checkpoint(tmp_path, content):
    box = Box()
    context = Context(folder=tmp_path, due=lambda seconds: False)
    for _ in context.steps(1, box=box):
        box.content = content
    context.close()
    return tmp_path / "checkpoints" / "last.pt"


def test_a_checkpoint_holds_a_slice_without_the_memory_under_it_and_no_attributes(tmp_path):
    """torch.save alone writes the whole storage of a view, and attributes of tensors."""
    secret, tensor = random.Random(1).randbytes(64), torch.zeros(1)
    records = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
    tensor.raw = records.clone()
    path = _checkpoint(tmp_path, {"view": records[:0], "part": records[3:5], "tensor": tensor})
    assert secret[8:] not in path.read_bytes()
    held = load_checkpoint(path).phases["train"].stateful["box"]
    assert torch.equal(held["part"], records[3:5])
    assert held["tensor"] == 0.0
    assert held["view"].shape == (0,)


def test_a_schedule_is_restored_unchanged(tmp_path):
    """The milestones of this schedule are a Counter."""
    sgd = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(sgd, [2, 5])
    path = _checkpoint(tmp_path, schedule.state_dict())
    assert load_checkpoint(path).phases["train"].stateful["box"] == schedule.state_dict()


def test_a_checkpoint_refuses_values_that_it_cannot_restore(tmp_path):
    loop: list[object] = []
    loop.append(loop)
    for content, what in ((nn.Linear(1, 1), "Linear"), ({1, 2}, "set"), (print, "builtin"), (loop, "within itself")):
        with pytest.raises(ValueError, match=f"got .*{what}.* at '/box/kept"):
            _checkpoint(tmp_path, {"kept": content})


def test_a_copy_of_parameters_and_views_keeps_values_and_strides():
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t(), requires_grad=False)
    copied = plain({"weight": weight})["weight"]
    assert torch.equal(copied, weight)
    assert (copied.stride(), copied.requires_grad, type(copied)) == (weight.stride(), False, nn.Parameter)


def test_a_method_cannot_change_the_clock_or_the_log():
    context = Context()
    with pytest.raises(TypeError, match="does not support item assignment"):
        context.seconds["train"] = 0.5
    with pytest.raises(AttributeError):
        context.seconds = {"train": 0.5}
    context.log(a=1.0)
    context.history[0]["a"] = 2.0
    context.history.clear()
    assert context.history[0]["a"] == 1.0
