"""What a run's callbacks are built from, and where in a step each of them acts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import lightning.pytorch as pl
from rich.console import Console

from lmtrain.callbacks.length import DependsOnLength, Length
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.validation import Validation
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.objectives.base import Objective
from lmtrain.run_folder.folder import RunDir


class Phase(IntEnum):
    """The order of the callbacks within a step; docs/architecture.md says why it is this one."""

    MEASURES = 0
    GIVES_UP = 1
    YOURS = 2  # callbacks.extra, before the validation, as in Lightning: what they do to the weights is judged
    CHANGES_WEIGHTS = 3
    VALIDATES = 4
    READS_SCORES = 5
    SHOWS = 6
    MAY_STOP = 7
    STOPS = 8  # after all that log: some Lightning callbacks log an extra time when they see that a stop was requested
    WRITES = 9
    SAVES = 10


Placed = tuple[Phase, pl.Callback]


@dataclass
class Parts:
    """What callbacks are built from: the objects of the run, then the callbacks that others refer to."""

    config: Config
    run_dir: RunDir
    console: Console
    corpus: Corpus
    objective: Objective
    length: Length
    scored_on: Callable[[str], str | None]  # names the rows that a metric is measured on, see `val_sets.scored_on`
    ranking: str  # how checkpoint.monitor ranks checkpoints: min, max or last

    metrics: Metrics = field(init=False)
    samples: Samples | None = field(init=False)
    validation: Validation = field(init=False)
    depend_on_length: Sequence[DependsOnLength] = ()
