"""Ids from fastokens equal those of the tokenizers library for every text, or it is not used and the log says so."""

import functools
import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lmtrain.data import fast_ids, tokenizers
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.fast_ids import TextIds
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.text import encode

HUB = Path(__file__).parents[3] / "shared" / "hub" / "models"
BYTES = pre_tokenizers.ByteLevel


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    by_pattern = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_pattern, BYTES(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt2": (None, BYTES(add_prefix_space=False)),
    "smollm2": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES(add_prefix_space=False)])),
    "qwen2": (normalizers.NFC(), split(QWEN2)),
    "llama3": (None, split(LLAMA3)),
}
PRE_TOKENIZERS |= {
    "prefix_space": (None, BYTES(add_prefix_space=True)),
    "lowercase": (normalizers.Lowercase(), BYTES(add_prefix_space=False)),
    "whitespace": (None, pre_tokenizers.Whitespace()),
    "grouped_digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(False), BYTES(add_prefix_space=False)])),
    "another_pattern": (None, split(QWEN2.replace("+", "{1,5}"))),
    "none": (None, None),
}


@functools.cache
def trained_once(kind: str, text: str, alphabet: tuple[str, ...]) -> str:
    normalizer, pre_tokenizer = PRE_TOKENIZERS[kind]
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<end>"], initial_alphabet=list(alphabet), show_progress=False
    )
    backend.train_from_iterator([text], trainer)
    return backend.to_str()


def trained(kind: str, text: str, without: str = "") -> Tokenizer:
    """Returns a BPE of 1,500 tokens trained on a text, that has all bytes but those that the letter stands for."""
    backend = Tokenizer.from_str(trained_once(kind, text, tuple(sorted({*BYTES.alphabet()} - {without}))))
    backend.encode_special_tokens = True
    return backend


@pytest.fixture(scope="module")
def prose() -> str:
    rng = random.Random(0)
    words = [
        "".join(rng.choices("etaoinshrdlucmfw", k=rng.randint(1, 9))) + rng.choice(["", "", "'s", "é", "1"])
        for _ in range(400)
    ]
    return " ".join(rng.choices(words, weights=[1 / n for n in range(1, 401)], k=20_000))


@functools.cache
def odd_texts(prose: str) -> list[str]:
    """Returns texts of words, digits, symbols, white space, letters of many scripts and the name of a special token."""
    rng = random.Random(1)
    parts = [*prose.split()[:300], *"0123456789", *"'.,;!?(){}<>#\\", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n",
             " 1", "  12", "'ll", "'LL", "'ſ", "<end>", "é", "e\u0301", "日本", "ⅷ", "½", "٣",
             "\u00a0", "\u2028",
             "\u0085", "\u200b", "🙂", "👩‍👧", "\x00", "\x1c", "\u1c89", "\U00010d40", "\ufb01"]  # fmt: skip
    return ["".join(rng.choices(parts, k=rng.randint(1, 60))) for _ in range(1500)]


def fast_of(backend: Tokenizer) -> TextIds:
    """Returns TextIds that uses fastokens; skips if it isn't installed."""
    pytest.importorskip("fastokens")
    ids = TextIds(backend)
    ids.hurry(["some text"])
    assert ids.by == "fastokens", ids.by
    return ids


def assert_alike(fast: TextIds, backend: Tokenizer, texts: list[str]) -> None:
    expected = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in fast(texts)] == expected
    assert fast.by == "fastokens"


@pytest.mark.parametrize("special_as_text", [True, False])
@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_ids_are_the_librarys(kind: str, special_as_text: bool, prose: str) -> None:
    backend = trained(kind, prose[:3000] if kind == "none" else prose)
    backend.encode_special_tokens = special_as_text
    ids = TextIds(backend)
    ids.hurry([prose])
    texts = odd_texts(prose)
    assert [found.tolist() for found in ids(texts)] == [e.ids for e in backend.encode_batch(texts)], ids.by


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "qwen2", "llama3"])
def test_words_end_where_the_librarys_do(kind: str, prose: str) -> None:
    """Words end as in the library, in all texts of up to five characters of each kind and in contraction-like ones."""
    backend = trained(kind, prose[:3000])
    texts = ["".join(text) for n in range(6) for text in itertools.product("lS1.' \n\t", repeat=n)]
    texts += ["".join(text) for text in itertools.product("rve'l é", repeat=5)]
    texts += ["a" + "1" * n + end for n in range(12) for end in ("", "b", " 1")]
    assert_alike(fast_of(backend), backend, texts)


def test_characters_of_every_script(prose: str) -> None:
    """6,000 Unicode characters, some of them new or changed by NFC, give the library's ids."""
    backend = trained("qwen2", prose)
    characters = random.Random(0).sample([chr(n) for n in range(0x20000) if not 0xD800 <= n < 0xE000], 6000)
    texts = ["a" + "".join(characters[n : n + 6]) + " b" for n in range(0, len(characters), 6)]
    assert_alike(fast_of(backend), backend, texts)


def test_whole_words_before_merges() -> None:
    """A word that is a token is encoded as that token, whatever its merges give (Llama 3's `ignore_merges`)."""
    letters = sorted(BYTES.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, "ab", "cab"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=True))
    backend.pre_tokenizer = BYTES(add_prefix_space=False)
    assert_alike(fast_of(backend), backend, ["cab", "cabs", "cab cab"])


@pytest.mark.parametrize(
    "name", ["openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "karpathy/stories260K"]
)
def test_published_tokenizers(name: str, prose: str) -> None:
    file = HUB / name / "tokenizer.json"
    if not file.exists():
        pytest.skip("the loopback hub's tokenizers are not here")
    backend = Tokenizer.from_file(str(file))
    backend.encode_special_tokens = True
    assert_alike(fast_of(backend), backend, odd_texts(prose)[:1000])


def test_one_that_gives_other_ids_is_not_used(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that reads one character of the data differently is left out, and `by` says so."""
    pytest.importorskip("fastokens")
    backend = trained("gpt2", prose)
    real = fast_ids._fast

    def differing(backend: Tokenizer):
        encode = real(backend)
        return lambda texts: encode([text.replace("\u20ac", "E") for text in texts])

    monkeypatch.setattr(fast_ids, "_fast", differing)
    usual, euro = TextIds(backend), TextIds(backend)
    usual.hurry([prose])
    euro.hurry(["costs 5 \u20ac"])
    assert (usual.by, euro.by) == ("fastokens", "tokenizers, as fastokens gives other ids")
    assert euro(["5 \u20ac"])[0].tolist() == backend.encode("5 \u20ac").ids


def test_one_that_is_missing_or_refuses_is_said(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = TextIds(tokenizers.numbers(20).backend_tokenizer)  # of a kind that fastokens doesn't read
    words.hurry(["1 2"])
    assert words.by.startswith("tokenizers, as fastokens can't load this tokenizer (")
    assert words(["3 4"])[0].tolist() == [3, 4]
    monkeypatch.setattr(fast_ids, "fastokens", None)
    missing = TextIds(trained("gpt2", prose))
    missing.hurry([prose])
    assert missing.by == "tokenizers, as fastokens can't load this tokenizer (it is not installed)"


def test_a_text_that_it_refuses_is_left_to_the_library(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = trained("gpt2", prose)
    ids = fast_of(backend)

    def refuse(texts: list[str]) -> list[np.ndarray]:
        raise ValueError("match limit")

    monkeypatch.setattr(ids, "_fast", refuse)
    assert ids(["a word"])[0].tolist() == backend.encode("a word").ids
    assert ids.by == "fastokens, but for texts that it refused: match limit"


def test_long_text_is_encoded_as_short_text_is(prose: str) -> None:
    """Text that is long enough for fastokens, with a run of spaces longer than a part, gets the library's ids."""
    backend = trained("smollm2", prose, without="Ą")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    documents = [prose[n : n + 9000] + ("\x04" if n % 7 == 0 else "") for n in range(0, len(prose), 9000)]
    documents = [*documents * (encode.PART // len(prose) + 1), " " * encode.PART + "x"]
    encoder = encode.Encoder(tokenizer, tokenizer.eos_token_id)
    found = list(encoder.encode(Piece(text, ends=True) for text in documents))
    expected = [[*backend.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id] for text in documents]
    assert [part.ids.tolist() for part in found] == expected
    assert all(part.ids.dtype == np.uint32 for part in found)
    assert fast_ids.fastokens is None or encoder.ids.by.startswith("fastokens, but for texts that it refused: ")


@pytest.mark.parametrize("special_as_text", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "qwen2", "llama3", "lowercase", "prefix_space", "whitespace"])
def test_characters_of_tokens_are_the_librarys(kind: str, special_as_text: bool, prose: str) -> None:
    """Also where NFC or a lost byte make the tokens' bytes differ from the text's."""
    backend = trained(kind, prose, without="Ą")
    backend.encode_special_tokens = special_as_text
    ids = TextIds(backend)
    ids.hurry([prose])
    for text in [*odd_texts(prose)[:600], "a\x04b", "", "\u212b"]:
        found = backend.encode(text)
        assert ids.with_offsets(text) == (found.ids, found.offsets)


def test_offsets_without_white_space(prose: str) -> None:
    """A post-processor that leaves white space out of offsets, as RoBERTa's, keeps doing so."""
    backend = trained("gpt2", prose)
    text = f"{prose[:60]}  "
    whole = backend.encode(text).offsets
    backend.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    ids = TextIds(backend)
    ids.hurry([prose])
    found = backend.encode(text, add_special_tokens=False)
    assert ids.with_offsets(text) == (found.ids, found.offsets)
    assert found.offsets != whole


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_conversations_are_encoded_as_by_the_library(
    train_on: str, prose: str, data_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastokens")
    backend = trained("qwen2", prose)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    cfg = data_config("chat", chat_template="zephyr", max_length=None, train_on=train_on)
    said = [text or "nothing" for text in odd_texts(prose)[:40]]
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
    samples = [Conversation(turns[n : n + 4], None, "") for n in range(0, 40, 4)]

    def encoded(enough: int) -> tuple[str, list]:
        monkeypatch.setattr(fast_ids, "ENOUGH", enough)
        encoder = ChatEncoder(tokenizer, cfg)
        examples = [encoder.encode(sample) for sample in samples]
        return encoder._ids.by, examples

    (slow, expected), (fast, found) = encoded(1 << 30), encoded(1)
    assert (slow, fast) == ("tokenizers", "fastokens")
    assert found == expected
