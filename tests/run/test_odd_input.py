"""Odd values, environments and files work or give one message that says what to change, with no traceback."""

import errno
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inprocess import message, run, train_tiny
from lmtrain import files
from lmtrain.config.batch import batch_split
from lmtrain.data.chat import jinja_rendering
from lmtrain.data.loaders import check_descriptors
from lmtrain.distributed import ranks
from lmtrain.errors import RunError, UserError
from lmtrain.files import write_atomic

HUGE = 99999999999999999999


@pytest.fixture(scope="module")
def a_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "run"
    ended = train_tiny(corpus, f"run.dir={folder}", "export.enabled=false")
    assert ended.code == 0, ended.err
    return folder


@pytest.mark.parametrize("key", ["trainer.max_steps", "data.global_batch_size", "data.num_workers",
                                 "checkpoint.keep_last", "trainer.save_every_n_steps", "model.vocab_size"])  # fmt: skip
def test_whole_numbers_have_64_bits(key: str, corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, f"run.dir={tmp_path}/run", f"{key}={HUGE}")
    assert ended.code == 2
    assert message(ended.err).startswith(f"{key}={HUGE}: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("key", ["trainer.gradient_clip_val", "optimizer.lr"])
def test_numbers_are_finite(key: str, value: str, corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, f"run.dir={tmp_path}/run", f"{key}={value}")
    assert ended.code == 2
    assert f"{key}={value}" in message(ended.err)


def test_the_nearest_split_of_a_large_batch_is_found_at_once() -> None:
    started = time.process_time()
    with pytest.raises(UserError, match=r"data.micro_batch_size=1 or"):
        batch_split(2**31 - 1, 2, 1)
    with pytest.raises(UserError, match=r"data.micro_batch_size=4 or"):
        batch_split(24, 5, 1)
    assert time.process_time() - started < 1


def test_too_many_workers_are_refused(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, f"run.dir={tmp_path}/run", "data.num_workers=100000")
    assert message(ended.err) == "data.num_workers=100000: a whole number from 0 to 512 is needed"


def test_workers_need_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    check_descriptors(0)
    with pytest.raises(UserError, match=r"needs about 96 open files, and this shell allows 24 .*data.num_workers=0"):
        check_descriptors(2)
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    check_descriptors(2)
    assert raised == [(96, 4096)]


@pytest.mark.parametrize("reader", [[], ["data=text"]])
def test_the_whole_file_system_is_no_data(reader: list[str], tmp_path: Path) -> None:
    ended = run("train", *reader, "data.path=/", f"run.dir={tmp_path}/run")
    assert ended.code == 2
    assert message(ended.err) == "data.path=/ is the whole file system: name the folder that holds the data"


def test_a_data_file_with_a_long_name(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / f"{'a' * 240}.txt"
    file.write_bytes(b"".join(p.read_bytes() for p in sorted(corpus.iterdir())))
    ended = train_tiny(file, f"run.dir={tmp_path}/run", "export.enabled=false")
    assert ended.code == 0, ended.err


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*File name too long"):
        write_atomic(tmp_path / ("a" * 300), "")


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    (tmp_path / "summary.json").write_text("{}")
    monkeypatch.setattr(files, "remove_leftovers", out_of_descriptors)
    with pytest.raises(RunError, match="Too many open files"):
        write_atomic(tmp_path / "summary.json", "new")
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_a_link_in_the_place_of_a_temporary_folder_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("")
    mine = files.temporary_beside(tmp_path / "export")
    mine.symlink_to(tmp_path / "elsewhere")
    assert files.temporary_beside(tmp_path / "export") == mine
    assert not mine.is_symlink()
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_a_checkpoint_named_at_the_root_of_the_file_system(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, f"run.dir={tmp_path}/run", "run.resume=/no_such_checkpoint")
    assert ended.code == 2
    assert "no such checkpoint folder" in message(ended.err)


def test_keys_without_effect(a_run: Path) -> None:
    assert "run_dir has no effect in `lmtrain estimate`" in message(run("estimate", f"run_dir={a_run}").err)
    explained = run("explain", "data.seq_len", f"run_dir={a_run}")
    assert explained.code == 2
    assert "run_dir has no effect in `lmtrain explain`" in message(explained.err)
    merged = run("export", f"run_dir={a_run}", "export.merge=true")
    assert merged.code == 2
    assert "export.merge=true has no effect here" in message(merged.err)
    told = run("generate", f"run_dir={a_run}", "generate.max_new_tokens=99999999999")
    assert told.code == 0
    assert "the model has 64 positions for the prompt and its continuation" in told.err


@pytest.mark.parametrize(
    ("stray", "said"),
    [
        ({"WORLD_SIZE": "2"}, "the environment has WORLD_SIZE=2, but no RANK"),
        ({"RANK": "1"}, "the environment has RANK=1, but no WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "but no LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (dict.fromkeys(ranks.TORCH, "x"), "RANK='x', which is not a number"),
        ({**dict.fromkeys(ranks.TORCH, "1"), "RANK": "7"}, "RANK=7, WORLD_SIZE=1"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID='', which is not a number"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "which is not a number"),
    ],
)
def test_stray_variables_of_a_launcher(stray: dict[str, str], said: str, corpus: Path, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    ended = train_tiny(corpus, f"run.dir={tmp_path}/run")
    assert ended.code == 1, ended.err
    assert said in message(ended.err)
    assert not (tmp_path / "run").exists()


def test_variables_of_one_process_alone_are_let_be() -> None:
    assert ranks.find({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert ranks.find({}) is None


def test_output_that_the_terminal_has_no_signs_for() -> None:
    code = "from lmtrain import cli, terminal; terminal.prepare_output(True); print('\\u2581 \\ud83d ok')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True,
                           env={**os.environ, "PYTHONIOENCODING": "latin-1"})  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == b"\\u2581 \\ud83d ok\n"


LOOPS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(99) %}{% endfor %}{% endfor %}{% endfor %}"
)


def chat_run(rows: list[dict[str, object]], tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={tmp_path}/rows.jsonl", "data.val_fraction=0.2", "data.seq_len=256", "tokenizer=bytes",
            "model=gpt_nano", "model.num_hidden_layers=1", "model.hidden_size=32", "model.num_attention_heads=2",
            "model.max_position_embeddings=256", "data.global_batch_size=2", "data.micro_batch_size=2",
            "trainer.max_steps=1", "trainer.val_check_interval=null", "trainer.limit_val_batches=1", "logger=none",
            "export.enabled=false", "callbacks.samples.every_n_validations=0", "trainer.precision=32-true",
            f"run.dir={tmp_path}/run", *more]  # fmt: skip


def test_a_template_that_loops_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja_rendering, "PATIENCE", 0.2)
    (tmp_path / "loops.jinja").write_text(LOOPS)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 10
    ended = run("train", *chat_run(rows, tmp_path, "objective=sft", "data=chat_jsonl",
                                   f"data.chat_template={tmp_path}/loops.jinja"))  # fmt: skip
    assert ended.code == 2
    assert "has not rendered a conversation after 0.2 seconds; it loops too often" in message(ended.err)


def unpaired(label: bool | None) -> list[dict[str, object]]:
    return [{"prompt": f"Say {i}", "completion": f"{i}", "label": i % 2 == 0 if label is None else label}
            for i in range(20)]  # fmt: skip


@pytest.mark.parametrize("label", [True, False])
def test_kto_needs_answers_of_both_kinds(label: bool, tmp_path: Path) -> None:
    there, absent = ("desirable", "undesirable") if label else ("undesirable", "desirable")
    kto = ["objective=kto", "data=unpaired_jsonl", "data.chat_template=vicuna"]
    ended = run("train", *chat_run(unpaired(label), tmp_path, *kto))
    assert ended.code == 2, ended.out
    assert f"answers are {there}, and KTO learns from how {absent} ones differ" in message(ended.err)
    meant = run("train", *chat_run(unpaired(label), tmp_path, *kto, f"objective.{absent}_weight=0"))
    assert meant.code == 0, meant.err


def test_a_system_prompt_stands_before_unpaired_answers(tmp_path: Path) -> None:
    kto = ["objective=kto", "data=unpaired_jsonl", "data.chat_template=zephyr"]
    shown = run("inspect", *chat_run(unpaired(None), tmp_path, *kto, "data.system_prompt=Be brief."))
    assert shown.code == 0, shown.err
    assert "Be brief." in shown.out.replace("╎", "")  # "╎" separates tokens


def test_a_system_prompt_without_a_place_is_said(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"prompt": f"Say {i}", "completion": f" {i}"} for i in range(20)]
    ended = run("train", *chat_run(rows, tmp_path, "objective=sft", "data=chat_jsonl", "data.system_prompt=Be brief."))
    assert ended.code == 0, ended.err
    assert "data.system_prompt has no effect: the prompt is text" in " ".join(ended.out.split())


def test_explain_says_what_a_key_of_the_validation_changes() -> None:
    explained = run("explain", "trainer.limit_val_batches")
    assert "changes   what scores are of" in explained.out
