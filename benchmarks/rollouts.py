"""Tokens per second of rollouts against transformers' `generate` with static batches, for equal and varying lengths.

python benchmarks/rollouts.py [hidden layers]

Both sample at temperature 1 from the same random llama; a completion ends at any of a set of stop tokens, so lengths
are geometrically distributed; without stop tokens all have a fixed length. Only tokens of completions count, up to the
stop token.
"""

import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmtrain.rollouts.engine import Request, Sampling
from lmtrain.rollouts.in_process import InProcess

VOCABULARY, PROMPT, PROMPTS, AT_ONCE, MOST, ROUNDS = 1024, 16, 96, 32, 128, 3


def by_generate(model: LlamaForCausalLM, prompts: list[list[int]], ends: list[int]) -> tuple[int, float]:
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(prompts), AT_ONCE):
        ids = torch.tensor(prompts[first : first + AT_ONCE])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST, do_sample=True, top_k=0,
                             eos_token_id=ends or None, pad_token_id=0)[:, PROMPT:]  # fmt: skip
        is_end = torch.isin(out, torch.tensor(ends)) if ends else torch.zeros_like(out, dtype=torch.bool)
        after = (is_end.int().cumsum(1) - is_end.int()) > 0
        tokens += int((~after).sum())
    return tokens, time.perf_counter() - started


def by_rollouts(model: LlamaForCausalLM, prompts: list[list[int]], ends: list[int], key: int) -> tuple[int, float]:
    started = time.perf_counter()
    requests = [Request(prompt, key + i) for i, prompt in enumerate(prompts)]
    found = InProcess(model, AT_ONCE).generate(requests, Sampling(MOST, 1.0, 1.0, tuple(ends)))
    return sum(len(completion.ids) for completion in found), time.perf_counter() - started


def main(hidden: int, layers: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=PROMPT + MOST, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT)).tolist()
    for name, ends in {"equal lengths": [], "ragged lengths": list(range(1, VOCABULARY, 24))}.items():
        by_generate(model, prompts[:AT_ONCE], ends)
        by_rollouts(model, prompts[:AT_ONCE], ends, 0)
        ratios = []
        for turn in range(ROUNDS):
            theirs, seconds = by_generate(model, prompts, ends)
            ours, own_seconds = by_rollouts(model, prompts, ends, 1000 * turn)
            ratios.append(ours / own_seconds / (theirs / seconds))
            print(
                f"{name}: generate {theirs / seconds:,.0f} tokens/s of {theirs:,}, rollouts "
                f"{ours / own_seconds:,.0f} of {ours:,}: {ratios[-1]:.2f}",
                flush=True,
            )
        print(f"{name}: median {statistics.median(ratios):.2f}", flush=True)


if __name__ == "__main__":
    main(*(map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (256, 4)))
