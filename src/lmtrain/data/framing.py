"""What stands before and after a text: the one place that preparation, generation, evaluation and export ask.

A tokenizer itself says what it puts before a text (`start_of`): BOS as Llama's and Gemma's, nothing as GPT-2's and
Qwen's, two tokens as GLM's. `follow` makes it say what data.prepend_bos wants, so that a run's copy of it and its
export say so too. Before a chat stands what the chat template writes there, and nothing else.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import processors

from lmtrain.config.schema_data import DataConfig
from lmtrain.data import hub
from lmtrain.errors import UserError
from lmtrain.files import read_regular


def start_of(tokenizer: Any) -> list[int]:
    """Returns the ids that a tokenizer puts before every text."""
    return _around(tokenizer)[0]


def wanted(tokenizer: Any, data: DataConfig) -> list[int]:
    """Returns the ids before a text by data.prepend_bos: with auto those that the tokenizer itself puts there.

    Raises:
        UserError: BOS is asked for, and the tokenizer has none.
    """
    if data.prepend_bos is False or (data.prepend_bos is None and data.rows == "text"):  # None: of an earlier version
        return []
    own = start_of(tokenizer)
    if own or data.prepend_bos is not True:
        return own
    if tokenizer.bos_token_id is None:
        raise UserError("the tokenizer has no BOS token: set data.prepend_bos=auto, or choose one that has")
    return [tokenizer.bos_token_id]


def between_documents(tokenizer: Any, data: DataConfig) -> list[int]:
    """Returns the ids before each document: `wanted`, unless it is the end of text, which ends the document before it.

    OPT's tokenizer begins a text with its end of text.
    """
    start = wanted(tokenizer, data)
    is_end = start == [tokenizer.eos_token_id] and bool(data.append_eos) and data.prepend_bos is not True
    return [] if is_end else start


def held(tokenizer: Any, begins_with: Callable[[list[int]], bool]) -> list[int]:
    """Returns the ids before a text for documents that are there already: `begins_with` says what they begin with."""
    own = start_of(tokenizer)
    start = own or [tokenizer.bos_token_id]
    return start if begins_with(start) or own == [tokenizer.eos_token_id] else []


def before_documents(tokenizer: Any) -> list[int]:
    """Returns the ids that a document follows in training: its start, or the end of the document before it."""
    end = tokenizer.eos_token_id
    return start_of(tokenizer) or ([] if end is None else [end])


def begun(ids: list[int], start: Sequence[int]) -> list[int]:
    """Returns ids that begin with `start`, once: a text may have it written at its beginning."""
    return ids if ids[: len(start)] == list(start) else [*start, *ids]


def ended(ids: list[int], tokenizer: Any) -> list[int]:
    """Returns ids that end with the end of text, once: a row may have it written at the end of its text.

    Raises:
        UserError: the tokenizer has no end of text.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end of text, so the model could never learn to stop: choose another")
    return ids if ids[-1:] == [tokenizer.eos_token_id] else [*ids, tokenizer.eos_token_id]


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Returns the ids of a text that goes on: begun, and without the end that some tokenizers put after every text."""
    return begun(tokenizer(text, add_special_tokens=False)["input_ids"], start_of(tokenizer))


def last_of(ids: list[int], most: int, start: Sequence[int]) -> list[int]:
    """Returns at most the last `most` ids; `start`, if they begin with it, stays before them."""
    if len(ids) <= most:
        return ids
    kept = list(start) if ids[: len(start)] == list(start) and len(start) < most else []
    return kept + ids[len(ids) - most + len(kept) :]


def follow(tokenizer: Any, start: list[int]) -> Any:
    """Returns the tokenizer, which from now on puts `start` before every text."""
    own, end = _around(tokenizer)
    if start != own:
        _put(tokenizer, start, end)
    return tokenizer


def follow_file(tokenizer: Any, name_or_path: str, **options: Any) -> Any:
    """Makes a tokenizer begin a text with BOS if only add_bos_token in its tokenizer_config.json says so (DeepSeek-V3).

    transformers 4 and llama.cpp read it; transformers 5 doesn't where there is a tokenizer.json.
    """
    file = hub.optional_file(name_or_path, "tokenizer_config.json", **options)
    declared = json.loads(read_regular(file)).get("add_bos_token") if file is not None else None
    if declared is True and tokenizer.bos_token_id is not None and not start_of(tokenizer):
        follow(tokenizer, [tokenizer.bos_token_id])
    return tokenizer


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the ids that a tokenizer puts before and after every text."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
    return ([], []) if at is None else (whole[:at], whole[at + len(bare) :])


def _put(tokenizer: Any, start: list[int], end: list[int]) -> None:
    """Makes the tokenizer put these ids around every text, and no others."""
    tokens = {i: tokenizer.convert_ids_to_tokens(i) for i in (*start, *end)}
    before, after = ([tokens[i] for i in ids] for ids in (start, end))
    special = [(token, i) for i, token in tokens.items()]
    frame = processors.TemplateProcessing([*before, "$A", *after], [*before, "$A", "$B:1", *after], special)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([*_byte_level(tokenizer), frame])


def _byte_level(tokenizer: Any) -> list[Any]:
    """Returns the part of the tokenizer's post-processor that only sets the characters of byte-level tokens."""
    own = tokenizer.backend_tokenizer.post_processor
    state: Any = json.loads(own.__getstate__()) if own is not None else {"type": ""}
    parts = state["processors"] if state["type"] == "Sequence" else [state]
    options = [{k: v for k, v in part.items() if k != "type"} for part in parts if part["type"] == "ByteLevel"]
    return [processors.ByteLevel(**kept) for kept in options]
