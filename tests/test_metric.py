"""One metric cannot harm another: errors, missing weights and random streams stay its own."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from dpgen_bench.data.records import Records
from dpgen_bench.evaluate.fidelity import Fid
from dpgen_bench.evaluate.metric import EvalContext, NotMeasured, evaluate, evaluate_all
from dpgen_bench.evaluate.utility import DpganCnn, LogisticRegression, Mlp

CONF = Path(__file__).resolve().parents[1] / "conf"


@pytest.fixture
def ctx(tmp_path) -> EvalContext:
    return EvalContext(seed=3, device="cpu", num_classes=2, cache=tmp_path)


def grey(n: int, side: int = 8, labels: int = 2) -> Records:
    return Records(torch.zeros(n, 1, side, side, dtype=torch.uint8), torch.arange(n) % labels)


def draws(samples, real_test, ctx):
    """A metric that reads all three global generators."""
    return {"torch": torch.rand(()).item(), "numpy": np.random.rand(), "python": random.random()}  # noqa: NPY002


def missing(samples, real_test, ctx):
    raise NotMeasured("weights missing at SOMEWHERE")


def broken(samples, real_test, ctx):
    raise ZeroDivisionError("one over nothing")


def undefined(samples, real_test, ctx):
    return {"fine": 1.0, "nothing": float("nan")}


def test_a_bad_metric_stops_no_other(ctx):
    metrics = {"missing": missing, "broken": broken, "undefined": undefined, "empty": lambda *_: {}, "draws": draws}
    results = evaluate_all(metrics, grey(4), grey(4), ctx)
    assert list(results) == list(metrics)
    assert results["missing"].status == "not measured"
    assert results["missing"].reason == "weights missing at SOMEWHERE"
    assert results["broken"].status == "failed"
    assert results["broken"].reason == "ZeroDivisionError: one over nothing"
    assert results["undefined"].status == results["empty"].status == "failed"
    assert "'nothing': nan" in results["undefined"].reason
    assert results["draws"].status == "measured"
    assert results["draws"].reason is None
    assert all(result.values == {} for name, result in results.items() if name != "draws")
    assert all(result.seconds >= 0 for result in results.values())


def test_a_users_interrupt_is_no_result(ctx):
    def interrupted(samples, real_test, ctx):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(interrupted, grey(4), grey(4), ctx)


def test_metrics_draw_from_the_seed_alone_and_leave_the_generators_as_they_were(ctx, tmp_path):
    torch.manual_seed(11)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())  # noqa: NPY002
    first = evaluate(draws, grey(4), grey(4), ctx).values
    after = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    assert before[2] == after[2]
    torch.rand(5)
    assert evaluate(draws, grey(4), grey(4), ctx).values == first
    other = EvalContext(seed=4, device="cpu", num_classes=2, cache=tmp_path)
    assert all(value != first[name] for name, value in evaluate(draws, grey(4), grey(4), other).values.items())


def test_results_go_to_json_and_numbers_become_floats(ctx):
    result = evaluate(lambda *_: {"a": np.float32(1.5), "b": torch.tensor(2)}, grey(4), grey(4), ctx)
    assert json.loads(json.dumps(asdict(result)))["values"] == {"a": 1.5, "b": 2.0}


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        (grey(4, side=9), r"shaped like the real images, \(1, 8, 8\), got \(1, 9, 9\)"),
        (grey(4, labels=3), "labels below 2 in the samples, got 2"),
        (grey(0), "at least one of the samples"),
    ],
)
def test_unlike_sets_are_never_compared(ctx, samples, complaint):
    result = evaluate(draws, samples, grey(4), ctx)
    assert result.status == "failed"
    with pytest.raises(ValueError, match=complaint):
        raise ValueError(result.reason)


@pytest.mark.parametrize(
    ("name", "num_samples", "labels", "metrics"),
    [
        ("quick", 2000, "balanced", {"logreg": LogisticRegression, "mlp": Mlp}),
        ("standard", 60_000, "balanced", {"logreg": LogisticRegression, "mlp": Mlp, "cnn": DpganCnn, "fid": Fid}),
        ("standard_10k", 10_000, "balanced", {"logreg": LogisticRegression, "mlp": Mlp, "cnn": DpganCnn, "fid": Fid}),
        ("dpgan_revisited", 60_000, "uniform", {"cnn": DpganCnn, "fid": Fid}),
    ],
)
def test_protocols_instantiate(name, num_samples, labels, metrics):
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        protocol = compose(overrides=[f"+protocol={name}"]).protocol
    assert (protocol.name, protocol.num_samples, protocol.labels, protocol.repeats) == (name, num_samples, labels, 1)
    assert {key: type(instantiate(node)) for key, node in protocol.metrics.items()} == metrics


def test_the_papers_cnn_is_the_default_one():
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        protocol = compose(overrides=["+protocol=dpgan_revisited"]).protocol
    assert instantiate(protocol.metrics.cnn) == DpganCnn() == DpganCnn(1e-3, 64, 10, 5000)
