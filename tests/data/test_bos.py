"""The BOS token at the start of documents, compared with plain calls of the tokenizer, which puts it before a text."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from inprocess import message, run
from lmtrain.config import compose as rules
from lmtrain.data import tokenizers
from lmtrain.data.store.prepared import PreparedData
from lmtrain.data.stream import head
from lmtrain.data.stream.source import cut_shards, endless
from lmtrain.data.text.encode import SEGMENT
from lmtrain.data.text.fim import FillInTheMiddle
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError
from lmtrain.evaluation.data import ScoredDocuments
from support import rows
from tiny_pretrained import SHORT, save_pretrained

STORIES = Path(__file__).parents[3] / "shared/hub/models/karpathy/stories260K"
LINES = ["the first line", "and a second", "the third one", "écrit", *(f"line {n} of many" for n in range(60))]


def save_with_bos(folder: Path, adds: str = "<b> $A") -> Path:
    """Saves a tiny model whose tokenizer has a BOS token <b>, and puts it before a text as Llama's and Gemma's do."""
    tokenizer = AutoTokenizer.from_pretrained(save_pretrained(folder, spare_rows=2))
    tokenizer.add_special_tokens({"bos_token": "<b>"})
    special = [("<b>", tokenizer.convert_tokens_to_ids("<b>"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=adds, special_tokens=special)
    tokenizer.save_pretrained(folder)
    return folder


def plan(folder: Path) -> str:
    return " ".join((folder / "plan.txt").read_text().split())


@pytest.fixture
def prepared(
    tmp_path: Path, data_config: Callable[..., Any], tokenizer_config: Callable[..., Any]
) -> Callable[..., PreparedData]:
    """Returns a function that prepares lines as documents with the tokenizer of a folder."""
    (tmp_path / "lines.txt").write_text("\n".join(LINES))

    def make(folder: Path | None, **settings: Any) -> PreparedData:
        cfg = data_config(**{"path": str(tmp_path / "lines.txt"), "sample_by": "line", **settings})
        named = tokenizer_config() if folder is None else tokenizer_config("hub", name_or_path=str(folder))
        return prepare(cfg, named, progress=False)

    return make


def tokens(found: PreparedData, split: str = "train") -> list[int]:
    return np.concatenate([shard.read(0, shard.tokens) for shard in found.splits[split].shards]).tolist()


@pytest.mark.parametrize("adds", ["<b> $A", "$A"])
@pytest.mark.parametrize("set_to", ["auto", True, False])
def test_documents_begin_as_the_tokenizer_begins_a_text(
    adds: str, set_to: bool | str, prepared: Callable[..., PreparedData], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_with_bos(tmp_path / "base", adds))
    documents = [*LINES, "a word and more, " * (SEGMENT // 4)]  # the last is tokenized in several segments
    (tmp_path / "lines.txt").write_text("\n".join(documents))
    found = prepared(tmp_path / "base", prepend_bos=set_to, val_fraction=0)
    own = {"auto": adds == "<b> $A", True: True, False: False}[set_to]
    texts = [tokenizer(text)["input_ids"] if set_to == "auto" else
             [tokenizer.bos_token_id] * own + tokenizer(text, add_special_tokens=False)["input_ids"]
             for text in documents]  # fmt: skip
    assert tokens(found) == [i for ids in texts for i in [*ids, tokenizer.eos_token_id]]
    train = found.splits["train"]
    assert (
        train.shards[0].document_ends(0, train.tokens + 1).tolist() == np.cumsum([len(t) + 1 for t in texts]).tolist()
    )
    assert train.bytes == sum(len(text.encode()) for text in documents)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/hub, which the project does not ship")
def test_the_rows_of_llamas_tokenizer(prepared: Callable[..., PreparedData]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    expected = [i for text in LINES for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    assert expected[0] == tokenizer.bos_token_id
    assert tokens(prepared(STORIES, val_fraction=0)) == expected


def test_what_was_prepared_without_bos_is_what_tokenizers_that_put_none_prepare(
    prepared: Callable[..., PreparedData], tmp_path: Path
) -> None:
    """prepend_bos=None is the config of versions without the key, whose folders these are."""
    with_bos = save_with_bos(tmp_path / "base")
    plain = save_with_bos(tmp_path / "plain", "$A")
    older = {folder: prepared(folder, prepend_bos=None) for folder in (None, with_bos, plain)}
    for folder, there in older.items():
        assert "prepend_bos" not in json.dumps(there.meta["key"])
        assert prepared(folder, prepend_bos=False).folder == there.folder
        assert (prepared(folder).fingerprint == there.fingerprint) == (folder != with_bos)
    now = prepared(with_bos)
    assert now.fingerprint != older[with_bos].fingerprint
    assert prepared(with_bos).folder == now.folder
    assert prepared(with_bos, prepend_bos=True).fingerprint == now.fingerprint
    assert prepared(plain, prepend_bos=True).folder not in (older[plain].folder, prepared(plain).folder)


def test_a_tokenizer_without_bos(prepared: Callable[..., PreparedData], tmp_path: Path) -> None:
    tokenizers.save(tokenizers.numbers(50), tmp_path / "numbers")
    with pytest.raises(UserError, match=r"no BOS token: set data\.prepend_bos=auto"):
        prepared(tmp_path / "numbers", prepend_bos=True, append_eos=False)


def test_a_stream_begins_its_documents_alike(
    prepared: Callable[..., PreparedData], tmp_path: Path, data_config: Any, tokenizer_config: Any
) -> None:
    base = save_with_bos(tmp_path / "base")
    flat = tokens(prepared(base, val_fraction=0))
    cfg = data_config(path=str(tmp_path / "lines.txt"), sample_by="line", ring_val_tokens=30)
    found = head.prepare_head(cfg, tokenizer_config("hub", name_or_path=str(base)), progress=False)
    held_out = tokens(found.prepared, "val")
    assert held_out == flat[: len(held_out)]
    shards = cut_shards(endless(found.source, found.encoder, found.begin, found.begin), 97)
    read = [next(shards) for _ in range((len(flat) - len(held_out)) // 97)]
    assert np.concatenate([s.ids for s in read]).tolist() == flat[len(held_out) : len(held_out) + 97 * len(read)]
    again = next(cut_shards(endless(found.source, found.encoder, found.begin, read[2].end), 97))
    assert again.ids.tolist() == read[3].ids.tolist()


def test_bins_are_scored_as_the_text_itself(prepared: Callable[..., PreparedData], tmp_path: Path) -> None:
    """Evaluation begins each document with BOS itself, which the bins hold already."""
    base = save_with_bos(tmp_path / "base")
    found = prepared(base, val_path=str(tmp_path / "lines.txt"))
    words = ["data=bins", f"data.path={found.folder}", "data.seq_len=8"]
    read = list(ScoredDocuments(rules.check(rules.compose(words)), None).read(found.tokenizer))
    plain = [found.tokenizer(text, add_special_tokens=False)["input_ids"] for text in LINES]
    assert [ids.tolist() for ids, _ in read] == plain
    assert [size for _, size in read] == [len(text.encode()) for text in LINES]


def test_bos_stays_in_front_of_a_rearranged_document() -> None:
    fims = [FillInTheMiddle(1, spm_rate, 90, 91, 92, 0, 7, begin=5) for spm_rate in (0, 1)]
    cuts = [0.0, 0.5, 0.0, 0.5]
    made = [fim._parts_in_order(np.array([5, 1, 2, 3, 0]), cuts).tolist() for fim in fims]
    assert made == [[5, 90, 91, 3, 92, 1, 2, 0], [5, 90, 91, 3, 92, 1, 2, 0]]


LAYOUTS = {
    "windows": [],
    "isolated windows": ["data.isolate_documents=true"],
    "packed": ["data.packing=best_fit_decreasing", "data.isolate_documents=true"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_per_byte_are_those_of_a_plain_loop(layout: str, tmp_path: Path) -> None:
    """The bits of all targets by the bytes of the text: BOS is a target only where a document before it predicts it."""
    base, text = save_with_bos(tmp_path / "base"), tmp_path / "lines.txt"
    texts = [f"{n} lines were read" for n in range(64)]
    text.write_text("\n".join(texts))
    ended = run("train", *SHORT, f"model.name_or_path={base}", f"data.path={text}", f"data.val_path={text}",
                "data.sample_by=line", *LAYOUTS[layout], "trainer.max_steps=1", "optimizer.lr=0",
                "optimizer.weight_decay=0", "trainer.limit_val_batches=null", f"run.dir={tmp_path / 'run'}",
                "export.enabled=false")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "each document begins with <b>" in plan(tmp_path / "run")
    (last,) = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in row]
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base).eval()
    documents = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    flat, size = [i for document in documents for i in document], sum(len(text.encode()) for text in texts)
    windows = [flat[at : at + 33] for at in range(0, len(flat) - 32, 32)]
    targets = len(flat) - (0 if layout == "windows" else len(documents))
    bits_per_target = last["val/loss"] / math.log(2)
    assert last["val/bits_per_byte"] == pytest.approx(bits_per_target * targets / size, rel=1e-9)
    if layout == "isolated windows":  # which cut documents
        return
    with torch.no_grad():
        nll = [model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
               for ids in (torch.tensor([row]) for row in (windows if layout == "windows" else documents))]  # fmt: skip
    predicted = 32 * len(windows) if layout == "windows" else targets
    assert last["val/loss"] == pytest.approx(sum(nll) / predicted, rel=1e-5)


def test_a_run_without_bos_is_continued_only_without_it(tmp_path: Path) -> None:
    """A run of a version without the key is refused, with the key's name, and goes on with data.prepend_bos=false."""
    base, text, folder = save_with_bos(tmp_path / "base"), tmp_path / "lines.txt", tmp_path / "run"
    text.write_text("\n".join(LINES))
    words = [*SHORT, f"model.name_or_path={base}", f"data.path={text}", "data.sample_by=line", f"run.dir={folder}",
             "export.enabled=false", "run.resume=auto"]  # fmt: skip
    assert run("train", *words, "trainer.max_steps=2", "data.prepend_bos=null").code == 0
    assert "documents begin without <b>" in plan(folder)
    written = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(written.replace("  prepend_bos: null\n", ""))
    ended = run("train", *words, "trainer.max_steps=4")
    assert ended.code == 2
    assert "; data.prepend_bos then None, now auto). Put them back" in message(ended.err)
    ended = run("train", *words, "trainer.max_steps=4", "data.prepend_bos=false")
    assert ended.code == 0, ended.err
