"""Forward and backward of the loss alone: lmtrain's against torch's F.linear_cross_entropy (since torch 2.13).

python benchmarks/loss.py                        65,536 tokens of gpt_small, 8,192 of Llama 3.2 1B; on a CPU a toy

Hidden states [N, D] and the output embedding [V, D] in bf16 on a GPU, with gradients of both. Reports the median of
several calls, each timed with the device idle before and after, and the peak memory of a call beyond its inputs.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import machine, setting
from torch import Tensor
from torch.nn import functional as F

from lmtrain.losses.cross_entropy import chunked_cross_entropy
from lmtrain.models.language_model import auto_chunk_bytes

SHAPES = {"gpt_small": (65536, 768, 50304), "llama_1b": (8192, 2048, 128256)}  # tokens, width, vocabulary
TOY = {"toy": (64, 32, 500)}
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def lmtrain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    chunk = max(1, auto_chunk_bytes(hidden.device.type) // (weight.shape[0] * weight.element_size()))
    compiled = hidden.device.type == "cuda"
    return chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk, compiled=compiled).loss_sum


def torchs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def contenders() -> dict[str, Loss]:
    return {"lmtrain": lmtrain} | ({"torch": torchs} if hasattr(F, "linear_cross_entropy") else {})


def measure(loss: Loss, shape: tuple[int, int, int], device: str, calls: int) -> dict[str, float]:
    tokens, width, words = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(words, width, device=device, dtype=dtype)).requires_grad_()
    labels = torch.randint(0, words, (tokens,), device=device)
    times, value = [], 0.0
    for _ in range(calls + 2):  # the first calls compile and allocate
        hidden.grad = weight.grad = None
        wait(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        found = loss(hidden, weight, labels)
        found.backward()
        wait(device)
        times.append(1000 * (time.perf_counter() - start))
        value = float(found.detach()) / tokens
    numbers = {"ms": median(times[2:]), "loss": value}
    if device == "cuda":
        numbers["gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return numbers


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10, help="timed calls of each (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    for name, shape in (SHAPES if device == "cuda" else TOY).items():
        for who, loss in contenders().items():
            found[f"{name}, {who}"] = numbers = measure(loss, shape, device, options.calls)
            print(
                f"{name:<10} {who:<8} {numbers['ms']:8.2f} ms, {numbers.get('gib', 0):.2f} GiB, {numbers['loss']:.5f}"
            )
    print(setting())
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "losses": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
