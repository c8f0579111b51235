"""Starts training from a config: on one device, on ranks launched from here, or as one of several started ranks.

Torch is imported here, once it is certain that training starts, and not earlier.
"""

import os

from lmtrain import errors
from lmtrain.config import compose as rules
from lmtrain.config.batch import split_over
from lmtrain.config.override_text import Command
from lmtrain.config.schema import Config
from lmtrain.distributed import ranks
from lmtrain.distributed.ranks import RankLayout
from lmtrain.errors import UserError
from lmtrain.run_folder import finished
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder.folder import RunDir
from lmtrain.terminal import status


def start(config: Config) -> int:
    """Trains as `config` says, in this process or in one per device; returns the exit code."""
    layout = ranks.find()
    if layout is not None:
        return _as_rank(config, layout)
    if config.trainer.num_nodes > 1:
        nodes = config.trainer.num_nodes
        each = f"torchrun --nnodes={nodes} -m lmtrain.train ... or srun"
        raise UserError(f"trainer.num_nodes={nodes}: start one command per node, with {each} (docs/multi_node.md)")
    if finished.is_finished(config):
        return errors.FINISHED
    folder = run_dir.open_run(config)
    try:
        status.say("loading torch")
        from lmtrain.distributed import devices

        devices.resolve_auto(config)
        processes = int(config.trainer.devices)
        split_over(config, processes)
        if processes == 1:
            return _session(config, folder)
        status.say(f"starting {processes} ranks")
        from lmtrain.run.launch import launch

        status.stop()
        return launch(folder, config, processes)
    finally:
        folder.discard_if_unused()


def keep_precision(config: Config) -> None:
    """Lets a continued run keep the precision that auto chose at its start, whatever would be faster now."""
    if config.trainer.precision == "auto" and run_dir.resume_mode(config) != "none":
        before = finished.last_start(RunDir(run_dir.locate(config)), config).get("trainer.precision")
        if before is not None:
            config.trainer.precision = before


def _session(config: Config, folder: RunDir) -> int:
    from lmtrain.distributed import compiler

    compiler.probe_early(config)
    status.say("loading transformers and lightning")
    from lmtrain.run.session import Session

    status.say("opening data and building the model")
    return Session(config, folder).run()


def _as_rank(config: Config, layout: RankLayout) -> int:
    """Trains as one rank started by torchrun or SLURM; returns the exit code, the same on all ranks if none fails."""
    import torch.distributed as dist

    from lmtrain.distributed import process_group as world

    place(config, layout)
    split_over(config, layout.per_node * layout.nodes)
    if ranks.was_restarted():
        run_dir.continue_after_restart(config, RunDir(run_dir.locate(config)))
    world.connect(config.trainer.accelerator, config.trainer.rank_timeout)
    opened = world.from_first(lambda: _open_for_all(config))
    code = opened if isinstance(opened, int) else _train_as_told(*opened, config.command)
    dist.destroy_process_group()
    if code == errors.PREEMPTED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        return errors.FINISHED  # torchrun would restart the ranks, past the time limit; summary.json has the status
    return code


def place(config: Config, layout: RankLayout) -> None:
    """Sets trainer.devices and num_nodes to what was started; raises UserError if the config asks for others."""
    from lmtrain.distributed import devices

    t, typed = config.trainer, config.command.typed
    wanted = {"trainer.devices": (t.devices, layout.per_node), "trainer.num_nodes": (t.num_nodes, layout.nodes)}
    for key, (asked, there) in wanted.items():
        # One process is the default of num_nodes, and what the config.yaml of a run on one device says.
        if str(asked) not in ("auto", str(there)) and (key in typed or str(asked) != "1"):
            raise UserError(f"{key}={asked}, but {layout.by} has started {there}: leave {key} out or start as many")
    t.devices, t.num_nodes = layout.per_node, layout.nodes
    devices.resolve_auto(config)


def _open_for_all(config: Config) -> tuple[str, RunDir] | int:
    """Returns (config as YAML, folder) of the run to train, or the exit code if the run has already finished."""
    if finished.is_finished(config):
        return errors.FINISHED
    folder = run_dir.open_run(config)
    return rules.dump(config), folder


def _train_as_told(text: str, folder: RunDir, command: Command) -> int:
    """Trains in the folder that rank 0 has opened, which removes it again if it is new and no training began in it."""
    try:
        return _session(rules.check(rules.undumped(text, "the config"), command), folder)
    finally:
        if ranks.is_first():
            folder.discard_if_unused()
