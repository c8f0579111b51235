"""Whole runs of families that don't fit transformers' attention interface or packed rows."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from chats import write_chats
from family_variants import Variant, build, config_of
from inprocess import message, run
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.models.folder import change_config
from support import rows
from tiny_pretrained import SHORT, save_pretrained

STEPS = ["trainer.max_steps=2", "data.chat_template=zephyr", "data.seq_len=128"]
SFT = [*SHORT, *STEPS, "objective=sft", "data=chat_jsonl"]
DPO = [*SHORT, *STEPS, "objective=dpo", "data=preference_jsonl", "optimizer.lr=0.0"]


def saved(folder: Path, family: str) -> Path:
    cfg = TokenizerConfig(kind="bytes")
    tokenizer = tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
    model = build(config_of(Variant(family, {})))
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizers.save(tokenizer, folder)
    return folder


def chats(folder: Path) -> Path:
    questions = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(40)]
    return write_chats(folder / "chats.jsonl", [{"messages": turns} for turns in questions])


def pairs(folder: Path) -> Path:
    found = [{"prompt": f"{i}?", "chosen": f"{i}!", "rejected": f"no{'!' * (i % 5)}"} for i in range(40)]
    return write_chats(folder / "pairs.jsonl", found)


def arguments(folder: Path, family: str, data: Path) -> list[str]:
    return [f"model.name_or_path={saved(folder / 'model', family)}", f"data.path={data}", f"run.dir={folder}/run"]


def test_examples_that_rows_would_mix_are_laid_out_one_a_row(tmp_path: Path) -> None:
    """Packing decides which examples make a step; the numbers are those of the same rows without packing."""
    fixed = arguments(tmp_path, "bloom", chats(tmp_path))
    one = ["data.seq_len=1400", "data.global_batch_size=1", "data.micro_batch_size=1"]  # a row with all examples
    ended = run("train", *SFT, *fixed, *one)
    assert ended.code == 0, ended.err
    assert "each example is a padded row of its own" in " ".join(ended.out.split())
    whole = run("train", *SFT, *fixed, f"run.dir={tmp_path}/off", "data.packing=off", "data.global_batch_size=40",
                "data.micro_batch_size=40")  # fmt: skip
    assert whole.code == 0, whole.err
    first, other = (rows(tmp_path / name / "metrics.jsonl")[0] for name in ("run", "off"))
    assert first["step"] == other["step"] == 1
    assert first["tokens_seen"] == other["tokens_seen"] == 1300  # all examples are in one row
    assert first["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)


def test_pairs_are_laid_out_one_answer_a_row(tmp_path: Path) -> None:
    """The loss before training is ln 2 in any layout; test_families.py shows that the layouts' numbers agree."""
    ended = run("train", *DPO, *arguments(tmp_path, "bloom", pairs(tmp_path)))
    assert ended.code == 0, ended.err
    assert "each example is a padded row of its own" in " ".join(ended.out.split())
    assert "the model's own" in ended.out
    assert rows(tmp_path / "run" / "metrics.jsonl")[0]["train/loss"] == pytest.approx(0.693147, abs=1e-4)


@pytest.mark.parametrize("family", ["mamba", pytest.param("deepseek_v32", marks=pytest.mark.slow)])
def test_text_trains(tmp_path: Path, family: str) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    fixed = arguments(tmp_path, family, tmp_path / "text.txt")
    refused = run("train", *SHORT, *fixed, "data.isolate_documents=true")
    assert refused.code == 2
    assert message(refused.err).endswith("set data.isolate_documents=false")
    ended = run("train", *SHORT, *fixed)
    assert ended.code == 0, ended.err


def test_logits_made_in_a_way_of_their_own_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    ended = run("train", *SHORT, *arguments(tmp_path, "modernbert-decoder", tmp_path / "text.txt"))
    assert ended.code == 2
    assert "ModernBertDecoderForCausalLM" in message(ended.err)


@pytest.mark.parametrize("chosen", ["auto", "transformers"])
def test_a_config_that_shows_the_future_is_refused_before_the_plan(tmp_path: Path, chosen: str) -> None:
    """transformers gives such a model a mask that hides nothing: its loss would be of tokens that it sees."""
    folder = save_pretrained(tmp_path / "model")
    change_config(folder, is_causal=False)
    model, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), torch.arange(8)[None]
    changed = ids.index_fill(1, torch.tensor([7]), 33)
    assert not torch.equal(model.model(ids)[0][:, 0], model.model(changed)[0][:, 0])
    (tmp_path / "text.txt").write_text("a line of text\n" * 400)
    asked = [*SHORT, f"model.name_or_path={folder}", f"data.path={tmp_path}/text.txt", f"model.attention={chosen}"]
    refused = run("train", *asked, "data.isolate_documents=false", f"run.dir={tmp_path}/run")
    assert refused.code == 2
    assert "see those that come after them" in message(refused.err)
    assert "is_causal: false" in message(refused.err)
    assert "model.attention" not in message(refused.err)
    assert not refused.out
    scored = run("evaluate", f"run_dir={folder}", "data=text", f"data.val_path={tmp_path}/text.txt")
    assert (scored.code, "see those that come after them" in message(scored.err)) == (2, True)
