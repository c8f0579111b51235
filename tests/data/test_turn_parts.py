"""The parts of reading rows, each by hand: turns, tool calls, pairs and margins, lines of JSON, columns, and files."""

import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmtrain.data.chat import pairs, turns
from lmtrain.data.chat.turns import BadRow, Remark
from lmtrain.data.sources import choose, files, tables
from lmtrain.errors import UserError

U, A, S, T = ({"role": role, "content": "x"} for role in ("user", "assistant", "system", "tool"))


@pytest.mark.parametrize(("messages", "words"), [
    ([U, A], None), ([S, U, A], None), ([U, U, A, A], None), ([U, A, T, A], None),
    ([S, S, U, A], "turns 1 and 2 are both system turns"), ([U, S, A], "turn 2 is a system turn; it must be the first"),
    ([A, U], "turn 1 is from assistant, but the first turn must be the user's$"),
    ([A, U, A], "turn 1 is from assistant.*data.on_assistant_first=drop_turn"),
    ([S, A, U, A], "turn 2 is from assistant.*data.on_assistant_first=drop_turn"), ([U], "no assistant turn"),
    ([S], "no assistant turn"),
])  # fmt: skip
def test_which_turns_are_a_conversation(messages: list[dict[str, Any]], words: str | None) -> None:
    if words is None:
        assert turns.check(messages, "row 1") is messages
        return
    with pytest.raises(BadRow, match=words):
        turns.check(messages, "row 1")


@pytest.mark.parametrize(("messages", "kept", "dropped"), [
    ([A, U, A], [U, A], 1), ([S, A, A, U, A], [S, U, A], 2), ([U, A], [U, A], 0), ([S, U, A], [S, U, A], 0),
    ([A], [A], 0),
    ([], [], 0), ([A, T, U, A], [U, A], 2),
])  # fmt: skip
def test_turns_before_the_first_user_turn_are_dropped(
    messages: list[dict[str, Any]], kept: list[dict[str, Any]], dropped: int
) -> None:
    assert turns.drop_first_answers(messages, "drop_turn", "x") == (kept, dropped)
    for policy in (None, "raise"):
        assert turns.drop_first_answers(messages, policy, "x") == (messages, 0)
    if dropped or messages == [A]:
        with pytest.raises(BadRow) as error:
            turns.drop_first_answers(messages, "skip", "x")
        assert error.value.skip


def test_tools_are_descriptions_of_functions() -> None:
    bare, whole = {"name": "f"}, {"type": "function", "function": {"name": "f"}}
    for value in ([bare], [whole], json.dumps([bare])):
        assert turns.tools_of(value, "x") == [whole]
    for value in (None, [], "", "  "):
        assert turns.tools_of(value, "x") is None
    for value in ("word", {"name": "f"}, [1]):
        with pytest.raises(BadRow, match="tools must be a list of function descriptions"):
            turns.tools_of(value, "x")


def test_texts_and_parts_of_texts() -> None:
    part = {"type": "text", "text": "a"}
    assert turns.text_of([part, {**part, "text": "b"}], "it", "x") == "ab"
    assert turns.text_of(" ", "it", "x", may_be_empty=True) == " "
    for value, words in ((" ", "it is empty"), (3, "it must be text and is 3"),
        ([{"type": "image"}], "part of type 'image'"),
                         ([{"type": "text"}], "part of type 'text'"), (["a"], "is a list with 'a'"),
                         ("\ud800", "half a surrogate pair")):  # fmt: skip
        with pytest.raises(BadRow, match=words):
            turns.text_of(value, "it", "x")
    for value in ({"a": ["\udfff"]}, {"\ud800": 1}):
        with pytest.raises(BadRow, match="half a surrogate"):
            turns.whole_text(value, "it", "x")
    assert turns.shown("a" * 58) == f"{'a' * 58!r} (str)"
    assert turns.shown("a" * 59) == f"{repr('a' * 59)[:60]}... (str)"


def test_truths_and_common_beginnings() -> None:
    truths = {"true": True, " 1 ": True, "1.0": True, "FALSE": False, "0": False, "0.0": False, "yes": None, 1: True,
              0: False, 2: None, None: None}  # fmt: skip
    assert {value: turns.truth_of(value) for value in truths} == truths
    assert turns.truth_of(1.0) is turns.truth_of(True) is True
    assert [turns.common(a, b) for a, b in (("abc", "abd"), ("ab", "abc"), ("", "a"), ("x", "y"))] == [2, 2, 0, 0]
    assert turns.is_exact(" 12\n", 12)
    assert not turns.is_exact("1 2", "12")


@pytest.mark.parametrize(("turn", "found"), [
    ({"from": "human", "value": "x"}, U),
    ({"role": "assistant", "content": "x", "value": None, "extra": 1}, A),
    ({"role": "tool", "content": {"a": 1}}, {"role": "tool", "content": '{"a": 1}'}),
    ({"role": "tool", "content": 0}, {"role": "tool", "content": "0"}),
    ({"role": "tool", "content": []}, {"role": "tool", "content": "[]"}),
    ({"role": "tool", "content": ""}, {"role": "tool", "content": ""}),
    ({"role": "tool", "content": "x", "name": "f", "tool_call_id": "1"}, {**T, "name": "f", "tool_call_id": "1"}),
    ({"role": "assistant", "content": "x", "thinking": "t"}, {**A, "reasoning_content": "t"}),
    ({"role": "assistant", "content": "x", "reasoning": ""}, A),
    ({**A, "train": False}, {**A, "train": False}), ({**A, "weight": 0}, {**A, "train": False}),
    ({**A, "loss": "true"}, A), ({**A, "weight": 1, "loss": True}, A),
    ({"role": "function_call", "content": '{"name": "f", "arguments": "{\\"a\\": 1}"}'},
     {"role": "assistant", "content": "",
      "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}),
    ({"role": "assistant", "tool_calls": [{"id": "7", "function": {"name": "f", "arguments": ""}}]},
     {"role": "assistant", "content": "",
      "tool_calls": [{"id": "7", "type": "function", "function": {"name": "f", "arguments": {}}}]}),
])  # fmt: skip
def test_a_turn_of_any_form(turn: dict[str, Any], found: dict[str, Any]) -> None:
    assert turns.turns_of([turn], "x") == [found]


@pytest.mark.parametrize(("value", "words"), [
    ([1], "turn 1 must be a mapping"), ([{"content": "x"}], r"turn 1 has no role \(its keys: content\)"),
    ([{"role": "user"}], r"turn 1 \(user\) has no content \(its keys: role\)"),
    ([U, {"role": "wizard"}], "turn 2 has the unknown role"),
    ([{"role": 3, "content": "x"}], "unknown role 3"), ([], "must be a list of turns and is"),
    ("word", "must be a list of turns"),
    ([{**U, "from": "assistant"}], "has role and from, and they differ"),
    ([{**A, "weight": 0.5}], 'turn 1 has "weight": 0.5'),
    ([{**A, "weight": 0, "loss": True}], "weight and loss, and they differ"),
    ([{"role": "assistant", "tool_calls": [{"name": ""}]}], "has a tool call that isn't"),
    ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "word"}]}], "has a tool call that isn't"),
    ([{"role": "assistant", "content": " "}], r"turn 1 \(assistant\) is empty"),
])  # fmt: skip
def test_a_turn_that_cannot_be_read(value: Any, words: str) -> None:
    with pytest.raises(BadRow, match=words):
        turns.turns_of(value, "x")


def test_strings_alternate_and_a_single_one_needs_a_speaker() -> None:
    assert [t["role"] for t in turns.turns_of(["a", "b", "c"], "x")] == ["user", "assistant", "user"]
    assert turns.turns_of('["a"]', "x", "prompt")[0]["role"] == "user"
    with pytest.raises(BadRow, match="chosen is a list of one string"):
        turns.turns_of(["a"], "x", "chosen")
    assert turns.unread({"m": [{**U, "mood": 1, "train": 1, "gone": None}], "other": [{"a": 1}]}) == [
        Remark("turns have the key mood, which nothing reads")
    ]
    images = turns.unread({"text": "see <image>"})
    assert len(images) == 1
    assert images == turns.unread({"m": [{"role": "user", "content": "<image>"}]})
    refusal = BadRow("row 1", "why").refusal()
    assert refusal == "row 1: why; fix the row, or set data.on_bad_row=skip to leave such rows out"


# Pairs


@pytest.mark.parametrize(("values", "margin"), [
    ({}, None), ({"margin": 0}, 0.0), ({"margin": "1.5"}, 1.5), ({"score_chosen": 3, "score_rejected": 1}, None),
    ({"score_chosen": 1, "score_rejected": 1}, None), ({"score_chosen": 1}, None),
    ({"margin": -0.1}, "margin is -0.1: the rejected answer is the better one"),
    ({"margin": "nan"}, "margin is NaN"), ({"margin": True}, "must be a number and is True"),
    ({"margin": "inf"}, "must be a number"), ({"margin": "word"}, "must be a number and is 'word'"),
    ({"margin": 10**400}, "must be a number"),
    ({"score_chosen": 1, "score_rejected": 2}, "score_chosen is 1, below score_rejected, 2"),
])  # fmt: skip
def test_margins_say_that_the_chosen_answer_is_the_better_one(values: dict[str, Any], margin: Any) -> None:
    if not isinstance(margin, str):
        assert pairs._margin(values, "x") == margin
        return
    with pytest.raises(BadRow, match=margin):
        pairs._margin(values, "x")


def test_conversations_are_split_where_they_begin_to_differ() -> None:
    other = {**A, "content": "y"}
    assert pairs._split([U, A, U, A], [U, A, U, other], "x") == ([U, A, U], [A], [other])
    for one, two, words in (([U, A], [A, U], "share no beginning"), ([U, A], [U, A], "are the same")):
        with pytest.raises(BadRow, match=words):
            pairs._split(one, two, "x")
    said = pairs._spoken("\n\nHuman: Hi  there\n\nAssistant: Yes?\n\nHuman: Bye\n\nAssistant:", "prompt", "x")
    assert [(t["role"], t["content"]) for t in said] == [("user", "Hi  there"), ("assistant", "Yes?"), ("user", "Bye")]
    with pytest.raises(BadRow, match="chosen, turn 2 is empty"):
        pairs._spoken("\n\nHuman: Hi\n\nAssistant:", "chosen", "x")
    with pytest.raises(BadRow, match="prompt is empty"):
        pairs._spoken("\n\nAssistant:", "prompt", "x")
    assert pairs.answer_turns("word", "chosen", "x") == [{"role": "assistant", "content": "word"}]
    assert pairs.answer_turns(A, "chosen", "x") == [A]


def test_answers_of_a_pair_end_with_the_assistant_and_differ(data_config: Any) -> None:
    cfg, other = data_config("preference"), {**A, "content": "y"}
    made = pairs._pair([U], [A, U, A], [other], {}, cfg, "x")
    assert (made.prompt, made.chosen, made.rejected) == ([U], [A, U, A], [other])
    for chosen, rejected, words in (([A], [], "rejected ends where the other goes on"), ([], [A], "chosen ends where"),
                                    ([U, A], [A], "chosen goes on with a turn from user"),
                                    ([A], [A, U], "rejected ends with a turn from user"),
                                    ([A], [A], "are the same")):  # fmt: skip
        with pytest.raises(BadRow, match=words):
            pairs._pair([U], chosen, rejected, {}, cfg, "x")
    space = {**U, "content": " x "}
    pairs._check_prompt([space], [U, A], "prompt", "x")
    pairs._check_prompt([U, A, U, A], [U, A, U], "prompt", "x")
    pairs._check_prompt([U], [S, U], "prompt", "x")
    with pytest.raises(BadRow, match=r"don't begin with the prompt, 'y{60}\.\.\.' in the column q"):
        pairs._check_prompt([{**U, "content": "y" * 61}], [U], "q", "x")


# Lines of JSON and tables


@pytest.mark.parametrize(("line", "found"), [
    ('{"a": 1}\n', {"a": 1}), ("  {} ", {}), ('{"a": 1} x', "malformed JSON (Extra data, column 10): {"),
    ("[1]", "a JSON object with columns is needed, found [1]"),
    ('{"a"', "malformed JSON (Expecting ':' delimiter, column 5)"),
    ('{"a": 1, "b": 2, "a": 3}', "the key 'a' appears twice in one object"),
    ('{"x": {"a": 1, "a": 3}}', "the key 'a' appears twice"),
    ("[" * 100_000, "JSON that is nested too deep to be read"),
    (f'{{"a": {"1" * 5000}}}', "JSON with a number of more than 4,300 digits"),
])  # fmt: skip
def test_a_line_is_an_object_or_says_why_not(line: str, found: Any) -> None:
    read = tables._row_of(line, tables._Decoder(checked=True))
    assert read == found if isinstance(found, dict) else str(read).startswith(found)
    assert tables._row_of('{"a": 1, "a": 2}', tables._Decoder(checked=False)) == {"a": 2}
    assert tables._excerpt("x" * 80) == "x" * 80
    assert tables._excerpt(" " + "x" * 81) == "x" * 77 + "..."


@pytest.mark.parametrize(("text", "rows"), [
    ("[]", []), (' [ {"a": 1} ,\n {"a": 2} ]\n', [("entry 0 (line 1)", {"a": 1}), ("entry 1 (line 2)", {"a": 2})]),
    ('[{"a": 1}, 3]', [("entry 0 (line 1)", {"a": 1}),
    ("entry 1 (line 1)", "a JSON object with columns is needed, found 3")]),
    ('\ufeff{"a": 1}\n\n{"a": 2}\n', [("line 1", {"a": 1}), ("line 3", {"a": 2})]),
    ('[{"a": 1} {"a": 2}]', "line 1: malformed JSON (Expecting ',' or ']')"), ('[{"a": 1}', "malformed JSON"),
    ('[{"a": 1},\n]', "line 2: malformed JSON"), ("[{}] x", "after the list there is more): x"),
    ("3", "holds 3; a list of objects"),
    ('{"a": [1],\n "b": 2}', "holds one object with 'a', 'b'; .*its key 'a' has a list"),
])  # fmt: skip
def test_a_json_file_is_a_list_or_lines(text: str, rows: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    if isinstance(rows, list):
        assert list(tables.read_table(path, "json")) == [(f"{path}, {where}", row) for where, row in rows]
        return
    with pytest.raises(UserError) as error:
        list(tables.read_table(path, "json"))
    assert all(part in str(error.value) for part in rows.split(".*"))


def test_parquet_is_read_from_any_row_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_ROWS", 2)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": list(range(11)), "t": [str(i) for i in range(11)]}), path, row_group_size=4)
    for start in range(13):
        found = list(tables.parquet_from(path, ["n"], start))
        assert found == [(i, {"n": i}) for i in range(start, 11)]
    with pytest.raises(UserError, match=r"has no column 'm'; it has: n, t: data.text_column=n"):
        list(tables.parquet_from(path, ["m"], 0))
    with pytest.raises(UserError, match="has several columns named 'n'"):
        tables._check_names(["n"], ["n", "t", "n"], "it")
    tables._check_names(["t"], ["n", "t", "n"], "it")
    many = [f"c{i}" for i in range(52)]
    with pytest.raises(UserError, match=r"c48, c49 and 2 more: data.text_column=c"):
        tables.check_columns(["zzz"], many, "it")
    with pytest.raises(UserError, match=r"it has: none: data.text_column=...$"):
        tables.check_columns(["zzz"], [], "it")


def test_the_text_of_a_row_is_that_of_its_columns() -> None:
    row = {"a": "one", "b": None, "c": "three", "d": 4}
    assert tables.text_of(row, ["a", "b", "c"], "|", "row 1") == "one|three"
    assert tables.columns_of("a") == ["a"]
    assert tables.columns_of(["a", "b"]) == ["a", "b"]
    for bad, columns, words in ((row, ["d"], "row 1: column 'd' holds int .'4'., not text"),
        (row, ["e"], "no column 'e'"),
                                ("broken", ["a"], "row 1: broken")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            tables.text_of(bad, columns, "|", "row 1")


# Choosing sources


def test_a_part_of_a_mixture_has_a_path_or_a_name_and_a_weight(
    data_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "open_source", lambda cfg: cfg.source)
    cfg = data_config("chat")
    for entry, source, weight in (({"path": "a"}, "files", 1), ({"name": "b", "weight": 0.1}, "hub", Fraction(1, 10)),
                                  ({"path": "a", "weight": 2}, "files", 2)):  # fmt: skip
        part = choose._part(cfg, entry, 1)
        assert (part.source, part.weight, part.cfg.mixture) == (source, weight, None)
    for entry, words in (({}, "give either path"), ({"path": "a", "name": "b"}, "give either path"),
                         ({"path": "a", "weight": 0}, "weight=0: a number above 0"),
                         ({"path": "a", "weight": True}, "weight=True"),
                         ({"path": "a", "weight": float("inf")}, "weight=inf"),
                         ({"path": "a", "weight": "1"}, "weight='1'")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            choose._part(cfg, entry, 1)


@pytest.mark.parametrize(("rows", "fraction", "few", "held"), [(20, 0.1, 1, [9, 19]), (20, 0.1, 5, [9, 19]),
    (20, 0.0, 5, None),
                                                               (50, 0.02, 4, [12, 24, 37, 49])])  # fmt: skip
def test_rows_are_held_out_of_training(rows: int, fraction: float, few: int, held: Any, data_config: Any) -> None:
    cfg = data_config("chat", val_fraction=fraction, min_val_rows=few, num_samples=None)
    source = SimpleNamespace(records=lambda name: iter(range(rows)) if name == "train" else None)
    part: Any = SimpleNamespace(cfg=cfg, source=source)
    val = choose.split_records(part, "val")
    assert (val if val is None else list(val)) == held
    assert list(choose.split_records(part, "train") or ()) == [i for i in range(rows) if i not in (held or ())]
    both: Any = SimpleNamespace(
        cfg=data_config("chat", num_samples=2), source=SimpleNamespace(records=lambda name: iter("abc"))
    )
    assert [list(choose.split_records(both, name) or ()) for name in ("train", "val")] == [["a", "b"]] * 2


def test_files_are_told_by_their_names(tmp_path: Path) -> None:
    labels = {"a/b.txt": "b.txt", "a/b/": "b", "a/*.txt": "a", "a/x[0-9].txt": "x", "*": "files"}
    assert {path: files.label_of(path) for path in labels} == labels
    assert files.label_of(["c/d", "e"]) == "d"
    for name, format in (
        ("a.TXT", "text"),
        ("a.ndjson.gz", "jsonl"),
        ("a.parquet.gz", None),
        ("a.csv.zst", "csv"),
        ("a", None),
    ):
        assert files._suffix_format(tmp_path / name) == format, name
    assert files._format_of(tmp_path / "a", "csv") == "csv"
    with pytest.raises(UserError, match="can't be told from the suffix"):
        files._format_of(tmp_path / "a", "auto")
    for i in range(7):
        (tmp_path / f"{i}.bin").write_bytes(b"x" * (i > 0))
    unread = sorted(tmp_path.iterdir())
    assert (
        files._unread("it", unread) == "it: 7 files are not read: 0.bin (empty), 1.bin, 2.bin, 3.bin, 4.bin and 2 more"
    )
    assert files._unread("it", unread[1:2]) == "it: 1 file is not read: 1.bin"
    assert files._unread("it", unread[:5]).endswith("4.bin")
