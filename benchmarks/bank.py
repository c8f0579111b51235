"""The CPU time that a memory adds to a training step of a frozen SmolLM2-135M-shaped model, on one thread.

python benchmarks/bank.py       what is measured, and how, is in benchmarks/README.md
"""

import argparse
import statistics
import time

import torch
from machine import machine
from transformers import LlamaConfig, LlamaForCausalLM

from lmtrain.adapters.memory import MemorySettings, attach_memory, decoder_layers, memory_blocks
from lmtrain.adapters.memory_adapter import without_memory

SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
         "num_key_value_heads": 3, "tie_word_embeddings": True}  # fmt: skip


def model_with(chapters: int, layers: tuple[int, ...], depth: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=depth))
    if chapters:
        model.requires_grad_(False)
        attach_memory(model, MemorySettings(chapters, 64, 256, 4, 4, layers, "top_k", 0.0, True))
    return model


def seconds(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Returns the CPU seconds of forward, backward and AdamW's step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(model, "own_optimizer", None) or torch.optim.AdamW(trained, fused=True)
    model.own_optimizer = optimizer
    started = time.process_time()
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=30, help="decoder layers")
    parser.add_argument("--tokens", type=int, default=512, help="of one row")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(SHAPE["vocab_size"], (1, args.tokens), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    every_4 = tuple(range(3, args.depth, 4))
    contenders = {
        "base, all trained": model_with(0, (), args.depth),
        "one block, 64 chapters": model_with(64, (0,), args.depth),
        "one block, 128 chapters": model_with(128, (0,), args.depth),
        "every_4, 64 chapters": model_with(64, every_4, args.depth),
        "every_4, 128 chapters": model_with(128, every_4, args.depth),
    }
    found: dict[str, list[float]] = {name: [] for name in [*contenders, "one block, turned off"]}
    for number in range(args.rounds + 1):  # interleaved; the first round warms up
        for name, model in contenders.items():
            taken = seconds(model, ids)
            if number:
                found[name].append(taken)
        if number:
            found["one block, turned off"].append(turned_off(contenders["one block, 64 chapters"], ids))
    print(f"{args.depth} layers, {args.tokens} tokens, medians of {args.rounds} interleaved rounds\n")
    for name, times in found.items():
        print(f"{name:26} {statistics.median(times):7.3f} s")
    ratio = lambda a, b: statistics.median(x / y for x, y in zip(found[a], found[b], strict=True))  # noqa: E731
    print(f"\none block / the same turned off   {ratio('one block, 64 chapters', 'one block, turned off'):.3f}")
    print(f"128 chapters / 64, one block      {ratio('one block, 128 chapters', 'one block, 64 chapters'):.3f}")
    print(f"128 chapters / 64, every_4        {ratio('every_4, 128 chapters', 'every_4, 64 chapters'):.3f}")
    print(machine())


def turned_off(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Turns the memory off; the backward pass still has to reach the layer after which the memory is read."""
    block, layer = memory_blocks(model)[0], decoder_layers(model)[0]
    bias = torch.zeros(SHAPE["hidden_size"], requires_grad=True)  # type: ignore[call-overload]
    handle = layer.register_forward_hook(lambda _module, _inputs, output: output + bias)
    with without_memory(model):
        started = time.process_time()
        model(ids, labels=ids, use_cache=False).loss.backward()
        taken = time.process_time() - started
    handle.remove()
    assert block.enabled
    return taken


if __name__ == "__main__":
    main()
