"""Where the GPU's time goes in a training step: milliseconds by kind of kernel, and the kernels that take longest."""

from collections import Counter
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

STEPS = 3  # in a profile
ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
# The first kind of which a part is in the kernel's name, in lower case. Kernels that torch runs without inductor come
# last: each of them is a loss, and their names say of what.
KINDS = {
    "inductor: reductions": ("triton_red", "triton_per", "triton_mix"),
    "inductor: elementwise": ("triton_poi",),
    "inductor: others": ("triton",),
    "attention": ("flash", "fmha", "cudnn", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "splitk", "gemv", "mm"),
    "communication": ("nccl",),
    "optimizer and clipping": ("multi_tensor", "adam", "foreach", "lpnorm"),
    "copies": ("memcpy", "memset", "copy", "catarray"),
    "sorting and scans": ("sort", "radix", "cub::", "scan"),
    "indexing": ("index", "gather", "scatter", "embedding"),
    "uncompiled norms and softmax": ("layer_norm", "layernorm", "softmax", "rms_norm"),
    "uncompiled reductions": ("reduce_kernel", "reduce_"),
    "uncompiled elementwise": ("elementwise", "fill"),
}


def table(events: Any, step_ms: float) -> dict[str, Any]:
    """Returns step_ms, kernels_ms, and milliseconds and calls a step by kind and of the 30 longest kernels.

    Args:
        events: of the profiler. Annotations (compiled regions, the optimizer's step) cover kernels that are counted
            already, and are left out.
    """
    on = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
    kinds: Counter[str] = Counter()
    kernels = []
    for event in events:
        if event.device_type != on or event.is_user_annotation:
            continue
        micros = event.self_device_time_total if on == DeviceType.CUDA else event.self_cpu_time_total
        ms = micros / 1000 / STEPS
        kinds[kind(event.key)] += ms  # type: ignore[assignment]
        kernels.append((round(ms, 3), event.count / STEPS, event.key[:160]))
    found = {name: round(ms, 3) for name, ms in kinds.most_common()}
    longest = sorted(kernels, reverse=True)[:30]
    return {
        "step_ms": round(step_ms, 3),
        "kernels_ms": round(sum(kinds.values()), 3),
        "kinds": found,
        "kernels": longest,
    }


def kind(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(p in name.lower() for p in parts)), "other")
