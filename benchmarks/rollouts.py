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

VOCABULARY, PROMPT = 1024, 16


def by_generate(
    model: LlamaForCausalLM, prompts: list[list[int]], ends: list[int], at_once: int, most: int
) -> tuple[int, float]:
    tokens, started = 0, time.perf_counter()
    for first in range(0, len(prompts), at_once):
        ids = torch.tensor(prompts[first : first + at_once], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=True, top_k=0,
                             eos_token_id=ends or None, pad_token_id=0)[:, PROMPT:]  # fmt: skip
        is_end = (
            torch.isin(out, torch.tensor(ends, device=out.device)) if ends else torch.zeros_like(out, dtype=torch.bool)
        )
        after = (is_end.int().cumsum(1) - is_end.int()) > 0
        tokens += int((~after).sum())
    return tokens, time.perf_counter() - started


def by_rollouts(
    model: LlamaForCausalLM, prompts: list[list[int]], ends: list[int], key: int, at_once: int, most: int
) -> tuple[int, float]:
    started = time.perf_counter()
    requests = [Request(prompt, key + i) for i, prompt in enumerate(prompts)]
    found = InProcess(model, at_once).generate(requests, Sampling(most, 1.0, 1.0, tuple(ends)))
    return sum(len(completion.ids) for completion in found), time.perf_counter() - started


def measure(
    hidden: int, layers: int, prompts_at_once: int, most: int, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns tokens per second of both, the median over rounds, for completions of equal and of varying lengths."""
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=PROMPT + most, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    if cuda:
        model = model.to("cuda", torch.bfloat16)
    found = {}
    prompts = torch.randint(2, VOCABULARY, (3 * prompts_at_once, PROMPT)).tolist()
    for name, ends in {"equal lengths": [], "ragged lengths": list(range(1, VOCABULARY, 24))}.items():
        by_generate(model, prompts[:prompts_at_once], ends, prompts_at_once, most)
        by_rollouts(model, prompts[:prompts_at_once], ends, 0, prompts_at_once, most)
        per_s: dict[str, list[float]] = {"generate": [], "rollouts": []}
        for turn in range(rounds):
            theirs, seconds = by_generate(model, prompts, ends, prompts_at_once, most)
            ours, own_seconds = by_rollouts(model, prompts, ends, 1000 * turn, prompts_at_once, most)
            per_s["generate"].append(theirs / seconds)
            per_s["rollouts"].append(ours / own_seconds)
            print(
                f"{name}: generate {theirs / seconds:,.0f} tokens/s of {theirs:,}, rollouts "
                f"{ours / own_seconds:,.0f} of {ours:,}: {per_s['rollouts'][-1] / per_s['generate'][-1]:.2f}",
                flush=True,
            )
        found[name] = {who: statistics.median(of) for who, of in per_s.items()}
    return {"tokens_per_s": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(*(map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (256, 4)), 32, 128, 3)
