"""TRL's SFTTrainer or DPOTrainer, in a separate environment (`make env-trl`).

Run by sft.py and dpo.py: python leg_trl.py spec.json
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
from transformers import AutoModelForCausalLM, AutoTokenizer

# TRL checkpoints activations by default. The option was renamed after transformers 5.17.
FIELDS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"


class Report(transformers.TrainerCallback):
    """Prints the time at each log, when Trainer has just read the loss from the device; num_tokens excludes padding."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            row = {"step": state.global_step, "time": time.time(), "tokens": logs["num_tokens"]}
            print(json.dumps(row), flush=True)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    transformers.utils.logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    tokenizer.chat_template = spec["template"]
    lora = LoraConfig(task_type="CAUSAL_LM", **spec["lora"]) if spec["lora"] else None
    given = {
        "model": AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["weights"])),
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
    if spec["objective"] == "sft":
        trainer = trl.SFTTrainer(args=trl.SFTConfig(assistant_only_loss=True, **args), **given)
    else:
        trainer = trl.DPOTrainer(args=trl.DPOConfig(**args), **given)
    trainer.train()
    if cuda:
        print(json.dumps({"gpu_gib": torch.cuda.max_memory_allocated() / 2**30}), flush=True)


if __name__ == "__main__":
    main()
