"""Token files of other programs: ids and borders as they were written, whatever is damaged refused."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

import token_layouts
from inprocess import message, run, stops_at
from lmtrain.callbacks.metrics import without_times
from lmtrain.data.store.prepared import PreparedData
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.text.prepare import prepare
from lmtrain.data.text.windows import IGNORE, Windows
from lmtrain.errors import UserError
from support import REPO, TINY, rows
from token_layouts import LAYOUTS

EOS = 256  # of tokenizer=bytes
CASES = REPO.parent / "shared" / "cases" / "tokens"


def documents(number: int = 40) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[*draw.integers(1, 256, draw.integers(3, 30)).tolist(), EOS] for _ in range(number)]


@pytest.fixture
def opened(data_config: Any, tokenizer_config: Any) -> Any:
    def make(path: Path, tokenizer: Any = None, **settings: Any) -> PreparedData:
        cfg = data_config("bins", path=str(path), **settings)
        return prepare(cfg, tokenizer or tokenizer_config("bytes"), progress=False)

    return make


def read(prepared: PreparedData, split: str = "train") -> list[list[int]]:
    """Returns the documents of a split."""
    (shard,) = prepared.splits[split].shards
    ids, ends = shard.read(0, shard.tokens).tolist(), shard.document_ends(1, shard.tokens + 1).tolist()
    assert prepared.splits[split].documents == len(ends)
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def laid_out(layout: str, folder: Path, given: list[list[int]]) -> list[list[int]]:
    """Writes documents in a layout; returns them as they are to be read."""
    folder.mkdir()
    LAYOUTS[layout](folder, given)
    return [[EOS, *one[:-1]] for one in given] if layout.startswith("llm.c") else given


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_borders_are_those_that_were_written(layout: str, tmp_path: Path, opened: Any) -> None:
    wanted = laid_out(layout, tmp_path / "tokens", documents())
    assert read(opened(tmp_path / "tokens")) == wanted


@pytest.mark.parametrize("name", [path.name for path in sorted(CASES.glob("[!e]*"))] or ["none"])
def test_files_that_the_programs_wrote(name: str, opened: Any, tokenizer_config: Any) -> None:
    if not (CASES / name).is_dir():
        pytest.skip("../shared/cases/tokens is not there")
    gpt2 = tokenizer_config("hub", name_or_path=str(REPO.parent / "shared/hub/models/openai-community/gpt2"))
    found = opened(CASES / name, gpt2)
    shards = json.loads((CASES / f"expected/{name}.json").read_text())["shards"].values()
    wanted = list(itertools.chain(*shards))
    here = [one for split in found.splits for one in read(found, split)]
    if name == "mds":  # rows of 64 tokens, cut without regard to documents, which end with the end of text
        assert all(one[-1] == 50256 and 50256 not in one[:-1] for one in here[:-1])
        here, wanted = [list(itertools.chain(*some)) for some in (here, wanted)]
    assert here == wanted


def damaged(raw: bytes) -> dict[str, bytes]:
    """Returns a file's bytes cut at several places, and with a byte of its header changed."""
    size = len(raw)
    places = {0, 1, 3, 8, size // 3, size // 2, size - 8, size - 2, size - 1} & set(range(size))
    cuts = {f"cut at {at}": raw[:at] for at in places}
    flips = {f"byte {at}": raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :] for at in range(0, min(size, 40), 3)}
    return cuts | flips


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_files_are_refused_or_read_whole(layout: str, tmp_path: Path, opened: Any) -> None:
    """Whatever is damaged: one message, or all of the tokens. Only nanoGPT's files don't say how many there are."""
    whole, refused = tmp_path / "whole", 0
    wanted = sum(map(len, laid_out(layout, whole, documents(16))))
    for file in sorted(whole.iterdir()):
        for what, raw in damaged(file.read_bytes()).items():
            broken = shutil.copytree(whole, tmp_path / "broken")
            (broken / file.name).write_bytes(raw)
            try:
                tokens = opened(broken).splits["train"].tokens
            except UserError:
                refused += 1
            else:
                assert tokens == wanted or (layout.startswith("nanogpt") and "cut" in what), (file.name, what)
            shutil.rmtree(broken)
    assert refused > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_that_are_missing_are_not_overlooked(layout: str, tmp_path: Path, opened: Any) -> None:
    whole = tmp_path / "whole"
    laid_out(layout, whole, documents(16))
    files = sorted(whole.iterdir())
    for file in files if len(files) > 1 else []:
        broken = shutil.copytree(whole, tmp_path / "broken")
        (broken / file.name).unlink()
        if file.name.endswith((".metadata", "info.json", "state.json", ".idx", ".csv.gz")):
            assert opened(broken).splits["train"].tokens == sum(map(len, documents(16))), "the ids show the rest"
        else:
            with pytest.raises(UserError, match=r"missing|no tokens|not named"):
                opened(broken)
        shutil.rmtree(broken)


def test_chunks_of_litdata_are_not_taken_for_tokens(tmp_path: Path, opened: Any, tokenizer_config: Any) -> None:
    laid_out("litdata", tmp_path / "lit", documents())
    index = tmp_path / "lit" / "index.json"
    for raw in (b"", b'{"chunks": [', b'{"chunks": []}'):
        index.write_bytes(raw)
        with pytest.raises(UserError, match="can't be read"):
            opened(tmp_path / "lit", tokenizer_config("bpe"))
    index.unlink()
    with pytest.raises(UserError, match=r"index\.json is missing, which names litdata's chunk-0-0\.bin"):
        opened(tmp_path / "lit", tokenizer_config("bpe"))


def settings(folder: Path, cache: Path) -> list[str]:
    return [*TINY, "data=bins", f"data.path={folder}", "tokenizer=bytes", "data.isolate_documents=true",
            "data.seq_len=32", "model.num_hidden_layers=1", f"data.cache_dir={cache}", "trainer.max_steps=4",
            "export.enabled=false", "callbacks.samples.every_n_validations=0"]  # fmt: skip


def losses(folder: Path) -> list[dict[str, Any]]:
    return [without_times(row) for row in rows(folder / "metrics.jsonl") if "train/loss" in row]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, list[dict[str, Any]]]:
    """The losses of a run on bins of our own with the same documents, by the place of the border token."""
    here, found = tmp_path_factory.mktemp("own"), {}
    (here / "a.txt").write_text("any text")
    words = ["prepare", "data=text", f"data.path={here / 'a.txt'}", "tokenizer=bytes", f"data.cache_dir={here}/c"]
    assert run(*words, "data.val_fraction=0").code == 0
    (prepared,) = here.glob("c/a*")
    for place, given in (("last", documents(80)), ("first", [[EOS, *one[:-1]] for one in documents(80)])):
        bins = shutil.copytree(prepared, here / place)
        meta = json.loads((bins / "meta.json").read_text())
        with BinWriter(bins, "train", meta["dtype"], 2**20) as writer:
            for one in given:
                writer.append(np.array(one), ends_document=True)
            meta["splits"] = {"train": writer.close()}
        (bins / "meta.json").write_text(json.dumps(meta))
        done = run("train", *settings(bins, here / "c"), f"run.dir={here}/run_{place}")
        assert done.code == 0, done.err
        found[place] = losses(here / f"run_{place}")
        assert len(found[place]) == 4
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_that_on_our_own_bins_and_resumes(layout: str, tmp_path: Path, own: Any) -> None:
    laid_out(layout, tmp_path / "tokens", documents(80))
    words = [*settings(tmp_path / "tokens", tmp_path / "c"), f"run.dir={tmp_path}/run"]
    assert run("train", *words, *stops_at(2)).code == 75
    done = run("train", *words, "run.resume=auto")
    assert done.code == 0, done.err
    assert losses(tmp_path / "run") == own["first" if layout.startswith("llm.c") else "last"]


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8", "<u8"])
@pytest.mark.parametrize("vocabulary", [200, 50_000, 65_536, 80_000])
def test_the_width_of_ids_is_decided(
    dtype: str, vocabulary: int, tmp_path: Path, opened: Any, tokenizer_config: Any
) -> None:
    ids = np.random.default_rng(0).integers(0, min(vocabulary, 65_536) if dtype == "<u2" else vocabulary, size=400)
    ids.astype(dtype).tofile(tmp_path / "train.bin")
    (shard,) = opened(tmp_path, tokenizer_config("bpe")).splits["train"].shards
    assert shard.read(0, shard.tokens).tolist() == ids.tolist()


def test_a_width_that_cannot_be_decided_is_refused(tmp_path: Path, opened: Any, tokenizer_config: Any) -> None:
    file = tmp_path / "train.bin"
    np.tile([1, 0], 200).astype("<u2").tofile(file)
    with pytest.raises(UserError, match=r"names no dtype and uint32 and uint16 fits: set data\.dtype"):
        opened(tmp_path, tokenizer_config("bpe"))
    numbers = opened(tmp_path, tokenizer_config("bpe"), dtype="uint16").splits["train"]
    assert numbers.tokens == 400
    np.arange(400, dtype=">u4").tofile(file)
    with pytest.raises(UserError, match=r"holds uint32, big endian: write it as little endian"):
        opened(tmp_path)
    np.arange(300, 700, dtype="<u4").tofile(file)
    with pytest.raises(UserError, match="token id 699, but tokenizer bytes has only 257"):
        opened(tmp_path)
    np.arange(100, dtype="<u4").tofile(tmp_path / "val.bin")
    np.arange(100, dtype="<u2").tofile(file)
    with pytest.raises(UserError, match=r"different widths \(train\.bin uint16, val\.bin uint32\)"):
        opened(tmp_path)
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "val.bin").unlink()
    with pytest.raises(UserError, match="has 199 bytes, not a whole number of uint16 tokens"):
        opened(tmp_path)


def test_headers_that_are_not_known_are_refused(tmp_path: Path, opened: Any) -> None:
    (tmp_path / "train.bin").write_bytes(np.append([7, 1, 40], np.zeros(253)).astype("<i4").tobytes() + bytes(80))
    with pytest.raises(UserError, match=r"a header that is not llm\.c's"):
        opened(tmp_path)
    token_layouts.datatrove(tmp_path, documents())
    token_layouts.mds(tmp_path, documents())
    with pytest.raises(UserError, match="holds tokens of datatrove and MDS: name the folder of one"):
        opened(tmp_path)


def test_the_tokenizer_is_compared(tmp_path: Path, opened: Any, tokenizer_config: Any) -> None:
    laid_out("datatrove", tmp_path / "named", documents())
    metadata = tmp_path / "named" / "00000_unshuffled.ds.metadata"
    metadata.write_text(metadata.read_text().replace("bytes", "org/gpt2"))
    with pytest.raises(UserError, match=r"was made with tokenizer org/gpt2, not bytes: set tokenizer=hub"):
        opened(tmp_path / "named")
    laid_out("megatron", tmp_path / "without", [one[:-1] for one in documents()])
    with pytest.raises(UserError, match=r"never holds <\|endoftext\|>, the end of text of tokenizer bytes"):
        opened(tmp_path / "without")
    assert read(opened(tmp_path / "without", append_eos=False)) == [one[:-1] for one in documents()]
    with pytest.raises(UserError, match=r"data\.dtype=uint16: Megatron's files say it themselves"):
        opened(tmp_path / "without", append_eos=False, dtype="uint16")


def test_several_files_splits_and_empty_ones(tmp_path: Path, opened: Any) -> None:
    given = documents()
    for number, some in enumerate((given[:9], [], given[9:])):
        token_layouts.datatrove(tmp_path, some or [[]], name=f"{number:05d}_shuffled")
    assert read(opened(tmp_path)) == given
    (tmp_path / "validation").mkdir()
    token_layouts.datatrove(tmp_path / "validation", given[:5])
    (tmp_path / "test").mkdir()
    token_layouts.datatrove(tmp_path / "test", given[:3])
    both = opened(tmp_path)
    assert both.notes[0] == f"{tmp_path}: not read: 00000_unshuffled.ds, 1 file in all"
    assert (read(both), read(both, "val")) == (given, given[:5])
    laid_out("megatron", tmp_path.parent / f"{tmp_path.name}_more", given[5:9])
    assert read(opened(tmp_path, val_path=f"{tmp_path}_more"), "val") == given[5:9]


@pytest.mark.parametrize("layout", ["parquet", "saved to disk"])
def test_what_is_not_learned_is_not(layout: str, tmp_path: Path, opened: Any) -> None:
    given = documents()
    learned = [[0] * 2 + [1] * (len(one) - 2) for one in given]
    labels = [[i if keep else -100 for i, keep in zip(*pair, strict=True)] for pair in zip(given, learned, strict=True)]
    writes = {"parquet": token_layouts.parquet, "saved to disk": token_layouts.saved_to_disk}[layout]
    columns: list[dict[str, Any]] = [{"labels": labels}, {"loss_mask": learned}, {"assistant_masks": learned}]
    for number, some in enumerate(columns):
        (tmp_path / f"{number}").mkdir()
        writes(tmp_path / f"{number}", given, **some)
        windows = Windows(opened(tmp_path / f"{number}").splits["train"].shards, 32, seed=None, isolate_documents=False)
        batch = windows.read(np.array([[0, row] for row in range(len(windows))]))
        stream, keep = np.concatenate(given), np.concatenate(learned)
        wanted = np.where(keep, stream, IGNORE)[1 : len(windows) * 32 + 1]
        assert batch["labels"].flatten().tolist() == wanted.tolist()
    (tmp_path / "shifted").mkdir()
    writes(tmp_path / "shifted", given, labels=[[*one[1:], -100] for one in given])
    with pytest.raises(UserError, match="labels are other tokens than input_ids"):
        opened(tmp_path / "shifted")
    (tmp_path / "padded").mkdir()
    writes(tmp_path / "padded", [[*one, 0, 0] for one in given], attention_mask=[[1] * len(o) + [0] * 2 for o in given])
    assert read(opened(tmp_path / "padded")) == given


@pytest.mark.parametrize("layout", ["parquet", "mds"])
def test_rows_that_are_cut_blocks_are_not_documents(layout: str, tmp_path: Path, opened: Any) -> None:
    stream = list(itertools.chain(*documents()))
    laid_out(layout, tmp_path / "blocks", [stream[at : at + 64] for at in range(0, len(stream), 64)])
    found = opened(tmp_path / "blocks")
    assert read(found) == documents()
    assert "rows are cut blocks, documents end with <|endoftext|>" in found.notes[0]


BORDERS = {
    "end of text last": lambda one: [*one, 2],
    "end of text first": lambda one: [2, *one],
    "start first, no end of text": lambda one: [1, *one],
    "start first and end of text last": lambda one: [1, *one, 2],
}


@pytest.mark.parametrize("place", BORDERS)
def test_the_border_token_is_found_where_the_file_has_it(
    place: str, tmp_path: Path, opened: Any, tokenizer_config: Any
) -> None:
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 300)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=model, **named).save_pretrained(tmp_path / "tokenizer")
    given = [BORDERS[place]([token + 3 for token in one[:-1]]) for one in documents()]
    np.concatenate(given).astype("<u2").tofile(tmp_path / "train.bin")
    assert read(opened(tmp_path, tokenizer_config("hub", name_or_path=str(tmp_path / "tokenizer")))) == given


def test_compressed_chunks_are_refused_with_what_to_do(tmp_path: Path, opened: Any) -> None:
    laid_out("litdata", tmp_path / "lit", documents())
    index = tmp_path / "lit" / "index.json"
    index.write_text(index.read_text().replace('"compression": null', '"compression": "zstd"'))
    with pytest.raises(UserError, match=r"compression 'zstd'.*: write the chunks again with optimize"):
        opened(tmp_path / "lit")
    laid_out("mds", tmp_path / "mds", documents())
    index = tmp_path / "mds" / "index.json"
    index.write_text(index.read_text().replace('"compression": null', '"compression": "zstd:3"'))
    with pytest.raises(UserError, match=r"shards are compressed \(zstd:3\): write them with MDSWriter"):
        opened(tmp_path / "mds")


def test_files_at_an_address_are_copied_once(tmp_path: Path, opened: Any) -> None:
    import fsspec

    laid_out("megatron", tmp_path / "tokens", documents())
    fsspec.filesystem("memory").put(f"{tmp_path}/tokens", "/corpus/train", recursive=True)
    assert read(opened("memory://corpus")) == documents()  # type: ignore[arg-type]
    fsspec.filesystem("memory").rm("/corpus", recursive=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_folder_as_a_first_word(layout: str, tmp_path: Path) -> None:
    laid_out(layout, tmp_path / "tokens", documents(80))
    words = ["tokenizer=bytes", "data.seq_len=32", "model=gpt_nano", f"data.cache_dir={tmp_path}/c"]
    for path in ([str(tmp_path / "tokens")], [f"data.path={tmp_path / 'tokens'}"]):
        shown = run("inspect", *path, *words)
        assert shown.code == 0, shown.err
        assert "80 documents" in shown.out or "documents 80" in " ".join(shown.out.split()), shown.out
    assert "holds no tokens" in message(run("inspect", "data=bins", f"data.path={tmp_path}/c/.locks", *words).err)
