"""How ranks start and end: torchrun on two nodes, SLURM, restarts, a failing rank. Signals: see tests/resume."""

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import forked
import processes
from lmtrain import errors
from lmtrain.callbacks.metrics import without_times
from lmtrain.config import compose
from lmtrain.config.override_text import Command
from lmtrain.distributed import ranks
from lmtrain.errors import UserError
from lmtrain.files import read_jsonl
from lmtrain.run import launch
from lmtrain.run.start import place
from lmtrain.run_folder.folder import RunDir
from ports import free_port
from support import EXPORT, TINY, environment_kept, rows

TEXT = [*TINY, EXPORT, "data=text", "data.global_batch_size=8", "data.micro_batch_size=2", "trainer.max_steps=12",
        "trainer.val_check_interval=6", "trainer.limit_val_batches=2", "trainer.save_every_n_steps=4",
        "callbacks.samples.every_n_validations=0"]  # fmt: skip
HERE = Path(__file__).parent
BREAKS = ["run.allow_target=[mishaps]"]


def environment() -> dict[str, str]:
    """Returns an environment in which the callbacks of this folder and of tests/resume can be imported."""
    path = os.pathsep.join([str(HERE), str(HERE.with_name("resume")), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def start_anew(command: list[str], **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**environment(), **env},
    )  # fmt: skip


def start(command: list[str]) -> forked.Started:
    return forked.Started(command, environment())


def breaks(**settings: object) -> str:
    fields = ",".join(f"{key}: {value}" for key, value in settings.items())
    return f"callbacks.extra=[{{_target_: mishaps.Breaks,{fields}}}]"


def numbers(run_dir: Path) -> list[dict]:
    return [without_times(row) for row in rows(run_dir / "metrics.jsonl")]


def on_two_nodes(*settings: str) -> list[tuple[int, str]]:
    """Returns the exit code and output of torchrun on each of two "nodes" of one rank each."""
    port = str(free_port())
    nodes = [
        start_anew(["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}",
               "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "lmtrain.train", *settings])
        for rank in (0, 1)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=600)[0] for node in nodes]
    return [(node.returncode, out) for node, out in zip(nodes, outputs, strict=True)]


@pytest.mark.slow
def test_two_nodes_by_torchrun(corpus: Path, tmp_path: Path) -> None:
    """Each rank determines the time in the folder's name itself, yet all use one folder and one config."""
    settings = [*TEXT, f"data.path={corpus}", f"run.root={tmp_path / 'runs'}", "trainer.strategy=fsdp"]
    for code, output in on_two_nodes(*settings):
        assert code == 0, output
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "export" / "model.safetensors").exists()
    assert [row["step"] for row in numbers(run_dir) if "train/loss" in row] == list(range(1, 13))
    config = (run_dir / "config.yaml").read_text()
    assert "num_nodes: 2" in config
    assert "devices: 1" in config


@pytest.mark.parametrize("key", ["trainer.devices", "trainer.num_nodes"])
def test_one_process_that_is_typed_where_several_are_started(key: str) -> None:
    """What a config.yaml says of an earlier start gives way to the processes there are, what is typed does not."""
    words = [*TEXT, "trainer.accelerator=cpu", f"{key}=1"]
    tree, there = compose.compose(words), ranks.RankLayout(2, 4, "torchrun")
    with pytest.raises(UserError, match=rf"{key}=1, but torchrun has started [24]: leave {key} out"):
        place(compose.check(tree, Command(tuple(words))), there)
    config = compose.check(tree)
    place(config, there)
    assert (config.trainer.devices, config.trainer.num_nodes) == (4, 2)


@pytest.mark.slow
def test_a_mistake_is_said_once_on_each_node_and_leaves_no_folder(corpus: Path, tmp_path: Path) -> None:
    settings = [*TEXT, f"data.path={corpus}", f"run.root={tmp_path / 'runs'}", "optimizer.name=adamv"]
    ended = on_two_nodes(*settings)
    assert all(code != 0 for code, _ in ended)
    assert [output.count("error: optimizer.name=adamv is not known") for _, output in ended] == [1, 1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_tasks_of_slurm(corpus: Path, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": str(free_port() - 15000), "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
           "SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NODELIST": "localhost",
           "SLURM_NODEID": "0"}  # fmt: skip
    settings = ["-m", "lmtrain.train", *TEXT, f"data.path={corpus}", f"run.root={tmp_path / 'runs'}"]
    tasks = [start_anew(settings, **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)]
    for task in tasks:
        output, _ = task.communicate(timeout=600)
        assert task.returncode == 0, output
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert len(numbers(run_dir)) == 14


@pytest.mark.slow
def test_ranks_that_fail_once_start_again_from_the_newest_checkpoint(corpus: Path, tmp_path: Path) -> None:
    settings = ["-m", "lmtrain.train", *TEXT, f"data.path={corpus}", "trainer.devices=2", "trainer.strategy=fsdp",
                "export.enabled=false", *BREAKS]  # fmt: skip
    for name, times in (("whole", 0), ("restarted", 1)):
        marker = tmp_path / f"{name}.marker"
        if times == 0:
            marker.touch()
        process = start([*settings, breaks(rank=1, step=7, marker=marker), f"run.dir={tmp_path / name}",
                         "trainer.max_restarts=1"])  # fmt: skip
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert output.count("a mistake on rank 1") == times
    assert numbers(tmp_path / "restarted") == numbers(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_ends_all(corpus: Path, tmp_path: Path, rank: int) -> None:
    settings = [*TEXT, f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", "trainer.devices=2"]
    process = start(["-m", "lmtrain.train", *settings, "trainer.strategy=fsdp", *BREAKS, breaks(rank=rank, step=5)])
    while process.poll() is None and not any(r["step"] >= 5 for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")):
        time.sleep(0.05)
    failed, family = time.monotonic(), processes.below(process.pid)
    output, _ = process.communicate(timeout=600)
    processes.wait_until_gone(family, 60)
    assert time.monotonic() - failed < 60
    assert process.returncode == 1
    assert f"ZeroDivisionError: a mistake on rank {rank}" in output
    assert f"rank {rank} failed first" in output
    first = next(line for line in output.splitlines() if "Error" in line)
    assert "ZeroDivisionError" in first, output


@pytest.mark.slow
def test_a_rank_that_fails_while_the_other_still_builds(corpus: Path, tmp_path: Path) -> None:
    """The launcher's SIGTERM ends the other rank, which can't note that it was not the first to fail."""
    settings = [*TEXT, f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", "trainer.devices=2", *BREAKS]
    process = start(["-m", "lmtrain.train", *settings, "callbacks.extra=[{_target_: mishaps.BreaksEarly,rank: 1}]"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "ZeroDivisionError: a mistake on rank 1" in output, output
    assert "rank 1 failed first, with exit code 1; what it said stands above" in output, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # The gradients, the count of tokens, and the step's metrics, which callbacks of the user's own may read at any
        # step (callbacks.extra, as the one that counts here): a run without them reduces its metrics with each record.
        ("ddp", {"gloo:all_reduce": 3}),
        # Gradients: two blocks and the rest, which gloo reduces by all_reduce; then token count, norm and metrics.
        # Weights, for each of two micro-batches: the rest once, and each block in forward and backward.
        ("fsdp", {"gloo:all_reduce": 3 + 3, "gloo:all_gather": 2 * (1 + 2 * 2)}),
    ],
)
def test_collectives_of_a_step(corpus: Path, tmp_path: Path, strategy: str, expected: dict[str, int]) -> None:
    counts = tmp_path / "counts.txt"
    callback = f"callbacks.extra=[{{_target_: mishaps.CountsCollectives,step: 3,path: {counts}}}]"
    process = start(["-m", "lmtrain.train", *TEXT, f"data.path={corpus}", f"run.dir={tmp_path / 'run'}",
                     "trainer.max_steps=6", "trainer.save_every_n_steps=null", "trainer.log_every_n_steps=10",
                     "export.enabled=false", "trainer.devices=2", f"trainer.strategy={strategy}", *BREAKS,
                     callback])  # fmt: skip
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert Counter(counts.read_text().splitlines()) == expected


def test_ranks_that_have_nothing_to_do_leave_a_finished_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They end by themselves, without a summary of their own; after a signal, it means that none could save."""
    run = RunDir(tmp_path)
    run.write_summary({"status": "finished", "step": 2})
    asked = compose.check(compose.compose(TINY))
    for code, wanted in ((0, errors.FINISHED), (-15, errors.PREEMPTED), (-2, errors.FAILED)):
        monkeypatch.setattr(launch, "launch_ranks", lambda *_, code=code: code)
        assert launch.launch(run, asked, 2) == wanted
        assert ("stopped before they saved" in capsys.readouterr().err) is (code < 0)


def test_ranks_are_found_in_the_environment() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
                "MASTER_PORT": "1"}  # fmt: skip
    assert ranks.find({}) is None
    assert ranks.find(torchrun) == ranks.RankLayout(2, 2, "torchrun")
    step = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
            "SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456"}  # fmt: skip
    assert ranks.find(step) == ranks.RankLayout(2, 4, "SLURM")
    assert step["RANK"] == "5"
    assert step["MASTER_ADDR"] == "gpu07"
    assert step["MASTER_PORT"] == "18456"
    # The batch script of an sbatch job is not a rank, however many tasks its job has.
    assert ranks.find({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) is None
    uneven = {**{k: v for k, v in step.items() if k.startswith("SLURM")}, "SLURM_STEP_NUM_TASKS": "7"}
    with pytest.raises(UserError, match="--ntasks-per-node"):
        ranks.find(uneven)


def test_variables_that_a_test_leaves_reach_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("LMTRAIN_OTHER", "a")
    with environment_kept(without=ranks.TORCH):
        assert "MASTER_PORT" not in os.environ
        os.environ |= dict.fromkeys(ranks.TORCH, "7") | {"LMTRAIN_OTHER": "b"}
        del os.environ["PATH"]
    assert not {*ranks.TORCH} & {*os.environ}
    assert os.environ["LMTRAIN_OTHER"] == "a"
    assert "PATH" in os.environ
