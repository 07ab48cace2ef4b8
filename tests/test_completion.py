"""Tab completion by argcomplete's protocol, and the modules that it loads."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import argcomplete
import pytest

from dpgen_bench.cli.parser import build_parser
from dpgen_bench.config.catalogue import names
from tests.test_cli import ROOT

WORD_BREAKS = "\"'><=;|&(:"


class Done(Exception):
    """Raised in place of the end of the process."""


def complete(line: str, monkeypatch) -> list[str]:
    """The completions of a line as bash gets them: without what precedes the last word break."""
    stream = io.StringIO()
    environment = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    for name, value in {**environment, "_ARGCOMPLETE_COMP_WORDBREAKS": WORD_BREAKS}.items():
        monkeypatch.setenv(name, value)

    def refuse(*_: object) -> None:  # argcomplete would take descriptor 9 of this process for its messages
        raise OSError

    monkeypatch.setattr(os, "fdopen", refuse)

    def leave(status: int) -> None:
        raise Done

    with pytest.raises(Done):
        argcomplete.autocomplete(build_parser()[0], exit_method=leave, output_stream=stream)
    return [each.strip() for each in stream.getvalue().split("\n") if each.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dpgen sw", ["sweep"]),
        ("dpgen sweep --dry", ["--dry-run"]),
        ("dpgen run meth", ["method=", "method.features="]),
        ("dpgen run method=dpg", ["dpgan"]),
        ("dpgen run -m method=dpgan dataset=mnist,fash", ["mnist,fashion_mnist"]),
        ("dpgen run experiment=demo/dpg", ["demo/dpgan"]),
        ("dpgen run protocol=standard_1", ["standard_10k", "standard_10k_fidelity", "standard_1k_cpu"]),
        ("dpgen run scale=q", ["quick"]),
        ("dpgen run privacy.noise=", ["seeded", "os"]),
        ("dpgen run method=dpgan method.lr", ["method.lr_d=", "method.lr_g="]),
        ("dpgen tables league_m", ["league_mnist"]),
        ("dpgen sweep dp_m", ["dp_merf"]),
        ("dpgen tables demo --format md,te", ["md,tex"]),
        ("dpgen list pro", ["protocols"]),
        ("dpgen sample abc --labels u", ["uniform"]),
    ],
)
def test_words_are_completed(line, expected, monkeypatch):
    found = complete(line, monkeypatch)
    assert set(expected) <= set(found)
    if len(expected) == 1:
        assert found == expected


def test_ids_of_runs_and_own_names_are_completed(monkeypatch, tmp_path):
    for run in ("abc123abc123", "abd000abd000", "fff000fff000"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.yaml").write_text("")
    assert complete(f"dpgen sample --results {tmp_path} ab", monkeypatch) == ["abc123abc123", "abd000abd000"]
    (tmp_path / "own" / "method").mkdir(parents=True)
    (tmp_path / "own" / "method" / "zebra.yaml").write_text("C: 1.0\n")
    assert complete(f"dpgen run --config-dir {tmp_path / 'own'} method=z", monkeypatch) == ["zebra"]


def test_all_names_of_a_group_are_completed(monkeypatch):
    assert complete("dpgen run dataset=", monkeypatch) == list(names("dataset"))


def test_completion_loads_neither_torch_nor_hydra():
    script = (
        "import sys, argcomplete\nfrom dpgen_bench.cli.parser import build_parser\nimport dpgen_bench.cli\n"
        "def leave(status):\n    print(*sys.modules, file=sys.stderr)\n    raise SystemExit\n"
        "argcomplete.autocomplete(build_parser()[0], exit_method=leave, output_stream=sys.stdout)\n"
    )
    line = "dpgen run method=dpgan method.l"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_ARGCOMPLETE": "1", "COMP_LINE": line}
    environment |= {"COMP_POINT": str(len(line))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    loaded = set(done.stderr.split())
    assert "dpgen_bench.config.catalogue" in loaded
    assert not loaded & {"torch", "hydra", "omegaconf", "pandas", "numpy"}
