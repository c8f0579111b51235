"""The code that exports and reports show loads, on padded batches, the model that was trained."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from chats import write_chats
from inprocess import run
from lmtrain.models.attention import generation_mode
from lmtrain.models.folder import change_config
from lmtrain.reports.report import _how_to_use
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from tiny_pretrained import SHORT, save_pretrained

ROWS = ["is it?", "a longer line", "and what it ends with!!", "!"]
# Scores or logits of the rows, whatever the model, as lists: of a causal model those of tokens that are no padding.
SHOW = """
import json, torch
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
tokenizer.padding_side = "right"
batch = tokenizer(ROWS, padding=True, return_tensors="pt", add_special_tokens=False)
with torch.no_grad():
    found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    shown = found if found.ndim == 2 else found[batch["attention_mask"].bool()]
    print("FOUND", json.dumps(shown.tolist()))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose config has a padding id of its own, that of "!"."""
    folder = save_pretrained(tmp_path_factory.mktemp("base"), max_position_embeddings=256)
    change_config(folder, pad_token_id=33)
    return folder


def train(objective: str, peft: str, base: Path, folder: Path) -> Path:
    """Trains two steps and returns the run; with an adapter it is also merged."""
    turns = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "so!" * (i % 5 + 1)}]}
             for i in range(20)]  # fmt: skip
    pairs = [{"prompt": f"{i}?", "chosen": f"{i}{'!' * (i % 7)}", "rejected": f"no{i}"} for i in range(20)]
    data = {
        "causal_lm": ["data=text", f"data.path={write_chats(folder / 'text.txt', turns)}"],
        "sft": ["data=chat_jsonl", f"data.path={write_chats(folder / 'chats.jsonl', turns)}"],
        "reward": ["data=preference_jsonl", f"data.path={write_chats(folder / 'pairs.jsonl', pairs)}"],
    }
    more = [] if peft == "none" else ["export.merge=true"]
    more += [] if objective == "causal_lm" else ["data.chat_template=zephyr"]
    ended = run("train", *SHORT, f"objective={objective}", *data[objective], f"peft={peft}", *more, "data.seq_len=128",
                f"model.name_or_path={base}", "trainer.max_steps=2", "optimizer.lr=0.02",
                f"run.dir={folder / 'run'}")  # fmt: skip
    assert ended.code == 0, ended.err
    return folder / "run"


def codes(run_dir: Path) -> list[str]:
    """Returns the code of the cards and the report, each the part that loads model and tokenizer."""
    found = [code for code in _how_to_use(RunDir(run_dir), {}) if "import" in code]
    for card in sorted(run_dir.glob("export*/README.md")):
        (code,) = re.findall(r"```python\n(.*?)```", card.read_text(), flags=re.DOTALL)
        before = re.split(r"^(?:messages|inputs) = ", code, flags=re.MULTILINE)[0]
        found.append(before.replace('folder = "."', f"folder = {str(card.parent)!r}"))
    return found


def one_at_a_time(model: PreTrainedModel, tokenizer: Any) -> list[Any]:
    """Returns what SHOW prints, of each row by itself, without padding."""
    rows = [torch.tensor([tokenizer(row, add_special_tokens=False)["input_ids"]]) for row in ROWS]
    with torch.no_grad(), generation_mode(model):
        return [line for row in rows for line in model(input_ids=row).logits.flatten(0, -2).tolist()]


def run_code(code: str, fresh: bool) -> list[Any]:
    code = f"ROWS = {ROWS!r}\n{code}\n{SHOW}"
    if fresh:
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        return list(json.loads(out.partition("FOUND ")[2]))
    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102
    return list(space["shown"].tolist())


@pytest.mark.parametrize(
    ("objective", "peft", "fresh"),
    [
        ("reward", "lora", False),
        *[pytest.param(objective, peft, True, marks=pytest.mark.slow)
          for objective in ("causal_lm", "sft", "reward") for peft in ("none", "lora")],
    ],
)  # fmt: skip
def test_the_code_gives_what_the_trained_model_gives(
    objective: str, peft: str, fresh: bool, base: Path, tmp_path: Path
) -> None:
    """Reward adapters: the base's padding id would end an answer before its last "!"."""
    run_dir = train(objective, peft, base, tmp_path)
    model, tokenizer = trained.load(str(run_dir), "last", {})
    expected = torch.tensor(one_at_a_time(model.eval(), tokenizer))
    found = codes(run_dir)
    assert len(found) == (4 if peft == "lora" else 2)
    for code in found:
        torch.testing.assert_close(torch.tensor(run_code(code, fresh)), expected, rtol=1e-4, atol=1e-4)
    exported, _ = trained.load(str(run_dir / "export"), "last", {})
    again = torch.tensor(one_at_a_time(exported.eval(), tokenizer))
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
