"""nanoGPT's model and optimizer in a loop equivalent to its train.py, so that only its model.py is needed.

Random windows of train.bin, forward, backward, clip, step; with `decay_lr`, its cosine schedule after a warm-up; with
`score`, also the loss of the trained model on all of val.bin, in the rows that lmtrain validates on.
Run by pretrain.py and learning.py, in the folder of model.py: python leg_nanogpt.py spec.json
"""

import contextlib
import json
import math
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from leg_score_nanogpt import val_loss
from torch import Tensor


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, str(Path.cwd()))
    from model import GPT, GPTConfig  # nanoGPT's

    torch.manual_seed(1337)
    torch.set_float32_matmul_precision("high")  # nanoGPT allows TF32 too
    vocab_size = pickle.loads((Path(spec["dataset"]) / "meta.pkl").read_bytes())["vocab_size"]  # noqa: S301  # our own
    shape = {key: spec[key] for key in ("block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")}
    model = GPT(GPTConfig(vocab_size=vocab_size, **shape)).to(spec["device"])
    last_loss = train(model, spec)
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "last_loss": last_loss}
    if spec.get("score"):
        with mixed(spec):
            facts["val_loss"] = val_loss(model, Path(spec["dataset"]) / "val.bin", spec["block_size"], spec["device"])
    print(json.dumps(facts))


def mixed(spec: dict[str, Any]) -> Any:
    if spec["dtype"] == "float32":
        return contextlib.nullcontext()
    return torch.autocast(spec["device"], getattr(torch, spec["dtype"]))


def train(model: Any, spec: dict[str, Any]) -> float:
    """Prints the time every few steps; returns the loss of the last micro-batch."""
    decay, betas = spec["weight_decay"], (spec["beta1"], spec["beta2"])
    optimizer = model.configure_optimizers(decay, spec["learning_rate"], betas, spec["device"])
    forward = torch.compile(model) if spec["compile"] else model
    tokens = np.memmap(Path(spec["dataset"]) / "train.bin", dtype=np.uint16, mode="r")
    inputs, labels = batch(tokens, spec)
    for done in range(1, spec["max_iters"] + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(done - 1, spec)
        for _ in range(spec["gradient_accumulation_steps"]):
            with mixed(spec):
                loss = forward(inputs, labels)[1] / spec["gradient_accumulation_steps"]
            inputs, labels = batch(tokens, spec)  # while the device computes
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec["grad_clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if done % spec["log_interval"] == 0:
            last = float(loss) * spec["gradient_accumulation_steps"]  # waits for the device
            print(json.dumps({"step": done, "time": time.time()}), flush=True)
    return last


def rate(step: int, spec: dict[str, Any]) -> float:
    """Returns the learning rate: constant, or linear warm-up, then cosine decay to `min_lr` at the last step."""
    highest = spec["learning_rate"]
    if not spec["decay_lr"]:
        return highest
    if step < spec["warmup_iters"]:
        return highest * (step + 1) / (spec["warmup_iters"] + 1)
    part = (step - spec["warmup_iters"]) / max(1, spec["max_iters"] - spec["warmup_iters"])
    return spec["min_lr"] + 0.5 * (1 + math.cos(math.pi * part)) * (highest - spec["min_lr"])


def batch(tokens: Any, spec: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels [B, T] of random windows, copied to the device asynchronously."""
    length = spec["block_size"]
    starts = torch.randint(len(tokens) - length, (spec["batch_size"],)).tolist()
    rows = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if spec["device"] == "cuda":
        inputs, labels = inputs.pin_memory(), labels.pin_memory()
    return inputs.to(spec["device"], non_blocking=True), labels.to(spec["device"], non_blocking=True)


if __name__ == "__main__":
    main()
