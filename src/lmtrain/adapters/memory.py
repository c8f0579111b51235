"""A bank of learned memory that a transformers decoder reads by routed cross-attention.

The bank has C chapters of S slots, each with a key and a value. After chosen decoder layers a block routes every token
to `top_k` chapters, attends to the slots of each of them, and adds the results, weighted by the router, to the residual
stream:

    x = norm(h);  p = softmax(W_r x);  o_c = attention(W_q x, K_c, V_c);  h + gate * W_o sum_{c in top k} w_c o_c

The output gate starts at zero, so that a new memory doesn't change the model's output. In the memory a token uses only
its own hidden state and the bank: documents stay apart, and generation needs no cache.

Large memories: Lample et al. 2019, arXiv:1907.05242. Routing: Fedus et al. 2021, arXiv:2101.03961. Zero gates: Alayrac
et al. 2022, arXiv:2204.14198. This file imports only torch, since exports contain a copy of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TILE = 64  # rows of one chapter that are multiplied at once
# Standard deviation of the initial keys. Query components are near 1, so a token's scores have this deviation too: it
# reads a few slots of a chapter. With 1 it would read the mean of about 20, which is near zero and the same for all
# tokens, and learn much slower.
KEY_STD = 3.0


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a memory, stored in an export's config.json under `memory`."""

    num_chapters: int
    chapter_size: int  # slots per chapter
    memory_dim: int  # width of a slot's key and value, over all heads
    num_heads: int
    top_k: int  # chapters that each token reads
    layers: tuple[int, ...]  # decoder layers after which the memory is read, counted from 0
    router: str  # top_k, straight_through or soft
    router_noise: float  # standard deviation of the noise added to the router's logits in training
    share_bank: bool  # whether all layers share one bank
    norm_eps: float = 1e-6


class MemoryBank(nn.Module):
    """The memory's `keys` and `values`, [C, H, S, d] each, with H heads of width d."""

    def __init__(self, settings: MemorySettings) -> None:
        super().__init__()
        head_dim = settings.memory_dim // settings.num_heads
        shape = (settings.num_chapters, settings.num_heads, settings.chapter_size, head_dim)
        self.keys = nn.Parameter(torch.empty(shape).normal_(std=KEY_STD))
        self.values = nn.Parameter(torch.empty(shape).normal_())


class MemoryNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019), computed in fp32 or fp64; the result has the weight's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_fp32(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(self.weight.dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class MemoryBlock(nn.Module):
    """A module that reads a bank for each token of a decoder layer's output, and adds the result to that output."""

    keeps_router_logits = True  # the last forward's are stored in `last_router_logits`, for the router's losses

    def __init__(self, width: int, settings: MemorySettings, shared: MemoryBank | None) -> None:
        super().__init__()
        self.settings = settings
        self.enabled, self.top_k = True, settings.top_k
        self.norm = MemoryNorm(width, settings.norm_eps)
        self.router = nn.Linear(width, settings.num_chapters, bias=False)
        self.query = nn.Linear(width, settings.memory_dim, bias=False)
        self.output = nn.Linear(settings.memory_dim, width, bias=False)
        self.gate = nn.Parameter(torch.zeros(width))
        for layer in (self.router, self.query, self.output):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        self.own_bank = MemoryBank(settings) if shared is None else None
        # A shared bank belongs to the model: registered here too, its parameters would be saved once per layer.
        self.__dict__["shared_bank"] = shared

    @property
    def bank(self) -> MemoryBank:
        return self.own_bank if self.own_bank is not None else self.__dict__["shared_bank"]

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states [B, T, D] to [B, T, D], in the same dtype."""
        if not self.enabled:
            return hidden
        s, bank = self.settings, self.bank
        x = self.norm(hidden).flatten(0, 1)  # [N, D]
        logits = self.router(x)  # [N, C]
        self.last_router_logits = logits
        chapters, weights = self.route(logits)
        queries = self.query(x).unflatten(1, (s.num_heads, -1))  # [N, H, d]
        read = read_chapters(queries, bank.keys, bank.values, chapters)  # [N, k, H, d]
        mixed = (read * weights.to(read.dtype)[:, :, None, None]).sum(1).flatten(1)  # [N, H * d]
        change = self.gate * self.output(mixed)
        return hidden + change.to(hidden.dtype).view_as(hidden)

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (chapters int64 [N, k], their weights in at least fp32 [N, k]) for the router's logits [N, C]."""
        s = self.settings
        logits = at_least_fp32(logits)
        if self.training and s.router_noise:
            logits = logits + s.router_noise * torch.randn_like(logits)
        probabilities = torch.softmax(logits, dim=1)
        chosen, chapters = probabilities.topk(s.top_k, dim=1)
        weights = chosen / chosen.sum(-1, keepdim=True)
        if s.router == "straight_through":  # uses the probabilities' gradient: a single chapter's weight has none
            weights = chosen + (weights - chosen).detach()
        return chapters, weights

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Returns the bytes kept for the backward of `tokens` tokens: tiles of queries, keys, values and results."""
        s, pairs = self.settings, tokens * self.settings.top_k
        return 2 * tile_count(pairs, s.num_chapters) * (TILE + s.chapter_size) * s.memory_dim * itemsize


def read_chapters(queries: Tensor, keys: Tensor, values: Tensor, chapters: Tensor) -> Tensor:
    """Computes each query's attention over each of its chapters: softmax(q K^T / sqrt(d)) V of that chapter alone.

    Pairs of token and chapter are sorted by chapter and put into tiles of one chapter each, so the cost grows with
    N k S, not with the bank. Every shape follows from the arguments' shapes, so the GPU is never synchronized.

    Args:
        queries: [N, H, d].
        keys: [C, H, S, d].
        values: [C, H, S, d].
        chapters: [N, k] int64, from 0 to C - 1.

    Returns: [N, k, H, d].
    """
    tokens, heads, width = queries.shape
    top_k = chapters.shape[1]
    place, chapter_of_tile = tiles(chapters.flatten(), keys.shape[0])
    count = chapter_of_tile.shape[0]
    repeated = queries[:, None].expand(-1, top_k, -1, -1).reshape(tokens * top_k, heads, width)
    laid = queries.new_zeros(count * TILE, heads, width).index_copy(0, place, repeated)
    read = F.scaled_dot_product_attention(
        laid.view(count, TILE, heads, width).transpose(1, 2),  # [tiles, H, TILE, d]
        keys.index_select(0, chapter_of_tile).to(queries.dtype),  # [tiles, H, S, d]
        values.index_select(0, chapter_of_tile).to(queries.dtype),
    )
    read = read.transpose(1, 2).reshape(count * TILE, heads, width).index_select(0, place)
    return read.view(tokens, top_k, heads, width)


def tiles(chapters: Tensor, num_chapters: int) -> tuple[Tensor, Tensor]:
    """Assigns rows, sorted by chapter, to tiles of TILE rows of one chapter each; some tiles stay empty.

    Args:
        chapters: [M] int64, the chapter of each row.

    Returns: (index of each row among all tiles' rows, [M] int64; chapter of each tile, [tiles] int64).
    """
    rows = chapters.shape[0]
    count = tile_count(rows, num_chapters)
    index = torch.arange(num_chapters + 1, device=chapters.device)
    in_order, order = chapters.sort(stable=True)
    starts = torch.searchsorted(in_order, index)  # [C + 1], where each chapter's rows begin
    ends_of_tiles = ((starts.diff() + TILE - 1) // TILE).cumsum(0)  # [C], last tile + 1
    first_tile = F.pad(ends_of_tiles, (1, -1))
    number = torch.arange(rows, device=chapters.device) - starts[in_order]  # index within its chapter
    place = torch.empty_like(order).scatter(0, order, first_tile[in_order] * TILE + number)
    each = torch.arange(count, device=chapters.device)
    return place, torch.searchsorted(ends_of_tiles, each, right=True).clamp(max=num_chapters - 1)


def tile_count(rows: int, num_chapters: int) -> int:
    """Returns the largest number of tiles that any distribution of rows over chapters can need."""
    return min(rows, rows // TILE + num_chapters)


def decoder_layers(model: Any) -> nn.ModuleList:
    """Returns a transformers model's decoder layers: the first ModuleList of the length that the config says.

    Raises ValueError if there is none.
    """
    depth = model.config.get_text_config().num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth)
    found = next(lists, None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no list of its {depth} decoder layers")
    return found


def attach_memory(model: Any, settings: MemorySettings) -> None:
    """Adds a memory block `<layer>.memory` after each layer of `settings.layers`, and `memory_bank` if it is shared."""
    layers = decoder_layers(model)
    shared = MemoryBank(settings) if settings.share_bank else None
    if shared is not None:
        model.base_model.memory_bank = shared
    for index in settings.layers:
        layer = layers[index]
        layer.memory = MemoryBlock(model.config.get_text_config().hidden_size, settings, shared)
        layer.register_forward_hook(_read_memory)


def _read_memory(layer: Any, _inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (layer.memory(output[0]), *output[1:])
    return layer.memory(output)


def memory_blocks(model: nn.Module) -> list[MemoryBlock]:
    """Returns the model's memory blocks in order, an empty list if it has no memory."""
    return [module for module in model.modules() if isinstance(module, MemoryBlock)]
