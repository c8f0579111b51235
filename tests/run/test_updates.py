"""budget.updates: a fine-tune is planned in examples and updates, whatever the packing, the devices and the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chats import write_chats
from inprocess import run
from lmtrain.config.compose import check, compose
from lmtrain.config.override_text import Command
from lmtrain.run import updates
from support import rows
from tiny_pretrained import save_pretrained

SHORT = ["trainer.precision=32-true", "callbacks.samples.every_n_validations=0", "logger=none", "export.enabled=false"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny model of 32 channels and 512 positions, without a chat template."""
    return save_pretrained(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns sixty short questions with their answers: a single packed row holds a dozen."""
    found = [{"question": f"what is {i}?", "answer": f"it is {i % 7}"} for i in range(60)]
    return write_chats(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", found)


def chosen(folder: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((folder / "config.yaml").read_text()))


def test_a_file_beside_a_model_is_trained_in_many_updates(model: Path, pairs: Path, tmp_path: Path) -> None:
    """Sixty pairs in packed rows of 512 tokens, 32 rows an update, would be three updates in three epochs."""
    words = [str(pairs), f"model={model}", "optimizer=adamw", f"run.dir={tmp_path / 'run'}", *SHORT]
    ended = run("train", *words)
    assert ended.code == 0, ended.err
    config, records = chosen(tmp_path / "run"), rows(tmp_path / "run" / "metrics.jsonl")
    steps = records[-1]["step"]
    per_update = 54 * config["trainer"]["max_epochs"] / steps
    assert 1.5 <= per_update <= 3  # 2, in whole rows
    assert steps >= 240
    assert config["optimizer"]["lr"] == 8e-4  # the most for so few examples
    assert "chat template: alpaca" in ended.out
    assert "of 54 examples" in " ".join(ended.out.split())
    first, *_, last = [row["val/loss"] for row in records if "val/loss" in row]
    assert last < 0.5 * first
    again = run("train", *words, "run.resume=auto")
    assert again.code == 0, again.err
    assert "nothing to do" in again.out


def test_what_is_typed_stays(model: Path, pairs: Path, tmp_path: Path) -> None:
    typed = ["data.global_batch_size=3", "data.micro_batch_size=1", "optimizer.lr=0.5", "trainer.max_steps=7"]
    words = ["objective=sft", "data=chat_jsonl", f"data.path={pairs}", f"model={model}", "data.chat_template=alpaca"]
    words = [*words, "budget.updates=auto", *typed]
    config = check(compose(words), Command(tuple(words)))
    updates.settle(config)
    assert (config.data.global_batch_size, config.data.micro_batch_size) == (3, 1)
    assert (config.optimizer.lr, config.trainer.max_steps, config.trainer.max_epochs) == (0.5, 7, None)


@pytest.mark.parametrize(("packing", "devices"), [("best_fit_decreasing", 1), ("best_fit_decreasing", 4), ("off", 2)])
@pytest.mark.parametrize(("size", "mean", "longest"), [(8, 30.0, 60), (32, 700.0, 1024), (16, 130.0, 600), (4, 9.0, 9)])
def test_rows_of_an_update_hold_its_examples(packing: str, devices: int, size: int, mean: float, longest: int) -> None:
    """An update has room for its examples, to within a row per device, and each device gets whole rows."""
    words = ["objective=sft", "data=chat_jsonl", f"data.packing={packing}", "trainer.accelerator=cpu"]
    config = check(compose([*words, f"trainer.devices={devices}", "data.seq_len=1024", "model=gpt_small"]))
    plan = updates.rows_of(config, size, mean, longest)
    batch, micro, length = plan["data.global_batch_size"], plan["data.micro_batch_size"], plan.get("data.seq_len", 1024)
    assert batch % (micro * devices) == 0
    assert longest <= length <= 1024
    if packing == "off":
        assert size <= batch < size + devices
    else:
        held = batch * max(1, length // mean)
        assert size - length * devices / mean <= held <= size + (max(length, longest) + 64 + mean) * devices / mean


def test_a_number_of_updates_sets_the_epochs(model: Path, pairs: Path) -> None:
    words = ["objective=sft", "data=chat_jsonl", f"data.path={pairs}", f"model={model}", "data.chat_template=alpaca"]
    config = check(compose([*words, "budget.updates=400"]))
    updates.settle(config)
    assert config.trainer.max_epochs == -(-400 * 2 // 54)
    assert config.trainer.precision == "auto"  # the faster one for the planned rows, so it is chosen later


@pytest.mark.parametrize(
    ("parameters", "full", "adapters"),
    [
        (260_000, 1.6e-3, 2e-3),
        (1_200_000, 1.6e-3, 2e-3),
        (134_515_008, 1.7e-4, 1.7e-3),
        (7_000_000_000, 2.4e-5, 2.4e-4),
    ],
)
def test_larger_models_get_smaller_rates(parameters: int, full: float, adapters: float) -> None:
    """The rates that were best of a grid in benchmarks/updates.py, and the usual ones of 7 billion parameters."""
    assert updates.learning_rate(parameters, 300, adapters=False) == full
    assert updates.learning_rate(parameters, 300, adapters=True) == adapters
    assert updates.learning_rate(parameters, 30, adapters=False) == min(full, 8e-4)


def test_a_large_model_learns_in_fewer_passes(model: Path, pairs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["objective=sft", "data=chat_jsonl", f"data.path={pairs}", f"model={model}", "data.chat_template=alpaca"]
    passes = []
    for parameters in (1_200_000, 134_515_008):
        monkeypatch.setattr(updates, "count_parameters", lambda *_, n=parameters: n)
        config = check(compose([*words, "budget.updates=auto"]))
        updates.settle(config)
        passes.append(config.trainer.max_epochs)
    assert passes == [12, 4]


def test_preferences_take_two_pairs_an_update(model: Path, tmp_path: Path) -> None:
    found = [{"prompt": f"what is {i}?", "chosen": "one", "rejected": f"it is {i}"} for i in range(60)]
    path = write_chats(tmp_path / "preferences.jsonl", found)
    words = [
        "objective=dpo",
        "data=preference_jsonl",
        "data.val_fraction=0",
        f"data.path={path}",
        f"model={model}",
        "data.chat_template=alpaca",
    ]
    config = check(compose([*words, "budget.updates=auto"]))
    updates.settle(config)
    assert config.data.global_batch_size == 2
    assert config.trainer.max_epochs == 10  # 300 updates of 2 of 60 pairs


def test_text_has_no_examples(corpus: Path) -> None:
    ended = run("train", "model=gpt_nano", "data=text", f"data.path={corpus}", "budget.updates=auto")
    assert (ended.code, "trainer.max_steps" in ended.err) == (2, True)


def test_too_few_updates_and_nothing_learned_are_said(model: Path, pairs: Path, tmp_path: Path) -> None:
    words = ["objective=sft", "data=chat_jsonl", f"data.path={pairs}", f"model={model}", "data.chat_template=alpaca"]
    slow = ["optimizer.lr=1e-9", "trainer.max_steps=3", "trainer.val_before_training=true", "data.seq_len=512"]
    ended = run("train", *words, *slow, f"run.dir={tmp_path / 'run'}", *SHORT)
    said = " ".join(ended.out.replace("│", " ").split())
    assert "3 updates will hardly teach the model anything" in said
    assert "it has hardly learned: val/loss was" in said
    json.loads((tmp_path / "run" / "summary.json").read_text())
