"""A pipeline of three tiny stages with its own data, as a user would write it."""

import json
from pathlib import Path

import yaml

SHAPE = ["model.num_hidden_layers=2", "model.num_attention_heads=2", "model.hidden_size=32",
         "model.max_position_embeddings=256", "data.seq_len=64", "tokenizer=bytes"]  # fmt: skip
STEPS = ["trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.save_every_n_steps=1",
         "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1", "trainer.precision=32-true",
         "data.global_batch_size=4", "data.micro_batch_size=4", "logger=none",
         "callbacks.samples.every_n_validations=0"]  # fmt: skip
CHAT = ["data.chat_template=vicuna", "data.seq_len=256", "model=pretrained", "data.val_fraction=0.2"]


ANSWERS = ["evaluate.answers=2", "evaluate.max_new_tokens=4"]


def write_rows(folder: Path) -> dict[str, Path]:
    """Writes ten questions with answers, and as many pairs of answers to them."""
    asked = [(f"What is {n} plus {n}?", f"It is {n + n}.", f"It is {n}.") for n in range(1, 11)]
    chats = [{"prompt": question, "response": right} for question, right, _ in asked]
    pairs = [{"prompt": question, "chosen": right, "rejected": wrong} for question, right, wrong in asked]
    found = {}
    for name, rows in {"chats": chats, "pairs": pairs}.items():
        found[name] = folder / f"{name}.jsonl"
        found[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def tiny(corpus: Path, folder: Path) -> dict[str, dict]:
    """Returns the tree of stages and evaluations, to be changed and then written with `write`."""
    rows = write_rows(folder)
    chats = ["data=chat_jsonl", f"data.path={rows['chats']}"]
    pairs = ["data=preference_jsonl", f"data.path={rows['pairs']}"]
    base, tuned = "model.name_or_path=${stage.pretrain.export}", "model.name_or_path=${stage.sft.export}"
    return {
        "stages": {
            "pretrain": {"overrides": ["data=text", f"data.path={corpus}", *SHAPE, *STEPS]},
            "sft": {"overrides": ["objective=sft", *chats, *CHAT, base, *STEPS]},
            "dpo": {"overrides": ["objective=dpo", *pairs, *CHAT, tuned, *STEPS]},
        },
        "evaluations": {
            "answers": {"of": ["pretrain", "sft"], "overrides": [*chats, *CHAT[:2], *ANSWERS]},
        },
    }  # fmt: skip


def write(tree: dict[str, dict], folder: Path) -> Path:
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file
