"""Cutting long documents never changes their tokens, and text never becomes special tokens."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmtrain.data import tokenizers
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.sources.stdlib import stdlib_pieces
from lmtrain.data.text import encode
from lmtrain.data.text.encode import SEGMENT, Encoder

HUB = Path(__file__).parents[3] / "shared" / "hub" / "models"


@pytest.fixture(scope="module")
def python_text():
    text = ""
    for piece in stdlib_pieces():
        text += piece.text
        if len(text) > 600_000:
            return text
    raise AssertionError("the standard library is larger than that")


def made(text, option, **settings):
    from lmtrain.config.schema_data import TokenizerConfig

    cfg = TokenizerConfig(kind=option, **settings)
    return tokenizers.load_or_train(cfg, lambda _: iter([text]))


def sentencepiece_like(text):
    """Trains a tokenizer like Llama 2's: a space before the text, spaces as ▁, merges over spaces and newlines."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    lines = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False, max_token_length=16)
    backend.train_from_iterator(text[:100_000].splitlines(keepends=True), lines)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def llama3_like(text):
    """Trains a tokenizer with Llama 3's pre-tokenizer: symbols join the next word, newlines the symbols before them."""
    from tokenizers import Regex

    backend = Backend(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    backend.train_from_iterator([text[:200_000]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {
    "bpe": lambda text: made(text[:200_000], "bpe", vocab_size=700, min_frequency=2, train_characters=None),
    "bytes": lambda text: made(text, "bytes"),
    "char": lambda text: made(text, "char"),
    "sentencepiece-like": sentencepiece_like,
    "llama3-like": llama3_like,
    "gpt2": lambda _: tokenizers.load_folder(hub_folder("openai-community/gpt2")),
    "stories260K": lambda _: tokenizers.load_folder(hub_folder("karpathy/stories260K")),
    "SmolLM2": lambda _: tokenizers.load_folder(hub_folder("HuggingFaceTB/SmolLM2-135M-Instruct")),
}


def hub_folder(name):
    if not (HUB / name).is_dir():
        pytest.skip(f"{HUB / name} is not here")
    return HUB / name


def indented(python_text):
    """Returns texts whose lines all begin with white space: Chinese paragraphs, code, a table, words with accents."""
    draw = random.Random(0)
    words = ["".join(chr(0x4E00 + draw.randrange(3000)) for _ in range(draw.randint(4, 60))) for _ in range(500)]
    paragraphs = "".join(f"\u3000\u3000{'，'.join(draw.choices(words, k=4))}。\n" for _ in range(1500))
    code = "".join(line + "\n" for line in python_text.split("\n") if line.startswith(" "))
    table = "".join(f"  {n}\t{n * n}  {n % 7}\n" for n in range(9000))
    accents = "  e\u0301te\u0301\u0302'n'’s\r\n" * 9000
    return paragraphs, code, table, accents


def cut_up(text, size):
    return [*(Piece(text[i : i + size], False) for i in range(0, len(text), size)), Piece("", True)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_segments_give_the_tokens_of_the_whole(name, python_text, monkeypatch):
    monkeypatch.setattr(encode, "SEGMENT", 4096)
    tokenizer = TOKENIZERS[name](python_text)
    encoder = Encoder(tokenizer, eos_id=None)
    one_line = " ".join(python_text.split("\n"))
    known = set(python_text)
    texts = (python_text[:50_000], one_line[:30_000], "a\n" * 10_000, "ähm, 日本 12 34\n\n 5\n" * 1000)
    cuts = 0
    for text in (*texts, *(lines[:20_000] for lines in indented(python_text))):
        if name == "char":  # its vocabulary has only the characters of python_text
            text = "".join(c for c in text if c in known)
        whole = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        for size in (50_000, 4099):
            parts = list(encoder.encode(cut_up(text, size)))
            assert np.concatenate([p.ids for p in parts]).tolist() == whole
            assert sum(p.text_bytes for p in parts) == len(text.encode())
            assert [p.ends for p in parts] == [False] * (len(parts) - 1) + [True]
            cuts += len(parts) - 1
    assert cuts > 50


def test_long_documents_are_really_cut(python_text):
    encoder = Encoder(TOKENIZERS["bpe"](python_text), eos_id=None)
    for pieces in (cut_up(python_text, 5000), [Piece(python_text, True)]):
        segments = list(encoder.segments(pieces))
        assert "".join(s.text for s in segments) == python_text
        assert max(len(s.text) for s in segments) < 3 * SEGMENT
        assert [s.continues for s in segments] == [False] + [True] * (len(segments) - 1)


@pytest.mark.parametrize("name", ["bpe", "sentencepiece-like", "llama3-like", "gpt2"])
def test_lines_that_begin_with_white_space_are_cut(name, python_text):
    encoder = Encoder(TOKENIZERS[name](python_text), eos_id=None)
    for text in indented(python_text):
        segments = list(encoder.segments([Piece(text, True)]))
        assert "".join(s.text for s in segments) == text
        assert max(len(s.text) for s in segments) < 3 * SEGMENT


def test_a_document_that_cannot_be_cut_stays_whole():
    encoder = Encoder(made("", "bytes"), eos_id=None)
    text = "x" * (5 * SEGMENT)
    assert [s.text for s in encoder.segments(cut_up(text, 1000))] == [text]


def test_eos_after_each_document_and_never_from_text():
    tokenizer = made("", "bytes")
    eos = tokenizer.eos_token_id
    pieces = [Piece("a<|endoftext|>", True), Piece("b", True)]
    ids = np.concatenate([p.ids for p in Encoder(tokenizer, eos).encode(pieces)]).tolist()
    assert ids == [*b"a<|endoftext|>", eos, *b"b", eos]
    without = np.concatenate([p.ids for p in Encoder(tokenizer, None).encode(pieces)]).tolist()
    assert without == [*b"a<|endoftext|>b"]


def test_the_tokenizer_itself_is_left_as_it_was():
    tokenizer = made("", "bytes")
    tokenizer.backend_tokenizer.enable_truncation(3)
    encoder = Encoder(tokenizer, None)
    assert len(next(encoder.encode([Piece("longer than three", True)])).ids) == 17
    assert tokenizer.backend_tokenizer.truncation is not None
    assert tokenizer("<|endoftext|>").input_ids == [tokenizer.eos_token_id]


def test_many_short_documents_keep_their_order():
    tokenizer = made("", "bytes")
    chance = random.Random(0)
    documents = ["".join(chance.choices("abc\n", k=chance.randint(1, 30))) for _ in range(5000)]
    encoded = list(Encoder(tokenizer, None).encode(Piece(d, True) for d in documents))
    assert [bytes(p.ids.tolist()).decode() for p in encoded] == documents
