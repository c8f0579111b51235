"""The pieces of a streamed answer, joined, are the whole text that the tokenizer decodes it to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.fast_ids import hostile_texts
from lmtrain.generation.conversation import Streamer
from tokenizer_families import FAMILIES, load_family

STORIES = Path(__file__).parents[3] / "shared/hub/models/karpathy/stories260K"
CODE = "def f(x):\n    return x\n\n  end\n\n\n    two\n \n   x"
TEXTS = [
    CODE,
    f" {CODE}",
    "a\tb\n \n c",
    "naïve café 漢字 漢字 ok 😀😀 done",
    "x👨‍👩‍👧 y\n😀",
    "\n",
    " ",
    "",
    "a\ufffd b\ufffd",
]
PARTS = [text for text in hostile_texts(()) if 0 < len(text) < 4]
TEXTS += [
    between.join(PARTS[start::6]) for start, between in enumerate(("", " ", "\n    "))
]  # longer than is decoded again


def streamed(tokenizer: Any, given: list[int], ids: list[int]) -> list[str]:
    pieces: list[str] = []
    streamer = Streamer(AnswerDecoder(tokenizer, [tokenizer.eos_token_id]), pieces.append, given)
    streamer.put(torch.tensor([given]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert streamer.text == "".join(pieces)
    return pieces


def decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def check(tokenizer: Any, texts: list[str]) -> None:
    asked = tokenizer("the king:", add_special_tokens=False)["input_ids"]
    for given in (asked, []):
        for text in texts:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            expected = decoded(tokenizer, given + ids).removeprefix(decoded(tokenizer, given))
            pieces = streamed(tokenizer, given, ids)
            assert "".join(pieces) == expected, (text, pieces)
            assert len(pieces) == len(ids) + 1  # what counts tokens and takes turns is called once for each


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_joined_are_the_whole(family: str, tmp_path: Path) -> None:
    tokenizer = load_family(family, tmp_path)
    check(tokenizer, TEXTS)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/hub, which the project does not ship")
def test_indented_code_of_llamas_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    check(tokenizer, TEXTS[:9])
    ids = tokenizer(CODE, add_special_tokens=False)["input_ids"]
    assert "".join(streamed(tokenizer, [1], ids)).strip() == CODE


def test_words_come_while_the_answer_is_written(tmp_path: Path) -> None:
    tokenizer = load_family("llama2", tmp_path)
    pieces = streamed(tokenizer, [1], tokenizer("the king went home", add_special_tokens=False)["input_ids"])
    assert sum(map(bool, pieces)) > 3
    assert not pieces[-1]
    emoji = streamed(tokenizer, [1], tokenizer("😀😀", add_special_tokens=False)["input_ids"])
    assert [piece for piece in emoji if piece.strip()] == ["😀", "😀"]
