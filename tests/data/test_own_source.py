"""Documents and rows of a class that data.source names are trained on; a changed class is prepared again."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from inprocess import Ended, run
from support import TINY

SOURCE = """from lmtrain.data.sources.pieces import Piece


class Greetings:
    label, settings, resolved, notes = "greetings", {"kind": "greetings"}, "1", []

    def __init__(self, name="world", number=40):
        self.name, self.number = name, number

    def pieces(self, split):
        if split == "val":
            return None
        texts = (f"Hello {self.name}, this is document number {n} of many." for n in range(self.number))
        return (Piece(text, True) for text in texts)

    def text_bytes(self, split):
        return None


class Questions(Greetings):
    def records(self, split):
        if split == "val":
            return None
        rows = ({"messages": [{"role": "user", "content": f"Who is {n}?"}, {"role": "assistant", "content": self.name}]}
                for n in range(self.number))
        return ((f"row {n}", row) for n, row in enumerate(rows))


class Raises(Greetings):
    def __init__(self):
        raise ArithmeticError("no such number")


class NoLabel:
    settings, resolved, notes = {}, "1", []


class NoBytes(NoLabel):
    label = "greetings"

    def pieces(self, split):
        return None


class FixedSettings(Greetings):
    @property
    def settings(self):
        return {}


class ListedSettings(Greetings):
    settings = ["kind"]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "my_source.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_source", raising=False)
    return file


def _prepare(module: Path, *settings: str) -> Ended:
    sys.modules.pop("my_source", None)
    return run("prepare", *TINY, "data=text", "data.source=my_source.Greetings", "run.allow_target=[my_source]",
               f"data.cache_dir={module.parent}/cache", *settings)  # fmt: skip


def _prepared(module: Path) -> set[str]:
    return {p.name for p in (module.parent / "cache").glob("greetings-*") if p.is_dir()}


def test_its_documents_are_prepared(module: Path) -> None:
    done = _prepare(module, "data.source_options={name: Ada, number: 30}", "data.val_fraction=0")
    assert done.code == 0, done.err
    (folder,) = (module.parent / "cache" / name for name in _prepared(module))
    ids = np.concatenate([np.fromfile(file, dtype=np.uint16) for file in sorted(folder.glob("train*.bin"))])
    texts = [bytes(part.astype(np.uint8)).decode() for part in np.split(ids, np.flatnonzero(ids == 256))]
    assert "".join(texts).replace("\x00", "") == "".join(
        f"Hello Ada, this is document number {n} of many." for n in range(30)
    )


def test_other_options_and_another_text_of_the_class_are_prepared_again(module: Path) -> None:
    for settings in ([], ["data.source_options={name: Ada}"]):
        done = _prepare(module, *settings)
        assert done.code == 0, done.err
    assert len(_prepared(module)) == 2
    assert _prepare(module).code == 0
    assert len(_prepared(module)) == 2  # the folder is reused
    module.write_text(SOURCE.replace("Hello", "Goodbye"))
    assert _prepare(module).code == 0
    assert len(_prepared(module)) == 3


def test_what_its_code_names_beside_it_is_part_of_it(module: Path) -> None:
    """Modules and data files that the class reads, also through another module; not whatever else is in the folder."""
    module.write_text("import my_helper\n" + SOURCE)
    (module.parent / "my_helper.py").write_text("WORDS = 'words.txt'\n")
    (module.parent / "words.txt").write_text("one")
    (module.parent / "other.txt").write_text("two")
    for number, (name, text) in enumerate([("other.txt", "changed"), ("words.txt", "changed"),
                                           ("my_helper.py", "WORDS = ['words.txt']\n")], 1):  # fmt: skip
        assert _prepare(module).code == 0
        assert len(_prepared(module)) == max(1, number - 1)
        (module.parent / name).write_text(text)
    assert _prepare(module).code == 0
    assert len(_prepared(module)) == 3


def test_its_rows_are_conversations(module: Path) -> None:
    done = run("inspect", *TINY, "objective=sft", "data=chat_jsonl", "data.source=my_source.Questions",
               "data.source_options={name: Ada}", "run.allow_target=[my_source]", "data.chat_template=vicuna",
               "model.max_position_embeddings=256", "data.seq_len=256",
               f"data.cache_dir={module.parent}/cache")  # fmt: skip
    assert done.code == 0, done.err
    assert "rows of messages" in done.out
    assert "Ada" in re.sub(r"\W", "", done.out)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["run.allow_target=[]"], "if you trust it: run.allow_target=[my_source]"),
        (["data.source=my_source.Nobody"], "has no attribute 'Nobody'"),
        (["data.source=nobody"], "package.module.Class"),
        (["data.source_options={colour: red}"], "got an unexpected keyword argument 'colour'"),
        (["data.source=my_source.Raises"], "my_source.Raises raised ArithmeticError: no such number"),
        (["data.source=my_source.NoLabel"], "it lacks label, pieces, text_bytes"),
        (["data.source=my_source.NoBytes"], "it lacks text_bytes"),
        (["data.source=my_source.FixedSettings"], "my_source.FixedSettings raised AttributeError: "),
        (["data.source=my_source.ListedSettings"], "its settings are ['kind']: make them a dict"),
        (["data.source=files", "data.source_options={name: Ada}"], "data.source_options has no effect"),
        (["data.path=book.txt"], "data.path has no effect"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_message(module: Path, settings: list[str], said: str) -> None:
    ended = _prepare(module, *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err
    assert len(ended.err.strip().splitlines()) == 1
