"""Prints as JSON how many bytes a forward of four blocks keeps for its backward, per kind of checkpointing."""

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch

from helpers_models import wrapped
from lmtrain.models.blocks import enable_activation_checkpointing
from lmtrain.models.documents import Inputs

ROWS, LENGTH = 4, 512


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def held(family: str, kept: bool | str) -> int:
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
    if family != "gpt2":
        shape |= {"intermediate_size": 704, "num_key_value_heads": 4}
    model = wrapped(family, **shape)
    if kept:
        enable_activation_checkpointing(model.model, kept)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    model(ids[:1, :8], ids[:1, :8]).loss_sum.backward()
    gc.collect()
    before = anonymous_bytes()
    hidden, _ = model.hidden_states(Inputs(ids))
    after = anonymous_bytes()
    hidden.sum().backward()
    return after - before


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory is returned to the system at once
    print(json.dumps([held(sys.argv[1], kept) for kept in (False, "selective", True)]))
