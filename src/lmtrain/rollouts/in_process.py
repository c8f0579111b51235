"""Sampling with the weights being trained, in the same process: waiting prompts replace finished rows of a batch.

Rows are padded on the left, so all end in the same column. A prompt with several completions is processed once.
Finished rows are removed from the batch and its cache; if the cache holds keys and values only, waiting prompts are
processed and take their places, and columns in which no row has a token any more are cut off. Keys and values are
written in place, and nothing is read from the device but, every few tokens, which rows are finished. On CUDA a step is
recorded as a CUDA graph where it can be, because to launch its kernels one by one takes longer than they run.
"""

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import evaluating
from lmtrain.rollouts.engine import Engine, Kept, Request, SampledText, Sampling, as_keys, draw

HOST = "cpu"  # the type of device that is never waited for
LEAVE_FROM = {True: 8, False: 2}  # finished rows are removed once they are 1 / LEAVE_FROM of the batch; True: on HOST
LOOK_EVERY = {True: 1, False: 8}  # tokens between looks at what is finished
BLOCK = 128  # columns by which a cache grows
IN_PLACE = {DynamicLayer, LinearAttentionLayer}  # layers of a cache that can be changed in place
RECORD_FROM = 32  # shorter completions end before a recorded step has paid
STATES = ("cache_params", "state")  # names by which recurrent families take and return their state
NO_STATE = ("xlstm", "rwkv")  # families whose state is lost, or right for a single row only

log = logging.getLogger(__name__)


class InProcess(Engine):
    """An engine that calls the transformers model itself, in evaluation mode."""

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        """batch_size: maximum number of completions that are generated at once."""
        self.model, self.batch_size = model, batch_size
        self.records: bool | None = None  # whether steps are recorded: unknown until one has been
        self.shares_its_cache: bool | None = None  # unknown until the first call

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, kept: Kept | None = None) -> list[SampledText]:
        """Returns completions as in the base class; `kept` holds the keys and values of up to `batch_size` of them."""
        found: list[SampledText | None] = [None] * len(requests)
        with evaluating(self.model), generation_mode(self.model):
            if not self._shares_its_cache():
                return self._by_length(requests, sampling)
            batch = _Batch(self, requests, sampling, kept)
            # Longest first: the last ones to wait are short, and prompts of similar lengths are processed together.
            waiting = deque(sorted(range(len(requests)), key=batch.place))
            while waiting or batch.rows:
                room = self.batch_size - len(batch.rows)
                if waiting and (not batch.rows or (batch.takes_more() and room >= max(1, self.batch_size // 4))):
                    batch.add([waiting.popleft() for _ in range(min(room, len(waiting)))])
                for row, completion in batch.leave():
                    found[row] = completion
                if batch.rows:
                    batch.advance()
        return found  # type: ignore[return-value]

    def _shares_its_cache(self) -> bool:
        """Returns whether the model reads and returns transformers' cache, whose rows can be padded and joined."""
        if self.shares_its_cache is None:
            accepts = "past_key_values" in inspect.signature(self.model.forward).parameters
            if accepts and self.model._supports_default_dynamic_cache():
                cache = DynamicCache(config=self.model.config.get_text_config())
                token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
                self.shares_its_cache = "past_key_values" in self.model(token, past_key_values=cache, use_cache=True)
            else:
                self.shares_its_cache = False
        return self.shares_its_cache

    def _by_length(self, requests: Sequence[Request], sampling: Sampling) -> list[SampledText]:
        """Generates in batches of prompts of one length, without padding; no row leaves its batch before the others."""
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(len(request.prompt), []).append(place)
        batches = [
            some[i : i + self.batch_size] for some in places.values() for i in range(0, len(some), self.batch_size)
        ]
        found: dict[int, SampledText] = {}
        for batch in batches:
            found |= dict(zip(batch, self._continued([requests[i] for i in batch], sampling), strict=True))
        return [found[place] for place in range(len(requests))]

    def _continued(self, requests: Sequence[Request], sampling: Sampling) -> list[SampledText]:
        """Generates from prompts of one length; a model that can't hand on its state reads all tokens at every step."""
        device, names = self.model.device, inspect.signature(self.model.forward).parameters
        name = next((n for n in STATES if n in names and self.model.config.model_type not in NO_STATE), None)
        read = torch.tensor([list(request.prompt) for request in requests], dtype=torch.int64, device=device)
        ends = torch.tensor(sampling.end_ids, dtype=torch.int64, device=device)
        state, carried = None, dict[str, Any]()
        while True:
            out = self.model(input_ids=read, use_cache=name is not None, **carried)
            logits = out.logits[:, -1].contiguous()
            if state is None:
                state = _begun(requests, sampling, logits, torch.zeros_like(read[:, 0]))
            state.logits = logits
            state.draw(sampling, ends)
            if not state.live.any():
                return state.texts(range(len(requests)), sampling)
            last = state.tokens.gather(1, (state.written - 1)[:, None])
            read = torch.cat([read, last], 1) if name is None else last
            carried = {} if name is None else {name: out[name]}


class _Block(DynamicLayer):
    """Keys and values of a layer, [B, H, columns, D], with room for later columns, which are written in place.

    at: int64 [1], `length` on the device, for steps that are recorded: all columns are returned and have to be masked.
    """

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor | None, room: int) -> None:
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.is_compileable = keys.device.type != HOST  # masks are built without asking the device if they are needed
        self.length, self.at = keys.shape[2], at
        self.keys, self.values = (F.pad(held, (0, 0, 0, room)) for held in (keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.at is not None:
            self.keys.index_copy_(2, self.at, key_states)
            self.values.index_copy_(2, self.at, value_states)
            return self.keys, self.values
        self.keys[:, :, self.length] = key_states[:, :, 0]
        self.values[:, :, self.length] = value_states[:, :, 0]
        self.length += 1
        return self.held()

    def held(self) -> tuple[Tensor, Tensor]:
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
            self.keys, self.values = (F.pad(held, (0, 0, 0, BLOCK)) for held in (self.keys, self.values))
        return moves

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.length + query_length if self.at is None else self.keys.shape[2]), 0

    def get_seq_length(self) -> Any:
        return self.length if self.at is None else self.at


@dataclass
class _Rows:
    """The state of the B rows that are generated, besides their cache."""

    logits: Tensor  # [B, V], of their next tokens
    keys: Tensor  # int64 [B]
    written: Tensor  # int64 [B], number of tokens of each completion so far
    positions: Tensor  # int64 [B], of the token that was drawn last
    live: Tensor  # bool [B], False once a completion has ended
    tokens: Tensor  # int64 [B, max_new_tokens + 1]
    log_probs: Tensor  # fp32 [B, max_new_tokens + 1]
    entropy: Tensor  # fp32 [B]

    def map(self, change: Callable[..., Tensor], *others: "_Rows") -> "_Rows":
        """Returns rows each of whose tensors is `change` of those of these rows and of the others."""
        return _Rows(*map(change, *(vars(rows).values() for rows in (self, *others))))

    def draw(self, sampling: Sampling, ends: Tensor) -> None:
        """Draws a token for each row."""
        tokens, log_probs, entropy = draw(self.logits, self.keys, self.written, sampling)
        most = sampling.max_new_tokens
        at = torch.where(self.live, self.written, most)[:, None]  # finished rows write to the last column, never read
        self.tokens.scatter_(1, at, tokens[:, None])
        self.log_probs.scatter_(1, at, log_probs[:, None])
        self.entropy += entropy * self.live
        self.written += self.live
        self.live &= ~(tokens[:, None] == ends).any(1) & (self.written < most)

    def texts(self, rows: Sequence[int], sampling: Sampling) -> list[SampledText]:
        """Returns the completions of some of the rows."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)
        parts = (x[index].tolist() for x in (self.tokens, self.log_probs, self.written, self.entropy))
        return [
            SampledText(ids[:count], log_probs[:count], entropy, ids[count - 1] in sampling.end_ids)
            for ids, log_probs, count, entropy in zip(*parts, strict=True)
        ]


def _begun(requests: Sequence[Request], sampling: Sampling, logits: Tensor, positions: Tensor) -> _Rows:
    """Returns rows of which nothing is written yet."""
    written = torch.zeros(len(requests), dtype=torch.int64, device=logits.device)
    shape = (len(requests), sampling.max_new_tokens + 1)
    blank = torch.zeros(shape, dtype=torch.float32, device=logits.device)
    keys = as_keys(requests, logits.device)
    return _Rows(logits, keys, written, positions, written == 0, blank.long(), blank, blank[:, 0].clone())


class _Batch:
    """The rows being generated, with a token drawn for each, and the cache of all tokens before these."""

    def __init__(self, engine: InProcess, requests: Sequence[Request], sampling: Sampling, kept: Kept | None) -> None:
        self.engine, self.model, self.requests, self.sampling = engine, engine.model, requests, sampling
        self.device = self.model.device
        self.ends = torch.tensor(sampling.end_ids, dtype=torch.int64, device=self.device)
        self.last_only = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self.on_host = self.device.type == HOST
        self.kept, self.earlier = kept, dict(kept or {})
        if kept:
            kept.clear()
        self.rows: list[int] = []  # index of the request of each row
        self.state: Any = None  # _Rows
        self.cache: Any = None
        self.columns = 0  # in use
        self.at: Tensor | None = None  # int64 [1], `columns` on the device, if steps are recorded
        self.replay: Callable[[], None] | None = None  # repeats a recorded step
        self.mask = torch.zeros(0, 0, dtype=torch.int64)  # [B, at least columns], 1 where a row has a token, or will

    def place(self, row: int) -> tuple[bool, int]:
        """Returns what requests are sorted by: those of which keys and values are kept, then the longest first."""
        prompt = self.requests[row].prompt
        return tuple(prompt[: self.requests[row].known]) not in self.earlier, -len(prompt)

    def takes_more(self) -> bool:
        """Returns whether rows can join those that are being generated."""
        return all(type(layer) is _Block for layer in self.cache.layers)

    def add(self, rows: list[int]) -> None:
        """Processes the prompts of some requests, adds them to the batch and draws their first tokens."""
        prompts = [tuple(self.requests[row].prompt) for row in rows]
        unique = list(dict.fromkeys(prompts))
        known = {prompt: self.requests[row].known for prompt, row in zip(prompts, rows, strict=True)}
        cache, logits, mask = self._read(unique, [self.earlier.pop(p[: known[p]], None) for p in unique])
        if not self.rows and not self.on_host and DynamicLayer in set(map(type, cache.layers)) <= IN_PLACE:
            self.at = torch.full((1,), mask.shape[1], dtype=torch.int64, device=self.device)
        for i, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[i] = _Block(layer.keys, layer.values, self.at, min(BLOCK, self.sampling.max_new_tokens))
        if len(unique) < len(prompts):
            place = {prompt: i for i, prompt in enumerate(unique)}
            which = torch.tensor([place[prompt] for prompt in prompts], dtype=torch.int64, device=self.device)
            cache.reorder_cache(which)
            logits, mask = logits[which], mask[which]
        state = _begun([self.requests[row] for row in rows], self.sampling, logits, mask.sum(1))
        state.draw(self.sampling, self.ends)
        if self.rows:
            self._join(cache, mask)
            state = self.state.map(lambda *both: torch.cat(both), state)
        else:
            self.cache, self.mask, self.columns = cache, mask, mask.shape[1]
        self.state, self.rows, self.replay = state, [*self.rows, *rows], None

    def _read(
        self, prompts: list[tuple[int, ...]], earlier: list[list[tuple[Tensor, Tensor]] | None]
    ) -> tuple[Any, Tensor, Tensor]:
        """Runs the model on prompts; returns their cache, logits of the next token [P, V] and mask [P, T].

        earlier: for each prompt keys and values [H, n, D] of its first n tokens in each layer, or None.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], dtype=torch.int64, device=self.device)
        mask = torch.tensor(
            [[0] * (longest - len(p)) + [1] * len(p) for p in prompts], dtype=torch.int64, device=self.device
        )
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config.get_text_config())
        # Of every prompt as many last tokens are read as of the one of which least is known.
        new = max(len(p) - (held[0][0].shape[1] if held else 0) for p, held in zip(prompts, earlier, strict=True))
        some = next((held for held in earlier if held), [])  # without tokens, in place of what isn't there
        for i, layer in enumerate(cache.layers if new < longest else ()):
            sides = [
                [(held or some)[i][side][:, : max(len(p) - new, 0)] for p, held in zip(prompts, earlier, strict=True)]
                for side in (0, 1)
            ]
            layer.update(
                *(torch.stack([F.pad(x, (0, 0, longest - new - x.shape[1], 0)) for x in one]) for one in sides)
            )
        out = self.model(input_ids=ids[:, -new:], attention_mask=mask, position_ids=positions[:, -new:],
                         past_key_values=cache, use_cache=True, **self.last_only)  # fmt: skip
        return out.past_key_values, out.logits[:, -1].contiguous(), mask

    def _join(self, cache: Any, mask: Tensor) -> None:
        """Appends the cache of more rows to that of the batch, both padded on the left to the same columns."""
        own = self.columns
        self._use(max(own, mask.shape[1]))
        left = [self.columns - own, self.columns - mask.shape[1]]
        for i, (mine, theirs) in enumerate(zip(self.cache.layers, cache.layers, strict=True)):
            pairs = zip(mine.held(), theirs.held(), strict=True)
            both = [[F.pad(x, (0, 0, n, 0)) for x, n in zip(pair, left, strict=True)] for pair in pairs]
            self.cache.layers[i] = _Block(torch.cat(both[0]), torch.cat(both[1]), self.at, BLOCK)
        masks = zip((self.mask[:, :own], mask), left, strict=True)
        self.mask = torch.cat([F.pad(m, (n, 0)) for m, n in masks])

    def leave(self) -> list[tuple[int, SampledText]]:
        """Removes the finished rows once there are enough of them; returns their completions with request indices."""
        live = self.state.live.tolist()
        gone = [i for i, stays in enumerate(live) if not stays]
        if not gone or (len(gone) < len(live) and len(gone) * LEAVE_FROM[self.on_host] < len(live)):
            return []
        found = [(self.rows[i], completion) for i, completion in zip(gone, self._completions(gone), strict=True)]
        stay = [i for i, stays in enumerate(live) if stays]
        self.rows = [self.rows[i] for i in stay]
        if stay:
            index, self.replay = torch.tensor(stay, dtype=torch.int64, device=self.device), None
            self.state, self.mask = self.state.map(lambda x: x[index]), self.mask[index]
            self.cache.reorder_cache(index)
            self._cut_columns()
        return found

    def _cut_columns(self) -> None:
        if self.takes_more() and (empty := int((~self.mask.any(0)).int().cumprod(0).sum())):
            for layer in self.cache.layers:
                layer.cut(empty)
            self.mask = self.mask[:, empty:]
            self._use(self.columns - empty)

    def _completions(self, rows: list[int]) -> list[SampledText]:
        found = self.state.texts(rows, self.sampling)
        for row, text in zip(rows, found, strict=True):
            if self.kept is not None and len(self.kept) < self.engine.batch_size and self.takes_more():
                self._keep(row, (*self.requests[self.rows[row]].prompt, *text.ids))
        return found

    def _keep(self, row: int, tokens: tuple[int, ...]) -> None:
        """Keeps keys and values of the tokens of a row that the model has read, which are all but the last."""
        assert self.kept is not None
        start = int(self.mask[row].argmax())
        which = slice(start, start + len(tokens) - 1)
        self.kept[tokens] = [
            (x.keys[row, :, which].clone(), x.values[row, :, which].clone()) for x in self.cache.layers
        ]

    def _use(self, columns: int) -> None:
        self.columns = columns
        if self.at is not None:
            self.at.fill_(columns)

    def advance(self) -> None:
        """Runs the model on the tokens that were drawn and draws the next ones, as often as nobody looks."""
        blocks, steps = [x for x in self.cache.layers if isinstance(x, _Block)], LOOK_EVERY[self.on_host]
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
                self._record()

    def _step(self) -> None:
        """Runs the model once and draws a token for each row; changes tensors in place only, if steps are recorded."""
        state = self.state
        tokens = state.tokens.gather(1, (state.written - 1)[:, None])  # [B, 1]
        mask = self.mask[:, : self.columns + 1] if self.at is None else self.mask
        out = self.model(input_ids=tokens, attention_mask=mask, position_ids=state.positions[:, None],
                         past_key_values=self.cache, use_cache=True)  # fmt: skip
        state.logits.copy_(out.logits[:, -1])
        state.positions += state.live
        state.draw(self.sampling, self.ends)
        if self.at is not None:
            self.at += 1

    def _record(self) -> None:
        """Records a step, from which `replay` follows; the first one recorded decides whether any will be."""
        if self.engine.records is False:
            return
        try:
            replay = record(self._step)
            reason = None if self.engine.records or self._repeats(replay) else "it gives other logits"
        except RuntimeError as error:  # a layer waits for the device
            reason = str(error).partition("\n")[0][:120]
        self.engine.records = reason is None
        if reason is None:
            self.replay = replay
        else:
            log.warning("rollouts: no CUDA graph of a step can be used (%s), so sampling is slower", reason)

    def _repeats(self, replay: Callable[[], None]) -> bool:
        """Returns whether a recorded step gives the logits that a step gives; leaves the batch as it is.

        Keys and values of both are written to the next column, which the next step writes again.
        """
        others = [vars(layer) for layer in self.cache.layers if type(layer) is not _Block]
        changed = [self.at, *vars(self.state).values(), *(x for held in others for x in _tensors(held))]
        before, logits = [x.clone() for x in changed], []
        for step in (self._step, replay):
            step()
            logits.append(self.state.logits.clone())
            for x, held in zip(changed, before, strict=True):
                x.copy_(held)
        # Not bit for bit: products in a graph may have another amount of memory, and so be added in another order.
        return bool((logits[0] - logits[1]).norm() <= 0.01 * logits[0].norm())


def _tensors(x: Any) -> list[Tensor]:
    """Returns the tensors in dictionaries and lists."""
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return [x] if isinstance(x, Tensor) else [tensor for y in inner for tensor in _tensors(y)]


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that repeats what `step` launches on the GPU, with the tensors of now."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
