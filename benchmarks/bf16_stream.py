"""Does a GPT learn as well if its residual stream is rounded to bf16? Emulated on a CPU, all computed in fp32.

python benchmarks/bf16_stream.py SEED [STEPS]     losses of both, averaged over 50 steps each

Inputs and outputs of all products are rounded to bf16, with their gradients, as under autocast; in one of two models
the sums of the residual stream are too. Same weights, same rows of the standard library's source.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, ROWS, LENGTH, RATE, WARMUP = 96, 12, 3, 12, 64, 1e-3, 20


class Rounded(torch.autograd.Function):
    """Rounds values and gradients to bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.bfloat16().float()


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return Rounded.apply(F.linear(Rounded.apply(x), Rounded.apply(layer.weight), Rounded.apply(layer.bias)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for last in (self.out, self.down):
            nn.init.normal_(last.weight, 0, 0.02 / math.sqrt(2 * LAYERS))

    def forward(self, x: Tensor, stream: Any) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = linear(self.qkv, self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = stream(x + linear(self.out, attended))
        return stream(x + linear(self.down, F.gelu(linear(self.up, self.norm2(x)), approximate="tanh")))


def train(seed: int, steps: int, text: Tensor, stream: Any) -> list[float]:
    torch.manual_seed(seed)
    tokens, places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
    blocks, norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
    for table in (tokens, places):
        nn.init.normal_(table.weight, 0, 0.02)
    parameters = [p for part in (tokens, places, blocks, norm) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARMUP)
        starts = torch.randint(len(text) - LENGTH, (ROWS,)).tolist()
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        x = stream(tokens(rows[:, :-1]) + places.weight)
        for block in blocks:
            x = block(x, stream)
        logits = Rounded.apply(F.linear(Rounded.apply(norm(x)), Rounded.apply(tokens.weight)))
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [round(sum(losses[i : i + 50]) / len(losses[i : i + 50]), 4) for i in range(0, steps, 50)]


def main() -> None:
    seed, steps = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 250
    source = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    streams = {"fp32": lambda x: x, "bf16": Rounded.apply}
    print(json.dumps({"seed": seed, **{name: train(seed, steps, text, of) for name, of in streams.items()}}))


if __name__ == "__main__":
    main()
