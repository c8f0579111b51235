"""Expected performance of three workloads on an H200, from counted FLOPs and bytes, to compare with measurements.

python benchmarks/computed.py   prints the table; about 1 minute

Seconds per step = FLOPs of the matrix products and of attention over their rates + bytes moved by everything else /
MEMORY. Kernel launches, the host and overlap are ignored, so this is not a bound; it shows where the time should go.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from workload import LLAMA_1B

from lmtrain.config.compose import check, compose
from lmtrain.models import flops
from lmtrain.models.build import build_model

# FLOP/s of bf16 products with random data, measured on an H200: of [8192, 8192]; and in a step of gpt_small.
PRODUCTS, NARROW_PRODUCTS = 790e12, 731e12
ATTENTION = 255e12  # causal, heads of 64, forward and backward: 17.0 ms for 64 x 12 heads x 1,024 (cuDNN)
MEMORY = 4.3e12  # bytes/s of a copy, read plus written, measured on an H200
# Bytes per token that the fused kernels of one block move in forward and backward, residuals in fp32 (bf16-mixed), the
# 1.24B on packed rows; and bytes per logit. Both as counted by tests/cuda/emitted.py.
BLOCK_BYTES = {"gpt_small": 110_884, "llama_1b": 329_760}
LOGIT_BYTES = 6
# Per parameter and step: fp32 gradient from bf16 (6), norm (4), clipping (8), fused AdamW (28), cast to bf16 (6).
STEP_BYTES = 52


@dataclass
class Workload:
    """A row of the table."""

    name: str
    preset: str
    rows: int
    seq_len: int
    mean_length: int  # mean length of a document (not of a row); on average a token attends to half of it
    learned: float  # share of the tokens whose logits are computed
    forwards_besides: float = 0.0  # forward passes of a reference model, relative to one of the policy
    per: str = "tokens"
    tokens_per: float = 1.0  # tokens per unit
    settings: tuple[str, ...] = ()


# The data of workload.py: conversations of 268 tokens on average, half of them trained on, packed into full rows;
# pairs of 534 tokens, 485 of them in the two answers.
WORKLOADS = [
    Workload("gpt_small, 64 x 1,024", "gpt_small", 64, 1024, 1024, 1.0),
    Workload("SFT 1.24B, packed 8 x 2,048", "llama_1b", 8, 2048, 268, 0.5),
    Workload("DPO 1.24B, 32 pairs, online", "llama_1b", 32, 534, 290, 0.91, 1.0, "pairs", 534.0),
    Workload("DPO 1.24B, 32 pairs, precomputed", "llama_1b", 32, 534, 290, 0.91, 0.0, "pairs", 534.0),
]


def config_of(work: Workload) -> Any:
    fixed = ["data=bins", "data.path=none", "trainer.precision=bf16-mixed", "trainer.accelerator=cpu"]
    rows = [f"data.seq_len={work.seq_len}", f"data.global_batch_size={work.rows}", f"data.micro_batch_size={work.rows}"]
    return check(compose([f"model={work.preset}", "optimizer=adamw", *fixed, *rows, *work.settings]))


def vocabulary(preset: str) -> int:
    return 50304 if preset == "gpt_small" else int(LLAMA_1B["vocab_size"])


def count(work: Workload) -> dict[str, float]:
    """Computes FLOPs and bytes of an optimizer step, and the resulting time and memory."""
    config, vocab = config_of(work), vocabulary(work.preset)
    with torch.device("meta"):
        model = build_model(config.model, vocab, None, work.seq_len)
    shape = model.config
    parameters, _, tables = flops.parameter_counts(model)
    tokens = work.rows * work.seq_len
    layers, width = shape.num_hidden_layers, shape.hidden_size
    blocks = parameters - tables  # the output layer is tied to a table, and computed only for trained tokens
    # Per parameter: forward 2, backward 4. Attention: 4 * width per pair of tokens, 3.5 times that with the backward.
    attention = 4 * layers * width * work.mean_length / 2
    forward = 2 * blocks + attention + 2 * width * vocab * work.learned
    products = 3 * (2 * blocks + 2 * width * vocab * work.learned) + work.forwards_besides * (forward - attention)
    attended = (3.5 + work.forwards_besides) * attention
    step_flops = tokens * (products + attended)
    moved = tokens * layers * BLOCK_BYTES[work.preset] * (1 + work.forwards_besides / 3)
    moved += tokens * work.learned * vocab * LOGIT_BYTES * (1 + work.forwards_besides / 3)
    moved += parameters * STEP_BYTES
    seconds = tokens * (products / (NARROW_PRODUCTS if width < 1024 else PRODUCTS) + attended / ATTENTION)
    seconds += moved / MEMORY
    per_s = tokens / seconds / work.tokens_per
    mfu = flops.flops_per_token(model, work.seq_len) * tokens / seconds / 989e12
    held = sum(flops.memory_estimate(model, config).values())
    held += 4 * parameters if work.forwards_besides else 0  # the reference is an fp32 copy
    return {
        "flops": step_flops,
        "bytes": moved,
        "seconds": seconds,
        "per_s": per_s,
        "mfu": mfu,
        "held_gib": held / 2**30,
    }


# The names of these numbers on the page of gpu_queue.py, and the targets.
NAMES = {
    "sft lmtrain, tokens/s": 1, "dpo lmtrain, pairs/s": 2,
}  # fmt: skip
GOALS = {
    "gpt_small lmtrain, ms a step": "0.91 of nanoGPT's",
    "time_to_loss muon_4x, val/loss": "nanoGPT's, in 0.4 of its time",
    "sft lmtrain, tokens/s": "85,000, and 4 x TRL's",
    "dpo lmtrain, pairs/s": "4 x TRL's",
}


def expected() -> dict[str, str]:
    """Returns the computed column of the page of gpu_queue.py."""
    steps = {"gpt_small lmtrain, ms a step": f"{1000 * count(WORKLOADS[0])['seconds']:.1f}"}
    return steps | {name: f"{count(WORKLOADS[number])['per_s']:,.0f}" for name, number in NAMES.items()}


def table() -> str:
    lines = ["| computed, H200 | TFLOP a step | GB moved a step | ms a step | per second | MFU | GiB held |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for work in WORKLOADS:
        found = count(work)
        lines.append(
            f"| {work.name} | {found['flops'] / 1e12:.1f} | {found['bytes'] / 1e9:.1f} | {1000 * found['seconds']:.1f} "
            f"| {found['per_s']:,.0f} {work.per} | {found['mfu']:.2f} | {found['held_gib']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
