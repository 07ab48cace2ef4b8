"""Launchers: what hydra/launcher=slurm_gpu asks Slurm for, and what a run does that submitit preempts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from submitit.slurm.slurm import SlurmExecutor

from dpgen_bench.runs.multirun import VARIABLE, IgnoreSignalsBetweenJobs, ignore_signals, job_of_multirun
from dpgen_bench.store.folders import RunFailed, Store
from dpgen_bench.tables.sweeps import check_overrides
from dpgen_bench.utils.paths import CONF, HOME


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides), return_hydra_config=True)


def submission(monkeypatch, tmp_path: Path, *overrides: str) -> str:
    """The text that the launcher would give to sbatch for two jobs."""
    config = composed("hydra/launcher=slurm_gpu", f"results={tmp_path}", "hydra.job.num=0", *overrides)
    launcher = instantiate(config.hydra.launcher)
    launcher.config = config
    texts = []

    def submit(self, path, *more):
        texts.append(Path(path).read_text())
        raise StopIteration  # nothing is submitted

    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")  # submitit looks for srun
    monkeypatch.setattr(SlurmExecutor, "_make_submission_command", submit)
    with pytest.raises(StopIteration):
        launcher.launch([["seed=0"], ["seed=1"]], initial_job_idx=0)
    return texts[0]


def test_the_example_for_slurm_asks_for_a_gpu_time_a_signal_and_a_requeue(monkeypatch, tmp_path):
    text = submission(monkeypatch, tmp_path, "hydra.launcher.partition=gpu")
    asked = dict(re.findall(r"#SBATCH --([\w-]+)(?:=(.*))?", text))
    assert asked["array"] == "0-1%2"
    assert (asked["gpus-per-node"], asked["cpus-per-task"], asked["mem"]) == ("1", "8", "32GB")
    assert (asked["time"], asked["partition"], asked["job-name"]) == ("240", "gpu", "dpgen")
    assert asked["signal"] == "USR2@180"
    assert asked["requeue"] == ""  # a flag without a value
    assert asked["output"] == f"{tmp_path}/multirun/slurm/%A_%a/%A_%a_0_log.out"
    assert text.index("export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK") < text.index("srun ")


def test_at_most_so_many_runs_at_the_same_time(monkeypatch, tmp_path):
    assert "#SBATCH --array=0-1%1" in submission(monkeypatch, tmp_path, "hydra.launcher.array_parallelism=1")


def test_a_sweep_takes_the_launcher():
    check_overrides(["hydra/launcher=slurm_gpu", "hydra.launcher.partition=gpu"], [], Path("results"))


def test_processes_of_joblib_ignore_signals_between_jobs():
    config = composed("hydra/launcher=joblib")
    IgnoreSignalsBetweenJobs().on_multirun_start(config)
    assert instantiate(config.hydra.launcher).joblib["initializer"] is ignore_signals
    assert "IgnoreSignalsBetweenJobs" in str(OmegaConf.to_container(composed().hydra.callbacks))
    other = composed("hydra/launcher=submitit_local")
    IgnoreSignalsBetweenJobs().on_multirun_start(other)
    assert "initializer" not in other.hydra.launcher


def test_a_job_that_submitit_does_not_start_again_fails_in_one_sentence(monkeypatch, tmp_path):
    from submitit.core.utils import UncompletedJobError

    def handler(number, frame):
        raise UncompletedJobError("Job not requeued because: timed-out too many times.")

    monkeypatch.setenv(VARIABLE, f"1:{tmp_path}")
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(RunFailed, match=r"timed-out too many times\. The run has a checkpoint"), job_of_multirun():
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)


PREEMPTED = """
import os, signal
from dataclasses import dataclass
from pathlib import Path
from tests.toys import MeanImage

@dataclass
class Preempted(MeanImage):
    def row(self, images, labels):
        with open("releases", "a") as file:
            print(os.getpid(), file=file)
        if len(Path("releases").read_text().split()) == 3:
            os.kill(os.getpid(), signal.SIGUSR2)  # as submitit does before the time of a job is over
        return images
"""


@pytest.mark.slow
def test_a_run_that_submitit_preempts_finds_its_checkpoint_and_goes_on(tmp_path):
    """The toy makes six releases; the process that gets the signal in the third leaves three to the next one."""
    (tmp_path / "preempted.py").write_text(PREEMPTED)
    (tmp_path / "own" / "method").mkdir(parents=True)
    (tmp_path / "own" / "method" / "preempted.yaml").write_text("name: preempted\n_target_: preempted.Preempted\n")
    command = [
        sys.executable, "-m", "dpgen_bench.cli", "run", "-m", "--config-dir", "own", "hydra/launcher=submitit_local",
        "method=preempted", "dataset=digits", "seed=0", "runtime.progress=false", "runtime.account_s=0.01",
        "runtime.checkpoint_s=1000", "~protocol.metrics.logreg", "~protocol.metrics.mlp", "protocol.num_samples=20",
        "+protocol.metrics.brightness={_target_:tests.toys.Brightness}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HOME)}, capture_output=True)
    logs = "".join(path.read_text() for path in (tmp_path / "results").rglob("*_log.out"))
    assert done.returncode == 0, done.stderr.decode() + logs
    (run,) = Store(tmp_path / "results").runs()
    assert run.status() == "finished"
    processes = (tmp_path / "releases").read_text().split()
    assert [processes.count(each) for each in dict.fromkeys(processes)] == [3, 3]
    assert "was stopped by a signal" in logs
    assert "Requeued job" in logs
