"""transformers' Trainer with the default shape of GPT-2 and the defaults of TrainingArguments, on bins of characters.

Run by minutes.py: python leg_default_trainer.py FOLDER CHARACTERS STEPS OUT
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

ROW = 256


class Rows(Dataset):
    """Rows of ROW characters."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.fromfile(path, dtype=np.uint16).astype(np.int64)

    def __len__(self) -> int:
        return len(self.tokens) // ROW

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.tokens[row * ROW : (row + 1) * ROW])
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    folder, characters, steps, out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    model = GPT2LMHeadModel(GPT2Config(vocab_size=characters, bos_token_id=0, eos_token_id=0, n_positions=ROW))
    settings = TrainingArguments(
        output_dir=str(out.parent / "trainer"), max_steps=steps, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, settings, train_dataset=Rows(folder / "train.bin"), eval_dataset=Rows(folder / "val.bin"))
    trainer.train()
    out.write_text(json.dumps({"val/loss": trainer.evaluate()["eval_loss"]}))


if __name__ == "__main__":
    main()
