"""The rows of a run: those it trains on, those it validates on, and how many steps they are read for."""

import math
from dataclasses import dataclass
from functools import cached_property

from lmtrain.callbacks.length import Length
from lmtrain.callbacks.time_budget import ENDLESS
from lmtrain.checkpoints import retention
from lmtrain.config.batch import check_reached, horizon, step_sizes
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, build_corpus, fit_to_model
from lmtrain.data.loaders import first_rows, rows_used, seen_rows
from lmtrain.data.order import Rows
from lmtrain.data.val_sets import ValSet, build_val_sets, count, measured_on, scored_on
from lmtrain.distributed import process_group as world
from lmtrain.errors import UserError
from lmtrain.models.language_model import LanguageModel


@dataclass
class RunData:
    """The data of a run: its corpus, its further validation sets, and its number of steps."""

    config: Config
    corpus: Corpus
    val_sets: dict[str, ValSet]  # of data.val_sets, by name
    total_steps: int

    @property
    def train_rows(self) -> Rows:
        return rows_to_train(self.config, self.corpus)

    @property
    def validated(self) -> dict[str, ValSet]:
        """All sets that a validation reads, by name; the validation split's name is empty."""
        corpus = self.corpus
        if corpus.val is None:
            return self.val_sets
        return {"": ValSet(corpus.val, corpus.val_bytes_per_token, corpus.fingerprint, []), **self.val_sets}

    @cached_property
    def length(self) -> Length:
        """The planned steps, the most that a time budget may extend them to, and the rows that a validation reads."""
        timed = self.config.budget.minutes is not None
        size, limit = self.config.data.micro_batch_size, self.config.trainer.limit_val_batches
        seen = sum(seen_rows(val_set.rows, size, limit) for val_set in self.validated.values())
        return Length(self.total_steps, at_most(self.config, self.train_rows) if timed else self.total_steps, seen)

    @property
    def ranking(self) -> str:
        """How checkpoint.monitor ranks checkpoints: min, max, or LAST if it is measured on too few rows."""
        rows, _ = measured_on(self.corpus, self.val_sets, self.config.checkpoint.monitor)
        few = rows is not None and count(rows) < self.config.checkpoint.min_val_rows
        return retention.LAST if few else self.config.checkpoint.mode

    def scored_on(self, monitor: str) -> str | None:
        """Returns a name for the rows that `monitor` is measured on, see `val_sets.scored_on`."""
        return scored_on(self.config, self.corpus, self.val_sets, monitor)

    def fit_to(self, model: LanguageModel) -> None:
        """Lays the rows out as the model needs them; raises UserError where it can't isolate packed documents."""
        more = [val_set.rows for val_set in self.val_sets.values()]
        fit_to_model(self.config, self.corpus, model.unpacked_because, model.lengths.limit, more)


def build_data(config: Config) -> RunData:
    """Prepares or opens a run's data on all ranks; raises UserError if the run is longer than its data allow."""
    corpus = world.together(lambda: build_corpus(config))
    rows = rows_to_train(config, corpus)
    total_steps = horizon(config.trainer.max_steps, config.trainer.max_epochs, len(rows), step_sizes(config.data))
    check_reached(config, total_steps)
    check_mixture(config, rows, total_steps)
    val_sets = world.together(lambda: build_val_sets(config, corpus))
    corpus.notes += [f"data.val_sets.{name}: {note}" for name, set_ in val_sets.items() for note in set_.notes]
    return RunData(config, corpus, val_sets, total_steps)


def rows_to_train(config: Config, corpus: Corpus) -> Rows:
    """Returns all training rows, or those of trainer.overfit_batches steps if that is set."""
    if not config.trainer.overfit_batches:
        return corpus.train
    return first_rows(corpus.train, rows_used(config, len(corpus.train)))


def at_most(config: Config, rows: Rows) -> int:
    """Returns the most steps of a run with a time budget: until trainer.max_epochs or a mixture ends it, or ENDLESS."""
    mixture = getattr(rows, "mixture", None)
    used_up = ENDLESS if mixture is None or mixture.end is None else mixture.step_sizes.step_of(mixture.end)
    return min(used_up, _steps_of_epochs(config, rows))


def _steps_of_epochs(config: Config, rows: Rows) -> int:
    epochs = config.trainer.max_epochs
    return ENDLESS if epochs is None else horizon(None, epochs, len(rows), step_sizes(config.data))


def out_of_epochs(config: Config, steps: int, rows: Rows) -> str | None:
    """Returns the key whose epochs, and not the clock, end a run with a time budget after `steps` steps, or None."""
    if config.budget.minutes is None or steps != at_most(config, rows):
        return None
    return "trainer.max_epochs" if steps == _steps_of_epochs(config, rows) else "data.mixture"


def check_mixture(config: Config, rows: Rows, total_steps: int) -> None:
    """Raises UserError where the sources of a mixture are used up before the run ends."""
    mixture = getattr(rows, "mixture", None)
    if mixture is None or mixture.end is None:
        return
    sizes = mixture.step_sizes
    steps = sizes.step_of(mixture.end)
    needed = len(rows) * config.trainer.max_epochs if config.trainer.max_epochs is not None else math.inf
    if min(sizes.before(total_steps), needed) > mixture.end:
        found = f"data.mixture: every source that has a weight is used up after {steps:,} of {total_steps:,} steps"
        raise UserError(f"{found}: set trainer.max_steps={steps}, or raise or leave out a max_epochs")
