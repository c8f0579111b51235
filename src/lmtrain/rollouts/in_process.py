"""Sampling with the weights being trained, in the same process: waiting prompts replace finished rows of a batch.

Rows are padded on the left, so all end in the same column. A prompt with several completions is processed once.
Finished rows are removed from the batch and its cache; if the cache holds keys and values only, waiting prompts are
processed and take their places, and columns in which no row has a token any more are cut off (batch.py). Keys and
values are written in place (cache_block.py), and nothing is read from the device but, every few tokens, which rows are
finished. On CUDA a step is recorded as a CUDA graph where it can be (step_graph.py).
"""

import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from lmtrain.distributed import process_group as world
from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import evaluating
from lmtrain.rollouts.batch import Batch
from lmtrain.rollouts.engine import Engine, PrefixCache, Request, SampledText, Sampling
from lmtrain.rollouts.row_states import new_rows
from lmtrain.rollouts.step_graph import StepGraphs

STATES = ("cache_params", "state")  # names by which recurrent families take and return their state
NO_STATE = ("xlstm", "rwkv")  # families whose state is lost, or right for a single row only


class InProcess(Engine):
    """An engine that calls the transformers model itself, in evaluation mode."""

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        """batch_size: maximum number of completions that are generated at once."""
        self.model, self.batch_size = model, batch_size
        self.graphs = StepGraphs()
        self.shares_its_cache: bool | None = None  # unknown until the first call

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, kept: PrefixCache | None = None
    ) -> list[SampledText]:
        """Returns completions as in the base class; `kept` holds the keys and values of up to `batch_size` of them."""
        found: list[SampledText | None] = [None] * len(requests)
        # A CPU computes a token of a small model 7 % faster in inference mode; ranks gather weights that train later.
        alone = self.model.device.type == "cpu" and world.size() == 1
        without_gradients = torch.inference_mode() if alone else torch.no_grad()
        with without_gradients, evaluating(self.model), generation_mode(self.model):
            if not self._shares_its_cache():
                return self._by_length(requests, sampling)
            batch = Batch(self.model, requests, sampling, self.graphs, kept, self.batch_size)
            # Longest first: the last ones to wait are short, and prompts of similar lengths are processed together.
            waiting = deque(sorted(range(len(requests)), key=batch.place))
            while waiting or batch.rows:
                room = self.batch_size - len(batch.rows)
                if waiting and (not batch.rows or (batch.takes_more() and room >= max(1, self.batch_size // 4))):
                    batch.add([waiting.popleft() for _ in range(min(room, len(waiting)))])
                for row, completion in batch.remove_finished():
                    found[row] = completion
                if batch.rows:
                    batch.advance()
        return found  # type: ignore[return-value]

    def _shares_its_cache(self) -> bool:
        """Returns whether the model reads and returns transformers' cache, whose rows can be padded and joined."""
        if self.shares_its_cache is None:
            accepts = "past_key_values" in inspect.signature(self.model.forward).parameters
            self.shares_its_cache = accepts and self.model._supports_default_dynamic_cache()
            if self.shares_its_cache:
                cache = DynamicCache(config=self.model.config.get_text_config())
                token = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
                self.shares_its_cache = "past_key_values" in self.model(token, past_key_values=cache, use_cache=True)
        return self.shares_its_cache

    def _by_length(self, requests: Sequence[Request], sampling: Sampling) -> list[SampledText]:
        """Generates in batches of prompts of one length, without padding; no row leaves its batch before the others."""
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(len(request.prompt), []).append(place)
        found: dict[int, SampledText] = {}
        for some in places.values():
            for start in range(0, len(some), self.batch_size):
                batch = some[start : start + self.batch_size]
                found |= dict(zip(batch, self._completed([requests[i] for i in batch], sampling), strict=True))
        return [found[place] for place in range(len(requests))]

    def _completed(self, requests: Sequence[Request], sampling: Sampling) -> list[SampledText]:
        """Generates from prompts of one length; a model that can't hand on its state reads all tokens at every step."""
        device, parameters = self.model.device, inspect.signature(self.model.forward).parameters
        has_state = self.model.config.model_type not in NO_STATE
        name = next((name for name in STATES if name in parameters and has_state), None)
        read = torch.tensor([list(request.prompt) for request in requests], dtype=torch.int64, device=device)
        ends = torch.tensor(sampling.end_ids, dtype=torch.int64, device=device)
        rows = None
        carried: dict[str, Any] = {}
        while True:
            out = self.model(input_ids=read, use_cache=name is not None, **carried)
            logits = out.logits[:, -1].contiguous()
            if rows is None:
                rows = new_rows(requests, sampling, logits, torch.zeros_like(read[:, 0]))
            rows.logits = logits
            rows.draw(sampling, ends)
            if not rows.live.any():
                return rows.texts(range(len(requests)), sampling)
            read = torch.cat([read, rows.last_tokens()], 1) if name is None else rows.last_tokens()
            carried = {} if name is None else {name: out[name]}
