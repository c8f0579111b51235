"""The table of RESULTS.md, "On paper": 1B, 8B and 70B on 1, 8 and 64 GPUs, computed from shapes, not measured.

python benchmarks/paper.py   prints it as Markdown; half a minute, on the meta device

Memory is the plan's estimate (models/flops.py), in GiB per GPU. A save writes the checkpoint's 12 bytes per parameter,
each node its share, at NODE_BYTES; a resume reads them twice, for the checksums and to load. Tokens/s are the FLOP/s of
the GPUs at MFU divided by the FLOPs per token.
"""

import sys

from lmtrain.config.compose import check, compose
from lmtrain.models.flops import flops_per_token
from lmtrain.planning import estimation

GPU = "h100"  # 80 GiB
PEAK, MFU = 989e12, 0.4  # peak FLOP/s of bf16 products; the share of it that training reaches
NODE_BYTES = 2 * 2**30  # bytes/s of one node to and from the file system
ROW = 8192  # tokens; one row per micro-batch
LLAMA_8B = ["hidden_size=4096", "num_hidden_layers=32", "num_attention_heads=32", "num_key_value_heads=8",
            "intermediate_size=14336"]  # fmt: skip
LLAMA_70B = ["hidden_size=8192", "num_hidden_layers=80", "num_attention_heads=64", "num_key_value_heads=8",
             "intermediate_size=28672"]  # fmt: skip
MODELS = {"1B": ["model=llama_1b"], "8B": ["model=llama_7b", *(f"model.{k}" for k in LLAMA_8B)],
          "70B": ["model=llama_7b", *(f"model.{k}" for k in LLAMA_70B)]}  # fmt: skip
VOCABULARY = 128_256
DEVICES = (1, 8, 64)
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits")


def row(name: str, devices: int) -> str:
    nodes = max(1, devices // 8)
    words = [*MODELS[name], "data=bins", "data.path=none", "tokenizer=gpt2", "trainer.accelerator=cuda"]
    words += ["trainer.strategy=fsdp", f"trainer.devices={devices // nodes}", f"trainer.num_nodes={nodes}"]
    words += ["trainer.precision=bf16-mixed", "trainer.activation_checkpointing=true", "optimizer=adamw"]
    words += ["trainer.fsdp.reduce_each_micro_batch=true", f"data.seq_len={ROW}", f"estimate.device={GPU}"]
    words += ["data.micro_batch_size=1", "data.global_batch_size=64", f"model.max_position_embeddings={ROW}"]
    config = check(compose(words))
    estimation.resolve(config)
    model = estimation.build(config, VOCABULARY)
    memory = estimation.memory(model, config)
    saved = estimation.checkpoint_bytes(model, config)
    seconds = saved / (nodes * NODE_BYTES)
    tokens = devices * MFU * PEAK / flops_per_token(model, ROW)
    parts = " | ".join(f"{memory.get(part, 0) / 2**30:,.1f}" for part in PARTS)
    whole = sum(memory.values()) / 2**30
    fits = "" if whole < 0.8 * estimation.device_of(config).bytes / 2**30 else " (too much)"
    found = f"{whole:,.0f}{fits} | {saved / 2**30:,.0f} | {seconds:,.0f} | {2 * seconds:,.0f} | {tokens:,.0f}"
    return f"| {name} | {devices} | {parts} | {found} |"


def table() -> str:
    head = f"| model | GPUs | {' | '.join(PARTS)} | in all | checkpoint | save, s | resume, s | tokens/s |"
    rule = "| --- | ---: | " + " | ".join("---:" for _ in PARTS) + " | ---: | ---: | ---: | ---: | ---: |"
    return "\n".join([head, rule, *(row(name, devices) for name in MODELS for devices in DEVICES)])


if __name__ == "__main__":
    print(table())
    sys.exit(0)
