"""What a difficulty curriculum goes with, and how many rows it orders. Imports no torch."""

from lmtrain.config.batch import step_sizes
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.errors import UserError

DIFFICULTY = "difficulty"


def check_difficulty(c: Config) -> None:
    """Raises UserError for settings of data.curriculum by=difficulty that make no order of rows."""
    d = c.data
    curriculum = d.curriculum
    if curriculum.by != DIFFICULTY:
        return
    if curriculum.score is None:
        raise UserError(
            "data.curriculum.by=difficulty needs data.curriculum.score: what makes a row hard, rarity, compression, "
            "loss or length"
        )
    if (curriculum.score == "loss") != (curriculum.model is not None):
        raise UserError(
            f"data.curriculum.score={curriculum.score} with data.curriculum.model={curriculum.model}: the loss, and it "
            f"alone, needs a model, a run's folder, a Hugging Face folder or a name of the hub"
        )
    wrong = {
        "data.curriculum.start_length": (curriculum.start_length, "null (it is of by=length)"),
        "data.curriculum.end_length": (curriculum.end_length, "null (it is of by=length)"),
        "trainer.overfit_batches": (c.trainer.overfit_batches, "0"),
    }
    for key, (value, instead) in wrong.items():
        if value:
            raise UserError(f"{key}={value} doesn't go with data.curriculum.by=difficulty: set {key}={instead}")
    if d.rows == "text" and d.source == "mixture":
        raise UserError(
            "data.curriculum.by=difficulty doesn't go with a mixture of text, whose weights say which rows a step has: "
            "set data.curriculum.by=null, or train on one source"
        )
    one_length = d.packing not in ("off", None) or (d.rows == "text" and d.packing is None)
    if curriculum.score == "length" and one_length:
        raise UserError(
            f"data.curriculum.score=length: with data.packing={d.packing} each row is filled up to data.seq_len="
            f"{d.seq_len} tokens; set data.packing=off, or score by rarity, compression or loss"
        )


def rows_in_order(data: DataConfig, rows: int) -> int:
    """How many rows, the first of the run, come from easy to hard: those of curriculum.steps steps, or of an epoch.

    Args:
        rows: of an epoch.

    Raises:
        UserError: an epoch has fewer.
    """
    steps, sizes = data.curriculum.steps, step_sizes(data)
    if steps is None:
        return rows
    if sizes.before(steps) > rows:
        raise UserError(
            f"data.curriculum.steps={steps}: the first epoch has {sizes.steps_for(rows):,} steps, after which its rows "
            f"come again: set data.curriculum.steps=null, which orders the whole epoch, or fewer steps"
        )
    return sizes.before(steps)


def check_seen(c: Config, rows: int, total_steps: int) -> None:
    """Raises UserError where the run ends before its hardest rows; a fast_dev_run may."""
    if c.data.curriculum.by != DIFFICULTY or c.trainer.fast_dev_run:
        return
    steps = step_sizes(c.data).steps_for(rows_in_order(c.data, rows))
    if steps > total_steps:
        raise UserError(
            f"data.curriculum.by=difficulty: rows come from easy to hard over {steps:,} steps, and the run ends after "
            f"{total_steps:,}, without the hardest: set data.curriculum.steps={total_steps} or less, or train longer "
            f"(trainer.max_steps)"
        )


def curriculum_words(data: DataConfig, rows: int) -> str:
    """'rarity, easy to hard over the first epoch (120 steps), 10 buckets'."""
    c = data.curriculum
    steps = step_sizes(data).steps_for(rows_in_order(data, rows))
    over = f"the first epoch ({steps:,} steps)" if c.steps is None else f"the first {steps:,} steps"
    by = f"loss of {c.model}" if c.score == "loss" else c.score
    return f"{by}, easy to hard over {over}, {c.buckets} buckets"
