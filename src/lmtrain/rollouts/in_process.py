"""Sampling with the weights being trained, in the same process: waiting prompts replace finished rows of a batch.

Rows are padded on the left, so all end in the same column. A prompt with several completions is processed once.
Finished rows are removed from the batch and its cache; if the cache holds keys and values only, waiting prompts are
processed and take their places, and columns in which no row has a token any more are cut off.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import evaluating
from lmtrain.rollouts.engine import Engine, Request, SampledText, Sampling, as_keys, draw

LEAVE_FROM = 8  # finished rows are removed once they are at least 1 / LEAVE_FROM of the batch


class InProcess(Engine):
    """An engine that calls the transformers model itself, in evaluation mode."""

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        """batch_size: maximum number of completions that are generated at once."""
        self.model, self.batch_size = model, batch_size

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[SampledText]:
        found: list[SampledText | None] = [None] * len(requests)
        # Longest first: the last ones to wait are short, and prompts of similar lengths are processed together.
        waiting = deque(sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt)))
        with evaluating(self.model), generation_mode(self.model):
            batch = _Batch(self.model, requests, sampling)
            while waiting or batch.rows:
                room = self.batch_size - len(batch.rows)
                if waiting and (not batch.rows or (batch.takes_more() and room >= max(1, self.batch_size // 4))):
                    batch.add([waiting.popleft() for _ in range(min(room, len(waiting)))])
                for row, completion in batch.step():
                    found[row] = completion
        return found  # type: ignore[return-value]


class _Batch:
    """The rows being generated: their tokens so far, their cache, and the logits of their next tokens."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[Request], sampling: Sampling) -> None:
        self.model, self.requests, self.sampling = model, requests, sampling
        self.device = model.device
        self.ends = torch.tensor(sampling.end_ids, dtype=torch.int64, device=self.device)
        self.last_only = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self.rows: list[int] = []  # index of the request of each row
        self.cache: Any = None
        self.logits = torch.zeros(0)  # [B, V]
        self.mask = torch.zeros(0, 0, dtype=torch.int64)  # [B, columns], 1 where a row has a token
        self.written = torch.zeros(0, dtype=torch.int64)  # [B], number of tokens of each completion so far
        self.keys = self.positions = self.written
        self.live = torch.zeros(0, dtype=torch.bool)  # [B]
        self.tokens = self.log_probs = torch.zeros(0, 0)  # [B, max_new_tokens + 1]
        self.entropy = torch.zeros(0)  # [B]

    def takes_more(self) -> bool:
        """Returns whether rows can join those that are being generated."""
        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    def add(self, rows: list[int]) -> None:
        """Processes the prompts of some requests and adds them to the batch."""
        prompts = [tuple(self.requests[row].prompt) for row in rows]
        unique = list(dict.fromkeys(prompts))
        place = {prompt: i for i, prompt in enumerate(unique)}
        which = torch.tensor([place[prompt] for prompt in prompts], device=self.device)
        cache, logits, mask = self._read(unique)
        if len(unique) < len(prompts):
            cache.reorder_cache(which)
            logits, mask = logits[which], mask[which]
        blank = torch.zeros(len(rows), self.sampling.max_new_tokens + 1, device=self.device)
        mine: dict[str, Tensor] = {
            "logits": logits,
            "written": torch.zeros(len(rows), dtype=torch.int64, device=self.device),
            "keys": as_keys([self.requests[row] for row in rows], self.device),
            "positions": mask.sum(1),
            "live": torch.ones(len(rows), dtype=torch.bool, device=self.device),
            "tokens": blank.long(),
            "log_probs": blank,
            "entropy": blank[:, 0].clone(),
        }
        if self.rows:
            self._join(cache, mask)
            mine = {name: torch.cat([getattr(self, name), value]) for name, value in mine.items()}
        else:
            self.cache, self.mask = cache, mask
        vars(self).update(mine)
        self.rows = [*self.rows, *rows]

    def _read(self, prompts: list[tuple[int, ...]]) -> tuple[Any, Tensor, Tensor]:
        """Runs the model on prompts; returns their cache, logits of the next token [P, V] and mask [P, T]."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config.get_text_config())
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                         use_cache=True, **self.last_only)  # fmt: skip
        return out.past_key_values, out.logits[:, -1], mask

    def _join(self, cache: Any, mask: Tensor) -> None:
        """Appends the cache of more rows to that of the batch, both padded on the left to the same columns."""
        columns = max(self.mask.shape[1], mask.shape[1])
        missing = [columns - m.shape[1] for m in (self.mask, mask)]
        for mine, theirs in zip(self.cache.layers, cache.layers, strict=True):
            for name in ("keys", "values"):
                both = zip((getattr(mine, name), getattr(theirs, name)), missing, strict=True)
                setattr(mine, name, torch.cat([F.pad(held, (0, 0, left, 0)) for held, left in both]))
        self.mask = torch.cat([F.pad(m, (left, 0)) for m, left in zip((self.mask, mask), missing, strict=True)])

    def step(self) -> list[tuple[int, SampledText]]:
        """Draws a token for each row; returns the completions that have left the batch, with their request indices."""
        tokens, log_probs, entropy = draw(self.logits, self.keys, self.written, self.sampling)
        live, most = self.live, self.sampling.max_new_tokens
        at = torch.where(live, self.written, most)[:, None]  # finished rows write to the last column, never read
        self.tokens.scatter_(1, at, tokens[:, None])
        self.log_probs.scatter_(1, at, log_probs[:, None])
        self.entropy += entropy * live
        self.written += live
        self.live = live & ~(tokens[:, None] == self.ends).any(1) & (self.written < most)
        left = self._leave()
        if self.rows:
            self._advance()
        return left

    def _leave(self) -> list[tuple[int, SampledText]]:
        """Removes the finished rows once there are enough of them; returns their completions."""
        live = self.live.tolist()
        gone = [i for i, stays in enumerate(live) if not stays]
        if not gone or (len(gone) < len(live) and len(gone) * LEAVE_FROM < len(live)):
            return []
        found = [(self.rows[i], self._completion(i)) for i in gone]
        stay = [i for i, stays in enumerate(live) if stays]
        self.rows = [self.rows[i] for i in stay]
        if stay:
            index = torch.tensor(stay, device=self.device)
            for name in ("logits", "mask", "written", "keys", "positions", "live", "tokens", "log_probs", "entropy"):
                setattr(self, name, getattr(self, name)[index])
            self.cache.reorder_cache(index)
            self._cut_columns()
        return found

    def _cut_columns(self) -> None:
        empty = int((self.mask.any(0).int().cumsum(0) == 0).sum())
        if not empty or not self.takes_more():
            return
        self.mask = self.mask[:, empty:]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, empty:], layer.values[:, :, empty:]

    def _completion(self, row: int) -> SampledText:
        count = int(self.written[row])
        ids = self.tokens[row, :count].tolist()
        return SampledText(ids, self.log_probs[row, :count].tolist(), float(self.entropy[row]),
                          ids[-1] in self.sampling.end_ids)  # fmt: skip

    def _advance(self) -> None:
        """Runs the model on the tokens that were drawn."""
        tokens = self.tokens.gather(1, (self.written - 1)[:, None])  # [B, 1]
        self.mask = F.pad(self.mask, (0, 1), value=1)
        out = self.model(input_ids=tokens, attention_mask=self.mask, position_ids=self.positions[:, None],
                         past_key_values=self.cache, use_cache=True)  # fmt: skip
        self.logits = out.logits[:, -1]
        self.positions = self.positions + self.live
