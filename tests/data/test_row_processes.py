"""Rows that several processes encode become what one process makes of them, and the processes end with their parent."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmtrain.data.chat.turns import BadRow
from lmtrain.data.corpus import ROW_FORMATS
from lmtrain.data.examples import prepare
from lmtrain.data.examples.prepare import PreparedExamples, prepare_examples
from lmtrain.data.fast_ids import TextIds
from lmtrain.errors import RunError, UserError
from processes import below

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
SPLITS = {"val_fraction": 0.2, "min_val_rows": 0, "max_length": 250, "max_untrained": None}


@pytest.fixture(autouse=True)
def few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(prepare, "ENOUGH", 10)
    monkeypatch.setattr(prepare, "_CHUNK", 3)
    monkeypatch.setattr(TextIds, "has_threads", False)  # whatever tests before this one did: these texts are few


@pytest.fixture
def made(data_config, tokenizer_config, tmp_path):
    """Returns a factory: made(processes, option, ...) prepares rows in a cache of this number of processes."""

    def make(processes: int, option: str, **settings) -> PreparedExamples:
        place = {"cache_dir": str(tmp_path / f"of{processes}"), "num_proc": processes}
        cfg = data_config(option, chat_template="alpaca", **{**SPLITS, **settings, **place})
        return prepare_examples(cfg, tokenizer_config("bytes"), ROW_FORMATS[cfg.rows], False)

    return make


def chats(path: Path, *more: str) -> str:
    """Writes rows in three formats, of which some can't be read, are cut, or lack something to learn; and `more`."""
    said = [[{"role": r, "content": f"{r} {i} " * (i % 9)} for r in ("user", "assistant")] for i in range(40)]
    rows = [{"messages": messages} for messages in said]
    rows += [{"prompt": f"question {i}", "completion": f"answer {i}", "score": i} for i in range(40)]
    rows += [{"instruction": f"say {i}", "output": "x" * i, "input": "twice" * (i % 2)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "".join(more))
    return str(path)


def pairs(path: Path) -> str:
    answers = [{"chosen": "yes " * (i % 7), "rejected": "no " * (i % 5), "margin": i / 7} for i in range(60)]
    rows = [{"prompt": f"{i}?", **answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["chats", "pairs", "mixture"])
def test_the_files_do_not_depend_on_the_number_of_processes(kind, made, tmp_path, monkeypatch):
    """Bytes, counts, notes, formats and questions are equal, and where there are several they did the work."""
    monkeypatch.setattr(prepare, "MAX_QUESTIONS", 7)
    file = pairs(tmp_path / "p.jsonl") if kind == "pairs" else chats(tmp_path / "c.jsonl")
    settings = {"path": file, "on_bad_row": "skip"}
    if kind == "mixture":  # the first source alone has too few rows
        few = tmp_path / "few.jsonl"
        few.write_text('{"prompt": "a", "completion": "b"}\n' * 6)
        settings |= {"path": None, "source": "mixture", "mixture": [{"path": str(few)}, {"path": file, "weight": 0.5}]}
    option = "preference_jsonl" if kind == "pairs" else "chat_jsonl"
    found, real, before = [], prepare._encode, below(os.getpid())  # of earlier tests, such as wandb's service
    for processes in (1, 3):
        seen = tmp_path / f"processes{processes}"
        seen.mkdir()
        monkeypatch.setattr(prepare, "_encode", lambda *row, seen=seen: (seen / str(os.getpid())).touch() or real(*row))
        one = made(processes, option, **settings)
        found.append((content(one.folder), one.fingerprint))
        assert len({*os.listdir(seen)} - {str(os.getpid())}) == (3 if processes == 3 else 0)
    assert found[0] == found[1]
    assert one.meta["splits"]["train"]["counts"]["bad"]
    assert len(one.meta["questions"]) == 7
    if kind == "chats":
        assert one.meta["words"] == "alpaca and messages and prompt_completion"
    assert [process for process in below(os.getpid()) if process not in before] == []


@pytest.mark.parametrize("end", ["", "{'not': JSON}\n"])
def test_the_first_bad_row_is_named(end, made, tmp_path):
    """Also where the file can't be read any further, which is noticed before the row's process answers."""
    file = chats(tmp_path / "c.jsonl", end)
    messages = []
    for processes in (1, 3):
        with pytest.raises(UserError) as refused:
            made(processes, "chat_jsonl", path=file)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    assert "c.jsonl, line 1: turn 1 " in messages[0]


def test_an_error_of_another_process_is_raised_here(made, tmp_path, monkeypatch):
    """With its own traceback; a process that is killed ends the preparation with a message."""
    file, here, real = chats(tmp_path / "c.jsonl"), os.getpid(), prepare._encode

    def broken(encoder, cfgs, row, asked=False):
        if row[1].endswith("line 50"):
            raise ZeroDivisionError("of this row")
        return real(encoder, cfgs, row, asked)

    monkeypatch.setattr(prepare, "_encode", broken)
    with pytest.raises(ZeroDivisionError, match="of this row"):
        made(3, "chat_jsonl", path=file, on_bad_row="skip")
    monkeypatch.setattr(prepare, "_encode", lambda *row: real(*row) if os.getpid() == here else os._exit(1))
    with pytest.raises(RunError, match=r"process that encodes rows was killed.*data.num_proc=1"):
        made(3, "chat_jsonl", path=file, on_bad_row="skip")
    assert not list((tmp_path / "of3").glob("*/meta.json"))


def test_a_bad_row_is_the_same_in_another_process():
    bad = pickle.loads(pickle.dumps(BadRow("a.jsonl, line 1", "it is empty", skip=True)))  # noqa: S301
    assert (str(bad), bad.where, bad.reason, bad.skip) == ("a.jsonl, line 1: it is empty", *bad.args)


SLOW = """{% for i in range(3000) %}{{ '' if i else '' }}{% endfor %}
{%- for m in messages %}<s>{{ m.role + m.content }}</s>{% endfor %}{{ '<s>assistant' if add_generation_prompt }}"""


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_processes_end_with_their_parent(by, tmp_path):
    """At Ctrl-C, which goes to all of them, and however else the parent ends; nothing is left that looks complete."""
    (tmp_path / "slow.jinja").write_text(SLOW)
    row = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n" * 20_000)
    settings = [f"data.path={tmp_path}/rows.jsonl", f"data.chat_template={tmp_path}/slow.jinja", "tokenizer=bytes",
                "tokenizer.add_tokens=[<s>,</s>]", f"data.cache_dir={tmp_path}/cache", "data.num_proc=2",
                "data.seq_len=256"]  # fmt: skip
    verb = [sys.executable, "-m", "lmtrain.prepare", "objective=sft", "data=chat_jsonl", *settings]
    with subprocess.Popen(verb, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while len(workers := below(process.pid)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(workers) == 2
        os.killpg(process.pid, by) if by == signal.SIGINT else process.send_signal(by)
        assert process.wait(timeout=60) != 0
        while any(worker.alive() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(worker.alive() for worker in workers)
    assert not list((tmp_path / "cache").glob("*/meta.json"))
