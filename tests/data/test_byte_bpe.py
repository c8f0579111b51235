"""tiktoken's ids are the tokenizers library's, for every text that it is used on."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmtrain.data.sources.pieces import Piece
from lmtrain.data.text import encode
from lmtrain.data.text.byte_bpe import SPLITS, ByteBPE

HUB = Path(__file__).parents[3] / "shared" / "hub" / "models"
BYTES = pre_tokenizers.ByteLevel
PRE_TOKENIZERS = {
    "gpt2": (None, BYTES(add_prefix_space=False)),
    "smollm2": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES(add_prefix_space=False)])),
    "qwen2": (
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(SPLITS[0]), "isolated"), BYTES(add_prefix_space=False, use_regex=False)]
        ),
    ),
}
OTHERS = {
    "prefix_space": (None, BYTES(add_prefix_space=True)),
    "lowercase": (normalizers.Lowercase(), BYTES(add_prefix_space=False)),
    "whitespace": (None, pre_tokenizers.Whitespace()),
    "grouped_digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(False), BYTES(add_prefix_space=False)])),
    "none": (None, None),
}


def trained(normalizer, pre_tokenizer, text: str, alphabet=None) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    letters = sorted(BYTES.alphabet()) if alphabet is None else alphabet
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<end>"], initial_alphabet=letters, show_progress=False
    )
    backend.train_from_iterator([text], trainer)
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


def odd_texts(prose: str) -> list[str]:
    """Words, digits, signs, runs of white space, letters of many scripts, and the name of a special token."""
    rng = random.Random(1)
    parts = [*prose.split()[:300], *"0123456789", *"'.,;!?(){}<>#\\", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n",
             " 1", "  12", "'ll", "'LL", "'ſ", "<end>", "é", "e\u0301", "日本", "ⅷ", "½", "٣",
             "\u00a0", "\u2028",
             "\u0085", "\u200b", "🙂", "👩‍👧", "\x00", "\x1c", "\u1c89", "\U00010d40", "\ufb01"]  # fmt: skip
    return ["".join(rng.choices(parts, k=rng.randint(1, 60))) for _ in range(3000)]


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_ids_are_the_librarys(kind: str, prose: str) -> None:
    backend = trained(*PRE_TOKENIZERS[kind], prose)
    fast = ByteBPE.of(backend)
    assert fast is not None
    covered = [text for text in odd_texts(prose) if fast.covers(text)]
    assert len(covered) > 1500
    expected = [encoding.ids for encoding in backend.encode_batch(covered, add_special_tokens=False)]
    assert [fast.encode(text).tolist() for text in covered] == expected


def test_what_is_not_normalized_is_left_to_the_library(prose: str) -> None:
    fast = ByteBPE.of(trained(*PRE_TOKENIZERS["qwen2"], prose))
    assert fast is not None
    assert fast.covers("caf\u00e9")
    assert not fast.covers("cafe\u0301")


def test_a_byte_without_a_token_is_left_to_the_library(prose: str) -> None:
    """SmolLM2 has none for some control characters: the library drops them."""
    alphabet = sorted(set(BYTES.alphabet()) - {"Ą"})  # byte 4
    backend = trained(*PRE_TOKENIZERS["smollm2"], prose, alphabet)
    fast = ByteBPE.of(backend)
    assert fast is not None
    assert fast.covers("plain")
    assert not fast.covers("a\x04b")


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tokenizers_are_left_to_the_library(kind: str, prose: str) -> None:
    assert ByteBPE.of(trained(*OTHERS[kind], prose[:3000])) is None


def test_added_words_are_left_to_the_library(prose: str) -> None:
    backend = trained(*PRE_TOKENIZERS["gpt2"], prose)
    backend.add_tokens([AddedToken("hello there", special=False)])
    assert ByteBPE.of(backend) is None


def test_merges_in_another_order_are_left_to_the_library() -> None:
    """Two ways to one token that stand apart: the library takes ab+c before and a+bc after b+d, tiktoken knows one."""
    letters = sorted(BYTES.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, "ab", "bc", "abc", "bd"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "c"), ("b", "d"), ("b", "c"), ("a", "bc")]))
    backend.pre_tokenizer = BYTES(add_prefix_space=False)
    assert ByteBPE.of(backend) is None


def test_a_token_that_no_text_gives_is_never_given() -> None:
    """a+bc is listed, but ab is merged first: the library writes "abc" as ab, c, and so does tiktoken."""
    letters = sorted(BYTES.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, "ab", "bc", "abc"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c"), ("a", "bc")]))
    backend.pre_tokenizer = BYTES(add_prefix_space=False)
    fast = ByteBPE.of(backend)
    assert fast is not None
    for text in ("abc", "bc", "aabc", "abcabc"):
        assert fast.encode(text).tolist() == backend.encode(text).ids
    assert fast.encode("abc").tolist() == [vocabulary["ab"], vocabulary["c"]]


@pytest.mark.parametrize("name", ["openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_published_tokenizers(name: str, prose: str) -> None:
    file = HUB / name / "tokenizer.json"
    if not file.exists():
        pytest.skip("the loopback hub's tokenizers are not here")
    backend = Tokenizer.from_file(str(file))
    backend.encode_special_tokens = True
    fast = ByteBPE.of(backend)
    assert fast is not None
    for text in odd_texts(prose)[:1000]:
        if fast.covers(text):
            assert fast.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids


def test_a_run_of_spaces_without_end_is_left_to_the_library(prose: str) -> None:
    """tiktoken raises an error where its regular expression has to go back over so many."""
    backend = trained(*PRE_TOKENIZERS["gpt2"], prose)
    fast = ByteBPE.of(backend)
    assert fast is not None
    run = " " * 60_000 + "x"
    assert fast.encode(run).tolist() == backend.encode(run).ids
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    run = " " * 2 * encode.BATCH + "x"
    (found,) = encode.Encoder(tokenizer, None).encode([Piece(run, ends=True)])
    assert found.ids.tolist() == backend.encode(run).ids


def test_long_text_is_encoded_as_short_text_is(prose: str) -> None:
    """The encoder's batches take the fast way; a short text, and one with a strange character, do not."""
    backend = trained(*PRE_TOKENIZERS["smollm2"], prose, sorted(set(BYTES.alphabet()) - {"Ą"}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    documents = [prose[n : n + 9000] + ("\x04" if n % 7 == 0 else "") for n in range(0, len(prose), 9000)]
    documents = documents * (3 * encode.BATCH // len(prose) + 1)
    encoder = encode.Encoder(tokenizer, tokenizer.eos_token_id, threads=2)
    found = list(encoder.encode(Piece(text, ends=True) for text in documents))
    expected = [[*backend.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id] for text in documents]
    assert [part.ids.tolist() for part in found] == expected
    assert all(part.ids.dtype == np.uint32 for part in found)
    assert encoder.fast is not None
