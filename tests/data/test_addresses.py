"""Data at addresses that fsspec opens gives the same files, rows and tokens as local copies of the files."""

import gzip
import http.server
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from inprocess import message, run
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.examples.row_format import ChatRows
from lmtrain.data.sources import addresses, files, lines, tables
from lmtrain.data.sources.choose import open_source
from lmtrain.data.stream.source import Place, cut_shards, endless, open_stream
from lmtrain.data.text.encode import Encoder
from lmtrain.data.text.prepare import prepare
from lmtrain.data.tokenizers import load_or_train
from lmtrain.errors import ReadError, UserError
from support import REPO

ROWS = [f"row {n}: " + "ä" * (n % 50) for n in range(1500)]


@dataclass
class Server:
    """A folder served over HTTP, with `ranges` as object stores do, or without them as Python's own server does."""

    folder: Path
    ranges: bool = True
    tagged: bool = True  # whether responses have an ETag, which names the version of a file
    asked: list[tuple[str, str]] = field(default_factory=list)  # method and path of each request
    breaks_at: int | None = None  # the next response is cut off after this number of bytes
    base: str = ""

    def handler(self) -> type[http.server.SimpleHTTPRequestHandler]:
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(server.folder))

            def log_message(self, *args: Any) -> None:
                server.asked.append((self.command, self.path))

            def do_GET(self) -> None:
                path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
                if not server.ranges or not path.is_file():
                    return super().do_GET()
                content = path.read_bytes()
                start, last = 0, len(content) - 1
                if wanted is not None:
                    start, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups())  # type: ignore[union-attr]
                part = content[start : last + 1]
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(len(part)))
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(content)}")
                self.end_headers()
                self.wfile.write(part[: server.breaks_at])
                server.breaks_at = None

            def send_header(self, keyword: str, value: str) -> None:
                if keyword != "Last-Modified":
                    super().send_header(keyword, value)
                elif server.tagged:
                    super().send_header("ETag", f'"{value}"')

        return Handler


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "served")
    made.folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), made.handler()) as running:
        running.daemon_threads = True
        running.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that closes early
        made.base = f"http://127.0.0.1:{running.server_port}"
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield made
        running.shutdown()


@pytest.fixture
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]


def write_text(folder: Path) -> None:
    for name in ("b.txt", "a/c.txt", "a.txt", "notes.md", ".git/d.txt", "empty.txt"):
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("" if "empty" in name else f"{name} is ünique. " * 1500)


def write_jsonl_gz(folder: Path) -> None:
    for n in range(2):
        with gzip.open(folder / f"{n}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.write("\n".join(json.dumps({"text": row}) for row in ROWS[n::2]))


def write_zst(folder: Path) -> None:
    with pa.CompressedOutputStream(str(folder / "a.txt.zst"), "zstd") as file:
        file.write("\n".join(ROWS).encode())


def write_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"n": list(range(len(ROWS))), "text": ROWS}), folder / "a.parquet", row_group_size=400)


def write_arrow(folder: Path) -> None:
    table = pa.table({"text": ROWS})
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "text": write_text,
    "jsonl": write_jsonl_gz,
    "zst": write_zst,
    "parquet": write_parquet,
    "arrow": write_arrow,
}
OPTION = {"text": "text", "zst": "text", "parquet": "parquet"}


@pytest.mark.parametrize("kind", WRITERS)
def test_prepared_over_http_the_tokens_are_those_of_the_files_here(
    kind: str, server: Server, data_config: Callable[..., Any], tokenizer_config: Callable[..., Any]
) -> None:
    WRITERS[kind](server.folder)
    here, there = (
        prepare(data_config(OPTION.get(kind, "jsonl"), path=path, val_fraction=0.2), tokenizer_config("bytes"))
        for path in (str(server.folder), f"{server.base}/")
    )
    assert there.fingerprint == here.fingerprint  # the hashes of all tokens and document ends
    assert there.folder != here.folder
    assert [note.partition(": ")[2] for note in there.notes] == [note.partition(": ")[2] for note in here.notes]
    assert bool(there.notes) == (kind == "text")


def test_globs_find_what_they_find_here(server: Server, memory: Any) -> None:
    write_text(server.folder)
    for file in (p for p in server.folder.rglob("*") if p.is_file()):
        memory.pipe(f"/store/{file.relative_to(server.folder)}", file.read_bytes())
    for pattern in ("*.txt", "**/*.txt", "a/*", "[ab].txt", "a.txt", "a"):
        here, unread = files.find_files(str(server.folder / pattern), "text")
        for root in (server.base, "memory://store"):
            there, missed = files.find_files(f"{root}/{pattern}", "text")
            names = [str(p).rpartition("/store/" if root == "memory://store" else root + "/")[2] for p, _ in there]
            assert names == [str(p.relative_to(server.folder)) for p, _ in here], (root, pattern)
            assert len(missed) == len(unread)


def test_pairs_and_conversations_of_a_store_are_those_of_the_files_here(
    tmp_path: Path, memory: Any, data_config: Callable[..., Any], tokenizer_config: Callable[..., Any]
) -> None:
    rows = [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    memory.pipe("/chats.jsonl", (tmp_path / "chats.jsonl").read_bytes())
    found = []
    for path in (f"{tmp_path}/chats.jsonl", f"file://{tmp_path}/chats.jsonl", "memory://chats.jsonl"):
        cfg = data_config("chat_jsonl", path=path, chat_template="vicuna", max_length=256)
        found.append(prepare_examples(cfg, tokenizer_config("bytes"), ChatRows, progress=False))
    assert len({one.fingerprint for one in found}) == 1
    assert found[0].folder == found[1].folder != found[2].folder  # a file:// address is the local file


def test_what_changed_is_prepared_again_and_nothing_is_read_to_tell(
    server: Server, data_config: Callable[..., Any]
) -> None:
    (server.folder / "a.jsonl").write_text('{"text": "one"}\n')
    cfg = data_config("jsonl", path=f"{server.base}/a.jsonl")
    before = open_source(cfg).resolved
    assert open_source(cfg).resolved == before
    assert {method for method, _ in server.asked} == {"HEAD"}
    (server.folder / "a.jsonl").write_text('{"text": "two"}\n')  # same length, other modification time
    os.utime(server.folder / "a.jsonl", (1_000_000_000, 1_000_000_000))
    assert open_source(cfg).resolved != before


def test_a_server_that_says_nothing_of_the_version_has_the_bytes_read(
    server: Server, data_config: Callable[..., Any]
) -> None:
    server.tagged = False
    (server.folder / "a.jsonl").write_text('{"text": "one"}\n')
    cfg = data_config("jsonl", path=f"{server.base}/a.jsonl")
    before = open_source(cfg).resolved
    (server.folder / "a.jsonl").write_text('{"text": "two"}\n')
    assert open_source(cfg).resolved != before


STREAMED = {"jsonl": write_jsonl_gz, "parquet": write_parquet, "text": write_text}


@pytest.mark.parametrize("kind", STREAMED)
def test_a_stream_goes_on_anywhere_without_files_that_are_read(
    kind: str, server: Server, data_config: Callable[..., Any], tokenizer_config: Callable[..., Any]
) -> None:
    STREAMED[kind](server.folder)
    tokenizer = load_or_train(tokenizer_config("bytes"), lambda _: iter(()))
    encoder = Encoder(tokenizer, tokenizer.eos_token_id)
    option = OPTION.get(kind, "jsonl")
    here, there = (open_stream(data_config(option, path=p)) for p in (str(server.folder), f"{server.base}/"))
    wanted = list(itertools.islice(cut_shards(endless(here, encoder, Place(), Place()), 4001), 10))
    for after in (0, 4, 8):
        server.asked.clear()
        begin = Place() if after == 0 else wanted[after - 1].end
        found = list(itertools.islice(cut_shards(endless(there, encoder, Place(), begin), 4001), 2))
        assert [s.end for s in found] == [s.end for s in wanted[after : after + 2]]
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(found, wanted[after : after + 2], strict=True))
        read = {path for _, path in server.asked}
        known = [f"/{p.path.removeprefix(server.base + '/')}" for p, _ in there.files]  # type: ignore[attr-defined]
        assert not read & set(known[: begin.part])


def test_a_transfer_that_breaks_off_is_an_error_that_is_tried_again(
    server: Server, data_config: Callable[..., Any]
) -> None:
    write_jsonl_gz(server.folder)
    source = open_stream(data_config("jsonl", path=f"{server.base}/*.gz"))
    server.breaks_at = 1000
    with pytest.raises(ReadError, match=r"0\.jsonl\.gz can't be read: "):
        list(source.rows(0, 0))
    assert [block.text for block in source.rows(0, 0)] == ROWS[::2]
    (server.folder / "1.jsonl.gz").unlink()
    with pytest.raises(ReadError, match=r"1\.jsonl\.gz can't be read: "):
        list(source.rows(1, 0))


def test_files_longer_than_a_block_need_a_server_with_ranges(server: Server) -> None:
    text = "".join(f"{n}\n" for n in range(1_200_000))  # 8 MB; fsspec requests 5 MB at first
    (server.folder / "a.txt").write_text(text)
    [(file, _)], _ = files.find_files(f"{server.base}/a.txt", "auto")
    assert "".join(lines.text_blocks(file, 1 << 20)) == text
    assert "".join(lines.text_blocks(file, 1 << 20, start=7_000_000)) == text[7_000_000:]
    server.ranges = False
    with pytest.raises(ReadError, match=r"sends only whole files \(no range requests\): download the file"):
        list(lines.text_blocks(file, 1 << 20))


def test_row_groups_before_the_first_row_are_not_read(server: Server) -> None:
    table = pa.table({"text": [f"{n:08d}" * 100 for n in range(40_000)]})
    pq.write_table(table, server.folder / "a.parquet", row_group_size=1000, compression="none", use_dictionary=False)
    [(file, _)], _ = files.find_files(f"{server.base}/a.parquet", "auto")
    assert isinstance(file, addresses.Address)
    server.asked.clear()
    number, row = next(tables.parquet_from(file, ["text"], 39_500))
    assert (number, row["text"][:8]) == (39_500, "00039500")
    assert len(server.asked) <= 3  # the footer, which locates the row groups, and one block


REFUSED = {
    "s3://bucket/*.jsonl": r"s3:// needs a package that is not installed: pip install s3fs fsspec==",
    "gs://bucket/a.txt": r"pip install gcsfs fsspec==",
    "nowhere://bucket/a.txt": r"Protocol not known: nowhere",
    "memory://nothing/*.txt": r"data.path=memory://nothing/\*.txt: no such file or folder, and as a glob",
    "http://127.0.0.1:1/a.txt": r"data.path=http://127.0.0.1:1/a.txt can't be read: .*Connect call failed",
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_opened_is_one_message(
    path: str, data_config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError, match=REFUSED[path]):
        open_source(data_config("jsonl", path=path))


def test_a_missing_object_and_a_forbidden_one(server: Server, data_config: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"/a\.txt: no such file or folder"):
        open_source(data_config(path=f"{server.base}/a.txt"))
    (server.folder / "a.txt").write_text("")
    with pytest.raises(UserError, match=r"/a\.txt is empty"):
        open_source(data_config(path=f"{server.base}/a.txt"))


def test_train_from_an_address_and_again_from_another_folder(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (server.folder / "a.txt").write_text("the cat sees a house. " * 500)
    words = ["model=gpt_nano", "model.hidden_size=32", "model.num_attention_heads=2", "model.num_hidden_layers=1",
             "tokenizer=bytes", "data.seq_len=32", "trainer.accelerator=cpu", "trainer.val_check_interval=2",
             "data.global_batch_size=2", "data.micro_batch_size=2", "logger=none", "export.enabled=false",
             "callbacks.samples.every_n_validations=0", f"run.dir={tmp_path}/run"]  # fmt: skip
    address = f"{server.base}/a.txt?download=true"
    monkeypatch.chdir(tmp_path)
    first = run("train", f"data.path={address}", "trainer.max_steps=2", *words)
    assert first.code == 0, first.err
    assert address in (tmp_path / "run" / "config.yaml").read_text()
    monkeypatch.chdir(REPO)
    again = run("train", f"data.path={address}", "trainer.max_steps=4", "run.resume=auto", *words)
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == 4

    evaluation = ["evaluate", f"run_dir={tmp_path}/run", "evaluate.resamples=10", "evaluate.context=32"]
    asked = len(server.asked)
    refused = run(*evaluation)
    assert refused.code == 2
    assert f"{tmp_path}/run/config.yaml sets data.path={address}, which counts only" in message(refused.err)
    assert len(server.asked) == asked
    trusted = run(*evaluation, "--trust", f"{tmp_path}/run/config.yaml")
    assert trusted.code == 0, trusted.err


class Broken(MemoryFileSystem):
    """Files whose reading raises `error`."""

    error: BaseException = OSError()

    def open(self, *_: Any, **__: Any) -> Any:
        return self

    def seek(self, at: int) -> None:
        raise self.error


def why(error: BaseException, path: str = "a") -> BaseException:
    """Returns what reading a file raises where its library raises `error`."""
    fs = Broken(skip_instance_cache=True)
    fs.error = error
    with pytest.raises(BaseException) as raised:  # which one is what is asked
        addresses.opened(addresses.Address(fs, path, path, 9, "1")).read()
    return raised.value


def test_errors_of_any_library_become_os_errors_that_say_why() -> None:
    own, memory = OSError("no route"), MemoryError()
    assert why(own) is own
    assert why(memory) is memory
    other = RuntimeError("wrapped")
    other.__cause__ = KeyError("the reason")
    found = why(other)
    assert isinstance(found, OSError)
    assert (str(found), found.__cause__) == ("'the reason'", other)
    caused = OSError("said late")
    caused.__cause__ = ValueError("said first")
    assert str(why(caused)) == "said first"
    assert "sends only whole files" in str(why(ValueError("no ranges"), "https://here/a"))
    assert str(why(ValueError("no ranges"))) == "no ranges"


def test_an_address_is_read_from_any_place() -> None:
    fs = MemoryFileSystem(skip_instance_cache=True)
    fs.pipe("/places", bytes(range(9)))
    file = addresses._Reading(addresses.Address(fs, "/places", "memory://places", 9, "1"))
    assert (file.seek(4), file.read(2), file.seek(1, 1), file.read(1), file.seek(-1, 2), file.read(5)) == (
        4,
        b"\4\5",
        7,
        b"\7",
        8,
        b"\10",
    )
