"""Ranks take their shards of a model that only rank 0 has: `torch.distributed.run ... zero_parts.py RESULTS`."""

import json
import os
import resource
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmtrain.distributed.ranks import leave
from lmtrain.strategies.deepspeed import connect, partition

SHAPE = {"vocab_size": 2048, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(**SHAPE, intermediate_size=2048, num_hidden_layers=12, tie_word_embeddings=True)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.model.register_buffer("flags", torch.arange(6).remainder(2).bool(), persistent=False)
    model.model.layers[0].input_layernorm.weight.requires_grad = False
    return model


def main(results: Path) -> None:
    connect("gloo", torch.device("cpu"))
    rank = torch.distributed.get_rank()
    with torch.device("cpu" if rank == 0 else "meta"):
        model = build()
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    expected = {
        name: t.clone() for name, t in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    }
    expected = expected if rank == 0 else {}
    objects = [id(p) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    partition(model, model.model.layers, torch.device("cpu"), CONFIG)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    parts = sum(p.ds_tensor.numel() * p.ds_tensor.itemsize for p in model.parameters())
    kept = sum(p.numel() for p in model.parameters())
    assert [id(p) for p in model.parameters()] == objects == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.layers.0.input_layernorm.weight"]
    wrong = []
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            reference = expected.get(name, torch.empty(parameter.shape))
            torch.distributed.broadcast(reference, 0)
            wrong += [] if torch.equal(parameter, reference) else [name]
    buffers = {name: buffer.double().flatten().tolist() for name, buffer in model.named_buffers()}
    found = {"whole": whole, "peak": peak, "parts": parts, "kept": kept, "wrong": wrong, "buffers": buffers}
    (results / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    main(Path(sys.argv[1]))
    leave(0)
