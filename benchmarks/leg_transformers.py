"""transformers' Trainer with transformers' model of the same shape and its own attention.

Run by pretrain.py: python leg_transformers.py spec.json
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lmtrain.config import compose as config
from lmtrain.config.schema import Config
from lmtrain.data.corpus import build_corpus
from lmtrain.models.build import build_model


class Rows(Dataset):
    """Row i of train.bin; the labels are not shifted, because transformers' models do that."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.tokens, self.seq_len = np.memmap(path, dtype=np.uint16, mode="r"), seq_len

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_len

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.tokens[row * self.seq_len : (row + 1) * self.seq_len].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class Report(TrainerCallback):
    """Prints the time at each log, when Trainer has just read the loss from the device."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            print(json.dumps({"step": state.global_step, "time": time.time()}), flush=True)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    cfg = config.check(config.compose(spec["overrides"]))
    transformers.utils.logging.set_verbosity_error()
    model = build_transformers_model(cfg)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}), flush=True)
    rows = Rows(Path(spec["bins"]) / "train.bin", cfg.data.seq_len)
    trainer = Trainer(model, arguments(cfg, spec), train_dataset=rows, callbacks=[Report()])
    trainer.train()


def build_transformers_model(cfg: Config) -> transformers.PreTrainedModel:
    """Builds the model from lmtrain's config, but with transformers' default attention."""
    vocab_size = len(build_corpus(cfg).tokenizer)
    with torch.device("meta"):
        shape = build_model(cfg.model, vocab_size, None, cfg.data.seq_len).config.to_dict()
    fresh = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    return AutoModelForCausalLM.from_config(fresh, attn_implementation="sdpa")


def arguments(cfg: Config, spec: dict[str, Any]) -> TrainingArguments:
    beta1, beta2 = cfg.optimizer.betas or (0.9, 0.95)
    return TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=cfg.data.micro_batch_size,
        gradient_accumulation_steps=cfg.data.global_batch_size // cfg.data.micro_batch_size,
        max_steps=spec["steps"],
        logging_steps=spec["every"],
        optim="adamw_torch_fused",
        learning_rate=cfg.optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=beta1,
        adam_beta2=beta2,
        weight_decay=cfg.optimizer.weight_decay,
        max_grad_norm=cfg.trainer.gradient_clip_val,
        use_cpu=not torch.cuda.is_available(),
        bf16=spec["precision"] == "bf16",
        torch_compile=torch.cuda.is_available(),
        save_strategy="no",
        report_to="tensorboard",  # as lmtrain does
        disable_tqdm=True,
        seed=cfg.seed,
    )


if __name__ == "__main__":
    main()
