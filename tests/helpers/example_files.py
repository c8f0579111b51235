"""Writes tokenized examples to a folder directly, without rows or a tokenizer."""

from pathlib import Path

import numpy as np

from lmtrain.data.examples.documents import Examples
from lmtrain.data.store.bins import open_shards
from lmtrain.data.store.writer import BinWriter


class ExampleWriter:
    def __init__(self, folder: Path, shard_tokens: int = 2**20) -> None:
        self.folder = folder
        self.writer = BinWriter(folder, "train", "uint32", shard_tokens, masked=True)

    def append(self, ids: list[int], trained: list[bool], label: int | None = None, kept: str | None = None) -> None:
        self.writer.append(np.array(ids), np.array(trained), ends_document=True, label=label, text=kept)

    def close(self) -> Examples:
        return Examples(open_shards(self.folder, "uint32", self.writer.close()))
