"""What functions of the data rooms refuse by themselves, whoever calls them, and return where little is given."""

import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmtrain.data import corpus, loaders, tokenizers
from lmtrain.data.chat import arguments, templates
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples import prepare, rows
from lmtrain.data.examples.documents import TextPieces
from lmtrain.data.sources import choose, files, hub, stdlib
from lmtrain.data.store import contents, prepared
from lmtrain.data.stream import ring
from lmtrain.data.text import mixture
from lmtrain.errors import ReadError, RunError, UserError

RING = ring.Ring(
    100, shard_rows=2, window_shards=3, seq_len=4, global_batch_size=1, dtype="uint16", isolate_documents=False
)


def given(**values: Any) -> Any:
    """Stands for a config of which only these values are read."""
    return SimpleNamespace(**values)


def mixed(entry: dict[str, Any]) -> Any:
    return mixture._config(given(), entry, "data.mixture[1]")


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "an empty mixture": (
        lambda tmp: choose.open_parts(given(source="mixture", mixture=[])), UserError, r"data\.mixture is empty: list"),
    "text where rows are needed": (
        lambda tmp: choose.open_parts(given(source="bins")), UserError, "data.source=bins holds text, not rows"),
    "modules as rows": (
        lambda tmp: stdlib.StdlibSource.records(given(), "train"), UserError, "python_stdlib is text: choose data="),
    "text with columns": (
        lambda tmp: next(files.read_records([(tmp / "a.txt", "text")])), UserError, "a.txt: rows with columns"),
    "no path": (lambda tmp: files.find_files([], "auto"), UserError, "data.path is empty: name a file"),
    "no dataset": (lambda tmp: hub.named(given(name=None)), UserError, "data.name is not set: name a dataset"),
    "no tokenizer": (
        lambda tmp: tokenizers.identity(given(kind="hub", name_or_path="")), UserError, "name_or_path is not set"),
    "a tokenizer's file that is gone": (
        lambda tmp: tokenizers._digest([tmp / "gone"]), UserError, "gone can't be read: No such file"),
    "a source's file that is gone": (
        lambda tmp: contents.Content([tmp / "gone"], contents.Facts(tmp)), UserError, "gone can't be read: No such"),
    "a prepared file that is gone": (
        lambda tmp: contents.check(tmp, {"train.bin": None}, tmp / "cache", print), UserError,
        r"train\.bin can't be read: No such file.*; delete .* and prepare the data again"),
    "rows of one token": (lambda tmp: TextPieces([], 1), UserError, "data.seq_len=1: a packed row needs two tokens"),
    "an example longer than a row": (
        lambda tmp: rows.example_rows(
            given(lengths=np.array([3, 9])),
            given(data=given(packing="best_fit_decreasing", seq_len=8, max_length=20)), 0),
        UserError, "an example has 9 tokens, more than a row of data.seq_len=8: raise it, lower data.max_length=20"),
    "a source of no known kind": (
        lambda tmp: mixed({"path": "a", "source": "ftp"}), UserError,
        r"data\.mixture\[1\]\.source=ftp: files, hub, bins or python_stdlib"),
    "two places of one source": (
        lambda tmp: mixed({"path": "a", "name": "b"}), UserError, r"data\.mixture\[1\]: give one of path"),
    "a stream that nothing fills": (
        lambda tmp: ring.StreamRows(RING)._open(0), UserError, "only training reads a stream .* data.num_samples=1000"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str, tmp_path: Path) -> None:
    refuse, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        refuse(tmp_path)


def test_the_longest_example_fits_its_row_or_is_cut() -> None:
    class Lengths(list[int]):
        lengths, tokens = property(np.array), property(sum)

    def laid(longest: int, method: str) -> Any:
        data = given(packing=method, seq_len=8, max_length=20, isolate_documents=True)
        return rows.example_rows(Lengths([3, longest]), given(data=data), 0)[0]  # type: ignore[arg-type]

    assert len(laid(8, "best_fit_decreasing")) == 2
    assert len(laid(9, "concat")) == 2


def test_a_folder_of_splits_is_told_by_its_splits(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").touch()
    with pytest.raises(UserError, match=r"has a dataset_dict\.json and no splits beside it: save the dataset again"):
        files.find_files(str(tmp_path), "auto")
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match=f"holds the splits test, train: set data.path={tmp_path}/test"):
        files.find_files(str(tmp_path), "auto")


def test_a_source_that_was_removed_while_it_was_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    content = contents.Content([file], contents.Facts(tmp_path / "cache"))
    content.refuse_changed()
    os.chmod(file, 0o600)
    content.refuse_changed()
    file.unlink()
    with pytest.raises(ReadError, match=r"a\.txt was changed while it was read: start again once it is complete"):
        content.refuse_changed()


def test_a_python_without_sources_has_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "empty.py").touch()
    with pytest.raises(UserError, match="this Python has no source text in"):
        stdlib.stdlib_files()
    for name in ("b.py", "a.py", "c.txt"):
        (tmp_path / name).write_text("1")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "d.py").write_text("1")
    assert [file.name for file in stdlib.stdlib_files()] == ["a.py", "b.py"]


def test_what_is_no_tokenizer_of_text_is_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer_class dict is not a text tokenizer"):
        tokenizers.usable({})
    made = tokenizers.numbers(3)
    assert tokenizers.usable(made) is made
    made.model_max_length = "long"
    with pytest.raises(ValueError, match="model_max_length is 'long' instead of a number"):
        tokenizers.usable(made)


def test_a_tokenizer_json_without_an_object_gives_nobodys_ids(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="it holds no JSON object"):
        tokenizers.gives_ids_of(tmp_path, "x")


def test_values_that_nest_too_deep_are_no_values() -> None:
    assert arguments.value_of("{a: [1, 'b']}", "'") == {"a": [1, "b"]}
    with pytest.raises(ValueError, match="a"):
        arguments.value_of("{a: " + "[" * 100_000)


def test_a_row_that_nests_too_deep_is_a_bad_row() -> None:
    def encode(*_: Any) -> Any:
        raise RecursionError

    encoder: Any = given(encode=encode)
    found = prepare._encode(encoder, [given()], (0, "line 3", {"a": 1}))
    assert isinstance(found, BadRow)
    assert (found.where, found.reason) == ("line 3", "the row is nested too deep")
    with pytest.raises(ReadError, match="gone"):
        prepare._encode(encoder, [given()], ReadError("gone"))


def test_a_class_without_a_file_has_no_code(tmp_path: Path) -> None:
    assert choose._code_of(type("Made", (), {"__module__": "builtins"}), str(tmp_path)) == ""
    (tmp_path / "made_source.py").write_text("import made_beside\nclass Rows: pass\n")
    (tmp_path / "made_beside.py").write_text("A = 1\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import made_source  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
    first = choose._code_of(made_source.Rows, str(tmp_path / "cache"))
    assert len(first) == 16
    (tmp_path / "made_beside.py").write_text("A = 22\n")
    assert choose._code_of(made_source.Rows, str(tmp_path / "cache")) != first


def test_a_dataset_is_labelled_by_the_last_part_of_its_name() -> None:
    for name in ("wikitext", "Salesforce/wikitext", "here/data/wikitext/"):
        assert hub.named(given(name=name)) == (name, "wikitext")


def test_features_in_lists_and_mappings_keep_their_files_undecoded() -> None:
    datasets = pytest.importorskip("datasets")
    found = hub._stored([{"a": datasets.Image(), "b": datasets.Value("string")}])
    assert found == [{"a": datasets.Image(decode=False), "b": datasets.Value("string")}]
    assert hub._stored(datasets.List(datasets.Image())) == datasets.List(datasets.Image(decode=False))


def test_a_template_that_refuses_a_question_says_so() -> None:
    def prompt(*_: Any) -> str:
        raise BadRow("prompt", "it wants a system turn")

    with pytest.raises(UserError, match="a prompt can't be put into a conversation: it wants a system turn"):
        templates.user_turn(given(), given(prompt=prompt), "a", None)


def test_the_line_on_bos_says_where_it_stands() -> None:
    tokenizer: Any = given(
        bos_token="<s>", eos_token="</s>", bos_token_id=1, eos_token_id=2,
        convert_ids_to_tokens=lambda number: {1: "<s>", 2: "</s>"}[number],
    )  # fmt: skip

    def lines(own: list[int], begins: list[int]) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus.framing, "start_of", lambda _: own)
            return corpus.bos_lines(given(begins_with=lambda start: start == begins), tokenizer)

    assert lines([1], [1]) == lines([], [1]) == ["each document begins with <s>"]
    assert lines([2], []) == ["between documents stands one </s>, which ends the first and begins the second"]
    without = "documents begin without <s>, which the tokenizer puts before a text (data.prepend_bos)"
    assert lines([1], []) == [without]
    assert lines([], []) == []


def test_chosen_rows_are_the_rows_own_where_a_rank_has_none() -> None:
    own = given(empty=lambda: {"a": 1}, lengths=np.array([5, 6, 7]))
    chosen = loaders.ChosenRows(own, np.array([2, 0]))
    assert (chosen.empty(), chosen.lengths.tolist(), len(chosen)) == ({"a": 1}, [7, 5], 2)


def test_a_stream_waits_for_its_shards_and_not_for_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = ring.StreamRows(RING)
    stream.folder = tmp_path
    with pytest.raises(RunError, match="shard 4 of the stream was removed after training on it"):
        stream._open(4, passed=True)
    monkeypatch.setattr(ring.time, "sleep", lambda seconds: (tmp_path / "000000004.bin").write_bytes(bytes(18)))
    assert stream._open(4).read(0, 9).tolist() == [0] * 9
    stream.folder = tmp_path / "gone"
    with pytest.raises(RunError, match=r"the stream has ended before shard 5: .*gone is gone"):
        stream._open(5)
    assert {name: tuple(value.shape) for name, value in stream.empty().items()}["input_ids"][1] == 4


def test_a_silent_hub_is_answered_by_the_newest_folder_of_the_same_key(tmp_path: Path) -> None:
    cfg = given(cache_dir=str(tmp_path))
    said: list[str] = []
    key = {"kind": "hub", "resolved": {"commit": None, "tokenizer": "t"}}
    show: Any = given(say=said.append)
    target = prepared.folder_of(cfg, "wiki", key)
    assert prepared.find_folder(cfg, "wiki", key, show) == target
    metas = {"old": {"commit": "a", "tokenizer": "t"}, "new": {"commit": "b", "tokenizer": "t"},
             "other": {"commit": "c", "tokenizer": "u"}}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for number, name in enumerate(metas):
            folder = tmp_path / f"wiki-{name}"
            folder.mkdir()
            (folder / prepared.bins.META).touch()
            os.utime(folder / prepared.bins.META, (number, number))
        (tmp_path / "wiki-half.tmp-1").mkdir()
        patch.setattr(prepared.bins, "is_complete", lambda folder: (folder / prepared.bins.META).exists())
        patch.setattr(
            prepared.bins, "load_meta",
            lambda folder: {"key": {"kind": "hub", "resolved": metas[folder.name.partition("-")[2]]}},
        )  # fmt: skip
        assert prepared.find_folder(cfg, "wiki", key, show) == tmp_path / "wiki-new"
    assert said == [f"the hub doesn't answer; using what was prepared from it before: {tmp_path / 'wiki-new'}"]
