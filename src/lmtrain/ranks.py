"""Ranks that torchrun or SLURM have started already, on one node or many.

Every rank was given the same command line. Rank 0 resolves it, opens the run's folder and tells the others the config,
so all have one config and one folder. The folder must lie on a file system that all nodes share.
"""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from lmtrain import config as rules
from lmtrain import errors, run_dir
from lmtrain.errors import UserError
from lmtrain.run_dir import RunDir
from lmtrain.schema import Config

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


@dataclass(frozen=True)
class Layout:
    """How the ranks lie on the nodes."""

    rank: int
    nodes: int
    per_node: int
    by: str  # torchrun or SLURM


def started_by(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """torchrun or SLURM, where this process may be one of several that were given the same command line."""
    if "RANK" in environ:
        return "torchrun"
    return "SLURM" if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else None  # of srun, not of sbatch


def find(environ: MutableMapping[str, str] = os.environ) -> Layout | None:
    """The ranks this process is one of, None where it was started by itself. SLURM's are given torchrun's variables.

    Raises:
        UserError: the nodes don't have the same number of ranks each.
    """
    by = started_by(environ)
    if by == "SLURM":
        _translate_slurm(environ)
    if by is None or not all(name in environ for name in TORCH):
        return None
    world = int(environ["WORLD_SIZE"])
    per_node = int(environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node != 0:
        raise UserError(f"{world} ranks with {per_node} on this node: start the same number on every node")
    return Layout(int(environ["RANK"]), world // per_node, per_node, by)


def _translate_slurm(environ: MutableMapping[str, str]) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    tasks, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks % nodes != 0:
        raise UserError(f"SLURM runs {tasks} tasks on {nodes} nodes: ask for as many on each with --ntasks-per-node")
    per_node = tasks // nodes
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(node_list),
        # Jobs that share a node must not share a port, and every rank has to find the same one.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(15000 + int(environ.get("SLURM_JOB_ID", "0")) % 10000),
    }
    environ.update(found)


def was_restarted() -> bool:
    """Whether the launcher has started these ranks again after one failed: they go on from the newest checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def train(config: Config, layout: Layout) -> int:
    """Trains as one of the ranks; returns the exit code, which is the same on all where nothing fails."""
    import torch.distributed as dist

    from lmtrain import world

    place(config, layout)
    if was_restarted():
        config.run.resume = "auto"
    world.connect(config.trainer.accelerator)
    existed = run_dir.existing_part(run_dir.locate(config))
    opened = world.from_first(lambda: open_run(config))
    if isinstance(opened, int):
        code = opened
    else:
        text, path = opened
        code = _run(text, path, existed if layout.rank == 0 else None)
    dist.destroy_process_group()
    if code == errors.PREEMPTED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        return errors.FINISHED  # torchrun would start the ranks again, past the time limit; summary.json tells
    return code


def _run(config: str, path: str, existed: Path | None) -> int:
    """Trains in the folder; where `existed` is given, a new folder in which no training began is removed again."""
    from lmtrain.train import run_in_process

    folder = RunDir(Path(path))
    fresh = not folder.config.exists()
    try:
        return run_in_process(rules.check(yaml.safe_load(config)), folder)
    finally:
        if existed is not None and fresh:
            folder.discard_if_unused(existed)


def place(config: Config, layout: Layout) -> None:
    """Sets devices and nodes to what was started; UserError where the command line says otherwise."""
    from lmtrain import devices

    t = config.trainer
    wanted = {"trainer.devices": (t.devices, layout.per_node), "trainer.num_nodes": (t.num_nodes, layout.nodes)}
    for key, (asked, there) in wanted.items():
        if str(asked) not in ("auto", "1", str(there)):
            raise UserError(f"{key}={asked}, but {layout.by} has started {there}: leave {key} out or start as many")
    t.devices, t.num_nodes = layout.per_node, layout.nodes
    devices.resolve_auto(config)
    rules.split_over(config, layout.per_node * layout.nodes)


def open_run(config: Config) -> tuple[str, str] | int:
    """(config as YAML, folder) of the run to train, or the exit code where it has finished."""
    from lmtrain.train import is_finished, say_finished

    folder = RunDir(run_dir.locate(config))
    if is_finished(config, folder):
        say_finished(folder)
        return errors.FINISHED
    folder = run_dir.open_run(config)
    return rules.dump(config), str(folder.path)
