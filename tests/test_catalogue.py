"""`dpgen list`: every name that the command line accepts, with one line for each."""

from __future__ import annotations

import pytest

from dpgen_bench import __version__
from dpgen_bench.cli import main
from dpgen_bench.config.catalogue import GROUPS, LONGEST, catalogue
from dpgen_bench.tables.load import load_table
from dpgen_bench.tables.names import table_names
from dpgen_bench.utils.own_folders import using
from dpgen_bench.utils.paths import CONF
from dpgen_bench.utils.validation import suggestion


@pytest.mark.parametrize("group", GROUPS)
def test_every_name_has_a_description(group):
    entries = catalogue(group)
    files = {
        path.relative_to(CONF / GROUPS[group][0]).with_suffix("").as_posix()
        for path in (CONF / GROUPS[group][0]).rglob("*.yaml")
    }
    assert entries.keys() == {name for name in files if not name.startswith("part/")}
    for name, text in entries.items():
        assert 5 <= len(text) <= LONGEST, name
        assert not text.endswith("."), name


def test_tables_are_described_by_their_titles():
    assert list(catalogue("tables")) == sorted(table_names())
    assert catalogue("tables")["demo"] == load_table("demo").title


def test_yamls_of_ones_own_are_listed(tmp_path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text(
        "# My method of Doe et al. 2020 with D = 1.5. More.\n_target_: mine.M\n"
    )
    (tmp_path / "method" / "dpgan.yaml").write_text("# Not used, as the bench has a file of this name.\n")
    before = catalogue("methods")
    with using([tmp_path]):
        assert catalogue("methods") == before | {"mine": "My method of Doe et al. 2020 with D = 1.5"}


def test_list_prints_groups(capsys):
    assert main(["list", "methods", "protocols"]) == 0
    printed = capsys.readouterr().out
    assert "dp_merf" in printed
    assert "standard_2k" in printed
    assert "celeba" not in printed
    assert main(["list"]) == 0
    assert "celeba" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["list", "method"],
            "experiments, tables, got 'method' (did you mean 'methods'?); `dpgen list` lists all of them.",
        ),
        (["list", "--config-dir", "nowhere"], "--config-dir: expected a folder, got 'nowhere'"),
        (["tabels"], "got 'tabels' (did you mean 'tables'?)"),
        (
            ["tables", "dpgan_tabel1"],
            "got 'dpgan_tabel1' (did you mean 'dpgan_table1'?). `dpgen list tables` lists them.",
        ),
    ],
)
def test_unknown_names_get_a_suggestion(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_close_gets_no_suggestion():
    assert suggestion("zzz", ["dpgan", "dp_merf"]) == ""


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dpgen_bench {__version__}\n"
