"""The rows that are generated at once, all ending in the same column, and their common cache.

Requests join with their prompts' keys and values, a step appends one column to all rows, and finished rows leave.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from lmtrain.rollouts import cache_block
from lmtrain.rollouts.cache_block import CacheBlock
from lmtrain.rollouts.engine import PrefixCache, Request, SampledText, Sampling
from lmtrain.rollouts.row_states import RowStates, new_rows
from lmtrain.rollouts.step_graph import Step, StepGraphs

REMOVE_FROM = {True: 8, False: 2}  # finished rows leave once they are 1 / REMOVE_FROM of the batch; True: on the host
STEPS_AT_ONCE = {True: 1, False: 8}  # steps between two reads of which rows have finished; True: on the host
IN_PLACE = {DynamicLayer, LinearAttentionLayer}  # layers of a cache that can be changed in place
RECORD_FROM = 32  # shorter completions end before a recorded step has paid


class Batch:
    """The rows being generated, with a token drawn for each, and the cache of all tokens before these."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        sampling: Sampling,
        graphs: StepGraphs,
        kept: PrefixCache | None,
        most_kept: int,
    ) -> None:
        """
        Args:
            kept: keys and values of the call before, which are taken out; gets those of up to `most_kept` completions.
        """
        self.model, self.requests, self.sampling, self.graphs = model, requests, sampling, graphs
        self.device = model.device
        self.on_host = self.device.type == cache_block.HOST
        self.ends = torch.tensor(sampling.end_ids, dtype=torch.int64, device=self.device)
        self.last_only = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        self.kept, self.most_kept = kept, most_kept
        self.earlier = dict(kept or {})
        if kept:
            kept.clear()
        self.rows: list[int] = []  # index of the request of each row
        self.state: Any = None  # RowStates
        self.cache: Any = None
        self.columns = 0  # in use
        self.at: Tensor | None = None  # int64 [1], `columns` on the device, if steps are recorded
        self.replay: Step | None = None  # repeats a recorded step
        self.mask = torch.zeros(0, 0, dtype=torch.int64)  # [B, at least columns], 1 where a row has a token, or will

    def place(self, row: int) -> tuple[bool, int]:
        """Returns what requests are sorted by: those of which keys and values are kept, then the longest first."""
        prompt = self.requests[row].prompt
        return tuple(prompt[: self.requests[row].known]) not in self.earlier, -len(prompt)

    def takes_more(self) -> bool:
        """Returns whether rows can join those that are being generated."""
        return all(type(layer) is CacheBlock for layer in self.cache.layers)

    def add(self, rows: list[int]) -> None:
        """Processes the prompts of some requests, adds them to the batch and draws their first tokens."""
        # Each prompt is read once, however many completions of it are asked for.
        prompts = [tuple(self.requests[row].prompt) for row in rows]
        unique = list(dict.fromkeys(prompts))
        known = {prompt: self.requests[row].known for prompt, row in zip(prompts, rows, strict=True)}
        cache, logits, mask = self._read(unique, [self.earlier.pop(p[: known[p]], None) for p in unique])

        # Its layers get room for the columns of the completions.
        if not self.rows and not self.on_host and DynamicLayer in set(map(type, cache.layers)) <= IN_PLACE:
            self.at = torch.full((1,), mask.shape[1], dtype=torch.int64, device=self.device)
        room = min(cache_block.BLOCK, self.sampling.max_new_tokens)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[i] = CacheBlock(layer.keys, layer.values, self.at, room)

        # A row for each completion.
        if len(unique) < len(prompts):
            place = {prompt: i for i, prompt in enumerate(unique)}
            which = torch.tensor([place[prompt] for prompt in prompts], dtype=torch.int64, device=self.device)
            cache.reorder_cache(which)
            logits, mask = logits[which], mask[which]
        state = new_rows([self.requests[row] for row in rows], self.sampling, logits, mask.sum(1))
        state.draw(self.sampling, self.ends)

        # They join the rows that are there.
        if self.rows:
            self._join(cache, mask)
            state = self.state.map(lambda *both: torch.cat(both), state)
        else:
            self.cache, self.mask = cache, mask
            self.columns = mask.shape[1]
        self.state = state
        self.rows = [*self.rows, *rows]
        self.replay = None

    def _read(
        self, prompts: list[tuple[int, ...]], earlier: list[list[tuple[Tensor, Tensor]] | None]
    ) -> tuple[Any, Tensor, Tensor]:
        """Runs the model on prompts; returns their cache, logits of the next token [P, V] and mask [P, T].

        earlier: for each prompt keys and values [H, n, D] of its first n tokens in each layer, or None.
        """
        longest = max(map(len, prompts))
        padding = [longest - len(p) for p in prompts]  # on the left
        of_prompts = list(zip(prompts, padding, strict=True))
        ids = torch.tensor([[0] * n + list(p) for p, n in of_prompts], dtype=torch.int64, device=self.device)
        mask = torch.tensor([[0] * n + [1] * len(p) for p, n in of_prompts], dtype=torch.int64, device=self.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config.get_text_config())
        # Of every prompt as many last tokens are read as of the one of which least is known.
        new = max(len(p) - (there[0][0].shape[1] if there else 0) for p, there in zip(prompts, earlier, strict=True))
        some = next((there for there in earlier if there), [])  # without tokens, in place of what isn't there
        for i, layer in enumerate(cache.layers if new < longest else ()):
            # The keys and values of the tokens before those, padded on the left like the prompts.
            sides = [
                [(there or some)[i][side][:, : max(len(p) - new, 0)] for p, there in zip(prompts, earlier, strict=True)]
                for side in (0, 1)
            ]
            padded = [[F.pad(x, (0, 0, longest - new - x.shape[1], 0)) for x in side] for side in sides]
            layer.update(*map(torch.stack, padded))
        out = self.model(input_ids=ids[:, -new:], attention_mask=mask, position_ids=positions[:, -new:],
                         past_key_values=cache, use_cache=True, **self.last_only)  # fmt: skip
        return out.past_key_values, out.logits[:, -1].contiguous(), mask

    def _join(self, cache: Any, mask: Tensor) -> None:
        """Appends the cache of more rows to that of the batch, both padded on the left to the same columns."""
        own = self.columns
        self._use(max(own, mask.shape[1]))
        left = [self.columns - own, self.columns - mask.shape[1]]
        for i, (mine, theirs) in enumerate(zip(self.cache.layers, cache.layers, strict=True)):
            pairs = zip(mine.in_use(), theirs.in_use(), strict=True)
            keys, values = [[F.pad(x, (0, 0, n, 0)) for x, n in zip(pair, left, strict=True)] for pair in pairs]
            self.cache.layers[i] = CacheBlock(torch.cat(keys), torch.cat(values), self.at, cache_block.BLOCK)
        masks = zip((self.mask[:, :own], mask), left, strict=True)
        self.mask = torch.cat([F.pad(m, (n, 0)) for m, n in masks])

    def remove_finished(self) -> list[tuple[int, SampledText]]:
        """Removes the finished rows once there are enough of them; returns their completions with request indices."""
        live = self.state.live.tolist()
        gone = [i for i, stays in enumerate(live) if not stays]
        if not gone or (len(gone) < len(live) and len(gone) * REMOVE_FROM[self.on_host] < len(live)):
            return []
        found = [(self.rows[i], completion) for i, completion in zip(gone, self._completions(gone), strict=True)]
        stay = [i for i, stays in enumerate(live) if stays]
        self.rows = [self.rows[i] for i in stay]
        if stay:
            index = torch.tensor(stay, dtype=torch.int64, device=self.device)
            self.replay = None
            self.state, self.mask = self.state.map(lambda x: x[index]), self.mask[index]
            self.cache.reorder_cache(index)
            self._cut_columns()
        return found

    def _cut_columns(self) -> None:
        """Cuts off the first columns in which no row has a token any more."""
        if self.takes_more() and (empty := int((~self.mask.any(0)).int().cumprod(0).sum())):
            for layer in self.cache.layers:
                layer.cut(empty)
            self.mask = self.mask[:, empty:]
            self._use(self.columns - empty)

    def _completions(self, rows: list[int]) -> list[SampledText]:
        found = self.state.texts(rows, self.sampling)
        for row, text in zip(rows, found, strict=True):
            if self.kept is not None and len(self.kept) < self.most_kept and self.takes_more():
                self._keep(row, (*self.requests[self.rows[row]].prompt, *text.ids))
        return found

    def _keep(self, row: int, tokens: tuple[int, ...]) -> None:
        """Keeps keys and values of the tokens of a row that the model has read, which are all but the last."""
        assert self.kept is not None
        start = int(self.mask[row].argmax())
        which = slice(start, start + len(tokens) - 1)
        layers = self.cache.layers
        self.kept[tokens] = [(x.keys[row, :, which].clone(), x.values[row, :, which].clone()) for x in layers]

    def _use(self, columns: int) -> None:
        self.columns = columns
        if self.at is not None:
            self.at.fill_(columns)

    def advance(self) -> None:
        """Runs the model on the tokens that were drawn and draws the next ones, several times on a GPU."""
        blocks = [x for x in self.cache.layers if isinstance(x, CacheBlock)]
        steps = STEPS_AT_ONCE[self.on_host]

        # Room for all of these steps; a recorded step would write to where keys and values were.
        moved = [block.make_room(steps) for block in blocks]
        self.replay = None if any(moved) else self.replay
        room = max([self.columns + steps, *(block.keys.shape[2] for block in blocks)])
        if room > self.mask.shape[1]:
            self.mask = F.pad(self.mask, (0, room - self.mask.shape[1]), value=1)

        for _ in range(steps):
            (self.replay or self._step)()
            self.columns += 1
            for block in blocks:
                block.length = self.columns
            if self.replay is None and self.at is not None and self.sampling.max_new_tokens >= RECORD_FROM:
                others = [vars(layer) for layer in self.cache.layers if type(layer) is not CacheBlock]
                changed = [self.at, *vars(self.state).values(), *others]
                self.replay = self.graphs.recorded(self._step, self.state.logits, changed)

    def _step(self) -> None:
        """Runs the model once and draws a token for each row; changes tensors in place only, if steps are recorded."""
        state: RowStates = self.state
        mask = self.mask[:, : self.columns + 1] if self.at is None else self.mask
        out = self.model(input_ids=state.last_tokens(), attention_mask=mask, position_ids=state.positions[:, None],
                         past_key_values=self.cache, use_cache=True)  # fmt: skip
        state.logits.copy_(out.logits[:, -1])
        state.positions += state.live
        state.draw(self.sampling, self.ends)
        if self.at is not None:
            self.at += 1
