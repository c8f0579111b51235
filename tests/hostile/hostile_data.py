"""Data from an attacker: text for pages and terminals, archives, bombs, links, addresses, false token metadata."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cases import SCRIPTS, STEERS, Case, Place
from hostile_targets import payloads

MiB = 1 << 20


def look(place: Place, data: Any, *words: str, option: str = "text") -> list[str]:
    """Returns the command that inspects data at a path and writes a page about it."""
    page = place.work / "outputs" / "page.html"
    page.parent.mkdir(exist_ok=True)
    plain = [w for w in place.train(data=False) if not w.startswith("run.name")]
    return [
        "inspect",
        *plain[1:],
        f"data={option}",
        f"data.path={_quoted(str(data))}",
        "data.val_fraction=0.2",
        f"inspect.html={page}",
        *words,
    ]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def trained(place: Place, data: Any, *words: str, option: str = "text") -> list[str]:
    return [
        *place.train(data=False),
        f"data={option}",
        f"data.path={_quoted(str(data))}",
        "data.val_fraction=0.2",
        *words,
    ]


def cases() -> Iterator[Case]:
    yield from _texts()
    yield from _chats()
    yield from _tables()
    yield from _archives()
    yield from _odd_files()
    yield from _addresses()
    yield from _prepared()


def _texts() -> Iterator[Case]:
    for i, text in enumerate([*SCRIPTS, *STEERS]):
        suffix, option = ((".txt", "text"), (".jsonl", "jsonl"))[i % 2]

        def make(place: Place, text: str = text, suffix: str = suffix, option: str = option, i: int = i) -> list[str]:
            if suffix == ".txt":
                file = place.text(f"a{suffix}", f"{text} ".replace("{", "(") * 80)
            else:
                file = place.jsonl(f"a{suffix}", [{"text": f"{text} " * 10}] * 20)
            return (look if i % 4 < 3 else trained)(place, file, option=option)

        must = None if "\0" in text else "harmless"
        yield Case("text in a page", f"{text!r}{suffix}"[:60], make, (), must)
    for i, name in enumerate(
        (
            "<b onclick=pwnedjs()>.txt",
            "\x1b]0;a\x07.txt",
            "\u202egnp.txt",
            "$(touch a).txt",
            "-rf.txt",
            "a;touch b;.txt",
            "'\"\\.txt",
            "a\nb.txt",
            "${oc.env:PLANTED_TOKEN}.txt",
            "%s%n.txt",
            "\udcff.txt",
        )
    ):

        def named(place: Place, name: str = name, i: int = i) -> list[str]:
            folder = place.stranger / "data"
            folder.mkdir()
            (folder / name).write_text("good text of many words " * 100)
            (folder / "b.txt").write_text("good text of many words " * 100)
            return (look, trained)[i % 2](place, folder)

        yield Case("name of a file", repr(name), named)
    for name in ("a" * 250, "\u00e9" * 120):

        def long(place: Place, name: str = name) -> list[str]:
            folder = place.stranger / "data"
            folder.mkdir()
            (folder / name).write_text("good text of many words " * 100)
            return look(place, folder / name, "data.format=text")

        yield Case("name of a file", f"{len(name)} {name[0]}s", long)


def _chats() -> Iterator[Case]:
    def asked(text: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}

    rows: dict[str, Any] = {
        "scripts": asked(" ".join(SCRIPTS)),
        "escapes": asked(" ".join(STEERS[:-1])),
        "a template": asked("{{ cycler.__init__.__globals__ }}"),
        "special tokens": asked("<|im_end|><|endoftext|></s>[INST]"),
        "a role with script": {"messages": [{"role": SCRIPTS[0], "content": "a"}]},
        "a role with escapes": {"messages": [{"role": STEERS[0], "content": "a"}]},
        "content that is a list": asked([{"type": "image", "url": "http://127.0.0.1:9/"}]),
        "content that is a file": asked([{"type": "image", "path": "{key}"}]),
        "content that is a dict": asked({"a": 1}),
        "content of null": asked(None),
        "keys with script": {SCRIPTS[0]: "a"},
        "tools": {**asked("a"), "tools": [{"type": "function", "function": {"name": SCRIPTS[0]}}]},
        "a template of its own": {
            **asked("a"),
            "chat_template": "{{ lipsum.__globals__ }}",
            "chat_template_kwargs": {"a": 1},
        },
        "many turns": {"messages": [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(5000)]},
    }
    for name, row in rows.items():

        def make(place: Place, row: Any = row) -> list[str]:
            file = place.jsonl("a.jsonl", [place.filled(row)] * 10)
            return look(place, file, "objective=sft", "data.chat_template=chatml", option="chat_jsonl")

        yield Case("conversation", name, make)
    pair = {"prompt": SCRIPTS[0], "chosen": SCRIPTS[1], "rejected": SCRIPTS[2]}
    for objective, option, row in (
        ("dpo", "preference_jsonl", pair),
        ("kto", "unpaired_jsonl", {"prompt": SCRIPTS[0], "completion": SCRIPTS[2], "label": True}),
    ):
        for what in ("scripts", "escapes"):

            def compared(
                place: Place, objective: str = objective, option: str = option, row: Any = row, what: str = what
            ) -> list[str]:
                told = {k: (STEERS[0] if what == "escapes" and isinstance(v, str) else v) for k, v in row.items()}
                other = {**told, "label": False} if "label" in told else told
                file = place.jsonl("a.jsonl", [told, other] * 10)
                return look(place, file, f"objective={objective}", "data.chat_template=chatml", option=option)

            yield Case("conversation", f"{objective}, {what}", compared)


def _tables() -> Iterator[Case]:
    def parquet(place: Place, table: Any, **options: Any) -> Path:
        file = place.stranger / "a.parquet"
        pq.write_table(table, file, **options)
        return file

    size = 8 * MiB
    bombs: dict[str, Callable[[], Any]] = {
        "one value of eight MiB": lambda: pa.table({"text": ["a" * size]}),
        "a million equal values": lambda: pa.table({"text": pa.array(["a" * 100] * (1 << 20)).dictionary_encode()}),
        "a column of another type": lambda: pa.table({"text": [1.5, 2.5]}),
        "no column of that name": lambda: pa.table({SCRIPTS[0]: ["a"]}),
        "escapes in a column": lambda: pa.table({STEERS[0]: ["a"]}),
        "no rows": lambda: pa.table({"text": pa.array([], pa.string())}),
        "lists": lambda: pa.table({"text": [[["a"]]]}),
        "nulls": lambda: pa.table({"text": pa.nulls(10)}),
        "metadata of pandas": lambda: pa.table({"text": ["a"]}).replace_schema_metadata(
            {"pandas": "{", "huggingface": '{"info": {"features": {"text": {"_type": "Pwned"}}}}'}
        ),
        "features with code": lambda: pa.table({"text": ["a"]}).replace_schema_metadata(
            {"huggingface": '{"info": {"features": {"text": {"_type": "os.system"}}}}'}
        ),
        "an extension type": lambda: pa.table({"text": ["a" * 20] * 20}).replace_schema_metadata(
            {"ARROW:extension:name": "pwned"}
        ),
    }
    for name, table in bombs.items():

        def make(place: Place, table: Any = table) -> list[str]:
            return look(place, parquet(place, table(), compression="zstd"), option="parquet")

        yield Case("table", f"parquet: {name}", make)
    files: dict[str, bytes] = {
        "parquet: a lie in the footer": b"PAR1" + b"\0" * 40 + b"\xff\xff\xff\x7fPAR1",
        "parquet: nothing": b"",
        "parquet: a pickle": pickle.dumps([1]),
        "arrow: a lie": b"ARROW1\0\0" + b"\xff" * 64 + b"ARROW1",
        "csv: quotes without end": b'text\n"' + b"a" * 200_000,
        "csv: formulas": b"text\n=cmd|'/c calc'!A1\n" * 20,
        "csv: many columns": b",".join(b"c%d" % i for i in range(20_000)) + b"\n",
        "csv: scripts": ("text\n" + "\n".join(f'"{s.replace(chr(34), chr(39))}"' for s in SCRIPTS) + "\n").encode(),
        "csv: NUL": b"text\na\0b\n" * 10,
        "json: deep": b"[" * 20_000,
        "json: a huge int": b'[{"text": ' + b"9" * 5000 + b"}]",
        "json: NaN": b'[{"text": NaN}]',
        "json: a pickle": pickle.dumps([1]),
        "jsonl: deep": b'{"text": ' + b"[" * 20_000 + b"\n",
        "jsonl: surrogates": b'{"text": "\\ud800"}\n' * 10,
        "jsonl: a key twice": b'{"text": "a", "text": "b"}\n' * 10,
        "jsonl: a huge int": b'{"text": ' + b"9" * 5000 + b"}\n",
        "jsonl: no end of line": b'{"text": "' + b"a" * MiB,
    }
    for name, content in files.items():
        suffix = name.partition(":")[0]

        def write(place: Place, content: bytes = content, suffix: str = suffix) -> list[str]:
            return look(place, place.text(f"a.{suffix}", content), option="parquet" if suffix == "parquet" else "jsonl")

        yield Case("table", name, write)


def _archives() -> Iterator[Case]:
    def zipped(names: dict[str, bytes]) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in names.items():
                archive.writestr(name, content)
        return out.getvalue()

    def tarred(members: list[tuple[str, bytes, str | None]]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as archive:
            for name, content, link in members:
                info = tarfile.TarInfo(name)
                info.size = 0 if link else len(content)
                if link:
                    info.type, info.linkname = tarfile.SYMTYPE, link
                archive.addfile(info, None if link else io.BytesIO(content))
        return out.getvalue()

    zeros = b"a" * (8 * MiB)
    made: dict[str, Callable[[], bytes]] = {
        "traversal.zip": lambda: zipped({"../../../PWNED": b"a", "/tmp/PWNED": b"a"}),
        "traversal.tar.gz": lambda: tarred([("../../../PWNED", b"a", None), ("/tmp/PWNED", b"a", None)]),
        "links.tar.gz": lambda: tarred([("a", b"", "/etc"), ("a/PWNED", b"a", None)]),
        "bomb.zip": lambda: zipped({"a.txt": zeros}),
        "bomb.txt.gz": lambda: gzip.compress(zeros, 1),
        "bomb.jsonl.gz": lambda: gzip.compress(b'{"text": "' + zeros + b'"}\n', 1),
        "bomb.txt.bz2": lambda: bz2.compress(zeros, 1),
        "bomb.txt.xz": lambda: lzma.compress(zeros, preset=0),
        "twice.txt.gz": lambda: gzip.compress(gzip.compress(b"good text " * 100)),
        "cut.txt.gz": lambda: gzip.compress(os.urandom(10_000))[:5000],
        "wrong.txt.gz": lambda: b"\x1f\x8b" + b"\0" * 50,
        "wrong.txt.zst": lambda: b"\x28\xb5\x2f\xfd\xff\xff\xff\xff\xff",
        "a name.txt.gz": lambda: b"\x1f\x8b\x08\x08\0\0\0\0\0\0../../PWNED\0" + gzip.compress(b"good text " * 100)[10:],
    }
    for name, content in made.items():

        def make(place: Place, name: str = name, content: Any = content) -> list[str]:
            file = place.text(name, content())
            words = [] if not name.startswith("bomb") else ["data.num_samples=3", "data.sample_by=line"]
            return look(
                place, file, *([] if ".jsonl" in name else words), option="jsonl" if ".jsonl" in name else "text"
            )

        yield Case("archive", name, make)


def _odd_files() -> Iterator[Case]:
    def script(place: Place) -> Path:
        payloads(place)
        folder = place.stranger / "data"
        folder.mkdir()
        (folder / "data.py").write_text(f"open({str(place.marker)!r}, 'w')\n")
        (folder / "a.txt").write_text("good text of many words " * 100)
        return folder

    def pickled(place: Place, name: str) -> Path:
        from hostile_runs import Runs

        return place.text(f"data/{name}", pickle.dumps(Runs(place.marker)))

    def npy(place: Place, name: str) -> Path:
        from hostile_runs import Runs

        file = place.stranger / name
        np.save(file.with_suffix(".npy"), np.array([Runs(place.marker)], dtype=object), allow_pickle=True)
        file.with_suffix(".npy").rename(file)
        return file

    def fifo(place: Place) -> Path:
        os.mkfifo(place.stranger / "a.txt")
        return place.stranger / "a.txt"

    def linked(place: Place, target: str) -> Path:
        (place.stranger / "a.txt").symlink_to(place.filled(target))
        return place.stranger / "a.txt"

    def circle(place: Place) -> Path:
        folder = place.stranger / "data"
        folder.mkdir()
        (folder / "again").symlink_to(folder)
        (folder / "a.txt").write_text("good text of many words " * 100)
        return folder

    def saved(place: Place, state: Any) -> Path:
        folder = place.stranger / "data"
        folder.mkdir()
        for name in ("state.json", "dataset_info.json", "dataset_dict.json"):
            (folder / name).write_text(json.dumps(place.filled(state)))
        return folder

    state = {
        "_data_files": [{"filename": "../../../home/.ssh/id_rsa"}],
        "_fingerprint": "../../PWNED",
        "_format_type": "os.system",
        "splits": ["../../home"],
        "_type": "Pwned",
    }
    makers: dict[str, tuple[Callable[[Place], Path], str]] = {
        "a loading script beside the text": (script, "text"),
        "a loading script": (lambda place: script(place) / "data.py", "text"),
        "a folder of a saved dataset": (lambda place: saved(place, state), "jsonl"),
        "a pickle as .jsonl": (lambda place: pickled(place, "a.jsonl"), "jsonl"),
        "a pickle as .pkl": (lambda place: pickled(place, "a.pkl"), "jsonl"),
        "a pickle as .parquet": (lambda place: pickled(place, "a.parquet"), "parquet"),
        "a pickled .npy": (lambda place: npy(place, "b.npy"), "text"),
        "a pickled .npy as text": (lambda place: npy(place, "b.txt"), "text"),
        "a FIFO": (fifo, "text"),
        "a link to zeros without end": (lambda place: linked(place, "/dev/zero"), "text"),
        "a link to random numbers": (lambda place: linked(place, "/dev/urandom"), "text"),
        "a link to a terminal": (lambda place: linked(place, "/dev/tty"), "text"),
        "a link to this process": (lambda place: linked(place, "/proc/self/environ"), "text"),
        "a link to itself": (lambda place: linked(place, "a.txt"), "text"),
        "a folder in itself": (circle, "text"),
        "a README with data_files": (
            lambda place: (
                place.text("data/README.md", "---\nconfigs:\n- config_name: a\n  data_files: '{key}'\n---\n").parent
            ),
            "text",
        ),
    }
    for name, (make, option) in makers.items():
        yield Case("odd file", name, lambda place, make=make, option=option: look(place, make(place), option=option))

    def by_name(place: Place) -> list[str]:
        folder = script(place)
        return [*place.train(data=False), "data=text", "data.source=hub", f"data.name={folder}"]

    yield Case("odd file", "a loading script as a hub's folder", by_name)

    def tasks(place: Place) -> list[str]:
        payloads(place)
        place.text("tasks/a.yaml", "task: a\ndataset_path: !function pwned_script.model\n")
        return [
            "evaluate",
            f"run_dir={place.export()}",
            "evaluate.tasks=[a]",
            f"evaluate.task_folder={place.stranger / 'other'}",
        ]

    yield Case("odd file", "tasks beside a folder that was not named", tasks, (), "refused")


def _addresses() -> Iterator[Case]:
    """Yields addresses in an attacker's YAML: nothing may be chained, fetched or written."""
    for address in (
        "zip://../../PWNED::file://{stranger}/a.zip",
        "simplecache::file://{stranger}/a.txt",
        "filecache::file://{key}",
        "reference://a::file://{stranger}/refs.json",
        "file://{key}",
        "local://{key}",
        "blockcache::file://{key}",
        "memory://PWNED",
        "dir://a::file://{area}",
        "tar://../../x::file://{stranger}/a.tar",
        "http://127.0.0.1:9/a.txt",
        "ftp://127.0.0.1/a.txt",
        "ssh://127.0.0.1/etc/passwd",
        "git://{stranger}:a@b",
        "github://a:b@c/d",
        "cached://{key}",
        "data:text/plain,a",
        "arrow_hdfs://a",
        "smb://127.0.0.1/a",
        "s3://pwned/a.txt",
        "generic://a",
        "libarchive://a::file://{stranger}/a.zip",
        "jupyter://a",
        "PWNED://a",
        "dask://a",
        "async_wrapper::file://{key}",
        "hf://datasets/pwned/a/b.txt",
        "file://{stranger}/../../home/.ssh/id_rsa",
    ):

        def make(place: Place, address: str = address) -> list[str]:
            from hostile_targets import experiment

            place.text(
                "refs.json", json.dumps(place.filled({"version": 1, "refs": {"a": ["file://{key}"], "b": "{{ 1 }}"}}))
            )
            with zipfile.ZipFile(place.stranger / "a.zip", "w") as archive:
                archive.writestr("../../PWNED", "good text " * 100)
            place.text("a.txt", "good text of many words " * 100)
            tree = {"defaults": [{"override /data": "text"}, "_self_"], "data": {"path": address}}
            return experiment(place, tree, data=False, verb="inspect")

        yield Case("address", address, make)


def _prepared() -> Iterator[Case]:
    """Yields folders of tokens whose metadata is false."""

    def make(place: Place, change: Callable[[Place, Path, dict[str, Any]], None]) -> list[str]:
        folder = Path(shutil.copytree(place.bins, place.stranger / "bins"))
        for lock in folder.parent.glob("*.lock"):
            lock.unlink()
        meta = json.loads((folder / "meta.json").read_text())
        change(place, folder, meta)
        if (folder / "meta.json").exists() and meta:
            (folder / "meta.json").write_text(json.dumps(meta))
        plain = [w for w in place.train(data=False) if w != "tokenizer=bytes"]
        return [*plain, "data=bins", f"data.path={folder}", "tokenizer=bpe"]

    def split(**values: Any) -> Callable[[Place, Path, dict[str, Any]], None]:
        return lambda place, folder, meta: meta["splits"]["train"].update(values)

    def shard(**values: Any) -> Callable[[Place, Path, dict[str, Any]], None]:
        return lambda place, folder, meta: meta["splits"]["train"]["shards"][0].update(place.filled(values))

    def top(**values: Any) -> Callable[[Place, Path, dict[str, Any]], None]:
        return lambda place, folder, meta: meta.update(values)

    def text(content: str) -> Callable[[Place, Path, dict[str, Any]], None]:
        def change(place: Place, folder: Path, meta: dict[str, Any]) -> None:
            meta.clear()
            (folder / "meta.json").write_text(content)

        return change

    def docs(content: bytes) -> Callable[[Place, Path, dict[str, Any]], None]:
        def change(place: Place, folder: Path, meta: dict[str, Any]) -> None:
            (folder / "train_00000.docs").write_bytes(content)
            meta["splits"]["train"]["shards"][0].pop("docs_sha256", None)

        return change

    lies: dict[str, Callable[[Place, Path, dict[str, Any]], None]] = {
        "more tokens than there are": split(tokens=10**12),
        "more tokens in a shard": shard(tokens=10**12),
        "negative tokens": shard(tokens=-5),
        "tokens that are a text": shard(tokens="many"),
        "more documents": shard(documents=10**9),
        "negative documents": split(documents=-1),
        "bytes of nothing": split(bytes=0),
        "a file elsewhere": shard(file="../../../home/.ssh/id_rsa"),
        "an absolute file": shard(file="{key}"),
        "a file that is a folder": shard(file="tokenizer"),
        "a file of no name": shard(file=""),
        "NUL in a name": shard(file="a\0b"),
        "no shards": split(shards=[]),
        "shards of another type": split(shards={"a": 1}),
        "a type of objects": top(dtype="O"),
        "a structured type": top(dtype="u2,u2"),
        "a type of code": top(dtype="os.system"),
        "a type of text": top(dtype="U10"),
        "a wider type": top(dtype="uint32"),
        "bytes": top(dtype="uint8"),
        "a type of bits": top(dtype="float16"),
        "a vocabulary of nothing": top(vocab_size=0),
        "a smaller vocabulary": top(vocab_size=5),
        "a vocabulary beyond": top(vocab_size=2**40),
        "another tokenizer": top(tokenizer_hash="a"),
        "an end of text beyond": top(eos_id=10**9),
        "another version": top(format_version=99),
        "no splits": top(splits={}),
        "splits that are a list": top(splits=[1]),
        "a key that is a list": top(key=[]),
        "a group": top(group=-2),
        "questions": top(questions="a"),
        "deep": text("[" * 20_000),
        "a list": text("[]"),
        "nothing": text(""),
        "NaN": text('{"format_version": NaN}'),
        "nulls": text('{"format_version": 1, "dtype": null}'),
        "no borders": docs(b""),
        "borders beyond": docs(np.array([2**63], dtype="<u8").tobytes()),
        "borders turned round": docs(np.arange(50, 0, -1, dtype="<u8").tobytes()),
        "borders cut": docs(b"\1\2\3"),
        "ids beyond": lambda p, f, m: (
            (f / "train_00000.bin").write_bytes(b"\xff" * (f / "train_00000.bin").stat().st_size) and None
        ),
        "a tokenizer that is a link": lambda p, f, m: _relink(f / "tokenizer" / "tokenizer.json", p.key),
        "a FIFO as tokens": lambda p, f, m: _fifo(f / "train_00000.bin"),
        "a pickle beside nanoGPT's": lambda p, f, m: (
            m.clear(),
            (f / "meta.json").unlink(),
            (f / "train_00000.bin").rename(f / "train.bin"),
            (f / "meta.pkl").write_bytes(f"cposix\nsystem\n(Vtouch {p.marker}\ntR.".encode()),
        )[0],
    }
    for name, change in lies.items():
        yield Case("sidecar", name, lambda place, change=change: make(place, change), reads="link" in name)


def _relink(file: Path, target: Path) -> None:
    file.unlink()
    file.symlink_to(target)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)
