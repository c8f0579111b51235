"""The baseline loop of the comparison: lmtrain's model, loss, optimizer and batches, and nothing else.

Forward, backward, clip, step. Batches are in host memory before timing starts, so lmtrain's loader counts as its
overhead.
Run by pretrain.py: python leg_bare.py spec.json
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch

from lmtrain.config import compose as config
from lmtrain.config.batch import step_sizes
from lmtrain.config.schema import Config
from lmtrain.data.corpus import build_corpus
from lmtrain.data.loaders import StepDataset
from lmtrain.data.order import MicroBatch
from lmtrain.data.text.windows import IGNORE
from lmtrain.distributed import devices
from lmtrain.run import build


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    cfg = config.check(config.compose(spec["overrides"]))
    devices.resolve_auto(cfg)
    corpus = build_corpus(cfg)
    objective = build.build_objective(cfg, corpus, spec["steps"]).to(cfg.trainer.accelerator)
    steps = read_steps(cfg, corpus, spec["steps"])
    last_loss = train(objective.model, objective.configure_optimizers(), cfg, steps, spec["every"])
    print(json.dumps({"parameters": sum(p.numel() for p in objective.parameters()), "last_loss": last_loss}))


def read_steps(cfg: Config, corpus: build.Corpus, steps: int) -> list[list[MicroBatch]]:
    """Returns the micro-batches of every step, as lmtrain's loader yields them."""
    dataset = StepDataset(
        corpus.train,
        seed=cfg.seed,
        sizes=step_sizes(cfg.data),
        micro_batch_size=cfg.data.micro_batch_size,
        max_epochs=cfg.trainer.max_epochs,
        rank=0,
        world_size=1,
    )
    loaded = [dataset[step]["micro_batches"] for step in range(steps)]
    if cfg.trainer.accelerator == "cuda":
        loaded = [[{k: v.pin_memory() for k, v in batch.items()} for batch in step] for step in loaded]
    return loaded


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    cfg: Config,
    steps: list[list[MicroBatch]],
    every: int,
) -> float:
    """Prints the time every few steps; returns the loss of the last step, which must equal lmtrain's."""
    device = cfg.trainer.accelerator
    parameters = list(model.parameters())
    for done, micro_batches in enumerate(steps, start=1):
        n_tokens = sum(int((batch["labels"] != IGNORE).sum()) for batch in micro_batches)
        mixed = torch.autocast(device, torch.bfloat16) if cfg.trainer.precision == "bf16-mixed" else None
        with mixed or contextlib.nullcontext():
            outputs = []
            for batch in micro_batches:
                batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
                outputs.append(model(**batch))
                (outputs[-1].loss_sum / n_tokens).backward()
        torch.nn.utils.clip_grad_norm_(parameters, cfg.trainer.gradient_clip_val)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if done % every == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            print(json.dumps({"step": done, "time": time.time()}), flush=True)
    return sum(float(out.nll_sum) for out in outputs) / n_tokens


if __name__ == "__main__":
    main()
