"""Training from existing bins: lmtrain's with their tokenizer, nanoGPT's without one."""

import os
import pickle

import numpy as np
import pytest

from lmtrain.data import tokenizers
from lmtrain.data.store import bins
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError


@pytest.fixture
def prepared(tmp_path, data_config, tokenizer_config):
    (tmp_path / "a.txt").write_text("one line\nand another\n" * 300)
    cfg = data_config(path=str(tmp_path / "a.txt"))
    return prepare(cfg, tokenizer_config("bpe", vocab_size=270), progress=False)


def test_our_own_folder(prepared, data_config, tokenizer_config):
    again = prepare(data_config("bins", path=str(prepared.folder)), tokenizer_config("bpe"), progress=False)
    assert (again.fingerprint, again.meta) == (prepared.fingerprint, prepared.meta)
    assert again.tokenizer.get_vocab() == prepared.tokenizer.get_vocab()
    own = tokenizer_config("hub", name_or_path=str(prepared.folder / "tokenizer"))
    assert prepare(data_config("bins", path=str(prepared.folder)), own, progress=False).meta == prepared.meta


def test_another_tokenizer_is_refused(tmp_path, prepared, data_config, tokenizer_config):
    cfg = data_config("bins", path=str(prepared.folder))
    message = r"made with another tokenizer than tokenizer bytes: .*tokenizer\.name_or_path=.*tokenizer, or prepare"
    with pytest.raises(UserError, match=message):
        prepare(cfg, tokenizer_config("bytes"), progress=False)
    tokenizers.save(
        tokenizers.load_or_train(tokenizer_config("bytes"), lambda _: iter(())), prepared.folder / "tokenizer"
    )
    with pytest.raises(UserError, match="made with another tokenizer"):
        prepare(cfg, tokenizer_config("bpe"), progress=False)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def plain(folder, tokens=(5, 6, 7, 255)):
    folder.mkdir()
    for name in ("train", "val"):
        np.array(tokens * 50, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


def test_nanogpt_bins_with_a_tokenizer(tmp_path, data_config, tokenizer_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = plain(tmp_path / "nano")
    (folder / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    found = prepare(data_config("bins", path=str(folder)), tokenizer_config("bytes"), progress=False)
    assert not (tmp_path / "exploded").exists()
    assert found.meta["vocab_size"] == len(found.tokenizer) == 257
    assert {k: s["tokens"] for k, s in found.meta["splits"].items()} == {"train": 200, "val": 200}
    assert bins.open_bins(found.folder, "val").shards[0].read(0, 4).tolist() == [5, 6, 7, 255]


def test_nanogpt_bins_without_one(tmp_path, data_config, tokenizer_config, capsys):
    cfg = data_config("bins", path=str(plain(tmp_path / "nano")))
    found = prepare(cfg, tokenizer_config("char"))
    assert "comes without a tokenizer (tokenizer.kind=char can't be made without the text)" in capsys.readouterr().err
    assert len(found.tokenizer) == found.meta["vocab_size"] == 256
    assert found.tokenizer.decode([5, 255]) == "5 255"
    # An unreachable hub (the tests are offline) is reported too.
    found = prepare(cfg, tokenizer_config("hub", name_or_path="gpt2", revision="not-cached"))
    assert "tokenizer 'gpt2' can't be fetched" in capsys.readouterr().err
    assert len(found.tokenizer) == 256


def test_ids_the_tokenizer_does_not_have(tmp_path, data_config, tokenizer_config):
    folder = plain(tmp_path / "nano", tokens=(1, 2, 40_000))
    with pytest.raises(UserError, match="hold token id 40000, but tokenizer bytes has only 257 ids"):
        prepare(data_config("bins", path=str(folder)), tokenizer_config("bytes"), progress=False)


def test_no_path(data_config, tokenizer_config):
    with pytest.raises(UserError, match=r"data=bins needs data\.path=<folder>"):
        prepare(data_config("bins"), tokenizer_config(), progress=False)


@pytest.mark.parametrize("dtype", ["<u4", "<i4", "<i8", "<u8", ">u4"])
@pytest.mark.parametrize("vocabulary", [200, 50_000, 151_000])
def test_bins_of_another_width_are_refused(dtype, vocabulary, tmp_path, data_config, tokenizer_config):
    """Read as uint16, every second token would be 0 or 1."""
    ids = np.random.default_rng(0).integers(0, vocabulary, size=400)
    (tmp_path / "wide").mkdir()
    ids.astype(dtype).tofile(tmp_path / "wide" / "train.bin")
    with pytest.raises(UserError, match=rf"train\.bin holds tokens of {np.dtype(dtype).itemsize} bytes each"):
        prepare(data_config("bins", path=str(tmp_path / "wide")), tokenizer_config("bytes"), progress=False)


@pytest.mark.parametrize("vocabulary", [2, 65, 50_000, 65_536])
def test_bins_of_16_bits_are_read(vocabulary, tmp_path):
    (tmp_path / "nano").mkdir()
    ids = np.random.default_rng(0).integers(0, vocabulary, size=400).astype("<u2")
    ids.tofile(tmp_path / "nano" / "train.bin")
    assert bins.open_bins(tmp_path / "nano", "train").shards[0].read(0, 400).tolist() == ids.tolist()


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_llm_cs_header_is_not_trained_on(magic, dtype, tmp_path, data_config, tokenizer_config):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, 1, 400
    ids = np.random.default_rng(0).integers(0, 50_000, size=400).astype(dtype)
    (tmp_path / "llmc").mkdir()
    (tmp_path / "llmc" / "train.bin").write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(UserError, match=r"train\.bin holds the header of llm\.c.* and then tokens, where nanoGPT's"):
        prepare(data_config("bins", path=str(tmp_path / "llmc")), tokenizer_config("bytes"), progress=False)
