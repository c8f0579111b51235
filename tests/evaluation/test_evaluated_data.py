"""The data that is evaluated: what a run held out, or the split that is named, each document whole."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from lmtrain.config import compose as rules
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.corpus import prepare_corpus
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.pair_rows import PairRowEncoder
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.examples.row_format import ChatRows, Encoded
from lmtrain.data.store import bins
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.text.mixture import prepare_mixture
from lmtrain.data.text.prepare import prepare
from lmtrain.evaluation import data
from lmtrain.evaluation.data import ScoredDocuments
from lmtrain.evaluation.scoring import _examples


def config(*words: str) -> Config:
    return rules.check(rules.compose(["tokenizer=bytes", "data.seq_len=8", *words]))


def written(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def held_out(folder: Path) -> list[str]:
    """Returns the documents of a folder's validation bins, whose tokens are bytes and, at each end, 256."""
    ids = np.concatenate([shard.read(0, shard.tokens) for shard in bins.open_bins(folder, "val").shards])
    return [bytes(part[part < 256].astype(np.uint8)).decode() for part in np.split(ids, np.flatnonzero(ids == 256) + 1)]


@pytest.mark.parametrize("mixture", [False, True])
def test_repeats_that_were_left_out_don_t_move_the_split(mixture: bool, tmp_path: Path) -> None:
    texts = [f"document {n // 4 * 3 + min(n % 4, 2)} of the corpus" for n in range(80)]  # every fourth repeats the last
    file = written(tmp_path / "texts.jsonl", texts)
    of_file = [f"data.mixture=[{{path: {file}, val_fraction: 0.1}}]"] if mixture else [f"data.path={file}"]
    c = config(f"data={'text_mixture' if mixture else 'jsonl'}", *of_file, "data.val_fraction=0.1", "data.dedup=exact")
    made = prepare_mixture(c.data, c.tokenizer)[0][1] if mixture else prepare(c.data, c.tokenizer, False)
    expected = [text for text in held_out(made.folder) if text]
    assert len(expected) == 6  # every tenth of the sixty that are left
    found = [bytes(ids.astype(np.uint8)).decode() for ids, _ in ScoredDocuments(c, None).read(made.tokenizer)]
    assert found == expected


def test_a_document_in_several_shards_is_scored_as_one(tmp_path: Path) -> None:
    texts = ["short", "long " * 60 + "é", "another", "last " * 30]
    file = written(tmp_path / "texts.jsonl", texts)
    c = config("data=jsonl", f"data.path={file}", f"data.val_path={file}", "data.shard_tokens=100")
    made = prepare(c.data, c.tokenizer, False)
    assert [shard.documents for shard in bins.open_bins(made.folder, "val").shards].count(0) > 1
    found = list(ScoredDocuments(config("data=bins", f"data.path={made.folder}"), None).read(made.tokenizer))
    assert [bytes(ids.astype(np.uint8)).decode() for ids, _ in found] == texts
    assert [size for _, size in found] == [len(text.encode()) for text in texts]


@pytest.mark.parametrize("splits", [["train"], ["train", "validation"]])
def test_pairs_of_the_hub_are_those_of_the_run(
    splits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    repository = tmp_path / "repository"
    (repository / "data").mkdir(parents=True)
    files = [{"split": name, "path": f"data/{name}.parquet"} for name in splits]
    (repository / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: " + json.dumps(files) + "\n---\n"
    )
    for name in splits:
        columns = {key: [f"{key} of {name} {n}" for n in range(60)] for key in ("question", "chosen", "rejected")}
        pq.write_table(pa.table(columns), repository / "data" / f"{name}.parquet")
    c = config("data=preference", f"data.name={repository}", "data.columns={prompt: question}",
               "data.chat_template=zephyr", "data.max_length=null",
               "objective=dpo")  # fmt: skip
    made = prepare_examples(c.data, c.tokenizer, PairRowEncoder, False)
    held = made.split("val")
    assert held is not None
    assert len(held) == (2 * 60 if "validation" in splits else 2 * 6)  # a tenth, as 0.02 would be a single row
    named, words = data.chosen(c, None)
    assert words == f"{repository}, {'split validation' if 'validation' in splits else 'held out of split train'}"
    encoded, real = set(), PairRowEncoder.encode
    monkeypatch.setattr(
        PairRowEncoder, "encode", lambda self, *row: encoded.add(row[0]["question"]) or real(self, *row)
    )
    for asked in (c, named):
        found = data.rows(asked, made.folder / "tokenizer").examples
        assert [found.read(i)[0].tolist() for i in range(len(found))] == [
            held.read(i)[0].tolist() for i in range(len(held))
        ]
    assert len(encoded) == len(held) // 2  # none of the training rows


@pytest.mark.parametrize(("argv", "words"), [
    (["data=text_mixture", "data.mixture=[{path: a.txt},{path: b.txt}]"], "mixture, validation part"),
    (["data=bins", "data.path=outputs/bins"], "outputs/bins, validation part"),
    (["data=text", "data.path=a.txt"], "all of a.txt"),
    (["data=jsonl", "data.path=[a.jsonl,b.jsonl]"], "all of a.jsonl, b.jsonl"),
])  # fmt: skip
def test_the_title_says_what_is_evaluated_on(argv: list[str], words: str) -> None:
    assert data.chosen(config(*argv), None)[1] == words


@pytest.mark.parametrize("argv", [
    ["data.val_path={}/a.txt"], ["data.val_path={}/a.jsonl"], ["data.val_path={}"], ["data=python_stdlib",
    "data.val_path={}/a.txt"], ["data=text_mixture", "data.mixture=[{{path: b.txt}}]", "data.val_path={}/a.txt"],
])  # fmt: skip
def test_files_that_are_named_alone_are_what_is_evaluated_on(argv: list[str], tmp_path: Path) -> None:
    """Without data=..., the default data is the standard library, whatever files are named."""
    name = argv[-1].rpartition("/")[2] if argv[-1].endswith(("txt", "jsonl")) else "a.txt"
    if name == "a.txt":
        (tmp_path / name).write_text("some text")
    else:
        written(tmp_path / name, ["some text"])
    named, _ = data.chosen(config(*(word.format(tmp_path) for word in argv)), None)
    own = tokenizers.load_or_train(TokenizerConfig(kind="bytes"), lambda _: iter(()))
    found = [bytes(ids.astype(np.uint8)).decode() for ids, _ in ScoredDocuments(named, None).read(own)]
    assert found == ["some text"]


def test_bytes_of_a_token_that_is_a_part_of_a_character() -> None:
    """What is scored of a text without its first token (evaluate.start_token=false) are the bytes of the others."""
    text = "日本 é\ufffd"
    own = tokenizers.load_or_train(TokenizerConfig(kind="bytes"), lambda _: iter(()))
    assert [data.bytes_of(token, own) for token in own(text)["input_ids"]] == [1] * len(text.encode())
    letters = tokenizers.load_or_train(TokenizerConfig(kind="char"), lambda _: iter([text]))
    assert [data.bytes_of(token, letters) for token in letters(text)["input_ids"]] == [3, 3, 1, 2, 3]
    fallback = Backend(
        models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[], byte_fallback=True)
    )
    fallback.decoder = decoders.ByteFallback()
    ids = tokenizers._wrap(fallback)("é")["input_ids"]
    assert [data.bytes_of(token, tokenizers._wrap(fallback)) for token in ids] == [1, 1]


def test_bytes_of_bins_don_t_depend_on_how_the_tokenizer_tidies_up(tmp_path: Path) -> None:
    file = written(tmp_path / "texts.jsonl", ["a , b .", "it 's"])
    c = config("data=jsonl", f"data.path={file}", f"data.val_path={file}")
    made = prepare(c.data, c.tokenizer, False)
    settings = made.folder / "tokenizer/tokenizer_config.json"
    settings.write_text(settings.read_text().replace('spaces": false', 'spaces": true'))
    tokenizer = tokenizers.load_folder(made.folder / "tokenizer")
    assert tokenizer.clean_up_tokenization_spaces
    found = ScoredDocuments(config("data=bins", f"data.path={made.folder}"), None).read(tokenizer)
    assert [size for _, size in found] == [7, 5]


def test_characters_that_a_tokenizer_lacks_are_counted(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("abä cab ößc")
    c = config("data=text", f"data.path={tmp_path / 'other.txt'}", f"data.val_path={tmp_path / 'other.txt'}")
    for kind, count in (("char", 3), ("bytes", 0)):
        own = tokenizers.load_or_train(TokenizerConfig(kind=kind), lambda _: iter(["abc " * 20]))
        documents = ScoredDocuments(c, None)
        for _ in range(2):
            assert len(list(documents.read(own))) == 1
            assert documents.unknown == count
        own.unk_token = own.eos_token  # as in GPT-2's tokenizer; whole bins hold many
        assert tokenizers.unknown_token(own) is None


class Rhymes(ChatRows):
    """A row format of rows {line, rhyme}."""

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        ids = self.chat.tokenizer(f"{row['line']} / {row['rhyme']}")["input_ids"]
        return Encoded([(ids, [at > len(row["line"]) for at in range(len(ids))])])


def test_a_first_token_is_not_scored(tmp_path: Path) -> None:
    with BinWriter(tmp_path, "val", "uint16", 100, masked=True) as writer:
        for length in (1, 4):
            writer.append(np.arange(length), np.ones(length), ends_document=True)
        shards = bins.open_shards(tmp_path, "uint16", writer.close())
    found = data.ScoredRows(Examples(shards), {}, [], "")
    assert [window.scored.tolist() for window in _examples(found, 2)] == [[False], [False, True, True, True]]


UNPAIRED = {"prompt": "What is {}?", "completion": "It is {}.", "label": True}


@pytest.mark.parametrize(("words", "row"), [
    (["objective=kto", "data=unpaired_jsonl"], UNPAIRED),
    (["data=chat_jsonl", "data.rows=test_evaluated_data.Rhymes"], {"line": "line {}", "rhyme": "rhyme {}"}),
])  # fmt: skip
def test_rows_are_read_in_the_format_of_the_run(words: list[str], row: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [{key: v.format(n) if isinstance(v, str) else n % 3 > 0 for key, v in row.items()} for n in range(30)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    c = config(*words, f"data.path={file}", "data.chat_template=zephyr", "data.max_length=null", "data.packing=off",
               "data.val_fraction=0.2", "run.allow_target=[test_evaluated_data]")  # fmt: skip
    corpus = prepare_corpus(c)
    held: Any = corpus.val
    assert data.kind_of(c) == "conversations"
    found = data.rows(c, corpus.folder / "tokenizer")
    wanted = np.flatnonzero(held.examples.labels) if "label" in row else np.arange(len(held.examples))
    assert len(found.examples) == len(wanted) == (4 if "label" in row else 6)
    for place, stored in enumerate(wanted.tolist()):
        for ours, theirs in zip(found.examples.read(place), held.examples.read(stored), strict=True):
            assert ours.tolist() == theirs.tolist()
    if "label" in row:  # only desirable answers are references
        assert list(found.questions) == list(range(4))


def test_questions_are_those_of_the_examples_that_weights_leave(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        turns = [(f"Question {n}?", f"Answer {n} of {file.stem}.") for n in range(5)]
        pairs = [[{"role": "user", "content": ask}, {"role": "assistant", "content": said}] for ask, said in turns]
        file.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in pairs))
    parts = [
        f"{{path: {file}, val_path: {file}, weight: {weight}}}" for file, weight in zip(files, (2, 0.4), strict=True)
    ]
    c = config("data=mixture", f"data.mixture=[{','.join(parts)}]", "data.chat_template=zephyr", "objective=sft",
               "data.max_length=null")  # fmt: skip
    tokenizer = tmp_path / "tokenizer"
    tokenizers.save(tokenizers.load_or_train(c.tokenizer, lambda _: iter(())), tokenizer)
    found = data.rows(c, tokenizer)
    assert len(found.examples) == 10 + 2
    assert list(found.questions) == [0, 2, 4, 6, 8, 10, 11]
    for place, question in found.questions.items():
        ids, learned = found.examples.read(place)
        assert bytes(ids[learned][:-1].astype(np.uint8)).decode() == question["reference"]


def test_a_runs_config_does_not_say_where_an_evaluation_writes(tmp_path: Path) -> None:
    own = rules.check(rules.compose(["data=text", "data.path=x", f"data.cache_dir={tmp_path}/theirs"]))
    found, _ = data.chosen(rules.check(rules.compose([f"data.cache_dir={tmp_path}/mine"])), own)
    assert found.data.cache_dir == f"{tmp_path}/mine"


def test_texts_are_compared_by_the_digest_of_their_tokens(tmp_path: Path) -> None:
    own = tokenizers.load_or_train(TokenizerConfig(kind="bytes"), lambda _: iter(()))

    def digest(texts: list[str], limit: int | None = None) -> str:
        file = written(tmp_path / "a.jsonl", texts)
        words = config("data=jsonl", f"data.path={file}", f"data.val_path={file}")
        found = ScoredDocuments(words, limit)
        assert len(list(found.read(own))) == min(len(texts), limit or len(texts))
        return found.digest.hexdigest()

    assert digest(["abc", "de"]) == digest(["abc", "de"])
    assert len({digest(texts) for texts in (["abc", "de"], ["abd", "de"], ["abc"], ["de", "abc"])}) == 4
    assert digest(["abc", "de"], limit=1) == digest(["abc"])
