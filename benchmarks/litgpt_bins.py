"""The bins of a benchmark as a litgpt DataModule; litgpt imports it in its own environment."""

from pathlib import Path

import numpy as np
import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Row i of a bin, int64 [seq_len + 1]: seq_len tokens and the label of the last one."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self.tokens, self.seq_len = np.memmap(path, dtype=np.uint16, mode="r"), seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, row: int) -> torch.Tensor:
        start = row * self.seq_len
        return torch.from_numpy(self.tokens[start : start + self.seq_len + 1].astype(np.int64))


class Bins(DataModule):
    """train.bin and val.bin of a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        assert max_seq_length is not None
        self.batch_size, self.seq_len = batch_size, max_seq_length

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader("val", shuffle=False)

    def _loader(self, split: str, shuffle: bool) -> DataLoader:
        rows = Rows(self.folder / f"{split}.bin", self.seq_len)
        return DataLoader(rows, self.batch_size, shuffle=shuffle, drop_last=True, pin_memory=torch.cuda.is_available())
