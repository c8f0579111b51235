"""What becomes of small updates of bfloat16 weights: 40 steps of SFT of a small model, under four ways of rounding.

    python benchmarks/half_weights.py MODEL CHATS.jsonl [--optimizers adamw lion muon] [--ways rest kahan ...]

MODEL is a folder of fp32 weights. Prints one line per optimizer and way: the validation loss after the last step.
`rest` is lmtrain's own; `zero` begins with rests of 0, `kahan` keeps them in bfloat16, `stochastic` keeps none and
rounds weights up or down at random, `nearest` keeps none. 32-true and bf16-mixed are for comparison, bf16-mixed also
with weights that are rounded to bf16 first, whose lower bits lmtrain draws (`mixed-drawn`) or leaves 0 (`mixed-zero`).
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import lmtrain
from lmtrain.objectives import base
from lmtrain.optim import half
from lmtrain.strategies import choose

WAYS = ("32-true", "bf16-mixed", "mixed-drawn", "mixed-zero", "rest", "zero", "kahan", "stochastic", "nearest")


def patch(way: str) -> None:
    """Replaces what half.py keeps between steps by that of another way."""
    if way in ("zero", "kahan", "stochastic", "nearest"):
        half.first_rest = lambda p, place: torch.zeros(p.shape, dtype=torch.int16, device=p.device)
    put_back = half._Wide.put_back

    def rounded(self: half._Wide, states: list, step: int) -> None:
        if way == "stochastic":
            for weight in self.weights:
                half.round_randomly(weight.data, step)
        put_back(self, states, step)
        for p, own in zip(self.halves, self.own, strict=True):
            if way in ("stochastic", "nearest"):
                own[half.REST].zero_()
            if way == "kahan":
                own[half.REST].copy_(as_bfloat16(p.detach(), own[half.REST]))

    if way in ("kahan", "stochastic", "nearest"):
        half._Wide.put_back = rounded  # type: ignore[method-assign]


def as_bfloat16(near: Tensor, rest: Tensor) -> Tensor:
    """Returns the rest that is left if the distance to the exact weight is stored in bfloat16."""
    near = near.float()
    off = (half.join(near.clone(), rest.int()) - near).bfloat16().float()
    return ((near + off).view(torch.int32) - near.view(torch.int32)).clamp(-(2**15), 2**15 - 1).short()


def loss(model: str, chats: str, optimizer: str, way: str) -> float:
    patch(way)
    precision = "bf16-mixed" if way.startswith("mixed") else way if "-" in way else "bf16-true"
    with tempfile.TemporaryDirectory() as folder:
        config = lmtrain.compose(
            ["objective=sft", f"model={model}", "data=chat_jsonl", f"data.path={chats}", f"data.val_path={chats}",
             "data.chat_template=alpaca", "data.packing=off", "data.seq_len=256", "data.global_batch_size=4",
             "data.micro_batch_size=4", "logger=none", "export.enabled=false", "report.enabled=false",
             f"trainer.precision={precision}", "trainer.max_steps=40",
             f"optimizer={optimizer}", "optimizer.lr=2e-5", "trainer.val_check_interval=40",
             "callbacks.samples.every_n_validations=0", f"run.dir={folder}/run"]
        )  # fmt: skip
        run = lmtrain.build(config)
        for p in run.objective.parameters() if way.startswith("mixed") else ():
            p.data = p.data.bfloat16().float()
        base.fill_in = choose.fill_in if way == "mixed-drawn" else lambda *_: None
        run.fit()
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return next(row["val/loss"] for row in reversed(rows) if "val/loss" in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("chats")
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "lion", "muon"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    original = half._Wide.put_back, half.first_rest
    for optimizer in options.optimizers:
        for way in options.ways:
            half._Wide.put_back, half.first_rest = original  # type: ignore[method-assign]
            print(optimizer, way, f"{loss(options.model, options.chats, optimizer, way):.4f}", flush=True)


if __name__ == "__main__":
    main()
