"""Whether a CPU multiplies faster in bf16 or in fp32: measured, since neither its flags nor its peak rates say so.

Of processors with AVX512-BF16 some take longer in bf16, and narrow layers do on most, because each product converts its
operands first. A measurement takes half a second and is kept per machine, shape and version of torch.
"""

import contextlib
import json
import os
import platform
import time
from pathlib import Path

import torch
from torch import nn

from lmtrain.errors import RunError
from lmtrain.files import write_atomic

WIDTH, TOKENS = 768, 1024  # if the config doesn't say; more tokens per forward pass are measured as these
_ROUNDS, _SECONDS = 15, 0.5  # at most
_LEAST_ROUNDS = 4  # one pause of a second must not decide
_KEPT = "machine.json"


def speedup_of_bf16(width: int, tokens: int, cache: Path | None) -> float:
    """Returns how many times as fast a feed-forward block is trained in bf16-mixed as in fp32, on this machine.

    Args:
        width: channels of the model; the block has four times as many inside.
        tokens: of a forward pass.
        cache: the folder in which the result is kept; None: it is measured each time.
    """
    found = kept(width, tokens, cache) if cache is not None else None
    if found is None:
        found = round(_measured(width, min(tokens, TOKENS)), 3)
        if cache is not None:
            with contextlib.suppress(OSError, RunError):  # a folder that can't be written: measured again next time
                cache.mkdir(parents=True, exist_ok=True)
                write_atomic(cache / _KEPT, json.dumps({**_all(cache), _key(width, tokens): found}, indent=1) + "\n")
    return found


def kept(width: int, tokens: int, cache: Path) -> float | None:
    """Returns what `speedup_of_bf16` has measured before, or None."""
    found = _all(cache).get(_key(width, tokens))
    return found if isinstance(found, float) else None


def _all(cache: Path) -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((cache / _KEPT).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def _key(width: int, tokens: int) -> str:
    machine = f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{machine}: {min(tokens, TOKENS)} x {width}"


def _measured(width: int, tokens: int) -> float:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        block = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)).to(torch.float32)
        inputs = torch.randn(tokens, width, dtype=torch.float32)

    def seconds(in_bf16: bool) -> float:
        began = time.perf_counter()
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            block(inputs).float().square().mean().backward()
        return time.perf_counter() - began

    times: list[tuple[float, float]] = []
    ends = time.perf_counter() + _SECONDS
    while len(times) <= _LEAST_ROUNDS or (len(times) < _ROUNDS and time.perf_counter() < ends):
        times.append((seconds(False), seconds(True)))  # in turns, so that other programs delay both alike
    fp32, bf16 = zip(*times[1:], strict=True)  # the first allocates memory and chooses kernels
    return min(fp32) / min(bf16)  # of a machine that does much else, the median tells about the others


def _processor() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{platform.processor()}, {os.cpu_count()} cores"
