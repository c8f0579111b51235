"""What inductor generates for the loss and decoder blocks on an H200 that isn't there: `python emitted.py LIBRARY`.

Run by the Python of `make env-triton`; prints JSON of {name: what was measured}. Tensors are fake: they have a shape, a
dtype and a device, but no values. Inductor lowers, fuses and writes its kernels as for a GPU of compute capability 9.0,
and Triton compiles them to machine code. In place of a compiled graph, its original operations run, for their shapes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import library

if __name__ == "__main__":
    library.load(sys.argv[1])

import torch
from pretended import fused_attention, pretend

PRETENDED = pretend()  # before torch.compile looks for devices

import torch._dynamo  # noqa: E402
from torch._inductor import codecache, config, graph, scheduler  # noqa: E402
from torch._inductor.fx_passes import fuse_attention, joint_graph, pad_mm  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.virtualized import V  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from lmtrain.config.compose import check, compose  # noqa: E402
from lmtrain.losses import cross_entropy as losses  # noqa: E402
from lmtrain.models.blocks import compile_model, let_grow  # noqa: E402
from lmtrain.models.build import build_model  # noqa: E402
from lmtrain.models.documents import Documents  # noqa: E402

aten = torch.ops.aten
ROWS, VOCABULARY = 4096, 50304
SOFTCAPS = {"plain": None, "softcap": 30.0}
SEQ_LEN = 1024
# Two batch sizes: their difference is the cost of the tokens, without that of processing the weights.
BATCHES = (8, 16)
BLOCKS = {"gpt2": "gpt_small", "llama": "llama_1b", "llama_packed": "llama_1b", "qwen3": "qwen3_small"}
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
LAUNCH = re.compile(r"^ +triton_\w+\.run\(", re.MULTILINE)
ALLOCATED = re.compile(r"empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)")


class Driver:
    """Replaces Triton's driver, which would ask the GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


def constant_on_host(self: Any, node: Any) -> Any:
    """Evaluates uniform tensors on the host; before compiling, inductor would evaluate one element on the device."""
    if node.target is aten.full.default and isinstance(node.args[1], bool | int | float):
        return aten.full.default([1], node.args[1], **{**node.kwargs, "device": "cpu"})
    return _deduce_value(self, node)


_deduce_value = joint_graph.UniformValueConstantFolder._deduce_value


def answer_without_device() -> None:
    """Replaces what inductor would do on a device: create tensors, time kernels and load Triton's driver."""
    nothing = lambda *_, **__: None  # noqa: E731
    for name in ("_lazy_init", "set_rng_state", "synchronize"):
        setattr(torch.cuda, name, nothing)
    torch.cuda._exchange_device = lambda device: 0
    torch.cuda._maybe_exchange_device = lambda device: 0
    torch.cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    # Skips patterns of unfused attention, which are traced on the device, and of products that padding might speed up.
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = nothing
    joint_graph.UniformValueConstantFolder._deduce_value = constant_on_host
    triton_helpers.set_driver_to_gpu = nothing
    driver.set_active(Driver())
    FakeTensorMode.avoid_device_init = True
    # Fake parameters are moved by swapping, which torch refuses for tensors that have weak references.
    torch.utils.weakref.getweakrefs = lambda tensor: []
    torch.nn.functional.scaled_dot_product_attention = fused_attention
    config.force_disable_caches, config.use_static_triton_launcher = True, False


@contextmanager
def emitted() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that gets one entry per graph compiled within the block, forward and backward."""
    torch._dynamo.reset()
    seen: list[dict[str, Any]] = []

    def to_module(self: graph.GraphLowering) -> Any:
        code = self.codegen()[0].value
        seen.append(described(self, code))
        return SimpleNamespace(call=lambda inputs: self.orig_gm(*inputs), __file__="")

    with mock.patch.object(graph.GraphLowering, "_compile_to_module", to_module):
        yield seen


def described(lowered: graph.GraphLowering, code: str) -> dict[str, Any]:
    """Describes a graph without matrix products and attention; inductor counts each buffer that a kernel uses once."""
    with V.set_graph_handler(lowered):
        nodes = [n for n in lowered.scheduler.nodes if not isinstance(n, scheduler.ExternKernelSchedulerNode)]
        moved = sum(node.get_read_write_buffers_sizes() for node in nodes)
    return {
        "kernels": KERNEL.findall(code),
        "launches": len(LAUNCH.findall(code)),
        "bytes": moved,
        "allocated": [{"sizes": sizes.split(", "), "dtype": dtype} for sizes, dtype in ALLOCATED.findall(code)],
    }


def machine_code(kernels: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Compiles all kernel configurations that a GPU would try; returns target, registers and spilled bytes of each."""
    found = []
    for name, source in kernels:
        kernel = getattr(codecache.PyCodeCache.load(source), name)
        for option in kernel.configs:
            binary = kernel._precompile_config(option).kernel
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(binary.asm["cubin"])
                file.flush()
                command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
                usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            (target,) = re.findall(r"\.target (\w+)", binary.asm["ptx"])
            (registers, stack, local) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)[0]
            spilled = int(stack) + int(local)
            found.append({"kernel": name, "target": target, "registers": int(registers), "spilled": spilled})
    return found


def loss(softcap: float | None, gradient: bool) -> list[dict[str, Any]]:
    """Compiles the loss of a chunk of bf16 logits and returns its graphs."""
    with emitted() as graphs, FakeTensorMode():
        logits = torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16, device="cuda")
        losses._compiled_block(logits, torch.zeros(ROWS, dtype=torch.int64, device="cuda"), softcap, gradient)
    return graphs


def block(preset: str, rows: int, packed: bool) -> list[dict[str, Any]]:
    """Compiles a decoder block under bf16 autocast, forward and backward; packed rows hold five documents each."""
    overrides = [f"model={preset}", "model.num_hidden_layers=1", "model.vocab_multiple_of=1"]
    cfg = check(compose([*overrides, "data=bins", "data.path=none"])).model
    with emitted() as graphs, FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(cfg, 512, None, SEQ_LEN).to("cuda").train()
        compile_model(model, changing_lengths=packed)
        ids = torch.zeros(rows, SEQ_LEN, dtype=torch.int64, device="cuda")
        options: dict[str, Any] = {}
        if packed:
            starts = torch.zeros(5 * rows + 1, dtype=torch.int32, device="cuda")
            let_grow(starts)
            options = {"position_ids": ids, "documents": Documents(starts, rows, SEQ_LEN, "varlen")}
        with torch.autocast("cuda", torch.bfloat16):
            model.base_model(input_ids=ids, use_cache=False, **options)[0].float().sum().backward()
    return graphs


def seen_of_loss(softcap: float | None, gradient: bool) -> dict[str, Any]:
    (only,) = loss(softcap, gradient)
    return {
        "bytes_per_logit": only["bytes"] / (ROWS * VOCABULARY),
        "launches": only["launches"],
        "allocated": only["allocated"],
        "machine_code": machine_code(only["kernels"]),
    }


def seen_of_block(preset: str, packed: bool) -> dict[str, Any]:
    few, many = (block(preset, rows, packed) for rows in BATCHES)
    tokens = (BATCHES[1] - BATCHES[0]) * SEQ_LEN
    forward, backward = many
    return {
        "bytes_per_token": sum(b["bytes"] - a["bytes"] for a, b in zip(few, many, strict=True)) / tokens,
        "launches": forward["launches"] + backward["launches"],
        "machine_code": machine_code(forward["kernels"] + backward["kernels"]),
    }


def main() -> None:
    answer_without_device()
    seen = {
        "losses": {name: seen_of_loss(cap, True) for name, cap in SOFTCAPS.items()},
        "validation": seen_of_loss(None, False),
        "blocks": {name: seen_of_block(preset, "packed" in name) for name, preset in BLOCKS.items()},
    }
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
