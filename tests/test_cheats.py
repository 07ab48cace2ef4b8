"""Planted cheats fail the suite for the expected reason, and similar honest methods pass it."""

from __future__ import annotations

import importlib

import pytest

from dpgen_bench.testing import ConformanceError, PrivateAccess, check_method
from tests import cheats
from tests.cheats import Momentum, PrivateAttribute, StateInBox, StepsByLoss
from tests.cheats_outside import ComputedOnce, Outside, SavesNote

SMALL = {"image_shape": (1, 8, 8), "num_classes": 3}

ROWS = "Row i must depend on record i and public inputs alone"
SAMPLES = "sampling reads something outside of"

CHEATS = {
    "a training image in the generator": (cheats.CopiedImage, "other than through releases"),
    "the best step by an exact loss": (lambda: StepsByLoss(private=True), "other than through releases"),
    "a stop by an exact loss": (lambda: StepsByLoss(private=True, stops=True), "releases were made|extra release"),
    "realised batch size": (cheats.RealisedSize, f"{ROWS}|its declared sensitivity"),
    "class weights of the batch": (cheats.ClassWeightsOfTheBatch, f"{ROWS}|its declared sensitivity"),
    "duplicates dropped": (cheats.WithoutDuplicates, ROWS),
    "augmentation by position": (cheats.AugmentedByPosition, f"{ROWS}|its declared sensitivity"),
    "losses weighted, clipping saturated": (cheats.WeightedLosses, ROWS),
    "public rows that depend on the draw": (cheats.PublicRowsOfTheDraw, ROWS),
    "module global": (lambda: Outside(where="global"), SAMPLES),
    "class attribute": (lambda: Outside(where="class"), SAMPLES),
    "mutable default argument": (lambda: Outside(where="default"), SAMPLES),
    "file": (lambda: Outside(where="file"), SAMPLES),
    "a release in a global": (lambda: Outside(where="release"), "new process without data or network"),
    **{
        f"computed once, kept in a {where}": (
            lambda where=where: ComputedOnce(where=where),
            "other than through releases",
        )
        for where in ("class", "global", "cache", "default")
    },
    "a file next to the weights": (lambda: SavesNote(private=True), "saves other files"),
    "labels that it draws": (lambda: SavesNote(private=True, labels=True), SAMPLES),
    "records in ctx.steps": (lambda: StateInBox(what="records"), "passed to ctx.steps differs"),
    "records in ctx.steps for a while": (lambda: StateInBox(what="records for a while"), "passed to ctx.steps differs"),
    "state forgotten in ctx.steps": (lambda: Momentum(listed=False), "another query with the same noise"),
    "a mean that an earlier function kept": (
        lambda: cheats.KeptBetweenReleases(private=True),
        "another query with the same noise",
    ),
    "buffers that a private function advances": (
        lambda: cheats.SpectralFeatures(training=True),
        "another query with the same noise",
    ),
    **{
        f"a private value called {name}": (
            lambda name=name, kind=kind: cheats.NamedAsTime(name=name, kind=kind),
            "the log differs",
        )
        for name, kind in (("seconds", float), ("time_ns", int), ("images_per_sec", float))
    },
}
HONEST = {
    "a release in the generator": cheats.CopiedRelease,
    "the best step by a noisy loss": StepsByLoss,
    "a stop by a noisy loss": lambda: StepsByLoss(stops=True),
    "configured batch size": cheats.ConfiguredSize,
    "public class weights": cheats.ClassWeights,
    "outliers dropped": cheats.WithoutOutliers,
    "augmentation by record": cheats.AugmentedByRecord,
    "gradients with public rows": cheats.Gradients,
    "features in eval mode": cheats.SpectralFeatures,
    "a constant of a module": lambda: Outside(where="constant"),
    "a cached public value": lambda: Outside(where="memo"),
    "its own source": lambda: Outside(where="source"),
    "a constant computed once": ComputedOnce,
    "a public file next to the weights": SavesNote,
    "releases in ctx.steps": StateInBox,
    "state listed in ctx.steps": Momentum,
    "a release that centres the next": cheats.KeptBetweenReleases,
    "public attributes": PrivateAttribute,
    "times in the log": cheats.LogsSeconds,
}


@pytest.mark.parametrize(("cheat", "reason"), CHEATS.values(), ids=CHEATS)
def test_cheats_are_detected(cheat, reason):
    with pytest.raises(ConformanceError, match=reason):
        check_method(cheat, **SMALL)


@pytest.mark.parametrize("honest", HONEST.values(), ids=HONEST)
def test_similar_honest_methods_pass(honest):
    check_method(honest, **SMALL)


@pytest.mark.parametrize("route", ["name", "getattr", "vars", "copy", "set", "caught"])
def test_access_to_private_attributes_is_refused(route):
    with pytest.raises(PrivateAccess, match=r"cheats.py:\d+ used '_"):
        check_method(lambda: PrivateAttribute(route=route), **SMALL)


def test_access_by_a_mangled_name_is_refused():
    with pytest.raises(PrivateAccess, match="used '_PrivateData__images' of a PrivateData"):
        check_method(cheats.MangledAccess, **SMALL)


LEAKY = """
from dataclasses import dataclass

import leaky_helper
import torch

from dpgen_bench.privacy.bounds import PerRecord
from dpgen_bench.privacy.sampling import Full
from tests.toys import Painter, release_painter


@dataclass
class Leaky:
    def fit(self, data, ctx):
        release = data.mechanism("sum", sample=Full(), bound=PerRecord(C=1.0, shape=data.image_shape), times=1)

        def rows(images, labels):
            if not leaky_helper.KEPT:
                leaky_helper.KEPT.append(images.mean(0).clone())
            return images

        release(rows)
        net = Painter(data.num_classes, list(data.image_shape))
        with torch.no_grad():
            net.means.add_(leaky_helper.KEPT[0])
        return release_painter(net, data)
"""


def test_a_statistic_that_is_kept_in_a_helper_next_to_the_plugin_is_detected(tmp_path, monkeypatch):
    (tmp_path / "leaky_plugin.py").write_text(LEAKY)
    (tmp_path / "leaky_helper.py").write_text("KEPT = []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConformanceError, match="the generator differs"):
        check_method(importlib.import_module("leaky_plugin").Leaky, **SMALL)
