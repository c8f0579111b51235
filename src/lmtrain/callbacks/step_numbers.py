"""Numbers of a step that follow from the config alone, for its record: tokens of each source, what has grown."""

import math

from lmtrain.config.growth import Stages, row_lengths, step_sizes
from lmtrain.config.schema import Config
from lmtrain.data.modules import Rows


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
            given = self.mixture.rows_given(int(min(self.sizes.before(steps), self.all_rows)))
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
        return self.sizes.before(steps) - self.sizes.before(steps - last)
