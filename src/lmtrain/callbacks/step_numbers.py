"""Numbers of a step that follow from the config alone, for its record: tokens of each source, what has grown."""

import math

from lmtrain.config.growth import Stages, row_lengths, step_sizes
from lmtrain.config.schema import Config
from lmtrain.data.order import Rows
from lmtrain.objectives.parts import Definition

_GROWN = {"plain count": "tests/data/test_growth.py::test_a_run_that_grows_goes_on_exactly"}
GROWN = {
    "tokens_seen/<source>": Definition(
        "tokens", "the run", "rows taken from that source of a mixture x data.seq_len",
        {"plain count": "tests/data/test_text_mixture.py::test_a_run_sees_its_sources_by_weight_and_goes_on_exactly"},
    ),
    "row_length": Definition("tokens", "the step", "tokens of a row, where data.curriculum lets rows grow", _GROWN),
    "step_rows": Definition("rows", "the step", "rows of the step, where data.batch_warmup lets it grow", _GROWN),
}  # fmt: skip


class StepNumbers:
    """Called with a number of steps taken, gives {"tokens_seen/<source>", "row_length", "step_rows"}.

    The tokens that each source of a mixture has given until then; the tokens of a row, and the rows of data.seq_len, of
    the last of these steps, where they grow.
    """

    def __init__(self, config: Config, rows: Rows) -> None:
        self.seq_len, self.mixture = config.data.seq_len, getattr(rows, "mixture", None)
        self.sizes = step_sizes(config.data)
        self.lengths = row_lengths(config.data) or Stages.constant(self.seq_len)
        epochs = config.trainer.max_epochs
        self.all_rows = len(rows) * epochs if epochs is not None else math.inf

    def __call__(self, steps: int) -> dict[str, int]:
        found = {}
        if self.mixture is not None:
            given = self.mixture.rows_given(self._rows_before(steps))
            for source, rows in zip(self.mixture.sources, given, strict=True):
                found[f"tokens_seen/{source.name}"] = int(rows) * self.seq_len
        if len(self.lengths.values) > 1:
            found["row_length"] = self.row_length(steps)
        if len(self.sizes.values) > 1:
            found["step_rows"] = self.sizes.at(steps - 1)
        return found

    def row_length(self, steps: int) -> int:
        """Tokens of a row in the last of so many steps."""
        return self.lengths.at(steps - 1)

    def rows_of_last(self, last: int, steps: int) -> int:
        """Rows of data.seq_len in the `last` of so many steps."""
        return self._rows_before(steps) - self._rows_before(steps - last)

    def _rows_before(self, steps: int) -> int:
        """The last step of a run by epochs may be short."""
        return int(min(self.sizes.before(steps), self.all_rows))
