"""Keys and values of one layer in a cache with free columns, into which every step writes in place."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

HOST = "cpu"  # the type of device that is never waited for
BLOCK = 128  # columns by which a cache grows


class CacheBlock(DynamicLayer):
    """Keys and values of a layer, [B, H, columns, D], with room for later columns, which are written in place.

    at: int64 [1], `length` on the device, for steps that are recorded: all columns are returned and have to be masked.
    """

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor | None, room: int) -> None:
        super().__init__()
        self.dtype = keys.dtype
        self.device = keys.device
        self.is_initialized = True
        self.is_compileable = keys.device.type != HOST  # masks are built without asking the device if they are needed
        self.length, self.at = keys.shape[2], at
        self.keys, self.values = (F.pad(x, (0, 0, 0, room)) for x in (keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.at is not None:
            self.keys.index_copy_(2, self.at, key_states)
            self.values.index_copy_(2, self.at, value_states)
            return self.keys, self.values
        self.keys[:, :, self.length] = key_states[:, :, 0]
        self.values[:, :, self.length] = value_states[:, :, 0]
        self.length += 1
        return self.in_use()

    def in_use(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the columns in use."""
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def cut(self, columns: int) -> None:
        """Removes the first columns."""
        self.keys, self.values = self.keys[:, :, columns:], self.values[:, :, columns:]
        self.length -= columns

    def make_room(self, columns: int) -> bool:
        """Makes room for further columns; returns whether keys and values have moved for it."""
        moves = self.length + columns > self.keys.shape[2]
        if moves:
            self.keys, self.values = (F.pad(x, (0, 0, 0, BLOCK)) for x in (self.keys, self.values))
        return moves

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.at is None else self.keys.shape[2]), 0

    def get_seq_length(self) -> Any:
        return self.length if self.at is None else self.at
