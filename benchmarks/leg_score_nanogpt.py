"""The loss of a nanoGPT checkpoint on all of val.bin, in exactly the rows of lmtrain's validation.

nanoGPT's own figure is a mean over a few random batches. Run by char.py, in nanoGPT's folder:
python leg_score_nanogpt.py ckpt.pt val.bin
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = 64  # per forward pass


@torch.no_grad()
def val_loss(model: Any, val: Path, seq_len: int, device: str = "cpu") -> float:
    """Returns the mean negative log-likelihood over all complete rows of `seq_len` tokens."""
    model.eval()
    tokens = torch.from_numpy(np.fromfile(val, dtype=np.uint16).astype(np.int64))
    rows = tokens.unfold(0, seq_len + 1, seq_len).to(device)  # [n, seq_len + 1]: the label of each token is the next
    losses = [model(part[:, :-1], part[:, 1:].contiguous())[1].double() * len(part) for part in rows.split(ROWS)]
    return float(sum(losses)) / len(rows)


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    from model import GPT, GPTConfig  # nanoGPT's

    saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()})
    loss = val_loss(model, Path(sys.argv[2]), saved["model_args"]["block_size"])
    print(json.dumps({"step": saved["iter_num"], "val/loss": loss}))


if __name__ == "__main__":
    main()
