"""What each stage of a pipeline takes, before it begins: memory of a device, and time where it is known.

From the shapes of its model alone: no weights are read, and an export that isn't there yet is not needed.
"""

import copy
import functools
import multiprocessing
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmtrain.config import keys
from lmtrain.config.batch import step_sizes
from lmtrain.config.constraints import PREPARED, TRAJECTORY
from lmtrain.config.schema import Config
from lmtrain.errors import first_line
from lmtrain.files import read_regular
from lmtrain.run.folder import RunDir
from lmtrain.stages.checks import lineage
from lmtrain.stages.plan import Plan, PlannedStage

UNKNOWN = "not known yet"


@dataclass(frozen=True)
class Cost:
    """In words; of memory also why it isn't known."""

    memory: str
    time: str


def costs(plan: Plan, names: set[str]) -> dict[str, Cost]:
    """Of the stages called so.

    Where torch isn't loaded, a process of its own finds them, which leaves all memory, a GPU's too, to the stages.
    """
    work = [(one.name, _shaped(plan, one), one.run) for one in plan.stages if one.name in names]
    if not work or "torch" in sys.modules:
        return _costs(work)
    spawn, deaf = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)  # this process answers Ctrl-C
    with ProcessPoolExecutor(1, spawn, initializer=signal.signal, initargs=deaf) as pool:
        return pool.submit(_costs, work).result()


def _shaped(plan: Plan, one: PlannedStage) -> Config:
    """The stage's config with the model and the tokenizer that the first stage before it makes or loads."""
    found, stages = copy.deepcopy(one.config), list(lineage(plan, one))
    root = copy.deepcopy(stages[-1].config)
    root.model.attention = found.model.attention
    found.model, found.tokenizer = root.model, root.tokenizer
    added = [token for stage in reversed(stages) for token in stage.config.tokenizer.add_tokens or []]
    found.tokenizer.add_tokens = list(dict.fromkeys(added))
    found.peft.adapter = None  # one that is trained on has the shape of a new one
    return found


def _costs(work: list[tuple[str, Config, Path]]) -> dict[str, Cost]:
    if not work:
        return {}
    from lmtrain.run.quiet import quiet_libraries

    quiet_libraries()
    return {name: _cost(config, run) for name, config, run in work}


def _cost(config: Config, run: Path) -> Cost:
    from lmtrain.distributed import devices
    from lmtrain.run import estimation
    from lmtrain.run.plan import gib

    try:
        if config.estimate.device is None:
            devices.resolve_auto(config)
        else:
            estimation.resolve(config)
        device, model = estimation.device_of(config), estimation.build(config)
        size = sum(estimation.memory(model, config).values())
    except Exception as error:  # the stage itself says it as an error, if it is one; an estimate ends no pipeline
        return Cost(f"not known: {first_line(error)}", UNKNOWN)
    room = device.bytes * (1 - config.estimate.headroom)
    too_large = "" if size <= room else f", and {gib(room)} can be used: python -m lmtrain.estimate shows ways to fit"
    return Cost(f"{gib(size)}{too_large}", _time(config, model, run))


def _time(c: Config, model: Any, run: Path) -> str:
    from lmtrain.models import flops
    from lmtrain.run import plan_time

    world = int(c.trainer.devices) * c.trainer.num_nodes
    found = plan_time.earlier(plan_time.speed_of(c, model, world), run)
    tokens = _tokens(c, None if found is None else found[0])
    if found is not None and tokens is not None:
        return f"about {plan_time.span(tokens / found[1])}, as {found[0].path.name}"
    speed = plan_time.hoped_for(c, world, flops.flops_per_token(model, c.data.seq_len))
    if speed is None or tokens is None:
        return UNKNOWN
    return f"about {plan_time.span(tokens / speed)}, at {c.estimate.mfu:.0%} of the peak"


def _tokens(c: Config, earlier: RunDir | None) -> int | None:
    """Of the whole stage; of rows that are no windows of text by those of an earlier run on the same."""
    if c.trainer.max_steps is None:
        return None
    rows = step_sizes(c.data).before(c.trainer.max_steps)
    if c.data.rows == "text" and c.data.packing in (None, "concat"):
        return rows * c.data.seq_len
    summary = None if earlier is None else earlier.read_summary()
    if earlier is None or not summary or not summary.get("step") or not _same_rows(c, earlier):
        return None
    return round(rows * summary["tokens"] / step_sizes(c.data).before(summary["step"]))


def _same_rows(c: Config, earlier: RunDir) -> bool:
    """Whether its steps had as many tokens, where rows are as long as their text is."""
    try:
        data = yaml.safe_load(read_regular(earlier.config))["data"]
        ours = keys.values(c.data, PREPARED, TRAJECTORY)
        return all(functools.reduce(dict.get, name.split("."), data) == value for name, value in ours.items())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return False
