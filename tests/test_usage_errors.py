"""Help of every verb, and usage errors, which are answered with status 2 before PyTorch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dpgen_bench.cli import main
from dpgen_bench.cli.parser import build_parser
from dpgen_bench.cli.verbs import VERBS
from dpgen_bench.utils.paths import HOME

PARSERS = build_parser()[1]


def test_every_verb_has_a_parser_and_a_function():
    assert PARSERS.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", sorted(PARSERS))
def test_help_shows_what_options_mean_and_two_examples(verb, capsys):
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert [action.dest for action in PARSERS[verb]._actions if not action.help] == []
    assert shown.partition("examples:\n")[2].count(f"  dpgen {verb}") >= 2
    assert "--config-dir" in shown
    assert "--results" in shown


def test_help_of_dpgen_names_every_verb_and_how_completion_is_switched_on(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [verb for verb in PARSERS if f"\n    {verb} " not in shown] == []
    assert 'eval "$(register-python-argcomplete dpgen)"' in shown
    assert main([]) == 2


@pytest.mark.parametrize("verb", sorted(PARSERS))
def test_the_examples_of_the_help_can_be_parsed(verb):
    for example in (PARSERS[verb].epilog or "").splitlines()[1:]:
        words = example.split()
        assert words[:2] == ["dpgen", verb]
        arguments = [each for each in words[2:] if each != "--config-dir" and each != "my_conf"]
        assert PARSERS[verb].parse(arguments) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["swep"], "did you mean 'sweep'?"),
        (["--versio"], "did you mean '--version'?"),
        (["run", "--multirum"], "did you mean '--multirun'?"),
        (["sample", "abc", "--out", "x"], "expected --n"),
        (["sample", "abc", "--n", "many", "--out", "x"], "expected an integer, got 'many'"),
        (["sample", "abc", "--n", "1", "--out", "x", "--labels", "balance"], "did you mean 'balanced'?"),
        (["tables", "demo", "--format", "mdd"], "expected formats md,tex,csv,html, got 'mdd'"),
        (["run", "--config-dir", "nowhere"], "expected a folder, got 'nowhere'"),
    ],
)
def test_options_get_one_line_with_a_suggestion(arguments, message, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_options_of_a_run_may_stand_anywhere():
    for arguments in (["-m", "a=1", "b=2"], ["a=1", "-m", "b=2"], ["a=1", "b=2", "--multirun"]):
        options = PARSERS["run"].parse(arguments)
        assert (options.multirun, options.overrides) == (True, ["a=1", "b=2"])


BAD = [
    (["swep"], "did you mean 'sweep'?"),
    (["run", "--devise=cpu"], "expected options of this verb"),
    (["run", "method=dpgn"], "did you mean 'dpgan'?"),
    (["run", "protocol=standart"], "did you mean 'standard'?"),
    (["run", "experiment=demo/dpgn"], "did you mean 'demo/dpgan'?"),
    (["run", "runtime.devise=cpu"], "did you mean 'runtime.device'?"),
    (["run", "-m", "seed=0,1", "method=dp_merf,dpgn"], "did you mean 'dpgan'?"),
    (["run", "a b=[1"], "expected an override"),
    (["check", "method=dpgn"], "did you mean 'dpgan'?"),
    (["account", "method=dpgn"], "did you mean 'dpgan'?"),
    (["fetch", "dataset=mnits"], "did you mean 'mnist'?"),
    (["tables", "leage_mnist"], "did you mean 'league_mnist'?"),
    (["tables", "demo", "--format", "pdf"], "expected formats"),
    (["tables"], "expected names of tables"),
    (["sweep", "leage_mnist"], "did you mean 'league_mnist'?"),
    (["sweep"], "expected one table"),
    (["sweep", "demo", "a b=[1"], "expected an override"),
    (["list", "method"], "did you mean 'methods'?"),
    (["runs", "failed"], "expected filters KEY=VALUE"),
    (["rm"], "expected ids of runs"),
    (["account"], "expected --q or --shards, --sigma and --steps"),
    (["account", "--q", "2", "--sigma", "1", "--steps", "1"], "--q in (0, 1], got 2"),
    (["sample", "zzz", "--n", "1", "--out", "x.npz"], "expected one run whose id starts with 'zzz'"),
    (["evaluate", "zzz"], "expected one run whose id starts with 'zzz'"),
    (["runs", "--results", "nowhere"], "expected a folder of results"),
]


@pytest.fixture(scope="module")
def answers() -> dict:
    """What a process that executes all bad commands, one after the other, answers, and whether it imported PyTorch."""
    program = (
        "import contextlib, io, json, sys\nfrom dpgen_bench.cli import main\nanswers = []\n"
        "for arguments in json.loads(sys.argv[1]):\n    text = io.StringIO()\n"
        "    with contextlib.redirect_stderr(text):\n        code = main(arguments)\n"
        "    answers.append([code, text.getvalue(), 'torch' in sys.modules])\n"
        "print(json.dumps(answers))\n"
    )
    command = [sys.executable, "-c", program, json.dumps([arguments for arguments, _ in BAD])]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HOME)
    assert done.returncode == 0, done.stderr
    return dict(zip((" ".join(arguments) for arguments, _ in BAD), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_usage_errors_are_answered_before_torch_is_imported(arguments, message, answers):
    code, shown, imported_torch = answers[" ".join(arguments)]
    assert (code, imported_torch) == (2, False), shown
    assert message in shown


@pytest.mark.parametrize("arguments", [["list"], ["runs", "--json"]])
def test_a_listing_whose_reader_ends_is_no_failure(arguments, tmp_path):
    command = [sys.executable, "-m", "dpgen_bench.cli", *arguments, "--results", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HOME)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), errors) == (0, b"")
