"""Checks of a stage's data that are possible before the stages it needs have run: files, rows, lengths, templates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.columns import UnfitColumns, detect
from lmtrain.data.chat.conversations import to_sample
from lmtrain.data.chat.pairs import to_pair
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError, naming
from lmtrain.stages.definition import REFERENCE, key_of
from lmtrain.stages.plan import PipelinePlan, PlannedEvaluation, PlannedStage


def check(plan: PipelinePlan, begun: set[str]) -> None:
    """Raises UserError for the first stage or evaluation whose data can't be used.

    Records row counts and file digests in each stage. Rows of stages and evaluations in `begun` are not read again.
    """
    for one in plan.stages:
        with naming(f"stage {one.name}"):
            _check_stage(plan, one, one.name in begun)
    for name, scored in {e.evaluation.name: e for e in plan.evaluations}.items():
        with naming(f"evaluation {name}"):
            _check_evaluation(scored, begun)


def _check_stage(plan: PipelinePlan, one: PlannedStage, begun: bool) -> None:
    c = one.config
    if c.objective.rows != c.data.rows:
        from lmtrain.data.corpus import check_rows

        check_rows(c)
    one.data = _digests(c.data)
    base = _base(plan, one)
    if base is not None:
        _check_length(c, base)
        _check_template(plan, one)
    if not begun and c.data.rows in ("conversations", "pairs"):
        one.rows = {name: count for name in ("train", "val") if (count := _read_all(c.data, name)) is not None}
        if not one.rows.get("train"):
            raise UserError("its data has no rows to train on")


def _check_evaluation(one: PlannedEvaluation, begun: set[str]) -> None:
    data = one.config.data
    _digests(data)
    if one.name not in begun and data.rows in ("conversations", "pairs"):
        _read_all(data, "val")


def _digests(data: DataConfig) -> list[str]:
    """Returns digests of the data files, after checking that they exist; none for bins, or for the Hub, not queried."""
    if data.source == "bins":
        if "://" not in str(data.path) and not Path(str(data.path)).expanduser().exists():
            raise UserError(f"data.path={data.path}: no such folder of bins on this machine")
        return []
    if data.source == "hub" and not data.path:
        return []
    if data.ring_bytes is not None:
        from lmtrain.data.stream.source import open_stream

        return [str(open_stream(data).identity)]
    from lmtrain.data.sources.choose import open_parts, open_source

    if data.rows == "text":
        return [str(open_source(data).resolved)]
    return [str(part.source.resolved) for part in open_parts(data) if part.cfg.source != "hub"]


def _read_all(data: DataConfig, split: str) -> int | None:
    """Counts the rows of a split, parsing each as a conversation or pairs; None if the split is missing or empty.

    Raises:
        UserError: a row can't be parsed, and data.on_bad_row=raise.
    """
    from lmtrain.data.sources.choose import open_parts, split_records

    count: int | None = None
    for part in open_parts(data):
        for where, row in split_records(part, split) or ():
            count = (count or 0) + 1
            try:
                _read_row(row, where, part.cfg)
            except BadRow as bad:
                if part.cfg.on_bad_row == "raise" and not bad.skip:
                    raise UserError(bad.refusal()) from None
    return count


def _read_row(row: dict[str, Any] | str, where: str, data: DataConfig) -> None:
    if isinstance(row, str):
        raise BadRow(where, row)
    try:
        (to_pair if data.rows == "pairs" else to_sample)(row, detect(data.rows, row, data), data, where)
    except UnfitColumns as error:
        raise BadRow(where, str(error)) from None


def _base(plan: PipelinePlan, one: PlannedStage) -> PlannedStage | None:
    """Returns the stage whose export is the model that this stage starts from, or None."""
    for word in reversed(one.stage.words):
        match = REFERENCE.search(word)
        if key_of(word) == "model.name_or_path":
            return next(s for s in plan.stages if s.name == match[1]) if match is not None else None
    return None


def lineage(plan: PipelinePlan, one: PlannedStage) -> Iterator[PlannedStage]:
    """Yields the stage, the stage whose model it starts from, and so on to the first."""
    found: PlannedStage | None = one
    while found is not None:
        yield found
        found = _base(plan, found)


def _check_length(c: Config, base: PlannedStage) -> None:
    positions = base.config.model.max_position_embeddings
    if base.config.model.init == "scratch" and positions is not None and c.data.seq_len > positions:
        found = f"data.seq_len={c.data.seq_len} exceeds the {positions} positions of the model that {base.name} trains"
        raise UserError(f"{found}: lower it, or raise {base.name}.model.max_position_embeddings")


def _check_template(plan: PipelinePlan, one: PlannedStage) -> None:
    """Raises UserError if a chat template is missing, or contains special tokens that no stage has added."""
    data = one.config.data
    if data.rows == "text":
        return
    behind = list(lineage(plan, one))
    if behind[-1].config.tokenizer.kind == "hub":
        return  # this tokenizer may have its own tokens and template: the stage itself checks them
    templates = [s.config.data.chat_template for s in behind if s.config.data.chat_template]
    columns = {"prompt_completion", "text", "preference_text"}
    if not templates and data.conversation_format not in columns:
        found = f"the tokenizer that {behind[-1].name} trains has no chat template"
        raise UserError(f"{found}: set data.chat_template (alpaca, vicuna and zephyr need no tokens of their own)")
    from lmtrain.data.chat.find_template import NAMED

    added = {token for s in behind for token in s.config.tokenizer.add_tokens or []}
    missing = [token for token in NAMED.get(templates[0] if templates else "", ()) if token not in added]
    if missing:
        found = f"data.chat_template={templates[0]} is made of tokens that the tokenizer of {behind[-1].name} lacks"
        word = f"'tokenizer.add_tokens=[{','.join(missing)}]'"
        raise UserError(f"{found}: add them with {word}, or choose alpaca, vicuna or zephyr")
