"""Untrusted files with terminal escapes, YAML tags or pickles: one message each, no terminal control, no code run."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.panel import Panel
from rich.table import Table

from inprocess import Ended, message, run, train_tiny
from lmtrain import terminal
from lmtrain.checkpoints import checksums, manifest, store
from support import EXPORT, SAMPLES, TINY

ESCAPE, BIDI, CLEAR = "\x1b]0;title\x07", "\u202egnp.", "\x9b2J"  # sets a title; reverses text; clears the screen
HOSTILE = f"a{ESCAPE}{BIDI}{CLEAR}b"


def assert_harmless(text: str) -> None:
    found = [c for c in text if c != "\n" and not c.isprintable()]
    assert not found, f"{found} in {text!r}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _line(here: Path) -> list[str]:
    (here / "a.jsonl").write_text(json.dumps({"text": "good"}) + "\n" + HOSTILE + "\n")
    return ["train", "data=jsonl", "data.path=a.jsonl"]


def _column(here: Path) -> list[str]:
    (here / "a.jsonl").write_text(json.dumps({HOSTILE: "good"}) + "\n")
    return ["train", "data=jsonl", "data.path=a.jsonl"]


def _file_name(here: Path) -> list[str]:
    (here / "data").mkdir()
    (here / "data" / f"{HOSTILE.replace('/', '')}.jsonl").write_text("no json\n")
    return ["train", "data=jsonl", "data.path=data"]


def _role(here: Path) -> list[str]:
    (here / "a.jsonl").write_text(json.dumps({"messages": [{"role": HOSTILE, "content": "hello"}]}) + "\n")
    return ["train", "objective=sft", "data=chat_jsonl", "data.path=a.jsonl"]


def _override(here: Path) -> list[str]:
    return ["train", f"optimizer.{HOSTILE}=1"]


@pytest.mark.parametrize("make", [_line, _column, _file_name, _role, _override])
def test_no_error_steers_the_terminal(make: Any, here: Path) -> None:
    verb, *argv = make(here)
    ended = run(verb, *TINY, *argv)
    assert ended.code == 2, ended.err
    assert "a" in message(ended.err)
    assert_harmless(ended.out)
    assert_harmless(ended.err)


def test_no_plan_steers_the_terminal(here: Path, corpus: Path) -> None:
    """A data file's text is shown in the plan's first row and in samples, its folder's name next to the tokens."""
    data = here / f"data{BIDI}"
    data.mkdir()
    for file in corpus.iterdir():
        (data / file.name).write_text(f"{HOSTILE} " * 20 + file.read_text())
    (here / "plain").symlink_to(data)
    ended = train_tiny(here / "plain", EXPORT, SAMPLES, "run.name=x")
    assert ended.code == 0, ended.err
    assert_harmless(ended.out)


def test_the_console_keeps_its_own_colours_and_takes_those_of_data() -> None:
    file = io.StringIO()
    console = terminal.console(file=file, force_terminal=True, color_system="truecolor", width=80)
    table = Table(HOSTILE)
    table.add_row(f"[red]{HOSTILE}[/red]")
    console.print(f"[bold]note[/bold] {HOSTILE}")
    console.print(Panel(table, title=HOSTILE))
    text = file.getvalue()
    assert "\x1b[1mnote\x1b[0m" in text
    for data in (ESCAPE, BIDI, CLEAR, "\x07"):
        assert data not in text
    assert text.count("␛") == 4


def test_brackets_and_colons_in_facts_and_notes_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """A closing tag that was never opened raises in rich; others, such as a pattern of files, would not be shown."""
    said = "no such file [/data/part[a-z].txt] :warning: [red]"
    terminal.note(said)
    terminal.console().print(terminal.facts([("[data]", said)], "title"))
    assert capsys.readouterr().out.split() == ["note:", *said.split(), "title", "[data]", *said.split()]


class Runs:
    """A pickle that runs a command if it is loaded without restrictions."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def assert_one_message(ended: Ended, *said: str) -> None:
    assert ended.code in (1, 2)
    for words in said:
        assert words in message(ended.err)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ended = train_tiny(corpus, EXPORT, SAMPLES, "run.name=run", f"run.root={folder}")
    assert ended.code == 0, ended.err
    return folder / "run"


@pytest.fixture
def kept(trained: Path, here: Path) -> Path:
    return Path(shutil.copytree(trained, here / "outputs" / "run", symlinks=True))


TAGS = ["!!python/object/apply:os.system [touch ran]", "seed: !!python/name:os.system", "seed: !unknown 3"]


@pytest.mark.parametrize("tag", TAGS)
def test_a_yaml_tag_runs_nothing(tag: str, kept: Path, corpus: Path, here: Path) -> None:
    (kept / "config.yaml").write_text(tag + "\n")
    assert_one_message(run("generate", f"run_dir={kept}"), "config.yaml", "can't be read")
    assert_one_message(run("export", f"run_dir={kept}"), "config.yaml", "can't be read")
    assert_one_message(run("train", "--config-dir", str(kept), "run.name=other"), "config.yaml", "can't be read")
    assert not (here / "ran").exists()


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"", b"[1, 2]", b"{", b"seed: 1\n", b"\0\0\0"])
def test_a_config_that_is_none(text: bytes, kept: Path, corpus: Path) -> None:
    (kept / "config.yaml").write_bytes(text)
    assert_one_message(run("generate", f"run_dir={kept}"))
    assert_one_message(run("train", "--config-dir", str(kept), "run.name=other", "data.path=nowhere"))


@pytest.mark.parametrize("name", ["model.pt", "trainer.pt"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_pickle_in_a_checkpoint_runs_nothing(name: str, whole: bool, kept: Path, corpus: Path, here: Path) -> None:
    """This holds even if the manifest was made to match, and in torch's own format with an unknown class."""
    for checkpoint in store.scan(kept / "checkpoints"):
        if whole:
            torch.save({"callbacks": Runs(here / "ran")}, checkpoint / name)
        else:
            (checkpoint / name).write_bytes(pickle.dumps({"fingerprint": Runs(here / "ran")}))
        content = manifest.read(checkpoint)
        data = (checkpoint / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "sha256": checksums.sha256(checkpoint / name, 0, len(data))}
        manifest.write(checkpoint, content)
        assert store.damage(checkpoint) is None
    assert_one_message(train_tiny(corpus, "run.name=run", "trainer.max_steps=3"), name, "Nothing in it was run")
    assert_one_message(run("export", f"run_dir={kept}"), name, "Nothing in it was run")
    assert not (here / "ran").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_in_an_export_runs_nothing(name: str, kept: Path, corpus: Path, here: Path) -> None:
    export = kept / "export"
    (export / "model.safetensors").unlink()
    (export / name).write_bytes(pickle.dumps({"weight": Runs(here / "ran")}))
    assert_one_message(run("generate", f"run_dir={export}"), str(export), "nothing in it was run")
    settings = ["model=pretrained", f"model.name_or_path={export}", "tokenizer=hub", f"tokenizer.name_or_path={export}"]
    plain = [o for o in TINY if not o.startswith(("model.", "tokenizer="))]
    ended = run("train", *plain, *settings, "data=text", f"data.path={corpus}", "run.name=tuned")
    assert_one_message(ended, str(export))
    assert not (here / "ran").exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_pickle_in_an_adapter_runs_nothing(name: str, kept: Path, corpus: Path, here: Path) -> None:
    adapter = here / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"],
              "fan_in_fan_out": True, "base_model_name_or_path": str(kept / "export")}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / name).write_bytes(pickle.dumps({"weight": Runs(here / "ran")}))
    settings = ["model=pretrained", f"model.name_or_path={kept / 'export'}", "tokenizer=hub",
                f"tokenizer.name_or_path={kept / 'export'}", "peft=lora", f"peft.adapter={adapter}"]  # fmt: skip
    plain = [o for o in TINY if not o.startswith(("model.", "tokenizer="))]
    ended = run("train", *plain, *settings, "data=text", f"data.path={corpus}", "run.name=tuned")
    assert_one_message(ended, f"peft.adapter={adapter} can't be loaded")
    assert_one_message(run("generate", f"run_dir={adapter}"), str(adapter), "nothing in it was run")
    assert not (here / "ran").exists()
