"""Malformed commands: each ends with one message that says what was expected, what came and what to do."""

from __future__ import annotations

import re
import shlex
import shutil

import pytest

from dpgen_bench.runs import execute as execution
from dpgen_bench.store.folders import RunFolder
from tests.malformed import Case, cases, contents, finished_run, keep_process_state, only_run, status_of

SETTINGS = "`dpgen run --cfg job` shows all settings"
LIST = "`dpgen list` describes them"
QUOTES = "KEY='VALUE'"
TRAINING = "run method=dp_merf dataset=digits runtime.progress=false "
SAMPLE = "sample {run} --benchmark --out {tmp}/images.npz "
EVALUATE = "evaluate {run} protocol=quick "
ACCOUNT = "account --q 0.1 --sigma 1 --steps 5 "

OVERRIDES = cases(
    # Names of groups, and keys.
    Case("unknown method", "run method=dpgann", "expected method=NAME", "'dpgann' (did you mean 'dpgan'?)", LIST),
    Case("unknown dataset", "run dataset=minst", "expected dataset=NAME", "'minst' (did you mean 'mnist'?)", LIST),
    Case("unknown scale", "run scale=tiny", "expected scale=NAME", "'tiny'", "paper, quick"),
    Case("unknown protocol", "run protocol=standart", "protocol=NAME", "(did you mean 'standard'?)", LIST),
    Case("a list of metrics", "run protocol.metrics=[mlp]", "expected the settings below protocol.metrics one by one",
         "'protocol.metrics=[mlp]'", "~protocol.metrics.NAME to leave one out"),
    Case("unknown preset", "run experiment=demo/dpgn", "experiment=NAME", "(did you mean 'demo/dpgan'?)", LIST),
    Case("unknown federation", "run federation=x", "expected federation=NAME", "'x'", "inproc, ray"),
    Case("unknown launcher", "run hydra/launcher=slurm", "that exists", "'hydra/launcher/slurm'", "submitit_slurm"),
    Case("group without a value", "run method=", "expected a config", "'method/'", "correct the name"),
    Case("group that is null", "run method=null", "expected method=NAME", "'method=null'", LIST),
    Case("group that is a number", "run privacy=3", "expected privacy=NAME", "'privacy=3'", LIST),
    Case("unknown name in a multirun", "run -m method=dp_merf,dpgn", "method=NAME", "'dpgn'", LIST),
    Case("unknown group", "run metod=dpgan", "expected a setting", "'metod=dpgan' (did you mean 'method'?)", SETTINGS),
    Case("misspelt key", "run method.step=3", "a setting of the config", "(did you mean 'method.steps'?)", SETTINGS),
    Case("misspelt key of privacy", "run privacy.eps=3", "a setting", "'privacy.eps=3'", "correct the name"),
    Case("added key of the method", "run +method.stepz=3", "a setting of the method", "'stepz'", "correct the name"),
    Case("added key of runtime", "run +runtime.devise=cpu", "one of the settings", "'devise'", "did you mean 'device'"),
    Case("added key that exists", "run +seed=3", "expected a new key after +", "'+seed=3'", "write it without +"),
    Case("deletion of nothing", "run ~sede", "a key of the config after ~", "(did you mean 'seed'?)", "leave it out"),
    Case("deletion of a group", "run ~dataset", "expected a config group 'dataset'", "None", "conf/dataset/"),
    Case("deletion of the seed", "run ~seed", "expected a value of seed", "none", "write seed=VALUE"),
    Case("deletion of epsilon", "run ~privacy.epsilon", "privacy.epsilon", "none", "write privacy.epsilon=VALUE"),
    Case("deletion of runtime", "run ~runtime", "expected settings runtime.*", "None", "leave it out"),
    Case("deletion of the device", "run ~runtime.device", "runtime.device", "none", "leave ~runtime.device out"),
    Case("open value", "run dataset=image_folder", "a value of dataset.path", "none", "dataset.path=FOLDER"),
    Case("second open value", "run dataset=npz", "a value of dataset.path", "none", "dataset.path=FILE.npz"),
    Case("interpolation of nothing", "run 'seed=${nothing}'", "can be resolved", "nothing", "correct the ${...}"),
    # The grammar of overrides.
    Case("no value", "run seed", "expected an override", "'seed'", QUOTES),
    Case("no key", "run =1", "expected KEY=VALUE", "'=1'", SETTINGS),
    Case("two equals signs", "run seed==1", "expected an override", "'seed==1'", QUOTES),
    Case("unbalanced quote", 'run "seed=\'1"', "expected an override", "\"seed='1\"", QUOTES),
    Case("unbalanced bracket", "run method.steps=[1", "expected an override", "'method.steps=[1'", QUOTES),
    Case("value with a space", "run 'dataset.root=my data)'", "expected an override",
         "'dataset.root=my data)'", QUOTES),
    Case("values without -m", "run seed=0,1", "expected one value of seed", "'seed=0,1'", "write -m"),
    Case("unknown option", "run --sede 3", "expected", "--sede", "see dpgen run --help"),
    Case("option without a value", "run --config-dir", "expected one argument", "--config-dir", "--help"),
    Case("config-dir that is missing", "run --config-dir {tmp}/x", "expected a folder", "/x'", "create it"),
    # Types and ranges of values.
    Case("epsilon of text", "run privacy.epsilon=abc", "numbers for privacy.epsilon", "'abc'", "null for no budget"),
    Case("epsilon of a list", "run privacy.epsilon=[1,2]", "numbers for privacy.epsilon", "[1, 2]", "null"),
    Case("epsilon that overflows", "run privacy.epsilon=1e400", "a number below 1.8e308", "1e400", "write inf"),
    Case("swept number that overflows", "run -m privacy.epsilon=1,1e400", "below 1.8e308", "1e400", "write inf"),
    Case("epsilon below 0", "run privacy.epsilon=-1", "privacy.epsilon > 0", "-1", "inf for a non-private run"),
    Case("epsilon that is NaN", "run privacy.epsilon=nan", "privacy.epsilon > 0", "nan", "inf for"),
    Case("delta of 2", "run privacy.delta=2", "privacy.delta in (0, 1)", "2", "set privacy.delta"),
    Case("relation", "run privacy.relation=x", "privacy.relation", "'x'", "replace_one"),
    Case("accountant", "run privacy.accountant=x", "privacy.accountant", "'x'", "pld"),
    Case("noise", "run privacy.noise=x", "privacy.noise", "'x'", "seeded"),
    Case("diagnostics", "run privacy.diagnostics=x", "privacy.diagnostics", "'x'", "unsafe"),
    Case("population", "run privacy.population=3", "privacy.population to be a name", "3", "or null"),
    Case("seed of text", "run seed=x", "expected seed to be an integer in [0, 2**63)", "'x'", "seed=0"),
    Case("seed of a fraction", "run seed=1.5", "expected seed to be an integer in [0, 2**63)", "1.5", "seed=0"),
    Case("seed below 0", "run seed=-1", "expected seed to be an integer in [0, 2**63)", "-1", "seed=0"),
    Case("seed of more than 64 bits", f"run seed={2**63}", "expected seed to be an integer in [0, 2**63)", str(2**63),
         "seed=0"),
    Case("no steps", "run method=dp_merf method.steps=0", "method.steps: expected a number in [1", "0", "method.steps"),
    Case("infinite steps", "run method=dp_merf method.steps=inf", "expected an integer", "inf", "method.steps"),
    Case("steps of a list", "run method=dp_merf method.steps=[1]", "an integer", "[1]", "method.steps"),
    Case("max_steps of text", "run scale.max_steps=abc", "scale.max_steps: expected", "'abc'", "scale.max_steps"),
    Case("max_steps of 0", "run scale.max_steps=0", "scale.max_steps of at least 1", "0", "null for no cap"),
    Case("folder that is a number", "run dataset.root=5", "dataset.root: expected a string", "5", "dataset.root"),
    Case("results that are null", "run results=null", "expected results to be a folder", "None", "results=FOLDER"),
    Case("device that is unknown", TRAINING + "runtime.device=tpu", "runtime.device", "'tpu'", "runtime.device=auto"),
    Case("device that is not here", TRAINING + "runtime.device=cuda:97", "a device of this machine", "cuda:97", "auto"),
    Case("threads of text", "run runtime.threads=x", "runtime.threads: expected", "'x'", "integer"),
    Case("no threads", "run runtime.threads=0", "runtime.threads: expected a number in [1", "0", "inf"),
    Case("no workers", "run runtime.workers=0", "runtime.workers: expected a number in [1", "0", "inf"),
    Case("interval of text", "run runtime.checkpoint_s=x", "runtime.checkpoint_s: expected a number", "'x'", "runtime"),
    Case("time limit of 0", "run runtime.account_s=0", "runtime.account_s: expected a number in (0", "0", "inf"),
    Case("one step to keep", "run runtime.keep_steps=5", "runtime.keep_steps: expected a list", "5", "integer"),
    Case("progress of text", "run runtime.progress=maybe", "runtime.progress: expected true or false", "'maybe'", ""),
    # Protocols and restarts.
    Case("metrics of a number", "run protocol.metrics=3", "protocol.metrics to name metrics", "3", "protocol.metrics"),
    Case("no samples", "run protocol.num_samples=0", "protocol.num_samples to be an integer >= 1", "0", "num_samples"),
    Case("repeats of text", "run protocol.repeats=x", "protocol.repeats to be an integer >= 1", "'x'", "repeats"),
    Case("name of a protocol", "run protocol.name=a/b", "protocol.name to be a word", "'a/b'", "can name a file"),
    Case("entry of a protocol", "run +protocol.n=3", "expected entries", "['n']", "num_samples"),
    Case("metric that is a number", TRAINING + "+protocol.metrics.x=3", "metric 'x'", "3", "_target_"),
    Case("metric without a class", TRAINING + "+protocol.metrics.x={a:1}", "metric 'x'", "{'a': 1}", "_target_"),
    Case("metric that is not found", TRAINING + "+protocol.metrics.x={_target_:no.X}", "x._target_",
         "'no.X'", "correct"),
    Case("restart of text", TRAINING + "restart=abc", "expected restart to be null, or a run", "'abc'", "restart={run"),
    Case("restart without a run", TRAINING + "restart={checkpoint:last}", "expected restart", "last", "restart={run"),
    Case("restart of a number", TRAINING + "restart={run:12}", "a run's id as text", "12", "quotes"),
    Case("restart of nothing", TRAINING + "restart={run:zzz}", "whose id starts with 'zzz'", "none", "`dpgen runs`"),
    Case("restart on other data", TRAINING + 'restart={run:"{run}"}', "expected a parent run on", "{run}", "must use"),
)  # fmt: skip

VERBS = cases(
    Case("unknown verb", "rnus", "expected one of run", "'rnus' (did you mean 'runs'?)", "see dpgen --help"),
    Case("option as a verb", "--config-dir x run", "expected one of run", "'--config-dir'", "see dpgen --help"),
    Case("runs of no folder", "runs --results {tmp}/x", "expected a folder of results", "/x", "--results"),
    Case("delta of text", "runs --spent --delta abc", "--delta: expected", "'abc'", "--help"),
    Case("delta without spent", "runs --delta 1e-5", "together with --spent", "1e-05", "--delta"),
    Case("sample without options", "sample {run}", "expected", "--n", "--help"),
    Case("no images", SAMPLE + "--n 0", "--n of at least 1", "0", "--n"),
    Case("images below 0", SAMPLE + "--n -5", "--n of at least 1", "-5", "--n"),
    Case("images of text", SAMPLE + "--n many", "--n: expected an integer", "'many'", "--help"),
    Case("seed of sample", SAMPLE + "--n 3 --seed x", "--seed: expected an integer", "'x'", "--help"),
    Case("labels of sample", SAMPLE + "--n 3 --labels all", "expected one of balanced, uniform", "'all'", "--help"),
    Case("not for release", "sample {run} --n 3 --out {tmp}/x.npz", "not for release", "seeded", "--benchmark"),
    Case("ending of out", "sample {run} --benchmark --n 3 --out {tmp}/x.jpg", "expected --out", "x.jpg", ".npz"),
    Case("out below a file", "sample {run} --benchmark --n 3 --out {tmp}/f/x.npz", "--out in a folder",
         "/f is a file", "choose",
         prepare=lambda tmp, run: (tmp / "f").write_text("")),
    Case("out that exists", "sample {run} --benchmark --n 3 --out {tmp}/x.npz", "a new file", "x.npz", "--overwrite",
         prepare=lambda tmp, run: (tmp / "x.npz").write_text("")),
    Case("sample of an unknown run", "sample zzz --n 1 --out {tmp}/x.npz", "starts with 'zzz'", "none", "`dpgen runs`"),
    Case("evaluate an unknown run", "evaluate zzz", "one run whose id starts with 'zzz'", "none", "`dpgen runs`"),
    Case("ambiguous id", "evaluate {run[0]}", "expected one run whose id starts with", "{run}, ", "`dpgen runs`",
         prepare=lambda tmp, run: shutil.copytree(run.path, run.path.with_name(run.id[0] + "f" * 11))),
    Case("evaluate with another seed", "evaluate {run} seed=3", "expected overrides of protocol", "seed",
         "`dpgen run`"),
    Case("evaluate by an unknown protocol", "evaluate {run} protocol=x", "protocol=NAME", "'x'", LIST),
    Case("evaluate by half a protocol", "evaluate {run} protocol.repeats=3", "expected protocol=NAME",
         "repeats", "which"),
    Case("evaluate on no device", EVALUATE + "runtime.device=tpu", "runtime.device", "'tpu'", "auto"),
    Case("evaluate with threads of text", EVALUATE + "runtime.threads=x", "runtime.threads: expected",
         "'x'", "integer"),
    Case("evaluate with words", "evaluate {run} quick", "expected overrides of protocol", "quick", "`dpgen run`"),
    Case("account of nothing", "account", "expected --q", "--steps", "--help"),
    Case("rate of 0", "account --q 0 --sigma 1 --steps 1", "--q in (0, 1]", "0", "--q"),
    Case("rate of text", "account --q x --sigma 1 --steps 1", "a number or a fraction", "'x'", "--help"),
    Case("sigma below 0", "account --q 0.1 --sigma -1 --steps 1", "--sigma > 0", "-1", "--sigma"),
    Case("sigma that is NaN", "account --q 0.1 --sigma nan --steps 1", "--sigma > 0", "nan", "--sigma"),
    Case("draws below 0", "account --q 0.1 --sigma 1 --steps -4", "--steps >= 1", "-4", "--steps"),
    Case("no draws", "account --q 0.1 --sigma 1", "together", "missing --steps", "--steps"),
    Case("delta of 0", ACCOUNT + "--delta 0", "--delta in (0, 1)", "0", "--delta"),
    Case("options and overrides", ACCOUNT + "method=dpgan", "expected either", "both", "or overrides"),
    Case("account for an unknown method", "account method=x", "expected method=NAME", "'x'", LIST),
    Case("check an unknown method", "check method=x", "expected method=NAME", "'x'", LIST),
    Case("check with one record", "check method=dp_merf --records 1", "--records of at least 2", "1", "--records"),
    Case("check with records of text", "check --records x", "--records: expected an integer", "'x'", "--help"),
    Case("no table", "tables", "expected names of tables", "neither", "league_mnist"),
    Case("unknown table", "tables leage_mnist", "the name of a table", "(did you mean 'league_mnist'?)", "dpgen list"),
    Case("table by its path", "tables ../config", "the name of a table", "'../config'", "dpgen list tables"),
    Case("format of tables", "tables demo --format docx", "expected formats md,tex,csv,html", "'docx'", "--help"),
    Case("scale of tables", "tables demo scale=x", "scale=paper or scale=quick", "'x'", "scale="),
    Case("sweep of nothing", "sweep", "expected one table", "no table", "KEY=VALUE"),
    Case("sweep of an unknown table", "sweep x --dry-run", "the name of a table", "'x'", "dpgen list tables"),
    Case("sweep with another seed", "sweep demo seed=3 --dry-run", "how runs are made", "seed=3", "`dpgen run`"),
    Case("sweep with an unknown setting", "sweep demo runtime.x=1 --dry-run", "a setting", "'runtime.x=1'", SETTINGS),
    Case("fetch of an unknown dataset", "fetch dataset=x", "expected dataset=NAME", "'x'", LIST),
    Case("fetch of an open value", "fetch dataset=image_folder", "a value of dataset.path", "none", "dataset.path="),
    Case("list of nonsense", "list methodes", "expected one of methods",
         "'methodes' (did you mean 'methods'?)", "list"),
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.mark.parametrize("case", [*OVERRIDES, *VERBS])
def test_a_malformed_command_is_refused(case, finished, tmp_path, monkeypatch, capsys):
    results, folder = tmp_path / "results", tmp_path / "tmp"
    shutil.copytree(finished.path.parents[1], results)
    folder.mkdir()
    monkeypatch.setenv("DPGEN_RESULTS", str(results))
    monkeypatch.chdir(folder)
    case.prepare(folder, only_run(results))
    before = contents(tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing may be trained")

    monkeypatch.setattr(execution, "_train", refuse)
    monkeypatch.setattr(execution, "measure", refuse)
    named = {"{tmp}": str(folder), "{run}": finished.id, "{run[0]}": finished.id[0]}
    fill = re.compile("|".join(map(re.escape, named)))
    command, *fragments = (
        fill.sub(lambda found: named[found[0]], text) for text in (case.command, case.expected, case.got, case.do)
    )
    keep_process_state(monkeypatch)
    status = status_of(shlex.split(command))
    shown = capsys.readouterr()
    assert (status, "Traceback" in shown.out + shown.err) == (case.status, False), shown.err
    assert shown.err.startswith("dpgen"), shown.err
    for fragment in fragments:
        assert fragment in shown.err, shown.err
    assert contents(tmp_path) == before


def test_the_table_is_long():
    assert len(OVERRIDES) + len(VERBS) >= 80
