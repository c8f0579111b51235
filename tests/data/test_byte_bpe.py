"""Ids of byte-level BPEs that are computed with arrays equal those of the tokenizers library, for every text."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lmtrain.data.byte_bpe import encoder
from lmtrain.data.byte_bpe.encoder import ByteBPE
from lmtrain.data.byte_bpe.words import LLAMA3, QWEN2
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.text import encode

HUB = Path(__file__).parents[3] / "shared" / "hub" / "models"
BYTES = pre_tokenizers.ByteLevel


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    by_pattern = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_pattern, BYTES(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = {
    "gpt2": (None, BYTES(add_prefix_space=False)),
    "smollm2": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES(add_prefix_space=False)])),
    "qwen2": (normalizers.NFC(), split(QWEN2)),
    "llama3": (None, split(LLAMA3)),
}
OTHERS = {
    "prefix_space": (None, BYTES(add_prefix_space=True)),
    "lowercase": (normalizers.Lowercase(), BYTES(add_prefix_space=False)),
    "whitespace": (None, pre_tokenizers.Whitespace()),
    "grouped_digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(False), BYTES(add_prefix_space=False)])),
    "another_pattern": (None, split(QWEN2.replace("+", "{1,5}"))),
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
    """Returns texts of words, digits, symbols, white space, letters of many scripts and the name of a special token."""
    rng = random.Random(1)
    parts = [*prose.split()[:300], *"0123456789", *"'.,;!?(){}<>#\\", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n",
             " 1", "  12", "'ll", "'LL", "'ſ", "<end>", "é", "e\u0301", "日本", "ⅷ", "½", "٣",
             "\u00a0", "\u2028",
             "\u0085", "\u200b", "🙂", "👩‍👧", "\x00", "\x1c", "\u1c89", "\U00010d40", "\ufb01"]  # fmt: skip
    return ["".join(rng.choices(parts, k=rng.randint(1, 60))) for _ in range(3000)]


def fast_of(backend: Tokenizer) -> ByteBPE:
    assert ByteBPE.covers(backend)
    return ByteBPE(backend)


def assert_alike(fast: ByteBPE, backend: Tokenizer, texts: list[str]) -> None:
    expected = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for ids in fast.encode(texts)] == expected


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_ids_are_the_librarys(kind: str, prose: str) -> None:
    backend = trained(*PRE_TOKENIZERS[kind], prose)
    texts = odd_texts(prose)
    assert_alike(fast_of(backend), backend, texts)
    assert_alike(fast_of(backend), backend, [text for text in texts if text.isascii()])


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_words_end_where_the_librarys_do(kind: str, prose: str) -> None:
    """Words end as in the library, in all texts of up to five characters of each kind and in contraction-like ones."""
    backend = trained(*PRE_TOKENIZERS[kind], prose[:3000])
    texts = ["".join(text) for n in range(6) for text in itertools.product("lS1.' \n\t", repeat=n)]
    texts += ["".join(text) for text in itertools.product("rve'l é", repeat=5)]
    texts += ["a" + "1" * n + end for n in range(12) for end in ("", "b", " 1")]
    assert_alike(fast_of(backend), backend, texts)


def test_what_python_and_the_library_sort_differently_is_left_to_the_library(prose: str) -> None:
    """6,000 Unicode characters, some of them letters for Python or the library only, give the library's ids."""
    backend = trained(*PRE_TOKENIZERS["qwen2"], prose)
    characters = random.Random(0).sample([chr(n) for n in range(0x20000) if not 0xD800 <= n < 0xE000], 6000)
    texts = ["a" + "".join(characters[n : n + 6]) + " b" for n in range(0, len(characters), 6)]
    assert_alike(fast_of(backend), backend, texts)


def test_a_character_of_another_kind_is_noticed(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that Python's older Unicode data classifies differently gives the library's ids."""
    kind_of = encoder.words.kind_of
    monkeypatch.setattr(encoder.words, "kind_of", lambda c: encoder.words.OTHER if c == "é" else kind_of(c))
    backend = trained(*PRE_TOKENIZERS["gpt2"], prose)
    assert_alike(fast_of(backend), backend, ["caf\u00e9 caf\u00e9s", "a \u00e9", "plain"])


def test_text_that_is_not_normalized(prose: str) -> None:
    backend = trained(*PRE_TOKENIZERS["qwen2"], prose)
    assert_alike(fast_of(backend), backend, ["caf\u00e9", "cafe\u0301", "e\u0301"])


def test_a_byte_without_a_token(prose: str) -> None:
    """A control character without a token, as some in SmolLM2, is dropped, as the library does."""
    alphabet = sorted(set(BYTES.alphabet()) - {"Ą"})  # stands for byte 4
    backend = trained(*PRE_TOKENIZERS["smollm2"], prose, alphabet)
    assert_alike(fast_of(backend), backend, ["plain", "a\x04b", "\x04", "\x04\x04", "a\x00b", "\x00", ""])


def test_words_move_into_larger_tables(prose: str) -> None:
    """Ids stay right with more words than a table holds at first, of 2 to 40 letters, each seen again."""
    backend = trained(*PRE_TOKENIZERS["gpt2"], prose)
    fast = fast_of(backend)
    rng = random.Random(2)
    texts = [
        " ".join("".join(rng.choices("abcdefgh", k=rng.choice([2, 5, 8, 9, 15, 16, 17, 40]))) for _ in range(500))
        for _ in range(40)
    ]
    for _ in range(2):
        for n in range(0, 40, 4):
            assert_alike(fast, backend, texts[n : n + 4])
    assert len(fast._table) > 8000


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tokenizers_are_left_to_the_library(kind: str, prose: str) -> None:
    assert not ByteBPE.covers(trained(*OTHERS[kind], prose[:3000]))


def test_added_words_are_left_to_the_library(prose: str) -> None:
    backend = trained(*PRE_TOKENIZERS["gpt2"], prose)
    backend.add_tokens([AddedToken("hello there", special=False)])
    assert not ByteBPE.covers(backend)


def test_merges_in_any_order() -> None:
    """Two paths of merges to one token, and a token that no text produces, give the library's ids."""
    letters = sorted(BYTES.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, "ab", "bc", "abc", "bd"])}
    for merges in (
        [("a", "b"), ("ab", "c"), ("b", "d"), ("b", "c"), ("a", "bc")],
        [("a", "b"), ("b", "c"), ("a", "bc")],
    ):
        backend = Tokenizer(models.BPE(vocabulary, merges))
        backend.pre_tokenizer = BYTES(add_prefix_space=False)
        assert_alike(fast_of(backend), backend, ["abc", "bc", "aabc", "abcabc", "abd", "bcd abcd"])


def test_pairs_of_any_rank() -> None:
    """Merges that no training gives apply as in the library, on all words of up to nine letters and longer ones."""
    letters = sorted(BYTES.alphabet())
    rng = random.Random(3)
    words = ["".join(word) for n in range(1, 10) for word in itertools.product("abc", repeat=n)]
    words += ["".join(rng.choices("aab", k=n)) for n in range(10, 18) for _ in range(300)]
    for _ in range(3):
        tokens, merges = ["a", "b", "c"], []
        while len(merges) < 40:
            pair = rng.choice(tokens), rng.choice(tokens)
            if len("".join(pair)) < 8 and pair not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
        rng.shuffle(merges)
        vocabulary = {token: n for n, token in enumerate(dict.fromkeys([*letters, *tokens]))}
        backend = Tokenizer(models.BPE(vocabulary, merges))
        backend.pre_tokenizer = BYTES(add_prefix_space=False)
        assert_alike(fast_of(backend), backend, [" ".join(words[n : n + 1000]) for n in range(0, len(words), 1000)])


def test_a_full_table_begins_again(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_IN_TABLE", 300)
    monkeypatch.setattr(encoder, "_MANY", 20)
    vocabulary = {token: n for n, token in enumerate([*sorted(BYTES.alphabet()), "et", "eta"])}
    whole = Tokenizer(models.BPE(vocabulary, [("e", "t")], ignore_merges=True))
    whole.pre_tokenizer = BYTES(add_prefix_space=False)
    for backend in (trained(*PRE_TOKENIZERS["gpt2"], prose), whole):
        fast, texts = fast_of(backend), odd_texts(prose)
        for n in range(0, 1000, 100):
            assert_alike(fast, backend, texts[n : n + 100])
        assert len(fast._table) < 2000


def test_whole_words_before_merges(prose: str) -> None:
    """A word that is a token is encoded as that token, whatever its merges give (Llama 3's `ignore_merges`)."""
    letters = sorted(BYTES.alphabet())
    vocabulary = {token: n for n, token in enumerate([*letters, "ab", "cab"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")], ignore_merges=True))
    backend.pre_tokenizer = BYTES(add_prefix_space=False)
    assert_alike(fast_of(backend), backend, ["cab", "cabs", "cab cab"])
    assert fast_of(backend).encode(["cab"])[0].tolist() == [vocabulary["cab"]]


@pytest.mark.parametrize("name", ["openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_published_tokenizers(name: str, prose: str) -> None:
    file = HUB / name / "tokenizer.json"
    if not file.exists():
        pytest.skip("the loopback hub's tokenizers are not here")
    backend = Tokenizer.from_file(str(file))
    backend.encode_special_tokens = True
    assert_alike(fast_of(backend), backend, odd_texts(prose)[:1000])


def test_a_run_of_spaces_without_end(prose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PART", 1 << 16)
    backend = trained(*PRE_TOKENIZERS["gpt2"], prose)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    run = " " * 2 * encode.PART + "x"
    (found,) = encode.Encoder(tokenizer, None).encode([Piece(run, ends=True)])
    assert found.ids.tolist() == backend.encode(run).ids


def test_long_text_is_encoded_as_short_text_is(prose: str) -> None:
    """The encoder's fast path, which batches of long text take, gives the library's ids."""
    backend = trained(*PRE_TOKENIZERS["smollm2"], prose, sorted(set(BYTES.alphabet()) - {"Ą"}))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    documents = [prose[n : n + 9000] + ("\x04" if n % 7 == 0 else "") for n in range(0, len(prose), 9000)]
    documents = documents * (3 * encode.PART // len(prose) + 1)
    encoder = encode.Encoder(tokenizer, tokenizer.eos_token_id, processes=2)
    found = list(encoder.encode(Piece(text, ends=True) for text in documents))
    expected = [[*backend.encode(text, add_special_tokens=False).ids, tokenizer.eos_token_id] for text in documents]
    assert [part.ids.tolist() for part in found] == expected
    assert all(part.ids.dtype == np.uint32 for part in found)
    assert encoder.fast
