"""Tuning of settings before a run: the learning rate, by a range test, and the largest micro-batch that fits."""

import copy
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from lmtrain import errors
from lmtrain.config.batch import split_over
from lmtrain.config.options import RangeTestConfig
from lmtrain.config.override_text import written
from lmtrain.config.schema import Config
from lmtrain.data.corpus import build_corpus
from lmtrain.distributed import devices, ranks
from lmtrain.errors import RunError, UserError, writing
from lmtrain.files import absolute, strict_json, write_atomic
from lmtrain.optim.schedules import Suggestion, suggest
from lmtrain.planning import estimation, trial
from lmtrain.run.plan_costs import HEADROOM
from lmtrain.run.start import start
from lmtrain.run_folder import folder as run_dir
from lmtrain.secrets import command

_REACH = 1000.0  # by default, a range test extends by this factor below and above optimizer.lr
_SMOOTHING = 0.8  # decay of the moving average of a range test's loss
_DIVERGED = 4.0  # a range test ends when that average exceeds its minimum by this factor
_PROBE_STEPS = 2  # from the second step on, optimizer state and gradients are in memory together


@dataclass
class Found:
    """The settings that were found, by config key; `tried` describes the attempts."""

    lr: float | None = None
    groups: list[dict[str, Any]] | None = None
    micro_batch_size: int | None = None
    curve: list[dict[str, Any]] = field(default_factory=list)
    suggestion: Suggestion | None = None
    tried: list[str] = field(default_factory=list)

    def overrides(self) -> list[str]:
        """Returns the settings as overrides, to be typed after those of the run."""
        lr = [f"optimizer.lr={self.lr:.2g}"] if self.lr is not None else []
        groups = [f"optimizer.groups={written(self.groups)}"] if self.groups else []
        size = [f"data.micro_batch_size={self.micro_batch_size}"] if self.micro_batch_size is not None else []
        return [*lr, *groups, *size]

    def put_into(self, config: Config) -> None:
        """Sets the found values in a config, as the overrides would."""
        optimizer, data = config.optimizer, config.data
        optimizer.lr, optimizer.groups = self.lr or optimizer.lr, self.groups or optimizer.groups
        data.micro_batch_size = self.micro_batch_size or data.micro_batch_size


def largest_micro_batch(config: Config, folder: Path, found: Found) -> None:
    """Finds the largest micro-batch that fits and sets it in `found` if it differs from the config's.

    On CUDA sizes are tried, on a CPU their memory is estimated.

    Args:
        config: with all `auto` values resolved.
        folder: a new folder for trials.

    Raises:
        RunError: not even a micro-batch of one row fits.
    """
    sizes, fits = micro_batch_sizes(config), _estimated if config.trainer.accelerator == "cpu" else _tried
    for size in sizes:
        print(f"trying data.micro_batch_size={size}", flush=True)
        smaller = copy.deepcopy(config)
        smaller.data.micro_batch_size = size
        good, words = fits(smaller, folder / f"rows_{size}")
        found.tried.append(f"data.micro_batch_size={size}: {words}")
        if good:
            found.micro_batch_size = size if size != config.data.micro_batch_size else None
            return
    raise RunError(f"a micro-batch of one row does not fit ({found.tried[-1]}): lmtrain.estimate names what would")


def micro_batch_sizes(config: Config) -> list[int]:
    """Returns a device's rows per step, and divisors of that number, each at most half of the previous, down to 1."""
    split = split_over(config, int(config.trainer.devices))
    rows = split.micro_batch_size * split.accumulation
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(next(size for size in range(sizes[-1] // 2, 0, -1) if rows % size == 0))
    return sizes


def _estimated(config: Config, _folder: Path) -> tuple[bool, str]:
    asked = copy.deepcopy(config)
    asked.estimate.device = None
    device = estimation.device_of(asked)
    room = device.bytes * (1 - HEADROOM) / int(config.trainer.devices)
    needed = sum(estimation.memory(estimation.build(asked, len(build_corpus(asked).tokenizer)), asked).values())
    words = f"{needed / 2**30:.2f} GiB by the estimate, of {room / 2**30:.2f} GiB that a process can use"
    return needed <= room, words


def _tried(config: Config, folder: Path) -> tuple[bool, str]:
    longest = int(config.trainer.devices) == 1
    rows = "the longest rows" if longest else "rows of the first steps"
    try:
        trial.run(trial.config_of(config, folder, _PROBE_STEPS), folder, longest_rows=longest)
    except trial.OutOfMemory:
        return False, f"out of memory on {rows}"
    return True, f"fits {rows}"


def range_test(config: Config, folder: Path, found: Found) -> None:
    """Finds the learning rate by a range test over the run's first rows, and scales those of parameter groups.

    Raises:
        UserError: the run is a cooldown, the range is empty, or the loss did not fall anywhere in it.
    """
    settings, lr = config.tune, config.optimizer.lr
    if config.run.cooldown_from is not None:
        going_on = f"run.cooldown_from={config.run.cooldown_from} goes on with the learning rate that the run had"
        raise UserError(f"{going_on}: set tune.lr=false, or leave run.cooldown_from out")
    if not lr and not (settings.min_lr and settings.max_lr):
        raise UserError("optimizer.lr=0 is not the middle of a range: set tune.min_lr and tune.max_lr")
    low, high = settings.min_lr or lr / _REACH, settings.max_lr or lr * _REACH
    if not low < high:
        raise UserError(f"tune.min_lr={low:g} and tune.max_lr={high:g}: the second has to be the larger")

    # The test: the run's own steps, at a rate that rises from the lowest to the highest.
    print(f"a range test of {settings.steps} steps, optimizer.lr from {low:.2g} to {high:.2g}", flush=True)
    tried = trial.config_of(config, folder, settings.steps, diverged=_DIVERGED, smoothing=_SMOOTHING)
    tried.optimizer.lr = high
    tried.optimizer.groups = scaled(config.optimizer.groups, lr, high) or config.optimizer.groups
    tried.schedule = RangeTestConfig(name="range_test", warmup_steps=None, warmup_ratio=None, min_lr_ratio=low / high)
    found.curve = trial.run(tried, folder)

    # Where the loss falls fastest, and the rates that follow from it.
    rates, losses = ([row[name] for row in found.curve] for name in ("lr", "loss"))
    found.suggestion = suggest(rates, losses, _SMOOTHING)
    if found.suggestion is None:
        level = f"the loss did not fall between optimizer.lr={low:.2g} and {high:.2g}"
        last = f"{len(rates)} steps, the last loss is {losses[-1]:.4g}"
        raise UserError(f"{level} ({last}): set another tune.min_lr and tune.max_lr, or more tune.steps")
    found.lr = float(f"{found.suggestion.lr:.2g}")
    found.groups = scaled(config.optimizer.groups, lr, found.lr)
    last = "where it diverged" if len(rates) < settings.steps else "its end"
    best = f"falls fastest at {found.suggestion.steepest:.2g}, is lowest at {found.suggestion.lowest:.2g}"
    found.tried.append(f"range test: the loss {best}; {last} was at {rates[-1]:.2g}")


def scaled(groups: list[dict[str, Any]], lr: float, new: float) -> list[dict[str, Any]] | None:
    """Scales the learning rates in optimizer.groups from base rate `lr` to `new`; None if no group has its own rate."""
    if not lr or not any(group.get("lr") for group in groups):
        return None
    return [group | ({"lr": float(f"{group['lr'] * new / lr:.3g}")} if group.get("lr") else {}) for group in groups]


def write(found: Found, folder: Path) -> list[Path]:
    """Writes tune.json and, if matplotlib is installed, lr.png to `folder`; returns the paths of the files."""
    with writing(str(folder), "; set tune.dir to another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        tree = {**asdict(found), "overrides": found.overrides()}
        if found.suggestion is not None:
            tree["suggestion"] = found.suggestion._asdict()
        write_atomic(folder / "tune.json", strict_json(tree, indent=2) + "\n")
        files = [folder / "tune.json"]
        if found.suggestion is not None:
            files += _draw(found, folder / "lr.png")
    return files


def _draw(found: Found, path: Path) -> list[Path]:
    """Plots the loss over the learning rate, with the suggested rate; without matplotlib, writes nothing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no picture: it needs matplotlib: pip install "lmtrain[plots]"')
        return []
    assert found.suggestion is not None
    rates = [row["lr"] for row in found.curve]
    figure = Figure(figsize=(6.4, 4))
    axis = figure.subplots()
    axis.plot(rates, [row["loss"] for row in found.curve], color="0.8", label="loss")
    axis.plot(rates[: len(found.suggestion.smoothed)], found.suggestion.smoothed, color="tab:blue", label="smoothed")
    axis.axvline(found.suggestion.lr, color="tab:red", label=f"suggested: {found.suggestion.lr:.2g}")
    smoothed = found.suggestion.smoothed
    margin = 0.2 * (smoothed[0] - min(smoothed))
    limits = (min(smoothed) - margin, smoothed[0] + margin)
    axis.set(xscale="log", xlabel="optimizer.lr", ylabel="train/loss", ylim=limits)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return [path]


def tune(config: Config) -> int:
    """Finds learning rate and micro-batch by trials and prints the overrides; with tune.apply, trains with them."""
    if ranks.started_by() is not None or config.trainer.num_nodes > 1:
        raise UserError("lmtrain.tune starts the ranks of one node itself: start it without torchrun and srun")
    if config.tune.apply and (run_dir.locate(config) / "config.yaml").exists():
        there = f"{run_dir.locate(config)} holds a run already, which keeps its learning rate and micro-batch"
        raise UserError(f"{there}: continue it with python -m lmtrain.train, or choose another run.name")
    found = look(config)
    for line in found.tried:
        print(line)
    for path in write(found, results(config)):
        print(f"written: {path}")
    overrides = found.overrides()
    words = [w for w in config.command.words if not w.lstrip("+").startswith("tune.")]
    print(f"to type: {command('train', [*words, *overrides])}" if overrides else "nothing to change")
    if not config.tune.apply:
        return errors.FINISHED
    found.put_into(config)
    config.tune.apply = False  # as in the run that the printed command starts
    vars(config)["command"] = replace(config.command, words=(*words, *overrides))
    return start(config)


def look(config: Config) -> Found:
    """Runs the trials that the config asks for, in a temporary folder, and returns what they found."""
    found, tried = Found(), copy.deepcopy(config)
    with run_dir.folder_beside_runs(config, "tune") as folder:
        devices.resolve_auto(tried)
        if config.tune.micro_batch_size:
            largest_micro_batch(tried, folder, found)
            found.put_into(tried)
        if config.tune.lr:
            range_test(tried, folder / "lr", found)
    return found


def results(config: Config) -> Path:
    """Returns the folder for tune.json and lr.png."""
    if config.tune.dir is not None:
        return absolute(config.tune.dir)
    name = config.run.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return absolute(config.run.root) / "tune" / name
