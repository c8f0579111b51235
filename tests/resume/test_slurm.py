"""What docs/multi_node.md says of SLURM, by the page's own script on a cluster of two nodes (helpers/slurm_cluster.py).

The jobs of a scenario are tiny runs, one rank on each node, slowed down where a test has to come in between.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import assert_equal_runs, command, stable_rows, train_here

import processes
import slurm_cluster
from lmtrain.files import read_jsonl
from slurm_cluster import Cluster
from support import REPO

MISSING = slurm_cluster.what_is_missing()
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
STEPS = ["data.micro_batch_size=3", "checkpoint.keep_last=9"]
SRUN = ["--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
PYTHONPATH = os.pathsep.join(str(REPO / "tests" / name) for name in ("distributed", "resume"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    found.env["PYTHONPATH"] = PYTHONPATH
    try:
        found.start()
        yield found
    finally:
        found.close()


def sbatch_script(words: list[str], **changed: str) -> str:
    """Returns the script of docs/multi_node.md for two nodes without GPUs, with other words for lmtrain.train."""
    page = (REPO / "docs" / "multi_node.md").read_text()
    block = page.partition("`train.sbatch`:\n\n")[2].partition("\n\n- ")[0]
    lines = [line.removeprefix("    ") for line in block.splitlines()]
    options = {"job-name": "tiny", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "1", "time": "10",
               "signal": "TERM@60", **changed}  # fmt: skip
    kept = [line for line in lines if "--gpus-per-node" not in line]
    for number, line in enumerate(kept):
        name = line.removeprefix("#SBATCH --").partition("=")[0]
        if name in options:
            kept[number] = f"#SBATCH --{name}={options.pop(name)}"
    assert not options, f"not in the page's script: {options}"
    text = "\n".join(kept)
    start, end = text.index("python -m lmtrain.train"), text.index(" || code=$?")
    return f"{text[:start]}{shlex.join(words)}{text[end:]}\n"


def submit(cluster: Cluster, folder: Path, words: list[str], *options: str, **changed: str) -> str:
    folder.mkdir(exist_ok=True)
    script = folder / "train.sbatch"
    script.write_text(sbatch_script(words, **changed))
    return cluster.submit(f"--chdir={folder}", "--open-mode=append", *options, str(script))


def output(folder: Path, job: str) -> str:
    return (folder / f"slurm-{job}.out").read_text()


def train(cluster: Cluster, words: list[str], folder: Path) -> str:
    """Trains on both nodes by srun alone."""
    return cluster.ask("srun", *SRUN, f"--chdir={folder}", *words)


def steps(run_dir: Path) -> int:
    return max((row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")), default=0)


def slow(name: str, **settings: object) -> list[str]:
    fields = "".join(f", {key}: {value}" for key, value in settings.items())
    return [f"callbacks.extra=[{{_target_: slow.{name}{fields}}}]", "run.allow_target=[slow]"]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run on both nodes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train(cluster, command(corpus, folder / "run", *STEPS), folder)
    return folder / "run"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_nodes_equal_one_process(strategy: str, cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    settings = [*STEPS, "model.dropout=0", "trainer.gradient_clip_val=0.5"]
    train(cluster, command(corpus, tmp_path / "two", *settings, f"trainer.strategy={strategy}"), tmp_path)
    config = (tmp_path / "two" / "config.yaml").read_text()
    assert "num_nodes: 2" in config
    assert f"strategy: {strategy}" in config
    assert train_here(corpus, tmp_path / "one", *settings).code == 0
    one, two = stable_rows(tmp_path / "one"), stable_rows(tmp_path / "two")
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for a, b in zip(one, two, strict=True):
        assert (a.get("rows"), a["tokens_seen"]) == (b.get("rows"), b["tokens_seen"])
        for key in ("train/loss", "val/loss", "grad_norm"):
            assert (key in a) == (key in b)
            assert b.get(key, 0) == pytest.approx(a.get(key, 0), rel=1e-5), (a["step"], key)


def test_the_end_of_the_time_requeues_the_job(cluster: Cluster, whole: Path, corpus: Path, tmp_path: Path) -> None:
    """SLURM itself sends the signal, 60 seconds before a minute is over; the requeued job then has a longer limit."""
    words = command(corpus, tmp_path / "run", *STEPS, *slow("SlowsDown", step=6, seconds=6))
    job = submit(cluster, tmp_path, words, time="1", signal="TERM@30")
    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", 180, "requeue")
    cluster.ask("scontrol", "update", f"jobid={job}", "timelimit=10")
    assert cluster.ended(job)["JobState"] == "COMPLETED"
    assert "stopped by SIGTERM" in output(tmp_path, job)
    assert_equal_runs(whole, tmp_path / "run")


def test_preempted_in_a_validation(cluster: Cluster, whole: Path, corpus: Path, tmp_path: Path) -> None:
    marker = tmp_path / "validating"
    words = command(corpus, tmp_path / "run", *STEPS, *slow("SlowValidation", seconds=20, step=6, marker=marker))
    job = submit(cluster, tmp_path, words)
    cluster.wait(marker.exists, 120, "validation")
    cluster.ask("scancel", "--signal=TERM", job)  # to all tasks of its steps, as --signal does
    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", 60, "requeue")
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "val/loss" in row] == [3]
    assert cluster.ended(job)["JobState"] == "COMPLETED"
    assert stable_rows(tmp_path / "run") == stable_rows(whole)
    assert_equal_runs(whole, tmp_path / "run")


@pytest.mark.parametrize("seconds", [0.3, 2, 4, 7])
def test_preempted_in_its_start(seconds: float, cluster: Cluster, whole: Path, corpus: Path, tmp_path: Path) -> None:
    """The signal comes so long after both tasks have started: in Python's start, in imports, around the first step."""
    words = command(corpus, tmp_path / "run", *STEPS, *slow("SlowsDown", step=1, seconds=1))
    job = submit(cluster, tmp_path, words)
    tasks_of(cluster, "n2")
    time.sleep(seconds)
    cluster.ask("scancel", "--signal=TERM", job)
    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1", 60, "requeue")
    assert cluster.ended(job)["JobState"] == "COMPLETED"
    assert_equal_runs(whole, tmp_path / "run")


def tasks_of(cluster: Cluster, node: str) -> list[processes.Process]:
    """Waits for the training process of a node."""
    found: list[processes.Process] = []

    def started() -> bool:
        found[:] = [p for p in cluster.tasks(node) if "-m lmtrain.train" in p.command and "srun" not in p.command]
        return bool(found)

    cluster.wait(started, 120, f"process on {node}")
    return found


def test_a_node_that_dies(cluster: Cluster, whole: Path, corpus: Path, tmp_path: Path) -> None:
    """Its slurmd, step daemon and process are killed at once; SLURM requeues the job, which waits for the node."""
    words = command(corpus, tmp_path / "run", *STEPS, *slow("SlowsDown", step=7, seconds=1))
    job = submit(cluster, tmp_path, words)
    cluster.wait(lambda: steps(tmp_path / "run") >= 7, 120, "step 7")
    cluster.kill_node("n2")
    cluster.wait(lambda: int(cluster.job(job)["Restarts"]) >= 1, 120, "requeue")
    assert not tasks_left(cluster, "n1"), "the other node's rank has ended"
    cluster.start_node("n2")
    assert cluster.ended(job)["JobState"] == "COMPLETED"
    assert_equal_runs(whole, tmp_path / "run")


def tasks_left(cluster: Cluster, node: str) -> list[processes.Process]:
    deadline = time.monotonic() + 60
    while (left := cluster.tasks(node)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def test_a_mistake_is_said_once(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    """The ranks meet it at once, and srun ends the others when one has left; the job's exit code is theirs."""
    job = submit(cluster, tmp_path, command(corpus, tmp_path / "run", "optimizer.name=adamv"))
    found = cluster.ended(job)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    assert output(tmp_path, job).count("error: optimizer.name=adamv is not known") == 1
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_one_rank_is_said(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    breaks = ["callbacks.extra=[{_target_: mishaps.Breaks, rank: 1, step: 4}]", "run.allow_target=[mishaps]"]
    job = submit(cluster, tmp_path, command(corpus, tmp_path / "run", *STEPS, *breaks))
    found = cluster.ended(job)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "1:0")
    assert "a mistake on rank 1" in output(tmp_path, job)


def test_an_array_whose_jobs_share_the_nodes(cluster: Cluster, whole: Path, corpus: Path, tmp_path: Path) -> None:
    """Both run at the same time on both nodes: ports and folders must not meet. One of them is preempted."""
    words = command(corpus, tmp_path / "run_TASK", *STEPS, *slow("SlowsDown", step=1, seconds=0.5))
    script = tmp_path / "train.sbatch"
    script.write_text(sbatch_script(words).replace("run_TASK", "run_$SLURM_ARRAY_TASK_ID"))
    job = cluster.submit("--array=0-1", f"--chdir={tmp_path}", str(script))
    cluster.wait(lambda: all(steps(tmp_path / f"run_{n}") >= 1 for n in (0, 1)), 120, "step 1 of both")
    assert all(steps(tmp_path / f"run_{n}") < 12 for n in (0, 1)), "they ran at the same time"
    cluster.ask("scancel", "--signal=TERM", f"{job}_1")
    cluster.wait(lambda: cluster.job(f"{job}_1")["Restarts"] == "1", 60, "requeue")
    for n in (0, 1):
        assert cluster.ended(f"{job}_{n}")["JobState"] == "COMPLETED"
        assert_equal_runs(whole, tmp_path / f"run_{n}")


def test_a_process_that_srun_did_not_start_is_no_rank(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    words = command(corpus, tmp_path / "run", "data.micro_batch_size=3", "trainer.devices=2")
    script = tmp_path / "alone.sbatch"
    script.write_text(f"#!/bin/bash\n{shlex.join(words)}\n")
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", f"--chdir={tmp_path}", str(script))
    assert cluster.ended(job)["JobState"] == "COMPLETED", output(tmp_path, job)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "num_nodes: 1" in config
    assert "devices: 2" in config


def test_a_sweep_whose_trials_are_jobs(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = [*command(corpus, tmp_path / "run", "data.micro_batch_size=6")[3:], "optimizer.lr=1e-3,1e-4"]
    words = [word for word in words if not word.startswith("run.dir=")]
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10", "sweep.name=mine"]
    out = cluster.ask("env", "-C", str(tmp_path), sys.executable, "-m", "lmtrain.train", "-m", *launcher, *words)
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    states = [json.loads((folder / str(n) / "summary.json").read_text())["status"] for n in (0, 1)]
    assert states == ["finished"] * 2, out


def test_data_prepared_by_jobs(cluster: Cluster, tmp_path: Path) -> None:
    """Two tasks, one of which is killed and then run again alone, by datatrove's executor: the bytes of one process."""
    pytest.importorskip("datatrove", reason="needs datatrove")
    (tmp_path / "text").mkdir()
    for number in range(4):
        rows = [json.dumps({"text": f"row {i} of file {number}"}) for i in range(200)]
        (tmp_path / "text" / f"{number}.jsonl").write_text("\n".join(rows))
    words = ["data=jsonl", f"data.path={tmp_path / 'text'}", "tokenizer=bpe", "tokenizer.vocab_size=300"]
    jobs = [
        "prepare.executor=slurm",
        "prepare.tasks=2",
        "prepare.slurm={partition: all, time: '10', mem_per_cpu_gb: 1}",
    ]
    prepare = [sys.executable, "-m", "lmtrain.prepare", *words]
    first = subprocess.Popen(
        [*prepare, *jobs, f"data.cache_dir={tmp_path / 'jobs'}"], env=cluster.env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    cluster.wait(lambda: cluster.ask("squeue", "--noheader", "--name=lmtrain_prepare").strip() != "", 60, "job")
    job = cluster.ask("squeue", "--noheader", "--name=lmtrain_prepare", "--format=%A").split()[0]
    cluster.ask("scancel", f"{job}_1")
    out = first.communicate(timeout=300)[0]
    assert first.returncode == 1, out
    assert "the same command makes only the parts that are missing" in out
    (done,) = (tmp_path / "jobs").glob("*.tasks-2/part_?????")
    assert done.name == "part_00000"
    out = cluster.ask(*prepare, *jobs, f"data.cache_dir={tmp_path / 'jobs'}")
    assert "encoding in 2 tasks (slurm, 1 are done already)" in out
    cluster.ask(*prepare, f"data.cache_dir={tmp_path / 'one'}")
    made = [
        {p.name: p.read_bytes() for p in sorted(next((tmp_path / name).glob("text-*")).rglob("*")) if p.is_file()}
        for name in ("jobs", "one")
    ]
    assert made[0] == made[1]
