"""Names for readers: every key that a table, a plot or the report may show has one."""

from __future__ import annotations

import re

import pytest

from dpgen_bench.config.catalogue import catalogue
from dpgen_bench.config.display import (
    METRICS,
    dataset_name,
    label_of,
    method_name,
    metric_label,
    metric_name,
    metric_with_value,
)
from dpgen_bench.outcomes.listing import format_certified
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.tables.published import METRICS as PUBLISHED
from dpgen_bench.utils.own_folders import using


def test_a_config_key_is_labelled_without_its_group():
    keys = ("init.share", "method.pretraining.steps", "method.latent_dim")
    assert [label_of(key) for key in keys] == ["share", "pretraining steps", "latent dim"]


@pytest.mark.parametrize(
    ("key", "label", "name"),
    [
        ("fid", "FID", "FID"),
        ("acc_cnn_pct", "Acc. CNN (%)", "accuracy, CNN (%)"),
        ("acc_logreg_pct", "Acc. log. reg. (%)", "accuracy, logistic regression (%)"),
        ("acc_avg_pct", "Acc. avg. (%)", "accuracy, average (%)"),
        ("acc_calibrated_pct", "Calib. acc. avg. (%)", "calibrated accuracy, average (%)"),
        ("acc_linear_svc_calibrated_pct", "Calib. acc. linear SVC (%)", "calibrated accuracy, linear SVC (%)"),
        ("acc_mlp_real_pct", "Real-data acc. MLP (%)", "accuracy with real data, MLP (%)"),
        ("acc_my_net_pct", "Acc. my net (%)", "accuracy, my net (%)"),
        ("seconds_train", "Time of train (s)", "time of train (s)"),
        ("brightness_gap", "Brightness gap", "brightness gap"),
        ("share_pct", "Share (%)", "share (%)"),
    ],
)
def test_metrics_have_names(key, label, name):
    assert (metric_label(key), metric_name(key), label_of(key)) == (label, name, name)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("fid", "FID 9.5"),
        ("acc_cnn_pct", "Acc. CNN 9.5%"),
        ("seconds_total", "Time 9.5 s"),
        ("peak_memory_mib", "Memory 9.5 MiB"),
    ],
)
def test_a_value_in_a_list_has_the_unit_of_its_metric(key, text):
    assert metric_with_value(key, "9.5") == text


def test_no_key_of_a_table_is_its_own_name():
    keys = {name for table in table_names() for name in load_table(table).metrics}
    keys |= {metric.name for metric in PUBLISHED.values()} | METRICS.keys()
    assert len(keys) > 40
    shown = {text for key in keys for text in (metric_label(key), metric_name(key))}
    assert not [text for text in shown if "_" in text or re.search(r"\bacc\b|pct", text.replace("acc.", ""))]
    assert not [key for key in keys if len(metric_label(key)) > 28], "too wide for the heading of a column"


def test_methods_and_data_sets_are_named_by_the_first_line_of_their_yaml():
    assert method_name("dp_merf") == "DP-MERF"
    assert method_name("real_data") == "Real data"
    assert dataset_name("fashion_mnist") == "Fashion-MNIST"
    assert dataset_name("celeba_gender") == "CelebA-Gender"
    unnamed = [name for name in catalogue("methods") if method_name(name) == name]
    own = {"image_folder", "npz", "torchvision"}  # these stand for a user's data, which have names of their own
    unnamed += [name for name in catalogue("datasets") if dataset_name(name) == name and name not in own]
    assert not unnamed, "begin the yaml with `# Name: ...`"


def test_names_of_ones_own(tmp_path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("# My method: a sum.\nname: mine\n")
    (tmp_path / "method" / "other.yaml").write_text("# A method that has no name for readers\nname: other\n")
    assert method_name("mine") == "mine"
    with using([tmp_path]):
        assert (method_name("mine"), method_name("other")) == ("My method", "other")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not audited"),
        (0.0, "≥ 0"),
        (0.64999, "≥ 0.649"),
        (0.72, "≥ 0.72"),
        (0.0009999, "≥ 0.000999"),
        (9.999, "≥ 9.99"),
    ],
)
def test_a_lower_bound_is_rounded_down(value, text):
    assert format_certified(value) == text
