"""What is switched in a corpus that the model can't read as it was prepared: shared prompts, packed rows."""

from pathlib import Path
from typing import Any

import pytest

from chats import write_rows
from lmtrain.config import compose as rules
from lmtrain.data.corpus import build_corpus, fit_to_model
from lmtrain.errors import UserError
from support import TINY

CHATS = ["objective=sft", "data=chat_jsonl", "data.chat_template=vicuna"]
PAIRS = ["objective=dpo", "data=preference_jsonl", "data.chat_template=vicuna"]
ROOM = ["data.seq_len=512", "model.max_position_embeddings=512", "data.val_fraction=0.2"]


def built(tmp_path: Path, *words: str) -> tuple[Any, Any]:
    option = words[1].removeprefix("data=")
    file = write_rows(tmp_path / f"{option}.jsonl", option)
    config = rules.check(rules.compose([*TINY, *words, *ROOM, f"data.path={file}", f"data.cache_dir={tmp_path}"]))
    return config, build_corpus(config)


def test_prompts_of_pairs_are_apart_where_an_example_is_longer_than_positions_agree(tmp_path: Path) -> None:
    config, corpus = built(tmp_path, *PAIRS, "data.share_prompts=true")
    _, further = built(tmp_path, *PAIRS, "data.share_prompts=true")
    longest = int(corpus.train.examples.lengths.max())
    before, tokens = list(corpus.words), corpus.epoch_tokens
    fit_to_model(config, corpus, None, longest)
    assert corpus.train.share_prompts
    assert (corpus.words, corpus.epoch_tokens) == (before, tokens)
    fit_to_model(config, corpus, None, longest - 1, [further.train])
    assert not corpus.train.share_prompts
    assert not further.train.share_prompts, "further validation sets too"
    assert f"beyond {longest - 1:,} tokens positions differ" in corpus.words[-1]
    assert corpus.epoch_tokens == corpus.train.epoch_tokens > tokens, "each prompt is now read twice"


def test_packed_rows_are_padded_or_refused_where_documents_cannot_be_kept_apart(tmp_path: Path) -> None:
    config, corpus = built(tmp_path, *CHATS, "data.packing=off")
    before = list(corpus.words)
    fit_to_model(config, corpus, None)
    assert corpus.words == before, "a model that can is given the rows as they are"
    config, corpus = built(tmp_path, *CHATS, "data.packing=first_fit", "data.isolate_documents=true")
    _, further = built(tmp_path, *CHATS, "data.packing=first_fit", "data.isolate_documents=true")
    fit_to_model(config, corpus, "it mixes", None, [further.val])
    assert corpus.train.padded
    assert corpus.val.padded
    assert further.val.padded, "further validation sets too"
    assert not further.train.padded
    assert corpus.words[-1].endswith("each example is a padded row of its own: in one, each sees others (it mixes)")
    assert corpus.epoch_tokens == corpus.train.epoch_tokens


def test_rows_of_text_that_cannot_be_padded_are_refused(tmp_path: Path, corpus: Path) -> None:
    words = [*TINY, "data=text", f"data.path={corpus}", f"data.cache_dir={tmp_path}"]
    config = rules.check(rules.compose([*words, "data.isolate_documents=true"]))
    with pytest.raises(UserError, match=r"\(it mixes\): set data\.isolate_documents=false$"):
        fit_to_model(config, build_corpus(config), "it mixes")
    with pytest.raises(UserError, match=r"isolate_documents=false or model\.attention=auto$"):
        fit_to_model(config, build_corpus(config), "model.attention=eager")
    config.data.isolate_documents = False
    fit_to_model(config, build_corpus(config), "it mixes")
