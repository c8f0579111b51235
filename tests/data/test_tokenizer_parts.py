"""The parts of tokenizing, each by hand: what stands around texts, offsets, tools' arguments, the hub, a BPE."""

import io
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors as hub_errors
from tokenizers import Tokenizer

from lmtrain.data import bpe_training, fast_ids, framing, hub, tokenizers
from lmtrain.data.chat.arguments import Misfit, fitted, typed, value_of
from lmtrain.errors import UserError

# Framing and ids


class Words:
    """A tokenizer of words whose ids are numbers, with ids around every text."""

    bos_token_id: int | None = 1
    eos_token_id: int | None = 2

    def __init__(self, before: list[int], after: list[int] | None = None) -> None:
        self.before, self.after = before, after or []

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(c) for c in text]
        return {"input_ids": [*self.before, *ids, *self.after] if add_special_tokens else ids}


def test_what_stands_around_a_text() -> None:
    bos, none, both = Words([1]), Words([]), Words([1, 9], [2])
    assert [framing.start_of(t) for t in (bos, none, both)] == [[1], [], [1, 9]]
    assert framing._around(both) == ([1, 9], [2])
    assert [framing.before_documents(t) for t in (bos, none)] == [[1], [2]]
    none.eos_token_id = None
    assert framing.before_documents(none) == []
    assert framing.text_ids(both, "ab") == [1, 9, 97, 98]
    assert framing.begun([1, 5], [1]) == [1, 5]
    assert framing.begun([5], [1, 9]) == [1, 9, 5]
    assert (framing.ended([5], bos), framing.ended([5, 2], bos), framing.ended([], bos)) == ([5, 2], [5, 2], [2])
    with pytest.raises(UserError, match="no end of text"):
        framing.ended([5], none)
    for most, kept in ((9, [1, 4, 5, 6]), (4, [1, 4, 5, 6]), (3, [1, 5, 6]), (2, [1, 6]), (1, [6])):
        assert framing.last_of([1, 4, 5, 6], most, [1]) == kept
    assert framing.last_of([4, 5, 6], 2, [1]) == [5, 6]


@pytest.mark.parametrize(("own", "asked", "rows", "found"), [
    ([1], None, "text", []), ([1], None, "chat", [1]), ([1], False, "chat", []), ([1], "auto", "text", [1]),
    ([], "auto", "text", []),
    ([], True, "text", [1]), ([1, 9], True, "text", [1, 9]),
])  # fmt: skip
def test_what_prepend_bos_asks_for(own: list[int], asked: Any, rows: str, found: list[int]) -> None:
    data: Any = SimpleNamespace(prepend_bos=asked, rows=rows, append_eos=True)
    assert framing.wanted(Words(own), data) == found
    assert framing.between_documents(Words(own), data) == found
    ends: Any = Words([2])
    for append, prepend, between in ((True, "auto", []), (False, "auto", [2]), (True, True, [2])):
        data = SimpleNamespace(prepend_bos=prepend, rows="text", append_eos=append)
        assert framing.between_documents(ends, data) == between
    without = Words([])
    without.bos_token_id = None
    with pytest.raises(UserError, match="has no BOS token"):
        framing.wanted(without, SimpleNamespace(prepend_bos=True, rows="text"))  # type: ignore[arg-type]


def test_documents_that_are_there_begin_as_they_do() -> None:
    assert framing.held(Words([1, 9]), lambda start: start == [1, 9]) == [1, 9]
    assert framing.held(Words([1, 9]), lambda start: False) == []
    assert framing.held(Words([]), lambda start: start == [1]) == [1]
    assert framing.held(Words([2]), lambda start: False) == [2], "the end of text, which may stand before"


def test_characters_of_tokens_follow_from_their_bytes() -> None:
    assert fast_ids._offsets(b"abcd", np.array([1, 2, 1])) == [(0, 1), (1, 3), (3, 4)]
    raw = "aé日b".encode()  # of 1, 2, 3 and 1 bytes
    assert fast_ids._offsets(raw, np.array([1, 2, 3, 1])) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert fast_ids._offsets(raw, np.array([2, 2, 3])) == [(0, 2), (1, 3), (2, 4)], (
        "parts of a character have all of it"
    )


# Arguments of tools


@pytest.mark.parametrize(("value", "schema", "found"), [
    (2.0, {"type": "integer"}, 2), (2, {"type": "number"}, 2), (2.5, {"type": "number"}, 2.5), (None, {}, None),
    (None, {"type": "string", "nullable": True}, None), (None, {"anyOf": [{"type": "null"}, {"type": "string"}]}, None),
    ([1.0, "a"], {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [1, "a"]),
    ({"a": 1.0, "b": 2.0}, {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "number"}},
     {"a": 1, "b": 2.0}), ("x", {"enum": ["x", "y"]}, "x"), (2.0, {"type": ["integer", "number"]}, 2.0),
    (True, {"type": "boolean"}, True),
])  # fmt: skip
def test_a_value_is_as_its_schema_has_it(value: Any, schema: Any, found: Any) -> None:
    assert repr(fitted(value, schema, "x")) == repr(found)


@pytest.mark.parametrize(("value", "schema", "words"), [
    (2.5, {"type": "integer"}, "x must be integer, and 2.5 is number"),
    (True, {"type": "integer"}, "x must be integer, and true is boolean"),
    (None, {"type": "string"}, "x must be string, and null is null"),
    ([1], {"items": {"type": "string"}}, "x[0] must be string, and 1 is integer"),
    ({"a": 1}, {"properties": {"a": {"type": ["string", "null"]}}}, "x.a must be string or null, and 1 is integer"),
    ("z", {"enum": ["x", "y"]}, 'x must be one of "x", "y", and not "z"'),
    ("z" * 80, {"type": "integer"}, f'x must be integer, and "{"z" * 59}... is string'),
])  # fmt: skip
def test_a_value_that_does_not_fit_is_told(value: Any, schema: Any, words: str) -> None:
    with pytest.raises(Misfit) as error:
        fitted(value, schema, "x")
    assert str(error.value) == words


def test_values_without_quotes_are_read_by_their_schema() -> None:
    assert value_of('{"a": [1, true]}') == {"a": [1, True]}
    assert value_of("{'a': True}") == {"a": True}
    assert value_of("{a: 1, b: {c: None}}") == {"a": 1, "b": {"c": None}}
    for text in ("{", "word", "(1, 2)"):
        with pytest.raises(ValueError):
            value_of(text)
    for text, schema, found in (
        ("12", {"type": "string"}, "12"), ("12", {"type": "integer"}, 12), ("12", {"type": ["integer", "string"]}, 12),
        ("1.5", {"type": ["integer", "string"]}, "1.5"), (" 12 ", {"type": "integer"}, 12), ("12", {}, 12),
        ("word", {"type": "integer"}, "word"), ("1.5", {"type": "integer"}, 1.5), ("null", {}, None),
    ):  # fmt: skip
        assert repr(typed(text, schema)) == repr(found), (text, schema)


# The hub and the tokenizers that are made here


def test_a_name_of_the_hub_is_a_commit_or_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer: list[Any] = [SimpleNamespace(sha="abc")]

    def ask(kind: str) -> Any:
        def info(self: Any, name: str, revision: str | None, timeout: float) -> Any:
            asked.append((kind, name, revision))
            if isinstance(answer[0], Exception):
                raise answer[0]
            return answer[0]

        return info

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", ask("dataset"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", ask("model"))
    assert hub.commit_of("dataset", "a/b", None) == ("abc", "")
    assert hub.commit_of("tokenizer", "a/c", "v1") == ("abc", "")
    assert hub.commit_of("model", "a/d", "f" * 40) == ("f" * 40, ""), "which is none to ask for"
    assert hub.commit_of("model", "a/d", "f" * 39) == ("abc", "")
    assert asked == [("dataset", "a/b", None), ("model", "a/c", "v1"), ("model", "a/d", "f" * 39)]
    answer[0] = OSError("no\nnetwork")
    assert hub.commit_of("model", "a/d", None) == (None, "no")
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    for error, words in ((hub_errors.GatedRepoError, "is gated: accept its terms"),
                         (hub_errors.RevisionNotFoundError, "has no revision 'v'"),
                         (hub_errors.RepositoryNotFoundError, "model or tokenizer 'a/b' doesn't exist")):  # fmt: skip
        answer[0] = error("x", response=response)
        with pytest.raises(UserError, match=words):
            hub.commit_of("tokenizer", "a/b", "v")
    assert "or tokenizer=bytes" in hub.explain_unreachable("tokenizer", "a/b", "why")


def test_files_beside_a_model_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("{}")
    assert hub.optional_file(str(tmp_path), "a.json") == tmp_path / "a.json"
    assert hub.optional_file(str(tmp_path), "b.json") is None
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file, **options: f"/{name}/{file}/{options['x']}"
    )
    assert hub.optional_file("a/b", "c.json", x=1) == Path("/a/b/c.json/1")

    def fails(*_: Any, **__: Any) -> str:
        raise OSError

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    assert hub.optional_file("a/b", "c.json") is None


def test_the_process_that_trains_a_bpe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in this process: it reads pieces of text and writes the tokenizer, and leaves Ctrl-C to the run."""
    seen: dict[Any, Any] = {}
    out = io.BytesIO()
    text = [json.dumps(part).encode() + b"\n" for part in ("low lower lowest " * 20, "new newer " * 20)]
    monkeypatch.setattr(bpe_training.signal, "signal", lambda number, what: seen.update({number: what}))
    monkeypatch.setattr(bpe_training, "end_with_parent", lambda parent, number: seen.update({parent: number}))
    monkeypatch.setattr(bpe_training.sys, "stdin", SimpleNamespace(buffer=text))
    monkeypatch.setattr(bpe_training.sys, "stdout", SimpleNamespace(buffer=out))
    bpe_training.main(270, 2, "<end>", 77)
    assert seen == {signal.SIGINT: signal.SIG_IGN, 77: signal.SIGKILL}
    made = Tokenizer.from_str(out.getvalue().decode())
    assert made.get_vocab_size() == 270
    assert made.token_to_id("<end>") == 0
    ids = made.encode(" lower\x00é").ids
    assert made.decode(ids) == " lower\x00é"
    assert len(made.encode(" low").ids) == 1, "frequent words are one token"
    assert made.encode("low").tokens[0] != "Ġlow", "no space is put before a text"


def test_a_text_is_cut_at_the_characters_that_are_trained_on() -> None:
    parts = ["abc", "def", "ghi"]
    for most, found in ((None, parts), (9, parts), (4, ["abc", "d"]), (3, ["abc"]), (0, [])):
        assert list(tokenizers._at_most(iter(parts), most)) == found
    assert tokenizers.unknown_token(SimpleNamespace(unk_token_id=3, eos_token_id=3)) is None  # type: ignore[arg-type]
    assert tokenizers.unknown_token(SimpleNamespace(unk_token_id=4, eos_token_id=3)) == 4  # type: ignore[arg-type]
