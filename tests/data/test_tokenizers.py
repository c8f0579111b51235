"""Tokenizers made by lmtrain load with AutoTokenizer, round-trip any text, and are the same every time."""

import json
import os
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.errors import UserError

TEXT = "the quick brown fox\n    jumps over\tthe lazy dog; the end.\n" * 50
ANY_TEXT = [
    "",
    "plain",
    " two  spaces ",
    "\n\n\t x\r\n",
    "naïve café 日本語 🙂🏽",
    "\x00\x7f\u200b",
    "a" * 1000,
    "’“”…",
]


def make(cfg, text=TEXT, val=""):
    return tokenizers.load_or_train(cfg, lambda split: iter([text] if split == "train" else [val]))


def reload(tokenizer, folder):
    tokenizers.save(tokenizer, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("option", ["bpe", "bytes"])
def test_any_text_round_trips_before_and_after_saving(option, tokenizer_config, tmp_path):
    settings = {"vocab_size": 300} if option == "bpe" else {}
    tokenizer = make(tokenizer_config(option, **settings))
    loaded = reload(tokenizer, tmp_path)
    for text in ANY_TEXT:
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert loaded(text).input_ids == ids
        assert loaded.decode(ids) == text


@pytest.mark.parametrize("option", ["bpe", "bytes", "char"])
def test_special_tokens(option, tokenizer_config, tmp_path):
    tokenizer = make(tokenizer_config(option))
    for t in (tokenizer, reload(tokenizer, tmp_path)):
        assert t.eos_token == t.bos_token == "<|endoftext|>"
        assert t.pad_token is None
        assert t.is_fast
        assert tokenizers.vocab_size(t) == len(t)
        assert tokenizers.tokenizer_hash(t) == tokenizers.tokenizer_hash(tokenizer)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_added_special_tokens_are_written_for_every_version(tokenizer_config, tmp_path):
    """transformers 4 reads a list of them under one name alone, and fails on version 5's."""
    tokenizer = make(tokenizer_config("bytes"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    loaded = reload(tokenizer, tmp_path)
    assert loaded.all_special_tokens == tokenizer.all_special_tokens == ["<|endoftext|>", "<a>", "<b>"]
    assert loaded("<a>x<b>").input_ids == [257, ord("x"), 258]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == ["<a>", "<b>"]
    assert "extra_special_tokens" not in config


def test_bytes_are_their_own_ids(tokenizer_config):
    tokenizer = make(tokenizer_config("bytes"))
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == 256
    for text in ANY_TEXT:
        assert tokenizer(text).input_ids == list(text.encode())
    for byte in range(256):  # every byte has its own token, also those that begin no UTF-8 text
        assert len(tokenizer.convert_ids_to_tokens(byte)) == 1


def test_characters(tokenizer_config, tmp_path):
    tokenizer = make(tokenizer_config("char"), text="hello\n wörld", val="zé")
    known = sorted(set("hello\n wörldzé"))
    loaded = reload(tokenizer, tmp_path)
    assert len(loaded) == len(known) + 2
    assert loaded("".join(known)).input_ids == list(range(len(known)))
    assert loaded.decode(loaded("hello  \n\nwörld é").input_ids) == "hello  \n\nwörld é"
    unknown = loaded("h?日o").input_ids
    assert unknown[1] == unknown[2] == loaded.convert_tokens_to_ids(tokenizers.UNKNOWN)


def test_a_trained_bpe_is_the_same_in_every_process(tokenizer_config, tmp_path):
    script = (
        "import sys; from pathlib import Path; from lmtrain.data import tokenizers; "
        "from lmtrain.data.sources.stdlib import *\n"
        "from lmtrain.config.schema import TokenizerConfig\n"
        "cfg = TokenizerConfig(kind='bpe', vocab_size=700, min_frequency=2, train_characters=400_000)\n"
        "made = tokenizers.load_or_train(cfg, lambda _: (p.text for p in stdlib_pieces()))\n"
        "tokenizers.save(made, Path(sys.argv[1]))\n"
    )
    children = []
    for i in "01":
        env = {**os.environ, "PYTHONHASHSEED": i, "RAYON_NUM_THREADS": str(1 + int(i))}
        children.append(subprocess.Popen([sys.executable, "-c", script, str(tmp_path / i)], env=env))
    assert [c.wait(600) for c in children] == [0, 0]
    files = [p.name for p in (tmp_path / "0").iterdir()]
    assert "tokenizer.json" in files
    for name in files:
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_bpe_settings(tokenizer_config):
    assert len(make(tokenizer_config("bpe", vocab_size=280))) == 280
    few = make(tokenizer_config("bpe", vocab_size=400, train_characters=20))
    assert "jumps" not in few.get_vocab()
    rare = make(tokenizer_config("bpe", vocab_size=400, min_frequency=1000))
    assert len(rare) == 257
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size=256 is too small.*vocab_size=257 or more"):
        make(tokenizer_config("bpe", vocab_size=256))


def test_the_hash_follows_what_decides_ids(tokenizer_config):
    cfg = tokenizer_config("bpe", vocab_size=300)
    first, again, other = make(cfg), make(cfg), make(cfg, text=TEXT.replace("fox", "cat"))
    again.backend_tokenizer.enable_truncation(5)
    hashes = [tokenizers.tokenizer_hash(t) for t in (first, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    first.add_tokens(["<|new|>"])
    assert tokenizers.tokenizer_hash(first) != hashes[0]


def test_a_folder(tokenizer_config, tmp_path):
    saved = make(tokenizer_config("bpe", vocab_size=300))
    tokenizers.save(saved, tmp_path / "mine")
    cfg = tokenizer_config("hub", name_or_path=str(tmp_path / "mine"))
    assert tokenizers.tokenizer_hash(make(cfg)) == tokenizers.tokenizer_hash(saved)
    identity = tokenizers.identity(cfg)
    assert (identity.settings, identity.label) == ({"kind": "hub"}, "mine")
    (tmp_path / "mine" / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    assert tokenizers.identity(cfg).resolved != identity.resolved


def test_bad_names(tokenizer_config, tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        tokenizers.identity(tokenizer_config("hub", name_or_path=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        tokenizers.identity(tokenizer_config("hub", name_or_path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="can't be loaded"):
        make(tokenizer_config("hub", name_or_path=str(tmp_path)))


def test_numbers_stand_in_for_an_unknown_tokenizer(tmp_path):
    loaded = reload(tokenizers.numbers(20), tmp_path)
    assert len(loaded) == 20
    assert loaded.decode([3, 17, 0]) == "3 17 0"
    assert loaded("3 17 0").input_ids == [3, 17, 0]
    assert loaded.eos_token_id is None


def test_the_stand_in_for_an_unknown_tokenizer_shows_numbers() -> None:
    stand_in = tokenizers.numbers(12)
    assert stand_in("3 11 0")["input_ids"] == [3, 11, 0]
    assert stand_in.decode([3, 11]) == "3 11"
    assert len(stand_in) == 12
    assert tokenizers.shows_numbers(stand_in)
    assert not tokenizers.shows_numbers(tokenizers.load_or_train(TokenizerConfig(kind="bytes"), lambda _: iter(())))
