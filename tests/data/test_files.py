"""Every file format gives the same documents, and every bad file one message that names the location."""

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from texts import documents

from lmtrain.data.sources import choose as sources
from lmtrain.data.sources.tables import read_table
from lmtrain.errors import UserError

TEXTS = ["first\ndocument", "second", "  dritter: äöü 日本 🙂\r\n", "fourth\n\nwith a gap"]


def read(cfg, split="train"):
    return list(documents(cfg, split))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows():
    return [{"text": t, "title": f"title {i}", "n": i} for i, t in enumerate(TEXTS)]


def as_jsonl(folder):
    write_jsonl(folder / "a.jsonl", rows())


def as_jsonl_gz(folder):
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps(row) for row in rows()))


def as_json(folder):
    (folder / "a.json").write_text(json.dumps(rows(), indent=2))


def as_json_lines_called_json(folder):
    write_jsonl(folder / "a.json", rows())


def as_parquet(folder):
    pq.write_table(pa.Table.from_pylist(rows()), folder / "a.parquet", row_group_size=2)


def as_arrow_file(folder):
    table = pa.Table.from_pylist(rows())
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def as_saved_dataset(folder):
    datasets.Dataset.from_list(rows()).save_to_disk(folder, num_shards=2)


FORMATS = [as_jsonl, as_jsonl_gz, as_json, as_json_lines_called_json, as_parquet, as_arrow_file, as_saved_dataset]


@pytest.mark.parametrize("make", FORMATS)
def test_formats(make, tmp_path, data_config):
    folder = tmp_path / "corpus"
    folder.mkdir()
    make(folder)
    assert read(data_config("jsonl", path=str(folder), val_fraction=0)) == TEXTS
    two = data_config("jsonl", path=str(folder), val_fraction=0, text_column=["title", "text"], column_separator=": ")
    assert read(two) == [f"title {i}: {t}" for i, t in enumerate(TEXTS)]
    with pytest.raises(UserError, match=r"no column 'txt'; it has: .*text.*data\.text_column=text"):
        read(data_config("jsonl", path=str(folder), text_column="txt"))
    with pytest.raises(UserError, match=r"column 'n' holds int .*not text"):
        read(data_config("jsonl", path=str(folder), text_column="n"))


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_text_files_are_whole_documents(suffix, tmp_path, data_config):
    for i, text in enumerate(TEXTS):
        opener = gzip.open if suffix.endswith("gz") else open
        with opener(tmp_path / f"{i}{suffix}", "wb") as file:
            file.write(text.encode())
    assert read(data_config(path=str(tmp_path), val_fraction=0)) == TEXTS
    assert read(data_config(path=str(tmp_path / f"[02]{suffix}"), val_fraction=0)) == [TEXTS[0], TEXTS[2]]
    listed = [str(tmp_path / f"3{suffix}"), str(tmp_path / f"1{suffix}")]
    assert read(data_config(path=listed, val_fraction=0)) == [TEXTS[3], TEXTS[1]]


def test_paragraphs_and_lines(tmp_path, data_config):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\n \nthree\r\n\nfour")
    path = str(tmp_path / "a.txt")
    assert read(data_config(path=path, sample_by="paragraph", val_fraction=0)) == ["one\ntwo", "three", "four"]
    lines = ["one", "two", " ", "three", "four"]
    assert read(data_config(path=path, sample_by="line", val_fraction=0)) == lines
    assert read(data_config(path=path, sample_by="line", val_fraction=0, min_length=4)) == ["three", "four"]
    joined = read(data_config(path=path, document_start="^t", val_fraction=0))
    assert joined == ["one\n", "two\n\n \n", "three\r\n\nfour"]


def test_a_validation_path(tmp_path, data_config):
    (tmp_path / "train.txt").write_text("to train on")
    (tmp_path / "val.txt").write_text("to validate on")
    cfg = data_config(path=str(tmp_path / "train.txt"), val_path=str(tmp_path / "val.txt"))
    assert (read(cfg), read(cfg, "val")) == (["to train on"], ["to validate on"])


def test_num_samples_counts_documents_that_are_kept(tmp_path, data_config):
    write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in ("", "x", None, "yy", "zzz", "tail")])
    cfg = data_config("jsonl", path=str(tmp_path), val_fraction=0, num_samples=2, min_length=2)
    assert read(cfg) == ["yy", "zzz"]


def test_a_path_wins_over_a_hub_name(tmp_path, data_config):
    (tmp_path / "input.txt").write_text("0123456789" * 10)
    cfg = data_config("tiny_shakespeare", path=str(tmp_path / "input.txt"))
    assert read(cfg) == ["0123456789" * 9]
    assert read(cfg, "val") == ["0123456789"]


def test_python_stdlib_is_deterministic_and_free_of_tests(data_config):
    cfg = data_config("python_stdlib")
    train, val = read(cfg), read(cfg, "val")
    assert train == read(cfg)
    assert 5e6 < sum(map(len, train)) < 3e7
    assert 0.02 < len(val) / (len(train) + len(val)) < 0.06
    assert any("class JSONDecoder" in d for d in train + val)
    assert not any("class BaseEventLoopTests" in d for d in train + val)


def test_a_blank_line_before_the_only_object_of_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\n{"text": "a"}\n')
    assert [row for _, row in read_table(tmp_path / "a.json", "json")] == [{"text": "a"}]


BAD_FILES = {
    "malformed line": (
        "a.jsonl", b'{"text": "fine"}\n{"text": "br', r"a\.jsonl, line 2: malformed JSON \(.*\): \{\"text\": \"br",
    ),
    "malformed list": ("a.json", b'[\n{"text": "fine"},\n{"text" 1}]', r"a\.json, line 3: malformed JSON .*text"),
    "a line that is no object": ("a.jsonl", b"[1, 2]\n", r"line 1: a JSON object .* needed, found \[1, 2\]"),
    "an object over several lines": (
        "a.json", b'{\n "version": 1,\n "data": [{"text": "a"}]\n}\n',
        r"a\.json holds one object with 'version', 'data'; a list of objects, .* its key 'data' has a list: write that",
    ),
    "a malformed first line": ("a.json", b'{"text": \n{"text": "a"}\n', r"a\.json, line 1: malformed JSON"),
    "a number in json": ("a.json", b"17", r"a\.json holds 17; a list of objects"),
    "a column missing in one row": (
        "a.jsonl", b'{"text": "a"}\n\n{"body": "b"}\n', r"line 3 has no column 'text'; it has: body.*text_column=body",
    ),
    "not UTF-8": ("a.txt", b"f\xc3\xa4r\nGr\xfc\xdfe\n", r"a\.txt, line 2: not UTF-8 .*Gr\\xfc\\xdfe"),
    "not UTF-8 in lines": ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl, line 1: not UTF-8"),
    "not parquet": ("a.parquet", b"PAR1 no, not really", r"a\.parquet can't be read as parquet"),
    "not Arrow": ("a.arrow", b"ARROW1 no, not really either", r"a\.arrow can't be read as Arrow"),
    "not gzip": ("a.txt.gz", b"plain text", r"a\.txt\.gz can't be read: Not a gzipped file"),
    "an empty file": ("a.txt", b"", r"a\.txt is empty"),
    "an unknown suffix": ("a.docx", b"PK", r"a\.docx: the format can't be told from the suffix.*data\.format=text"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(case, tmp_path, data_config):
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(data_config("jsonl", path=str(tmp_path / name), val_fraction=0))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_two_columns_of_one_name(format, tmp_path, data_config):
    table = pa.table([["a"], ["b"], ["c"]], names=["text", "text", "other"])
    path = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    for columns in (["text"], None):
        with pytest.raises(UserError, match=rf"a\.{format} has several columns named 'text': rename all but one"):
            list(read_table(path, format, columns))
    assert [row for _, row in read_table(path, format, ["other"])] == [{"other": "c"}]


def test_bad_paths(tmp_path, data_config):
    with pytest.raises(UserError, match=r"data\.path=.*nowhere: no such file or folder"):
        read(data_config(path=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"data\.path is not set"):
        read(data_config())
    with pytest.raises(UserError, match="holds no text file"):
        read(data_config(path=str(tmp_path)))
    with pytest.raises(UserError, match=r"data\.val_path=.* set data\.path too"):
        read(data_config("wikitext", val_path=str(tmp_path)))
    with pytest.raises(UserError, match=r"data\.document_start='\(' is not a regular expression"):
        read(data_config(path=str(tmp_path), document_start="("))
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(UserError, match=r"holds jsonl and parquet files: choose with data\.format"):
        read(data_config("jsonl", path=str(tmp_path)))


def test_a_saved_dataset_dict_names_its_splits(tmp_path, data_config):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows())}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"holds the splits train: set data\.path=.*saved/train"):
        read(data_config("parquet", path=str(tmp_path / "saved")))
    assert read(data_config("parquet", path=str(tmp_path / "saved" / "train"), val_fraction=0)) == TEXTS


def as_csv(folder):
    text = "".join(f'{r["n"]},"{r["title"]}","{r["text"]}"\r\n' for r in rows())
    (folder / "a.csv").write_bytes(("n,title,text\r\n" + text).encode())


def test_csv_holds_the_same_texts_and_numbers_are_text(tmp_path, data_config):
    as_csv(tmp_path)
    assert read(data_config("jsonl", path=str(tmp_path), val_fraction=0)) == TEXTS
    numbers = data_config("jsonl", path=str(tmp_path), val_fraction=0, text_column="n")
    assert read(numbers) == ["0", "1", "2", "3"]
    with pytest.raises(UserError, match=r"a\.csv has no column 'txt'; it has: n, title, text"):
        read(data_config("jsonl", path=str(tmp_path), text_column="txt"))


def test_zstd_in_several_frames(tmp_path, data_config):
    frames = [pa.compress(part.encode(), codec="zstd", asbytes=True) for part in TEXTS]
    (tmp_path / "a.txt.zst").write_bytes(b"".join(frames))
    assert read(data_config(path=str(tmp_path), val_fraction=0)) == ["".join(TEXTS)]


def test_files_of_a_folder_that_are_not_read_are_counted_and_named(tmp_path, data_config):
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    (folder / ".git").mkdir()
    write_jsonl(folder / "a.jsonl", rows())
    write_jsonl(folder / ".git" / "hidden.jsonl", rows())
    (folder / "empty.jsonl").write_text("")
    for name in ("README.md", "b.docx", "more/c.pdf", "more/d.parquet.gz", "e.jsonl.zip"):
        (folder / name).write_text("x")
    (folder / "dataset_info.json").write_text("{}")
    cfg = data_config("jsonl", path=str(folder), val_fraction=0)
    source = sources.open_source(cfg)
    named = "README.md, b.docx, e.jsonl.zip, empty.jsonl (empty), c.pdf and 1 more"
    assert source.notes == [f"{folder}: 6 files are not read: {named}"]
    assert read(cfg) == TEXTS
    listed = data_config("jsonl", path=str(folder / "*.jsonl"), val_fraction=0)
    assert sources.open_source(listed).notes == [f"{folder}/*.jsonl: 1 file is not read: empty.jsonl (empty)"]
    (folder / "b.csv").write_text("text\nb\n")
    with pytest.raises(UserError, match=r"holds csv and jsonl files: choose with data\.format"):
        read(cfg)


@pytest.mark.parametrize("document_start", [None, "a"])
def test_half_a_surrogate_pair(document_start, tmp_path, data_config):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "a.jsonl").open("a").write('{"text": "a\\ud83d"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: the text holds half a surrogate pair"):
        read(data_config("jsonl", path=str(tmp_path / "a.jsonl"), document_start=document_start))
