"""The loss of a nanoGPT checkpoint on all of val.bin, cut into rows exactly as lmtrain's validation cuts them.

nanoGPT's own figure is a mean over a few random batches. Run by char.py, in nanoGPT's folder:
python leg_score_nanogpt.py ckpt.pt val.bin
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

ROWS = 64  # per forward


@torch.no_grad()
def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    from model import GPT, GPTConfig  # nanoGPT's

    saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()})
    model.eval()
    seq_len = saved["model_args"]["block_size"]
    tokens = torch.from_numpy(np.fromfile(sys.argv[2], dtype=np.uint16).astype(np.int64))
    rows = tokens.unfold(0, seq_len + 1, seq_len)  # [n, seq_len + 1]: the label of each token is the next
    losses = [model(part[:, :-1], part[:, 1:].contiguous())[1].double() * len(part) for part in rows.split(ROWS)]
    print(json.dumps({"step": saved["iter_num"], "val/loss": float(sum(losses)) / len(rows)}))


if __name__ == "__main__":
    main()
