"""Compares models whose rows are shared by two ranks with the same models on whole rows.

`torch.distributed.run ... context_families.py FOLDER` writes each rank's result for each variant into the folder.
"""

import copy
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from family_variants import Variant, build, config_of, variants
from helpers_models import packed
from lmtrain.distributed.ranks import leave
from lmtrain.errors import UserError
from lmtrain.models import context, probe
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.probe import TESTED

ROW = 10**6  # the value of data.seq_len: longer than every window
PLAIN = ("input_ids", "labels")
# Gemma 4's gradients magnify rounding: 2e-5 in fp32 is 5e-8 where weights are fp64.
ALLOWED = {"gemma4_text": 1e-4}


def compare(variant: Variant) -> str:
    """Returns "right", or "refused" with the reason; raises if loss or gradients differ from those of whole rows."""
    model = build(config_of(variant))
    probe.set_attention("auto", model, ROW)
    try:
        context.check(model, dist.get_world_size())
    except UserError as error:
        return f"refused: {error}"
    whole = LanguageModel(model).eval()
    shared = copy.deepcopy(whole)
    shared.context = context.Context(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    shared.context.mark(shared.model)
    for batch in (packed(), {name: packed()[name] for name in PLAIN}):
        expected, own = whole(**batch), shared(**shared.context.slice_of(batch))
        for out in (expected, own):
            out.loss_sum.backward()
        torch.testing.assert_close(summed(own.nll_sum), expected.nll_sum, rtol=2e-6, atol=0)
        assert int(summed(own.n_tokens)) == int(expected.n_tokens)
        largest = max(p.grad.abs().max() for p in whole.parameters() if p.grad is not None)
        for (name, a), b in zip(whole.named_parameters(), shared.parameters(), strict=True):
            if a.grad is not None:
                off = (summed(b.grad) - a.grad).abs().max() / largest
                assert off < ALLOWED.get(variant.family, 1e-6), f"gradient of {name} is off by {off:.2g} of the largest"
        whole.zero_grad()
        shared.zero_grad()
    return "right"


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {}
    for variant in (v for v in variants() if v.family in TESTED):
        try:
            found[str(variant)] = compare(variant)
        except Exception:
            found[str(variant)] = traceback.format_exc(limit=-1)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()  # no rank may leave while another still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
