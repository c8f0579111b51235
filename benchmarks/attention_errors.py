"""How far attention's kernels are from fp32 on this GPU, in the output and in the gradients, by row length and heads.

python benchmarks/attention_errors.py          prints a row of relative errors for each kernel and shape

lmtrain's own choice (models/attention.py) leaves kernels out where they were wrong: this tells whether it still has to.
"""

import itertools
import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
LENGTHS, HEADS, WIDTH = (6, 7, 100, 128, 1000, 1024), 4, 64
ON_CPU = LENGTHS[:3]  # where the numbers say nothing


def errors(kernel: str, length: int, kv_heads: int, masked: bool, device: str = "cuda") -> list[float]:
    """Returns ||x - exact|| / ||exact|| of the output and of the gradients of queries, keys and values."""
    torch.manual_seed(0)
    # As the projections of a model: [B, T, H, D] in memory.
    shapes = [(2, length, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, device=device).transpose(1, 2) for shape in shapes]
    weights = torch.randn(2, HEADS, length, WIDTH, device=device)
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() if masked else None

    def run(dtype: torch.dtype, backend: SDPBackend) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, enable_gqa=kv_heads != HEADS)
        return [out, *torch.autograd.grad((out.float() * weights).sum(), (q, k, v))]

    made = run(torch.bfloat16, getattr(SDPBackend, kernel))
    exact = run(torch.float32, SDPBackend.MATH)
    return [round(((a.float() - b).norm() / b.norm()).item(), 4) for a, b in zip(made, exact, strict=True)]


def measure(device: str = "cuda") -> dict[str, Any]:
    found: dict[str, Any] = {"cudnn": torch.backends.cudnn.version()}
    lengths = ON_CPU if device == "cpu" else LENGTHS
    for kernel, length, kv_heads, masked in itertools.product(KERNELS, lengths, (4, 2), (False, True)):
        name = f"{kernel} T={length} kv_heads={kv_heads}{' masked' * masked}"
        try:
            found[name] = errors(kernel, length, kv_heads, masked, device)
        except RuntimeError as error:  # it doesn't support the shape
            found[name] = str(error).splitlines()[0][:80]
        print(f"{name:50} {found[name]}", flush=True)
    return found


if __name__ == "__main__":
    measure(*sys.argv[1:])
