"""Tests the total epsilon of several runs on one population: how it is computed, printed, and what a population is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from dp_accounting import get_epsilon_gaussian
from omegaconf import OmegaConf

from dpgen_bench import cli
from dpgen_bench.config.compose import compose_config
from dpgen_bench.config.spec import build_spec, identify, population_of
from dpgen_bench.outcomes.sample_command import sample_run
from dpgen_bench.outcomes.spent import describe_total, print_spent, read_spent, total
from dpgen_bench.privacy.events import Budget, Event, Sensitivity
from dpgen_bench.privacy.ledger import Entry, Ledger
from dpgen_bench.privacy.sampling import Full, OneClient, Poisson
from dpgen_bench.runs.execute import execute
from dpgen_bench.runs.validation import folder_problem
from dpgen_bench.store.folders import Store
from tests.run_toys import config

GAUSSIAN = Event(Full(), Sensitivity(1.0, 2.0), 5.0, 1)


def make_run(results: Path, run: str, *events: Event, parent: Ledger | None = None, **settings) -> Ledger:
    """Make the folder of a run that was approved for `events` and killed before its first release."""
    settings = {"noise": "os", "population": "staff", **settings}
    ledger = Ledger(settings.pop("budget", Budget(10.0)), 100, **settings)
    for number, event in enumerate(events):
        ledger.approve(Entry(f"m{number}", {"kind": "PerRecord", "C": 1.0, "rows": 1}, event))
    if parent is not None:
        assert parent.path is not None
        ledger.inherit(parent, parent.path.parent.name)
    folder = Store(results).folder(run)
    folder.path.mkdir(parents=True)
    (folder.path / "config.yaml").write_text(OmegaConf.to_yaml(compose_config(["data_root=/data"])))
    ledger.path = folder.path / "ledger.json"
    ledger.save()
    return ledger


def only(results: Path):
    (spent,) = read_spent(results)[0]
    return spent


def test_runs_that_did_not_finish_compose_as_gaussians_do(tmp_path):
    """Two releases of multiplier 5 are one of 5 / sqrt(2) (add/remove), 2.5 / sqrt(2) under replace-one."""
    make_run(tmp_path, "a" * 12, GAUSSIAN)
    make_run(tmp_path, "b" * 12, GAUSSIAN)
    spent = only(tmp_path)
    assert spent.runs == {"a" * 12, "b" * 12}
    table = total(spent, tmp_path)
    assert table["add_remove"]["pld"] == pytest.approx(get_epsilon_gaussian(5 / 2**0.5, 1e-5), rel=1e-6)
    assert table["replace_one"]["pld"] == pytest.approx(get_epsilon_gaussian(2.5 / 2**0.5, 1e-5), rel=1e-6)


@pytest.mark.parametrize("deleted", [False, True])
def test_inherited_releases_count_once(tmp_path, deleted):
    parent = make_run(tmp_path, "a" * 12, GAUSSIAN, Event(Poisson(0.1), Sensitivity(1.0, 2.0), 5.0, 10))
    child = make_run(tmp_path, "b" * 12, GAUSSIAN, parent=parent)
    make_run(tmp_path, "c" * 12, parent=child)  # after two restarts, without its own releases
    if deleted:
        shutil.rmtree(tmp_path / "runs" / ("a" * 12))
    spent = only(tmp_path)
    assert sorted(str(event) for event in spent.events) == sorted(str(event) for event in [*parent.events, GAUSSIAN])
    assert spent.runs == {"a" * 12, "b" * 12}


def test_an_older_copy_of_an_entry_is_the_same_entry(tmp_path):
    parent = make_run(tmp_path, "a" * 12, GAUSSIAN)
    make_run(tmp_path, "b" * 12, parent=parent)
    file = Store(tmp_path).folder("b" * 12)
    content = file.read_json("ledger.json")
    for row in content["entries"]:
        del row["noise"], row["diagnostics"]
    file.write_json("ledger.json", content)
    assert only(tmp_path).events == [GAUSSIAN]


def test_populations_and_units_stay_apart_and_seeded_runs_do_not_count(tmp_path, capsys):
    make_run(tmp_path, "a" * 12, GAUSSIAN)
    make_run(tmp_path, "b" * 12, GAUSSIAN, population="guests")
    make_run(tmp_path, "c" * 12, Event(OneClient(5), Sensitivity(2.0, 2.0), 9.0, 5), unit="client")
    make_run(tmp_path, "d" * 12, GAUSSIAN, noise="seeded")
    make_run(tmp_path, "e" * 12)
    populations, unreadable = read_spent(tmp_path)
    assert [(each.population, each.unit, len(each.runs)) for each in populations] == [
        ("guests", "record", 1),
        ("staff", "client", 1),
        ("staff", "record", 1),
    ]
    assert unreadable == []
    print_spent(tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "staff (records): dddddddddddd made releases with privacy.noise=seeded" in out
    assert "staff (records): runs whose unit is the client spend on these records, too" in out
    assert "give runs on overlapping records one name with privacy.population" in out


def test_the_total_is_at_the_smallest_delta_unless_another_is_requested(tmp_path, capsys):
    make_run(tmp_path, "a" * 12, GAUSSIAN)
    make_run(tmp_path, "b" * 12, GAUSSIAN, budget=Budget(10.0, 1e-7))
    assert only(tmp_path).delta == 1e-7
    for options, delta in ([], 1e-7), (["--delta", "1e-6"], 1e-6):
        assert cli.main(["runs", "--spent", "--results", str(tmp_path), *options]) == 0
        out = capsys.readouterr().out
        assert f"{get_epsilon_gaussian(5 / 2**0.5, delta):.3g}" in out
        assert "the total is at the smallest" in out
    for options in (["--delta", "1e-6"], ["--spent", "--delta", "2"]):
        assert cli.main(["runs", "--results", str(tmp_path), *options]) == 2


def test_one_unproven_run_leaves_the_total_unproven_and_a_damaged_run_is_named(tmp_path, capsys):
    make_run(tmp_path, "a" * 12, GAUSSIAN)
    make_run(tmp_path, "b" * 12, GAUSSIAN).record_failure("release 0 of 'm0' raised ValueError")
    make_run(tmp_path, "c" * 12, GAUSSIAN)
    (tmp_path / "runs" / ("c" * 12) / "ledger.json").write_text("{bad")
    print_spent(tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing is proven: run bbbbbbbbbbbb: release 0 of 'm0' raised ValueError" in out
    assert "run cccccccccccc cannot be read (JSONDecodeError): what it spent is not in any total" in out
    assert set(total(only(tmp_path), tmp_path)["add_remove"].values()) == {"inf"}


# --- the population of a run ------------------------------------------------------------------------------------------


def test_a_population_is_the_data_sets_name_and_path_unless_it_is_named():
    folder = ["dataset=image_folder", "dataset.image_size=28"]
    paths = [compose_config([*folder, f"dataset.path={path}"]) for path in ("/data/faces", "/data/x/../faces", "/b")]
    one, same, other = map(population_of, paths)
    assert one == same == "image_folder at /data/faces"
    assert other == "image_folder at /b"
    assert population_of(compose_config(["data_root=/data"])) == "digits at /data"
    assert population_of(compose_config(["privacy.population=staff 2026"])) == "staff 2026"
    for bad in ("5", "' '", "[a]"):
        with pytest.raises(ValueError, match=r"expected privacy\.population to be a name"):
            population_of(compose_config([f"privacy.population={bad}"]))


def test_the_population_is_no_part_of_the_id(tmp_path):
    older = config(tmp_path)
    del older.privacy["population"]
    assert build_spec(older).id == build_spec(config(tmp_path, "privacy.population=staff")).id
    assert build_spec(older).training == build_spec(config(tmp_path)).training
    assert "population" not in build_spec(config(tmp_path)).training["privacy"]


def test_the_population_of_a_run_can_be_named_later_and_is_printed_with_samples(tmp_path, capsys):
    run = execute(config(tmp_path, "privacy.noise=os"))
    ledger = Ledger.load(run.path / "ledger.json")
    assert ledger.population == population_of(run.config)
    generator, epsilon = (run.path / "generator.safetensors").read_bytes(), ledger.epsilon
    capsys.readouterr()
    execute(config(tmp_path, "privacy.noise=os", "privacy.population=staff"))
    assert "is now 'staff'" in capsys.readouterr().out
    execute(config(tmp_path, "privacy.noise=os"))  # the default does not remove the name
    ledger = Ledger.load(run.path / "ledger.json")
    assert (ledger.population, ledger.epsilon) == ("staff", epsilon)
    assert (run.path / "generator.safetensors").read_bytes() == generator
    assert folder_problem(run) == ""
    assert identify(run.read_json("identity.json")) == run.id
    make_run(tmp_path, "a" * 12, GAUSSIAN)
    capsys.readouterr()
    sample_run(tmp_path, run.id, 4, 1, tmp_path / "out.npz", "uniform", benchmark=False)
    out = capsys.readouterr().out
    assert "this run: epsilon" in out
    assert "all 2 run(s) with privacy.noise=os on the records of 'staff'" in out
    total_epsilon = total(only(tmp_path), tmp_path)["add_remove"]["pld"]
    assert f"epsilon {float(total_epsilon):.3g} (add/remove)" in out
    assert epsilon is not None
    assert float(total_epsilon) > float(epsilon["proven"])


def test_a_seeded_run_names_no_population(tmp_path):
    ledger = build_spec(config(tmp_path, "privacy.population=staff")).new_ledger(12)
    assert ledger.population is None
    assert describe_total(tmp_path, execute(config(tmp_path))) == []
