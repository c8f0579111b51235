"""How many steps fit into `budget.minutes`, by the time that some steps take on this machine.

The number becomes trainer.max_steps, so the schedule ends with the time, and a run that is stopped and resumed is the
run it was: nothing is measured again.
"""

import copy
import itertools
import time
from dataclasses import dataclass
from statistics import median

from lmtrain.config import safe_yaml
from lmtrain.config.override_text import typed_keys
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.loaders import seen_rows
from lmtrain.distributed import devices, ranks
from lmtrain.errors import UserError
from lmtrain.files import read_regular
from lmtrain.planning import trial
from lmtrain.run_folder import folder as run_dir

_MEASURED_S = 8.0  # how long steps are measured; a step that takes longer is measured _FEWEST times
_FEWEST, _MOST, _RANKS = 6, 400, 20  # steps; the last with several ranks
_FORWARD = 0.4  # of a step's time a token: what a token of validation takes
_ENDING_S = 4.0  # the last checkpoint, the export and the report


@dataclass
class Measured:
    """What steps take here, in seconds."""

    starting: float  # from a process's start to its first step
    step: float
    validation: float


def settle(config: Config, began: float) -> None:
    """Sets trainer.max_steps to the steps that end within config.budget.minutes of `began`, a time.time().

    A length that was typed wins, and a run that began with a budget keeps its number of steps.

    Raises:
        UserError: ranks of another launcher, no time left for training, a trial that fails.
    """
    typed = typed_keys(ranks.typed())
    by_hand = [key for key in ("trainer.max_steps", "trainer.max_epochs") if key in typed]
    if by_hand:
        print(f"{by_hand[0]}={typed[by_hand[0]]} was typed and decides the length: budget.minutes is left out")
        config.budget.minutes = None
        return
    if ranks.started_by() is not None:
        raise UserError(
            "budget.minutes measures this machine before ranks are started: start the run without torchrun and srun, "
            "or set trainer.max_steps"
        )
    before = _chosen_before(config)
    if before is not None:
        config.trainer.max_steps = before
        return
    devices.resolve_auto(config)
    corpus = build_corpus(config)
    print("measuring this machine for some seconds (budget.minutes)", flush=True)
    took = measure(config, corpus)
    left = began + 60 * config.budget.minutes - time.time()  # type: ignore[operator]
    config.trainer.max_steps = steps_within(left, took, config)


def _chosen_before(config: Config) -> int | None:
    """The steps of the run that is to be continued; None where none is there."""
    file = run_dir.locate(config) / "config.yaml"
    if run_dir.resume_mode(config) == "none" or not file.is_file():
        return None
    try:
        saved = safe_yaml.parse(read_regular(file), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} can't be read: {error}") from None
    steps = saved.get("trainer", {}).get("max_steps") if isinstance(saved, dict) else None
    return steps if isinstance(steps, int) and steps > 0 else None


def measure(config: Config, corpus: Corpus) -> Measured:
    """What starting, a step and a validation take, from some steps in a process of their own."""
    tried = copy.deepcopy(config)
    tried.budget.minutes = None
    # Ranks that looked at their clocks would not end at the same step.
    alone = int(config.trainer.devices) == 1
    ends = {"seconds": _MEASURED_S, "fewest": _FEWEST} if alone else {}
    with trial.folder_beside_runs(config, "budget") as folder:
        started, here = time.time(), folder / "trial"
        rows = trial.run(trial.config_of(tried, here, _MOST if alone else _RANKS, **ends), here)
    times = [row["time"] for row in rows]
    steps = [after - before for before, after in itertools.pairwise(times)]
    step = median(steps[len(steps) // 2 :])  # in the first, memory is taken and code compiled
    return Measured(max(0.0, times[0] - started - step), step, _validation(config, corpus, step))


def _validation(config: Config, corpus: Corpus, step: float) -> float:
    """Seconds of a validation, from those of a step: its tokens only go forward."""
    if corpus.val is None:
        return 0.0
    rows = seen_rows(corpus.val, config.data.micro_batch_size, config.trainer.limit_val_batches)
    return _FORWARD * step * rows / config.data.global_batch_size


def steps_within(seconds: float, took: Measured, config: Config) -> int:
    """The steps that end after `seconds` from now, with starting, validations and the end.

    Raises UserError where fewer than ten do.
    """
    every = config.trainer.val_check_interval
    left = seconds - took.starting - took.validation - _ENDING_S
    steps = int(left / (took.step + (took.validation / every if every else 0.0)))
    if steps < 10:
        least = 60 * config.budget.minutes - left + 10 * took.step  # type: ignore[operator]
        raise UserError(
            f"budget.minutes={config.budget.minutes:g}: what was measured, starting ({took.starting:.0f} s), a "
            f"validation ({took.validation:.0f} s) and the end leave time for {max(0, steps)} steps of "
            f"{took.step:.2f} s: give it {least / 60:.1f} minutes or more, or choose a smaller model"
        )
    return steps
