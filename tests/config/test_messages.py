"""Mistakes whose messages used to name the wrong thing or to wait for a hub."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inprocess import message, run
from lmtrain.config.compose import check, compose
from lmtrain.errors import UserError

SAID = {
    "model=pretrained": "set model.name_or_path to a hub name or a folder",
    "model=pretrained|model.name_or_path=a/b": "set data.seq_len=... (a pretrained model brings none; 1024 is usual)",
    f"objective=dpo|data=chat_jsonl|data.path={__file__}": "dpo needs pairs, and this data holds conversations",
    "logger=wandb|logger.wandb.mode=offlin": "did you mean offline?",
    "callbacks.extra={_target_: lightning.pytorch.callbacks.Timer}": "a list is needed, callbacks.extra=[{_target_: ",
    "optimizer=adamw|optimizer.betas=[0.9,1.5]": "optimizer.betas=[0.9, 1.5]: two numbers are needed, from 0 up to",
    "model.name=gpt2": "the hub are model=pretrained model.name_or_path=gpt2",
    "model=llama_nano|model.name=llama_small": "the model stays llama_nano. Choose model=llama_small",
    "~peft=lora": "peft=none turns it off",
    "~model": "the group model can't be left out; options: ",
    "run.name=\u00e9t\u00e9": "use a-z, A-Z, digits",
    "callbacks.samples.prompts=[a\udcff]": "it can't hold a NUL character or what is not valid UTF-8",
    "data=text|data.path=/dev/null": "is a device, pipe or socket",
}


@pytest.mark.parametrize("typed", SAID)
def test_the_message_names_what_is_wrong(typed: str) -> None:
    ended = run("train", *typed.split("|"))
    assert ended.code == 2
    assert SAID[typed] in message(ended.err)


def test_a_models_name_is_its_own() -> None:
    """A model.name that repeats the chosen model changes nothing; with a class of the user's own it is free."""
    assert compose(["model=llama_nano", "model.name=llama_nano"]).model.name == "llama_nano"
    own = compose(["model=custom", "model._target_=a.B", "run.allow_target=[a]", "model.name=mine", "data.seq_len=8"])
    assert own.model.name == "mine"


def test_a_name_the_hub_lacks_is_called_a_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    from lmtrain.data import hub

    def missing(*_: object, **__: object) -> None:
        raise errors.HFValidationError("no")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", missing)
    ended = run("train", "model=pretrained", "model.name_or_path=nobody/nothing", "data.seq_len=32")
    assert ended.code == 2
    assert f"model or tokenizer 'nobody/nothing' doesn't exist on {hub.endpoint()}" in message(ended.err)


def test_a_mistyped_run_folder_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "my_book").mkdir(parents=True)
    began = time.perf_counter()
    ended = run("generate", "run_dir=outputs/my_bok")
    assert ended.code == 2
    assert message(ended.err) == "outputs/my_bok: no such folder; did you mean outputs/my_book?"
    assert "no such folder; python -m lmtrain.runs lists" in message(run("generate", "run_dir=outputs/x/y").err)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run("generate", "run_dir=nobody/nothing").code == 2
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize("words", [["train", "--cfg"], ["train", "--help"], ["explain"]])
def test_a_reader_that_leaves_is_no_error(words: list[str]) -> None:
    """A closed pipe, as in `... --cfg | head -1`, is no error."""
    command = [sys.executable, "-m", f"lmtrain.{words[0]}", *words[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""


@pytest.mark.parametrize("value", ["a", "[a,b]"])
def test_a_key_of_text_has_no_meaning_with_conversations(value: str) -> None:
    ended = run("train", "objective=sft", "data=chat_jsonl", "data.path=x.jsonl", f"data.text_column={value}")
    assert ended.code == 2
    assert message(ended.err).startswith("data.text_column has no meaning with the data chosen here")


@pytest.mark.parametrize("key", ["trainer.max_stepss", "checkpoint.keep_lasst"])
def test_a_wrong_key_is_named_although_the_path_chooses_the_data(key: str) -> None:
    """Not data.chat_template, which only the reader of the path defines."""
    ended = run("train", "objective=grpo", "data.path=x.jsonl", "data.chat_template=chatml", f"{key}=1")
    assert message(ended.err).startswith(f"there is no key '{key}'; did you mean {key.replace('ss', 's')}")


def test_masked_diffusion_needs_no_other_word() -> None:
    config = check(compose(["objective=mdlm"]))
    assert config.export.enabled
    assert config.callbacks.samples.every_n_validations == 1
    with pytest.raises(UserError, match=r"its base would attend causally\. Set export\.enabled=false$"):
        check(compose(["objective=mdlm", "peft=lora", "model=pretrained", "model.name_or_path=gpt2",
                       "data.seq_len=64"]))  # fmt: skip
