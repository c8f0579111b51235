"""TRL's SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer or GRPOTrainer, in a separate environment (`make env-trl`).

Run by sft.py, dpo.py and grpo.py: python leg_trl.py spec.json
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

# TRL checkpoints activations by default. The option was renamed after transformers 5.17.
FIELDS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"


class Report(transformers.TrainerCallback):
    """Prints the time at each log, when Trainer has just read the loss from the device; num_tokens excludes padding."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            row = {"step": state.global_step, "time": time.time(), "tokens": logs.get("num_tokens")}
            print(json.dumps(row), flush=True)


def trainer_of(spec: dict[str, Any], args: dict[str, Any], given: dict[str, Any]) -> transformers.Trainer:
    match spec["objective"]:
        case "sft":
            return trl.SFTTrainer(args=trl.SFTConfig(assistant_only_loss=True, **args), **given)
        case "dpo":
            return trl.DPOTrainer(args=trl.DPOConfig(**args), **given)
        case "kto":
            return trl.KTOTrainer(args=trl.KTOConfig(**args), **given)
        case "reward":
            return trl.RewardTrainer(args=trl.RewardConfig(**args), **given)
        case _:
            del args["max_length"]  # GRPO's rows are prompts
            return trl.GRPOTrainer(args=trl.GRPOConfig(**args), reward_funcs=has_an_e, **given)


def has_an_e(completions: list[Any], **_: Any) -> list[float]:
    """The same reward as reward=regex reward.pattern=e reward.whole=false."""
    return [float("e" in completion[0]["content"]) for completion in completions]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    tokenizer.chat_template = spec["template"]
    dtype, scores = getattr(torch, spec["weights"]), spec["objective"] == "reward"
    lora = LoraConfig(task_type="SEQ_CLS" if scores else "CAUSAL_LM", **spec["lora"]) if spec["lora"] else None
    if scores:
        model = AutoModelForSequenceClassification.from_pretrained(spec["model"], num_labels=1, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype)
    given = {
        "model": model,
        "train_dataset": Dataset.from_list([json.loads(line) for line in Path(spec["data"]).read_text().splitlines()]),
        "processing_class": tokenizer,
        "peft_config": lora,
        "callbacks": [Report()],
    }
    cuda = torch.cuda.is_available()
    args = {
        "output_dir": "out",
        "use_cpu": not cuda,
        CHECKPOINTING: False,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **spec["arguments"],
    }
    trainer_of(spec, args, given).train()
    if cuda:
        print(json.dumps({"gpu_gib": torch.cuda.max_memory_allocated() / 2**30}), flush=True)


if __name__ == "__main__":
    main()
