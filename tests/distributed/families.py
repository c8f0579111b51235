"""Compares models whose layers are split over the ranks with the same models unsplit.

`torch.distributed.run ... families.py FOLDER FAMILY,FAMILY,...` writes each rank's results into the folder, with all
tokens on every rank between the layers and with tokens shared out over the ranks.
"""

import copy
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from lmtrain.distributed.dtensor import whole
from lmtrain.distributed.ranks import leave
from lmtrain.models.blocks import decoder_blocks
from lmtrain.models.split import TokenShares, check, split

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8, "pad_token_id": None, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


def compare(family: str, shares_tokens: bool) -> str:
    """Returns how many parameters are split; raises if logits or gradients differ from the unsplit model's."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if family != "gpt2" or k not in ("intermediate_size", "head_dim")}
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0) if family == "gpt2" else {}
    config = AutoConfig.for_model(family, **sizes, **dropouts)
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.2)
    whole_model = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers, blocks = check(model, mesh.size()), decoder_blocks(model)
    tokens = TokenShares(mesh) if shares_tokens else None
    if tokens is not None:
        tokens.enter(blocks[0])
        tokens.leave(blocks[-1])
    for block in blocks:
        split(block, layers, mesh, tokens)
    ids = torch.randint(0, 64, (2, 15))  # not a multiple of the number of ranks
    outputs = [m(input_ids=ids, labels=ids, use_cache=False) for m in (whole_model, model)]
    for out in outputs:
        out.loss.backward()
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-4, atol=1e-5)
    split_parameters = 0
    for (name, a), (_, b) in zip(whole_model.named_parameters(), model.named_parameters(), strict=True):
        assert a.shape == b.shape, name
        split_parameters += a.numel() > getattr(b, "_local_tensor", b).numel()
        torch.testing.assert_close(whole(b.grad), a.grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    return f"{split_parameters} split"


def main(folder: Path, families: list[str]) -> None:
    dist.init_process_group("gloo")
    found = {}
    for family in families:
        try:
            found[family] = f"{compare(family, False)}, {compare(family, True)}"
        except Exception:
            found[family] = traceback.format_exc()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # no rank may leave while another still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
    leave(0)
