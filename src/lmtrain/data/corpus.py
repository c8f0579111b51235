"""The prepared data of a run: rows to train and validate on, and what is known about them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lmtrain.config.schema import Config, Data
from lmtrain.data.modules import Rows
from lmtrain.data.stream.head import Head
from lmtrain.errors import UserError


@runtime_checkable
class PadsAnswers(Protocol):
    """Rows that put several answers in one row of a micro-batch, and can be told to give each a row of its own."""

    def pad(self) -> None: ...

    @property
    def epoch_tokens(self) -> int: ...


@dataclass
class Corpus:
    """Rows to train and validate on, and what is known about them."""

    tokenizer: Any
    folder: Path
    fingerprint: str  # names the tokens themselves
    train: Rows
    val: Rows | None
    epoch_tokens: int  # tokens of the training rows, without padding
    words: list[str]  # for the plan
    notes: list[str]  # what of the sources is not read, for the plan and inspect
    val_bytes_per_token: float | None = None
    questions: list[dict[str, Any]] = field(default_factory=list)  # prompt_ids, prompt, reference, chat
    end_ids: list[int] | None = None  # that end an answer; None where data is text
    splits: dict[str, Any] = field(default_factory=dict)  # what became of the rows of each
    stream: Head | None = None  # where the training rows are a stream's
    # What checkpoints of earlier versions call the tokens.
    earlier_fingerprints: Callable[[], list[str]] = field(kw_only=True)

    def how_to_validate(self, data: Data) -> str:
        """What to set so that there is a validation split, where there is none."""
        if data.source == "bins":
            return "put a val.bin beside train.bin, or prepare the text again with data.val_fraction=0.01"
        rows = self.splits["train"].get("rows")  # of conversations and pairs; text is cut anywhere
        if rows == 1:
            return "data.val_path or data.val_split names one, for one row can't be shared out"
        share = 0.01 if rows is None else max(0.01, math.ceil(100 / rows) / 100)  # every (1 / share)-th row
        return f"data.val_fraction={share:g} holds one out, data.val_path or data.val_split names one"


def fit_to_model(config: Config, corpus: Corpus, unpacked_because: str | None, more: Sequence[Rows] = ()) -> None:
    """Lays answers out one a row where the model can't keep several documents in a row apart, and says so.

    Args:
        unpacked_because: why it can't; None where it can.
        more: rows besides the corpus's own.

    Raises:
        UserError: rows that hold several documents, for such a model.
    """
    if unpacked_because is None:
        return
    data = config.data
    if isinstance(corpus.train, PadsAnswers):
        for rows in (corpus.train, corpus.val, *more):
            if isinstance(rows, PadsAnswers):
                rows.pad()
        corpus.epoch_tokens = corpus.train.epoch_tokens
        corpus.words[-1] = f"each answer is a row of its own, padded: several in a row would mix ({unpacked_because})"
    elif data.isolate_documents and data.packing != "off":
        advice = "isolate_documents=false" if data.packing is None else "packing=off"
        chosen = " or model.attention=auto" if unpacked_because.startswith("model.attention=") else ""
        raise UserError(
            f"data.isolate_documents=true: this model can't keep the documents of a row apart ({unpacked_because}): "
            f"set data.{advice}{chosen}"
        )
