"""The inspect verb's facts about data agree with counting by hand; odd text breaks neither the screen nor the page."""

import json
import re
import shlex
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from chats import conversation, pair, write_chats
from inprocess import Ended, message, run
from lmtrain.config.compose import check, compose
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.reports.inspection import look
from lmtrain.reports.token_view import marked, pieces
from lmtrain.terminal import visible
from support import TINY

CHAT = [*TINY, "objective=sft", "data=chat_jsonl", "data.chat_template=vicuna", "model.max_position_embeddings=1024",
        "data.seq_len=512", "data.val_fraction=0"]  # fmt: skip
ODD = "[bold red]no markup[/] \x1b[31mred\x07 \u202eleft \x00 <script>alert(1)</script> & 日本 🤦🏽‍♂️ \r\nend"


def inspect(path: Path, *argv: str) -> Ended:
    return run("inspect", *CHAT, f"data.path={path}", *argv)


def byte_tokenizer() -> object:
    cfg = TokenizerConfig(kind="bytes")
    return tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))


def test_a_document_that_is_longer_than_a_shard_has_its_whole_length(tmp_path: Path) -> None:
    texts = ["short", "x" * 250, "another"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = look(check(compose(["data=jsonl", f"data.path={tmp_path / 'texts.jsonl'}", "tokenizer=bytes",
                                "data.seq_len=8", "data.val_fraction=0", "data.shard_tokens=100"])))  # fmt: skip
    assert found.lengths is not None
    assert found.lengths.tolist() == [len(text) + 1 for text in texts]  # the end of text


def test_prompts_are_given_and_not_learned(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(8)]
    path = write_chats(tmp_path / "prompts.jsonl", rows)
    prompts = [*TINY, "objective=grpo", "data=prompts_jsonl", f"data.path={path}", "data.val_fraction=0",
               "data.chat_template=zephyr", "inspect.samples=1"]  # fmt: skip
    ended = run("inspect", *prompts)
    assert ended.code == 0, ended.err
    assert "8 rows -> 8 examples" in ended.out + ended.err
    assert re.search(r"[1-9]\d* learned|% learned|learned +[1-9]", ended.out + ended.err) is None
    assert "learned ones" not in ended.out
    (body,) = re.findall(r"prompt 1 of 8(.*?)⟦learned⟧ given", ended.out, re.DOTALL)
    assert "⟦" not in body


def test_notes_on_a_source_are_called_notes(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"text": "one and the same"}\n' * 4)
    found = look(check(compose(["data=jsonl", f"data.path={tmp_path / 'texts.jsonl'}", "tokenizer=bytes",
                                "data.seq_len=8", "data.val_fraction=0"])))  # fmt: skip
    copies = "3 of 4 documents (75%) are exact copies of an earlier one: data.dedup=exact leaves them out"
    assert ("note", copies) in found.rows  # they are read


def test_counts_lengths_and_masks(tmp_path: Path) -> None:
    """With one token per byte, learned tokens can be counted in the rows themselves."""
    late = {"messages": [{"role": "user", "content": "x" * 600}, {"role": "assistant", "content": "late"}]}
    bad = {"messages": [{"role": "user", "content": "and?"}]}
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "y" * 900}]}
    good = [conversation(i) for i in range(40)]
    path = write_chats(tmp_path / "chats.jsonl", [*good, long, late, late, late, bad])
    config = check(compose([*CHAT, f"data.path={path}", "data.on_bad_row=skip"]))
    found = look(config)
    facts = dict(found.rows)
    assert (facts["rows in the data"], facts["examples"]) == ("45", "41")
    assert facts["truncated"] == "4"
    assert facts["left out: no learned token"] == "3"
    assert facts["left out: bad"] == "1"
    assert f"{path}, line 42" in facts["first without a learned token"]
    assert f"{path}, line 45" in facts["1 row skipped"]
    assert "training refuses this" in facts

    answers = [[m["content"] for m in row["messages"] if m["role"] == "assistant"] for row in good]
    by_hand = [sum(len(a) + 2 for a in said) for said in answers]  # a space before each answer, an end of text after it
    assert found.learned is not None
    assert found.lengths is not None
    assert Counter(found.learned.tolist()[:-1]) == Counter(by_hand)
    bars = found.histogram()
    assert sum(n for _, _, n in bars) == 41
    for low, high, number in bars:
        assert number == int(np.sum((found.lengths >= low) & (found.lengths <= high)))
    header, lines = found.percentiles()
    assert header[1:] == ["tokens of examples", "learned ones"]
    assert {line[0]: line[1] for line in lines}["longest"] == "512"

    sample = found.samples[0]
    learned = "".join(p.text for p in sample.head if p.learned)
    assert learned.split("<|endoftext|>")[:-1] == [f" {a}" for a in answers[0]]

    ended = inspect(path, "data.on_bad_row=skip")
    assert ended.code == 0, ended.err
    assert re.search(r"left out: no learned token +3 ", ended.out)
    refused = run("train", *CHAT, f"data.path={path}", "data.on_bad_row=skip", f"run.dir={tmp_path}/run")
    assert refused.code == 2
    said = message(refused.err)
    assert "3 of 44 train rows have no learned token" in said
    assert "xxxxxx" in said, "an example of them"
    assert len(said) < 1200


def test_screen_without_colour_marks_what_is_learned(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 4)
    ended = inspect(path, "inspect.samples=1", "inspect.tokens=2000")
    assert "\x1b" not in ended.out
    shown = "".join(line[2:-2].rstrip(" ") for line in ended.out.splitlines() if line.startswith("│"))
    said = conversation(0)["messages"][1]["content"]
    spans = re.findall("⟦(.*?)⟧", shown.replace("╎", ""))
    assert [s.replace(" ", "") for s in spans] == [said.replace(" ", "") + "<|endoftext|>"]
    short = inspect(path, "inspect.samples=1", "inspect.tokens=20")
    assert re.search(r"\.\.\. \d+ tokens \.\.\.", short.out)


class Page(HTMLParser):
    """Collects the text of each token with its classes; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tokens: list[tuple[str, str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in ("meta", "rect", "wbr"):
            return
        self.open.append(tag)
        if tag == "i":
            self.tokens.append((dict(attrs).get("class") or "", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "i":
            self.tokens[-1] = (self.tokens[-1][0], self.tokens[-1][1] + data)


def test_odd_text_on_screen_and_page(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": ODD}, {"role": "assistant", "content": ODD}]
    path = write_chats(tmp_path / "odd.jsonl", [{"messages": turns}] * 3)
    page = tmp_path / "rows.html"
    ended = inspect(path, "inspect.samples=1", f"inspect.html={page}")
    assert ended.code == 0, ended.err
    for sign in ("\x1b", "\x07", "\x00", "\u202e", "\r"):
        assert sign not in ended.out
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert not re.search(r"(src|href)=|@import|url\(", text), "nothing is loaded from elsewhere"
    parsed = Page()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    assert {"table", "pre", "b"} <= parsed.tags, "counts, tokens and bars"
    learned = "".join(t for kind, t in parsed.tokens[3:] if "l" in kind.split())  # the legend comes first
    assert learned == " " + visible(ODD).replace("\n", "↵\n") + "<|endoftext|>"
    refused = inspect(path, f"inspect.html={tmp_path}/nowhere/rows.html")
    assert refused.code == 2
    assert "inspect.html" in message(refused.err)


def test_half_a_character_is_a_bad_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a \ud800 b"}, {"role": "assistant", "content": "c"}]
    path = write_chats(tmp_path / "half.jsonl", [conversation(0), {"messages": turns}])
    ended = inspect(path)
    assert ended.code == 2
    assert f"{path}, line 2" in message(ended.err)


def test_pieces_are_whole_characters_and_the_whole_text() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(ODD)["input_ids"]  # type: ignore[operator]
    found = pieces(tokenizer, ids, [False] * len(ids))
    assert "".join(p.text for p in found) == ODD
    assert [i for p in found for i in p.ids] == ids
    assert "日" in [p.text for p in found]
    broken = pieces(tokenizer, ids[: ids.index(0xE6) + 2], [False] * len(ids))
    assert broken[-1].text == "\ufffd", "the end of a text cut within a character"


def test_colour_tells_learned_from_given() -> None:
    tokenizer = byte_tokenizer()
    text = marked(pieces(tokenizer, list(b"ab[i]"), [False, True, False, False, False]), colour=True)
    assert text.plain == "ab[i]"
    console = Console(color_system="truecolor", force_terminal=True, width=40)
    with console.capture() as capture:
        console.print(text)
    out = capture.get()
    assert re.search(r"\x1b\[[^m]*48;2;[^m]*mb\x1b", out), "the learned b has a background"
    assert len(re.findall("48;2;", out)) == 1


def test_text_and_pairs(corpus: Path, tmp_path: Path) -> None:
    ended = run("inspect", *TINY, "data=text", f"data.path={corpus}", "inspect.samples=2", "inspect.split=val")
    assert ended.code == 0, ended.err
    assert "tokens of documents" in ended.out
    assert re.search(r"row 1 of \d+: 32 tokens", ended.out)
    path = write_chats(tmp_path / "pairs.jsonl", [pair(i) for i in range(6)])
    chat = [w for w in CHAT if w not in ("objective=sft", "data=chat_jsonl")]
    ended = run("inspect", *chat, "objective=dpo", "data=preference_jsonl", f"data.path={path}", "inspect.samples=1")
    assert ended.code == 0, ended.err
    assert "pair 1 of 6, chosen" in ended.out
    assert "pair 1 of 6, rejected" in ended.out
    lines = ended.out[ended.out.index("rejected:") :]
    assert "⟦ I do" in lines.replace("╎", "")


def test_the_plan_shows_the_mask(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", 12)
    tiny = ["trainer.max_steps=1", "export.enabled=false", f"run.dir={tmp_path}/run"]
    ended = run("train", *CHAT, f"data.path={path}", *tiny)
    assert ended.code == 0, ended.err
    plan = ended.out[ended.out.index("first training row") :]
    assert "⟦learned⟧ given" in plan
    learned = re.search("⟦[^⟧]*⟧", plan[plan.index("\n") :])
    assert learned is not None


def test_what_is_not_read_or_left_out_is_shown(tmp_path: Path) -> None:
    """The plan and inspect show unread files by name, bad rows by reason, and conversations without their start."""
    folder = tmp_path / "chats"
    folder.mkdir()
    good = [conversation(i) for i in range(8)]
    late = {"messages": [good[0]["messages"][1], *good[0]["messages"]]}
    empty = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]}
    unknown = {"messages": [{"role": "poet", "content": "?"}]}
    path = write_chats(folder / "chats.jsonl", [*good, late, unknown, empty, empty, empty])
    (folder / "more.docx").write_text("x")
    argv = ["data.on_bad_row=skip", "data.on_assistant_first=drop_turn"]
    said = [
        f"3 rows skipped first {path}, line 11: turn 2 (assistant) is empty",
        f"1 row skipped first {path}, line 10: turn 1 has the unknown role 'poet'",
        f"{folder}: 1 file is not read: more.docx",
    ]
    ended = inspect(folder, *argv)
    assert ended.code == 0, ended.err
    shown = flat(ended.out)
    assert all(flat(words) in shown for words in said), ended.out
    assert flat("began with the assistant 1, whose first turns were dropped") in shown
    tiny = ["trainer.max_steps=1", "export.enabled=false", f"run.dir={tmp_path}/run"]
    ended = run("train", *CHAT, f"data.path={folder}", *argv, *tiny)
    assert ended.code == 0, ended.err
    plan = flat(ended.out)
    assert all(flat(words) in plan for words in said), ended.out
    assert flat("1 began with the assistant, whose first turns were dropped, 4 bad rows skipped") in plan


def test_prepare_says_what_is_not_read(tmp_path: Path) -> None:
    folder, cache = tmp_path / "corpus", tmp_path / "the cache"
    folder.mkdir()
    (folder / "book.txt").write_text("some text " * 100)
    (folder / "more.docx").write_text("x")
    argv = [f"data.path={folder}", f"data.cache_dir={cache}", "data.val_fraction=0.1"]
    ended = run("prepare", *TINY, "data=text", *argv)
    assert ended.code == 0, ended.err
    assert f"{folder}: 1 file is not read: more.docx" in ended.out
    words = shlex.split(ended.out[ended.out.index("data=bins") :])
    assert run("inspect", *TINY, *words).code == 0, words
    (folder / "book.txt").rename(folder / "book.md")
    write_chats(folder / "chats.jsonl", [conversation(i) for i in range(4)])
    ended = run("prepare", *CHAT, *argv[:2])
    assert ended.code == 0, ended.err
    assert f"{folder}: 2 files are not read: book.md, more.docx" in ended.out


def flat(text: str) -> str:
    """Removes everything that a table on the screen puts between words."""
    return re.sub(r"[^\w'?.]+", "", text)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_unknown_split(split: str, tmp_path: Path) -> None:
    ended = inspect(tmp_path, f"inspect.split={split}")
    assert ended.code == 2
    assert "options: train, val" in ended.err
    assert json.dumps(ended.out) == '""'
