"""Rotary embeddings whose frequencies depend on the length of the sequence (longrope: Ding et al. 2024,
arXiv:2402.13753).

transformers takes that length from the largest position of a micro-batch, so the frequencies of a document would depend
on the documents beside it, and those of a padded row on the longest row. `Lengths` gives each the frequencies that
transformers gives it alone. NTK scaling (rope_type dynamic) depends on the length only beyond max_position_embeddings,
which data.seq_len may not exceed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.models.documents import Inputs, token_lengths

KIND = "longrope"


def _limits(module: nn.Module) -> dict[str | None, int]:
    """Returns the length from which a rotary module has other frequencies, by layer type (None: for all layers)."""
    kind: Any = getattr(module, "rope_type", None)
    parameters: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    found = {layer: parameters[layer] for layer in kind if kind[layer] == KIND} if isinstance(kind, dict) else {}
    found |= {None: parameters} if kind == KIND else {}
    return {layer: int(of_layer["original_max_position_embeddings"]) for layer, of_layer in found.items()}


def limit(model: nn.Module) -> int | None:
    """Returns the length that a sequence must exceed to have other frequencies; None if none ever has others."""
    return min((value for module in model.modules() for value in _limits(module).values()), default=None)


class Lengths:
    """Hooks that make the frequencies of each token those of its own document's length; exact, by transformers' code.

    tokens: the length of the document of each token, int64 [B, T]; None: the frequencies are those of the longest
    position, as in transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tokens: Tensor | None = None
        self.limit = limit(model)
        for module in model.modules() if self.limit is not None else ():
            if _limits(module):
                module.register_forward_hook(self._by_length, with_kwargs=True)

    def read(self, inputs: Inputs) -> None:
        """Takes the lengths of documents, or of padded rows, for the next forward pass."""
        rows, length = inputs.input_ids.shape
        self.tokens = None
        if self.limit is None:
            return
        if inputs.cu_seqlens is not None:
            more = None if inputs.prefixes is None else inputs.prefixes.lengths
            self.tokens = token_lengths(inputs.cu_seqlens, rows, length, more)
        elif inputs.row_lengths is not None:
            self.tokens = inputs.row_lengths[:, None].expand(rows, length)

    def _by_length(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
        x, positions, layer = given["x"], given["position_ids"], given.get("layer_type")
        longest = _limits(module).get(layer)
        if self.tokens is None or longest is None or positions.shape[-1] <= longest:
            return None
        more = {} if layer is None else {"layer_type": layer}
        beyond = torch.cat([positions, torch.full_like(positions[..., :1], longest)], dim=-1)
        long = module.forward(x, beyond, **more)
        short = module.forward(x, positions.clamp(max=longest - 1), **more)
        exceeds = (self.tokens > longest)[..., None]
        return tuple(torch.where(exceeds, far[:, :-1], near) for far, near in zip(long, short, strict=True))
