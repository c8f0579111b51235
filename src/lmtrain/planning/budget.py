"""The number of steps that fit into a budget: of minutes, by timing some steps; of tokens or FLOPs, by counting.

The number becomes trainer.max_steps. With budget.minutes, callbacks/time_budget.py adjusts it to the clock while the
run trains.
"""

import copy
import itertools
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lmtrain import terminal
from lmtrain.callbacks.stopping import EndsEarly
from lmtrain.callbacks.stream import build_feed
from lmtrain.callbacks.time_budget import ENDING_S, steps_of_validation
from lmtrain.config import safe_yaml
from lmtrain.config.batch import nearest_divisor, step_sizes
from lmtrain.config.keys import value_of
from lmtrain.config.proposers import EPOCHS, LENGTHS
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, build_corpus, fit_to_model
from lmtrain.data.loaders import no_workers_left, seen_rows
from lmtrain.data.val_sets import build_val_sets
from lmtrain.distributed import compiler, devices, ranks
from lmtrain.distributed import process_group as world
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import UserError
from lmtrain.files import read_jsonl
from lmtrain.models import dial
from lmtrain.models.flops import flops_per_token
from lmtrain.planning import estimation, trial
from lmtrain.run import build
from lmtrain.run.data import at_most, rows_to_train
from lmtrain.run.start import place
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder.folder import RunDir

_MEASURED_S = 1.2  # how long steps are measured; slow steps are measured _FEWEST times
_VALIDATIONS = 10.5  # per run; the half keeps the last of them away from the validation at the end
# On a CPU, uncompiled steps are measured: the share of their time that compiled ones take, and seconds of compiling.
_COMPILED, _COMPILING_S = 0.68, 20.0
_FEWEST, _MOST, _RANKS = 4, 400, 20  # numbers of measured steps; the last one with several ranks
_NEAR, _FAR = 1.5, 3  # times the deepest measured depth: the farthest that is chosen, and that is measured next
_MEASURING = "measuring the speed of this machine for a few seconds (budget.minutes)"
_FORWARD_TOKENS = 2**14  # tokens in one forward pass of model=dial, which fit into the memory of a GPU at every depth


@dataclass
class Measured:
    """Durations measured on this machine, in seconds."""

    starting: float  # from the start to the first step
    step: float
    validation: float


@dataclass
class Chosen:
    """A depth of model=dial, chosen for a budget of minutes."""

    depth: int
    took: Measured  # expected at this depth
    corpus: Corpus | None  # None if the depth is another than that of the config, which may shape the data


Again = Callable[[list[str]], Config]  # composes the command's config once more, with further overrides


def settle(config: Config, began: float, again: Again) -> Config:
    """Returns the config with trainer.max_steps set from config.budget; minutes count from `began`, a time.time().

    Spreads the validations over the steps unless the user has set their interval. A typed run length overrides the
    budget, one in a file doesn't. If a depth is chosen for model=dial, the config is composed again with it, visibly.

    Raises:
        UserError: the run is a cooldown; or see `_settle_minutes` and `_settle_amount`.
    """
    chosen, typed = config.budget.chosen, config.command.typed
    given = config.command.given  # typed, or set by a file
    by_hand = [key for key in LENGTHS if key in typed and value_of(config, key)]
    if typed.get("debug", "null") != "null":
        by_hand.append("debug")
    if by_hand:
        print(f"{by_hand[0]}={typed[by_hand[0]]} was typed and decides the length: budget.{chosen} is left out")
        setattr(config.budget, str(chosen), None)
        return config
    if config.run.cooldown_from is not None:
        found = f"budget.{chosen} counts from the first step, and run.cooldown_from={config.run.cooldown_from}"
        raise UserError(f"{found} continues another run to trainer.max_steps: set that instead of the budget")
    if chosen == "tokens":
        _settle_amount(config, given)
        return config
    _resolve_devices(config)
    compiler.probe_early(config)
    world.connect(config.trainer.accelerator, config.trainer.rank_timeout)
    if chosen == "flops":  # as below, all ranks train with the config of the first
        world.from_first(lambda: _settle_amount(config, given))
        return config
    os.environ[ranks.BEGAN] = str(began)
    _split(config, given)
    measured: Chosen | None = None  # on the first rank

    def depth_for_time() -> int | None:
        nonlocal measured
        if config.model.name != dial.NAME or {dial.KEY, dial.LAYERS} & given.keys():
            return None
        before = _chosen_before(config)
        if before is not None:
            depth = before.get("model", {}).get("num_hidden_layers")
            return depth if isinstance(depth, int) else None
        measured = _choose_depth(config, began, given)
        return measured.depth

    depth = world.from_first(depth_for_time)
    if depth is not None and depth != config.model.num_hidden_layers:  # type: ignore[attr-defined]
        config = again([f"{dial.KEY}={depth}"])
        given = {**given, dial.KEY: str(depth)}
        _resolve_devices(config)
        _split(config, given)
    world.from_first(lambda: _settle_minutes(config, began, given, measured))
    return config


def _resolve_devices(config: Config) -> None:
    layout = ranks.find()
    devices.resolve_auto(config) if layout is None else place(config, layout)


def _settle_amount(config: Config, given: Mapping[str, Any]) -> None:
    """Sets trainer.max_steps to the smallest number of steps that uses up budget.tokens or budget.flops.

    FLOPs are those of forward and backward, counted by `flops_per_token`. A limit of epochs that a config sets is
    lifted.

    Raises:
        UserError: rows differ in length, so that their tokens can't be counted before they are read.
    """
    packing = config.data.packing not in (None, "concat")  # rows are padded: it takes FLOPs, but is not trained on
    if config.data.rows != "text" or config.data.packing == "off" or (packing and config.budget.tokens is not None):
        counts = f"budget.{config.budget.chosen} counts rows of data.seq_len={config.data.seq_len} tokens"
        instead = "set trainer.max_epochs, trainer.max_steps or budget.minutes"
        raise UserError(f"{counts}, but rows of this data differ in length: {instead}")
    tokens = config.budget.tokens
    if config.budget.flops is not None:
        terminal.quiet_libraries()
        model = estimation.build(config, len(build_corpus(config).tokenizer))
        tokens = config.budget.flops / flops_per_token(model, config.data.seq_len)
    rows = math.ceil(tokens / config.data.seq_len)  # type: ignore[operator]  # short rows are cut from full ones
    steps = step_sizes(config.data).steps_for(rows)
    config.trainer.max_steps, config.trainer.max_epochs = steps, None
    _set_unless_given(config, given, {"trainer.val_check_interval": math.ceil(steps / _VALIDATIONS)})


def _settle_minutes(config: Config, began: float, given: Mapping[str, Any], measured: Chosen | None) -> None:
    """Sets trainer.max_steps to the number of steps that end within budget.minutes, as described in `settle`.

    A continued run keeps its number of steps. Data that is small for the time is trained on for a limited number of
    epochs, because more rarely help.

    Raises:
        UserError: no time is left for training, or a trial fails.
    """
    known = not config.data.streaming and not config.trainer.overfit_batches  # whether epochs are passes over all data
    known = known and not config.objective.trains_on_rollouts  # with new completions in every epoch
    if config.trainer.max_epochs is None and known and "trainer.max_epochs" not in given:
        config.trainer.max_epochs = EPOCHS["text" if config.data.rows == "text" else "rows"]
    before = _chosen_before(config)
    if before is not None:
        config.trainer.max_steps = before["trainer"]["max_steps"]
        _set_unless_given(config, given, {"trainer.val_check_interval": before["trainer"].get("val_check_interval")})
        if dial.is_measured(config):
            decay, dropout = before["optimizer"]["weight_decay"], before["model"]["dropout"]
            _set_unless_given(config, given, {"optimizer.weight_decay": decay, "model.dropout": dropout})
        return
    if measured is None:
        terminal.quiet_libraries()
        corpus = build_corpus(config)
        terminal.status.say(_MEASURING)
        took = measure(config, corpus)
    else:
        corpus, took = measured.corpus or build_corpus(config), measured.took
    left = began + 60 * config.budget.minutes - time.time()  # type: ignore[operator]
    rows = rows_to_train(config, corpus)
    most = at_most(config, rows)
    steps = min(most, steps_within(left, took, config))
    _set_unless_given(config, given, {"trainer.val_check_interval": math.ceil(steps / _VALIDATIONS)})
    config.trainer.max_steps = min(most, steps_within(left, took, config))  # with the time of these validations
    epochs = step_sizes(config.data).before(config.trainer.max_steps) / len(rows)
    if dial.is_measured(config) and corpus.stream is None:
        _set_unless_given(config, given, dial.regularization(config.optimizer.lr, config.trainer.max_steps, epochs))


def _set_unless_given(config: Config, given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Sets the keys that were not given."""
    for key, value in values.items():
        if key not in given:
            section, name = key.split(".")
            setattr(getattr(config, section), name, value)


def _split(config: Config, given: Mapping[str, Any]) -> None:
    """Fits model=dial's rows, where not given, to the devices: as many on each, in forward passes that they hold."""
    if config.model.name != dial.NAME:
        return
    data, parts = config.data, devices.readers(config)
    rows = -(-data.global_batch_size // parts) * parts
    if rows != data.global_batch_size and "data.global_batch_size" not in given:
        terminal.say_once(f"data.global_batch_size={rows} instead of {data.global_batch_size}: as many on each device")
        data.global_batch_size = rows
    rows = data.global_batch_size // parts
    most = min(rows, _FORWARD_TOKENS // data.seq_len)
    _set_unless_given(config, given, {"data.micro_batch_size": nearest_divisor(rows, most)})


def _at_depth(config: Config, depth: int) -> Config:
    """Returns the config at another depth: values that follow from the depth by a rule are those of the rule there."""
    other = copy.deepcopy(config)
    now, there = dial.recipe(config.model.num_hidden_layers), dial.recipe(depth)  # type: ignore[attr-defined]
    _set_unless_given(other, {}, {k: v for k, v in there.items() if v != now[k] and value_of(config, k) == now[k]})
    return other


def _choose_depth(config: Config, began: float, given: Mapping[str, Any]) -> Chosen:
    """Returns the depth of the least expected loss after the time that is left.

    Measures steps at the composed depth and at those that `_next_to_measure` names, until one takes more than a sixth
    of the time left.
    """
    terminal.quiet_libraries()
    corpus = build_corpus(config)
    terminal.status.say(_MEASURING)
    now, size = config.model.num_hidden_layers, len(corpus.tokenizer)  # type: ignore[attr-defined]

    def shape(depth: int, vocabulary: int | None = None) -> dial.Shape:
        at = _at_depth(config, depth)
        tokens = at.data.seq_len * at.data.global_batch_size
        return dial.Shape(depth, vocabulary or at.tokenizer.vocab_size or size, tokens)

    unique = corpus.epoch_tokens * dial.longer(size) if corpus.stream is None else math.inf  # a window is no epoch
    times: dict[int, float] = {}
    measured: int | None = now
    while measured is not None:
        other, before = _at_depth(config, measured), time.time()
        other.tokenizer.vocab_size = config.tokenizer.vocab_size  # of the text that is prepared
        _split(other, given)
        took = measure(other, corpus if measured == now else build_corpus(other))
        times[measured] = took.step
        speed = dial.Speed.of([(shape(at, size), step) for at, step in times.items()])
        ends = began + 60 * config.budget.minutes - took.starting - took.validation - ENDING_S  # type: ignore[operator]
        left = ends - time.time()
        depth = dial.best_depth(left, speed, shape, unique)
        measured = _next_to_measure(depth, list(times)) if time.time() - before <= left / 6 else None
    bound = speed.layer * now / speed.step(shape(now))
    chose = f"budget.minutes={config.budget.minutes:g} chose {dial.KEY}={depth}, of which the lowest loss is expected"
    small = f"; small shapes are bound by launches, {bound:.0%} of a step with {now} layers" if bound > 0.5 else ""
    terminal.say_once(chose + small)
    step = speed.step(shape(depth))
    expected = Measured(took.starting, step, _validation(_at_depth(config, depth), corpus, step))
    return Chosen(depth, expected, corpus if depth == now else None)


def _next_to_measure(best: int, measured: list[int]) -> int | None:
    """Returns the depth to measure after those, or None if they tell enough about the one that looks best by them.

    A second depth tells the time of a FLOP from that of a layer's launches: the best one if all time went into FLOPs,
    or half the first. Further ones are measured where the best is far beyond them.
    """
    alone, deepest = len(measured) == 1, max(measured)
    if alone and best == deepest:
        return best // 2 or None
    return min(best, _FAR * deepest) if alone or best > _NEAR * deepest else None


def _chosen_before(config: Config) -> dict[str, Any] | None:
    """Returns the saved config of the run to continue, which contains its number of steps, or None."""
    file = run_dir.locate(config) / "config.yaml"
    if run_dir.resume_mode(config) == "none" or not file.is_file():
        return None
    saved = safe_yaml.read(file)
    steps = saved.get("trainer", {}).get("max_steps") if isinstance(saved, dict) else None
    return saved if isinstance(steps, int) and steps > 0 else None


def measure(config: Config, corpus: Corpus) -> Measured:
    """Measures starting and steps on rows of the corpus, and estimates the duration of a validation from them."""
    alone = int(config.trainer.devices) == 1 and ranks.find() is None
    starting, times = _alone(config, corpus) if alone else _on_ranks(config)
    steps = [after - before for before, after in itertools.pairwise(times)]
    step = median(steps[len(steps) // 2 :])  # the first half allocates memory and compiles code
    if _compiles_later(config):
        starting, step = starting + _COMPILING_S, _COMPILED * step
    return Measured(starting, step, _validation(config, corpus, step))


def _compiles_later(config: Config) -> bool:
    t = config.trainer
    return bool(t.compile) and t.accelerator == "cpu" and t.devices == 1


def _alone(config: Config, corpus: Corpus) -> tuple[float, list[float]]:
    """Returns the seconds of building a run in this process, and the time.time() at the end of each of its steps."""
    tried, began = copy.deepcopy(config), time.time()
    # Rows and steps of full size, which most of the run has.
    tried.data.curriculum.by = tried.data.batch_warmup.start_size = None
    devices.set_threads(tried.trainer.num_threads, 1)
    tried.trainer.profiler = None
    tried.trainer.compile = bool(tried.trainer.compile) and not _compiles_later(config)
    with tempfile.TemporaryDirectory(prefix="lmtrain_budget_") as folder:
        curve = Path(folder) / "curve.jsonl"
        objective = build.build_objective(tried, corpus, _MOST)
        fit_to_model(tried, corpus, objective.model.unpacked_because, objective.model.lengths.limit)
        datamodule = build.build_datamodule(tried, corpus, _MOST)
        ends = EndsEarly(str(curve), _MOST - 1, seconds=_MEASURED_S, fewest=_FEWEST)
        feed = build_feed(tried, RunDir(Path(folder)), corpus, StopRequest(), _MOST)
        trainer = build.build_trainer(tried, RunDir(Path(folder)), [ends, *([feed] if feed else [])], None, _MOST)
        building = time.time() - began
        with no_workers_left():
            trainer.fit(objective, datamodule=datamodule)
        times = [row["time"] for row in read_jsonl(curve)]
        # A stream's first window is tokenized before the first step.
        return (building if feed is None else times[0] - began), times


def _on_ranks(config: Config) -> tuple[float, list[float]]:
    """Returns the seconds from starting a trial's ranks to its first step, and the time.time() of each of its steps.

    The trial's ranks are all on this node; those of others are left out, with their rows.
    """
    tried = copy.deepcopy(config)
    tried.budget.minutes = None
    tried.data.global_batch_size //= tried.trainer.num_nodes
    tried.trainer.num_nodes = 1
    with run_dir.folder_beside_runs(config, "budget") as folder:
        started, here = time.time(), folder / "trial"
        rows = trial.run(trial.config_of(tried, here, _RANKS), here)
    times = [row["time"] for row in rows]
    return max(0.0, times[0] - started), times


def _validation(config: Config, corpus: Corpus, step: float) -> float:
    """Estimates the seconds of a validation from those of a step; its tokens take only a forward."""
    sets = [corpus.val, *(val_set.rows for val_set in build_val_sets(config, corpus).values())]
    size, limit = config.data.micro_batch_size, config.trainer.limit_val_batches
    rows = sum(seen_rows(rows, size, limit) for rows in sets if rows is not None)
    return step * steps_of_validation(rows, config.data.global_batch_size)


def steps_within(seconds: float, took: Measured, config: Config) -> int:
    """Returns how many steps end within `seconds` from now, after starting, validations and the end of the run.

    Raises UserError if there are fewer than ten.
    """
    every, sizes = config.trainer.val_check_interval, step_sizes(config.data)
    left = seconds - took.starting - took.validation - ENDING_S
    steps = left / (took.step + (took.validation / every if every else 0.0))  # of full size
    if steps < 10:
        whole: float = 60 * config.budget.minutes  # type: ignore[operator]
        least = whole - left + 10 * took.step
        took_first = f"preparing ({whole - seconds:.0f} s), starting ({took.starting:.0f} s)"
        found = f"{took_first}, a validation ({took.validation:.0f} s) and the end of the run leave time for"
        steps_left = f"only {max(0, int(steps))} steps of {took.step:.2f} s: give it {least / 60:.1f} minutes or more"
        raise UserError(f"budget.minutes={config.budget.minutes:g}: {found} {steps_left}, or choose a smaller model")
    return sizes.step_of(int(steps * sizes.last))
