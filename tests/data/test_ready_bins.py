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


def plain(folder, tokens=(5, 6, 7, 256)):
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
    assert bins.open_bins(found.folder, "val").shards[0].read(0, 4).tolist() == [5, 6, 7, 256]


def test_nanogpt_bins_without_one(tmp_path, data_config, tokenizer_config, capsys):
    cfg = data_config("bins", path=str(plain(tmp_path / "nano")))
    found = prepare(cfg, tokenizer_config("char"))
    assert "comes without a tokenizer (tokenizer.kind=char can't be made without the text)" in capsys.readouterr().err
    assert len(found.tokenizer) == found.meta["vocab_size"] == 257
    assert found.tokenizer.decode([5, 256]) == "5 256"
    # An unreachable hub (the tests are offline) is reported too.
    found = prepare(cfg, tokenizer_config("hub", name_or_path="gpt2", revision="not-cached"))
    assert "tokenizer 'gpt2' can't be fetched" in capsys.readouterr().err
    assert len(found.tokenizer) == 257


def test_ids_the_tokenizer_does_not_have(tmp_path, data_config, tokenizer_config):
    folder = plain(tmp_path / "nano", tokens=(1, 2, 40_000))
    with pytest.raises(UserError, match="hold token id 40000, but tokenizer bytes has only 257 ids"):
        prepare(data_config("bins", path=str(folder)), tokenizer_config("bytes"), progress=False)


def test_no_path(data_config, tokenizer_config):
    with pytest.raises(UserError, match=r"data=bins needs data\.path=<folder>"):
        prepare(data_config("bins"), tokenizer_config(), progress=False)
