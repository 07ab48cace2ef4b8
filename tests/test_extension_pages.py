"""The pages of docs/extend: their examples conform, and their tables list what the code has."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dpgen_bench.cli import main
from dpgen_bench.config.building import build_method
from dpgen_bench.config.compose import compose_config
from dpgen_bench.data.private import PrivateData
from dpgen_bench.evaluate.metric import EvalContext
from dpgen_bench.method import Context
from dpgen_bench.privacy.mechanism import Mechanism
from dpgen_bench.tables.plot_spec import PLOT_KINDS
from dpgen_bench.tables.spec import RowSpec, TableSpec, parse_table
from tests.test_page_examples import examples, own_modules, write_files  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent
METHOD, METRIC, TABLE = (ROOT / "docs" / "extend" / f"{name}.md" for name in ("method", "metric", "table"))


def first_cells(page: Path, heading: str) -> list[str]:
    """The first cells of the table whose header begins with `heading`."""
    (table,) = re.findall(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]


def in_backticks(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


# --- examples ---------------------------------------------------------------------------------------------------------


def test_the_page_has_the_methods_example_of_the_readme() -> None:
    readme = {each.marker: each.code for each in examples(ROOT / "README.md")}
    page = {each.marker: each.code for each in examples(METHOD)}
    names = ("mean_image.py", "my_conf/method/mean_image.yaml")
    assert [page[name] for name in names] == [readme[name] for name in names]


def test_presets_protocols_and_methods_of_the_pages_compose(own_modules) -> None:  # noqa: F811
    write_files(METHOD, own_modules)
    write_files(METRIC, own_modules)
    own = "--config-dir=my_conf"
    config = compose_config([own, "experiment=tiny_vae_long", "protocol=forest"])
    assert type(build_method(config)).__name__ == "TinyVAE"
    assert set(config.protocol.metrics) == {"logreg", "mlp", "forest"}
    assert compose_config([own, "method=prototypes"]).method.C == 10.0


@pytest.mark.parametrize("page", [METHOD, TABLE], ids=lambda page: page.stem)
def test_the_tables_of_the_pages_are_valid(page: Path) -> None:
    tables = [each for each in examples(page) if "/table/" in each.marker]
    assert tables
    for each in tables:
        assert parse_table(each.marker, OmegaConf.to_container(OmegaConf.create(each.code))).leaderboard is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_vae", "prototypes"])
def test_the_methods_of_the_page_conform(name: str, own_modules, capsys) -> None:  # noqa: F811
    write_files(METHOD, own_modules)
    assert main(["check", "--config-dir", "my_conf", f"method={name}"]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_autoencoder_of_the_page_learns_without_privacy(own_modules, monkeypatch) -> None:  # noqa: F811
    from dpgen_bench import evaluate_images, run

    write_files(METHOD, own_modules)
    monkeypatch.setenv("DPGEN_RESULTS", str(own_modules / "results"))
    no_mlp = "~protocol.metrics.mlp"
    folder = run("--config-dir=my_conf", "method=tiny_vae", "privacy.epsilon=inf", "runtime.threads=1", no_mlp)
    values = evaluate_images(folder, dataset="digits", overrides=[no_mlp]).values
    assert values["acc_logreg_pct"] > 50  # 83 here, and 10 by chance


# --- tables of the pages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "of", "owner"),
    [
        (METHOD, "data", PrivateData),
        (METHOD, "a mechanism", Mechanism),
        (METHOD, "ctx", Context),
        (METRIC, "ctx", EvalContext),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_a_page_offers_exists_with_this_signature(page: Path, of: str, owner: type) -> None:
    heading = f"of `{of}`" if of != "a mechanism" else f"of {of}"
    listed = in_backticks(first_cells(page, heading))
    assert len(listed) > 4
    instance = vars(Context()) if owner is Context else {}
    attributes = {"num_classes", "image_shape"} if owner is PrivateData else set()  # set in __init__
    for each in listed:
        called = re.fullmatch(r"(?:\w+\.)?(\w+)(?:\((.*)\))?", each)
        assert called, each
        name, arguments = called[1], called[2]
        if name == "release":
            name = "__call__"
        fields = {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()
        assert hasattr(owner, name) or name in {*instance, *attributes, *fields}, each
        if arguments is None or "client" in arguments:
            continue
        signature = inspect.signature(getattr(owner, name))
        plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
        own = inspect.Signature(plain[1:])  # without self
        assert str(own).replace("'", '"') == f"({arguments})", each


def test_the_keys_of_a_table_are_those_of_the_page() -> None:
    text = TABLE.read_text()
    keys = text.split("## Keys")[1].split("## Plots")[0]
    listed = {name for line in keys.splitlines() if line.startswith("| `") for name in _names(line)}
    assert listed == {field.name for field in dataclasses.fields(TableSpec)}
    rows = text.split("## A paper's table")[1]
    listed = {name for line in rows.splitlines() if line.startswith("| `") for name in _names(line)}
    assert listed == {field.name for field in dataclasses.fields(RowSpec)} | {"for"}


def _names(line: str) -> list[str]:
    return re.findall("`([^`]+)`", line.split(" | ")[0])


def test_the_kinds_of_plots_are_those_of_the_page() -> None:
    assert sorted(in_backticks(first_cells(TABLE, "kind"))) == sorted(PLOT_KINDS)
