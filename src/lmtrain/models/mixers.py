"""Layers that mix tokens outside of attention (short convolutions, Mamba, delta rules) and attention that isn't told of
documents: makes them keep the documents of packed rows apart.

Such a layer reads each row from its beginning. Here it reads each document as a row of its own, behind the tokens of
the prefix that the document shares; a short convolution leaves out the taps that reach beyond a document's beginning.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from lmtrain.models.blocks import decoder_blocks
from lmtrain.models.documents import Documents

Choices = Mapping[str, str]  # {qualified name of a layer: its class below}


class ByDocument(nn.Module):
    """A layer's class with this one before it: reads each document of a packed row as a row of its own."""

    handed: Documents | None = None  # by a block that doesn't pass `documents` on

    def forward(self, *args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
        documents = self.handed if documents is None else documents
        if documents is None:
            return super().forward(*args, **kwargs)
        return _each_document(super().forward, documents, args, kwargs)


class ShortConvolution(ByDocument):
    """LFM2's gated convolution of a few tokens, without the taps that would reach into another document."""

    in_proj: nn.Linear
    out_proj: nn.Linear
    conv: nn.Conv1d

    def forward(self, *args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
        if documents is None:
            return super().forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        before, after, x = self.in_proj(hidden).chunk(3, dim=-1)  # gates and input, [B, T, D]
        return self.out_proj(after * _convolved(before * x, self.conv, documents))


class HandsOn(nn.Module):
    """A block's class with this one before it: hands the documents to layers to which the block doesn't pass them."""

    def forward(self, *args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
        for layer in self.children():
            if isinstance(layer, ByDocument):
                layer.handed = documents
        return super().forward(*args, documents=documents, **kwargs)


def _convolved(x: Tensor, conv: nn.Conv1d, documents: Documents) -> Tensor:
    """Returns the causal depthwise convolution of x [B, T, D] within documents; sums are in fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    weight = conv.weight.squeeze(1).to(exact)  # [D, K], the current token's tap last
    flat = x.flatten(0, 1).to(exact)  # [B * T, D]
    total = flat * weight[:, -1]
    if conv.bias is not None:
        total = total + conv.bias.to(exact)
    for distance in range(1, weight.shape[1]):
        total = total + documents.shifted(flat, distance) * weight[:, -1 - distance]
    return total.to(x.dtype).view_as(x)


@torch.compiler.disable
def _each_document(forward: Callable[..., Any], documents: Documents, args: Any, kwargs: Any) -> Any:
    """Calls `forward` with its [B, T, ...] arguments laid out as a row per document, and its results laid out back.

    Documents of similar length are in one call. They are padded at their ends, which a causal layer never looks at.
    """
    batch, seq_len = documents.batch, documents.seq_len
    groups, back = documents.as_rows()

    def called(index: Tensor) -> Any:
        def row_by_row(x: Any) -> Any:
            of_tokens = isinstance(x, Tensor) and x.shape[:2] == (batch, seq_len)
            return x.flatten(0, 1)[index] if of_tokens else x

        return forward(*tree_map(row_by_row, args), **tree_map(row_by_row, kwargs))

    def joined(*parts: Any) -> Any:
        if not isinstance(parts[0], Tensor) or parts[0].shape[:2] != groups[0].shape:
            return parts[0]  # states and the like, which training doesn't use
        return torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, back).unflatten(0, (batch, seq_len))

    results = [called(index) for index in groups]
    return tree_map(joined, results[0], *results[1:])


@cache
def _with(kind: Any, cls: Any) -> Any:
    return type(cls.__name__, (kind, cls), {"__module__": cls.__module__})


def keep_apart(model: PreTrainedModel, choices: Choices) -> None:
    """Makes the named layers of `model` keep documents apart; parameters, and rows without documents, stay the same."""
    kinds = {kind.__name__: kind for kind in (ByDocument, ShortConvolution)}
    for name, kind in choices.items():
        _become(model.get_submodule(name), kinds[kind])
    for block in decoder_blocks(model):
        if any(map(_reads_rows, block.children())) and not isinstance(block, ByDocument):
            _become(block, HandsOn)


def _become(layer: Any, kind: Any) -> None:
    layer.__class__ = _with(kind, layer.__class__)


def find(model: PreTrainedModel, run: Callable[[], Any], documents: Documents) -> dict[str, str]:
    """Returns the innermost layers whose outputs for a document depend on another, with the class that mends each.

    Args:
        model: in eval mode.
        run: a forward of rows with `documents`, whose first row holds two.
    """
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def noting(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs: calls.setdefault(name, (args, kwargs)) and None

    hooks = [m.register_forward_pre_hook(noting(n), with_kwargs=True) for n, m in model.named_modules() if n]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    alike: dict[tuple[str, str], list[str]] = {}  # of several layers of a kind, one is tried
    for name in calls:
        alike.setdefault((re.sub(r"\d+", "N", name), str(type(model.get_submodule(name)))), []).append(name)
    leaking = [names for names in alike.values() if _leaks(model.get_submodule(names[0]), *calls[names[0]], documents)]
    every = {name for names in leaking for name in names}
    found: dict[str, str] = {}
    for names in leaking:
        if not any(other.startswith(f"{names[0]}.") for other in every):
            found |= dict.fromkeys(names, _mended_by(model.get_submodule(names[0]), *calls[names[0]]))
    return found


def _leaks(layer: nn.Module, args: Any, kwargs: Any, documents: Documents) -> bool:
    """Returns whether a change of the first document's inputs changes outputs in the second; False if that fails."""
    border, shape = int(documents.cu_seqlens[1]), (documents.batch, documents.seq_len)

    def changed(x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.shape[:2] == shape and x.is_floating_point()):
            return x
        x = x.clone()
        x[0, :border] = x[0, :border].flip(0) + 1
        return x

    try:
        before = layer(*args, **kwargs)
        after = layer(*tree_map(changed, args), **kwargs | {k: changed(v) for k, v in kwargs.items()})
    except Exception:  # such as layers that change a cache or take other inputs
        return False
    before, after = (x[0] if isinstance(x, tuple) else x for x in (before, after))
    if not isinstance(before, Tensor) or before.shape[:2] != shape:
        return False
    difference = (before[0, border:] - after[0, border:]).nan_to_num().abs().max()
    return bool(difference > 1e-5 * before.nan_to_num().abs().max())  # more than the order of sums


def _mended_by(layer: Any, args: Any, kwargs: Any) -> str:
    """Returns ShortConvolution if it computes the same as the layer for rows of one document each, else ByDocument."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    try:
        batch, seq_len, _ = hidden.shape
        starts = torch.arange(0, (batch + 1) * seq_len, seq_len, dtype=torch.int32)
        rows = Documents(starts, batch, seq_len, "slices", reach=_reach_of(layer))
        found = ShortConvolution.forward(layer, hidden, documents=rows)
        expected = layer(hidden)
        same = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    except Exception:  # a layer of another kind has other parts
        same = False
    return "ShortConvolution" if same else "ByDocument"


def _reach_of(layer: nn.Module) -> int:
    """Returns how many tokens before the current one a short convolution reads; 0 for other layers."""
    conv = getattr(layer, "conv", None)
    return conv.kernel_size[0] - 1 if isinstance(conv, nn.Conv1d) else 0


def by_rows(model: nn.Module) -> int:
    """Returns how many layers read each document as a row of its own, which takes more time than packed rows."""
    return sum(map(_reads_rows, model.modules()))


def _reads_rows(layer: nn.Module) -> bool:
    return isinstance(layer, ByDocument) and not isinstance(layer, ShortConvolution)


def reach(model: nn.Module) -> int:
    """Returns how many tokens before the current one the model's layers of class ShortConvolution read."""
    return max((_reach_of(layer) for layer in model.modules() if isinstance(layer, ShortConvolution)), default=0)
