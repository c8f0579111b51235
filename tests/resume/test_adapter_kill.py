"""A run that trains an adapter, killed anywhere, continues bit for bit from checkpoints without the base weights."""

from pathlib import Path

import pytest
from runs import SETTINGS, assert_equal_runs, train_here
from test_kill_matrix import PLACES, chain

from lmtrain.checkpoints import store
from tiny_pretrained import save_pretrained

TRAINED = ("lora_", "trainable_tokens", ".memory.", ".memory_bank.")
# The shape is the base's; `runs.SETTINGS` come first, so later settings override them.
SHAPE = ("model.num_", "model.hidden", "model.max_position", "tokenizer=")
PEFT = {
    "lora": ["peft=lora", "peft.dropout=0.1", 'tokenizer.add_tokens=["<|a|>"]', "data.micro_batch_size=2"],
    "memory": [
        "peft=memory",
        "memory.layers=[0,1]",
        "memory.num_chapters=4",
        "memory.chapter_size=8",
        "memory.memory_dim=16",
        "memory.top_k=2",
        "memory.router_noise=0.5",
        "router.scope=step",
        "data.micro_batch_size=2",
    ],
    "pissa": ["peft=lora", "peft.dropout=0.1", "peft.init_weights=pissa", "data.micro_batch_size=3"],
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the model from scratch in the runs' settings by a pretrained base."""
    base = save_pretrained(tmp_path / "base", tie_word_embeddings=True, attention_dropout=0.1)
    monkeypatch.setattr("runs.SETTINGS", [s for s in SETTINGS if not s.startswith(SHAPE)])
    return ["model=pretrained", f"model.name_or_path={base}", "optimizer.lr=0.01"]


@pytest.mark.slow
def test_a_memory_killed_in_a_save_and_a_validation(settings: list[str], corpus: Path, tmp_path: Path) -> None:
    """It has noise in its routers, and router losses over whole steps, which read each micro-batch twice."""
    assert_killed_equals_whole("memory", [("mid_save", 4), ("mid_validation", 9)], settings, corpus, tmp_path)


@pytest.mark.slow
def test_an_adapter_killed_everywhere(settings: list[str], corpus: Path, tmp_path: Path) -> None:
    assert_killed_equals_whole("lora", PLACES, settings, corpus, tmp_path)


@pytest.mark.slow
def test_an_adapter_of_the_bases_main_directions(settings: list[str], corpus: Path, tmp_path: Path) -> None:
    """PiSSA's initial adapter is subtracted from the base, again at each start."""
    assert_killed_equals_whole("pissa", [("mid_step", 1), ("mid_save", 4)], settings, corpus, tmp_path)


def assert_killed_equals_whole(
    kind: str, places: list[tuple[str, int]], settings: list[str], corpus: Path, tmp_path: Path
) -> None:
    given = [*settings, *PEFT[kind]]
    (tmp_path / "whole").mkdir()
    done = train_here(corpus, tmp_path / "whole" / "run", *given)
    assert done.code == 0, done.err
    weights = store.load_weights(tmp_path / "whole" / "run" / "checkpoints" / "last")
    assert all(any(part in name for part in TRAINED) for name in weights), "no base in a checkpoint"
    chain(corpus, tmp_path / "run", places, *given)
    assert_equal_runs(tmp_path / "whole" / "run", tmp_path / "run")
