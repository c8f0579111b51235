"""What a model family can do, found on a tiny copy before a run: does lmtrain's attention give transformers' results,
does it keep packed documents apart, does a token see only what comes before it.

Reading the config doesn't tell. A decoder layer may drop the keyword that says where documents lie; a family may mix
tokens by something other than softmax attention (Mamba, linear or lightning attention, convolutions), or ask its
attention for what lmtrain's doesn't do. Each would train on, silently, with a wrong loss.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.models import attention
from lmtrain.models.documents import Documents
from lmtrain.models.families import TESTED
from lmtrain.models.tiny_copy import VOCAB, tiny_copy

# Two rows of one length, the first of two documents; each longer than the window of the copy.
FIRST, LENGTH = 7, 18
# Settings of families that choose the keys a query sees by an index of their own; it shows in long rows only.
SPARSE = ("index_topk", "index_topk_blocks")
# Of the largest value in the hidden states. One token too many or too few moves them by 1e-2 or more of it, another
# order of sums in fp32 by 1e-6 in most families and by 3e-4 in the deepest.
TOLERANCE = 2e-3


class Support(NamedTuple):
    """What works is None, what doesn't is why: words that can follow a colon."""

    causal: str | None = None  # a token sees only those before it
    attention: str | None = None  # lmtrain's attention gives the results of the model's own
    documents: str | None = None  # and keeps packed documents apart


def set_attention(choice: str, model: PreTrainedModel, seq_len: int) -> None:
    """Puts lmtrain's attention into the model, or leaves it its own where the family needs that.

    Sets what LanguageModel and the plan read: `documents_attention`, the way to keep packed documents apart, or
    "transformers"; `own_attention_because` and `unpacked_because`, None or a reason.

    Args:
        choice: model.attention.
        seq_len: tokens per training row.

    Raises:
        UserError: tokens see those that come after them; an explicit choice that the family can't take.
    """
    name, found = type(model).__name__, support(model, seq_len)
    if found.causal is not None:
        raise UserError(
            f"{name} can't be trained to predict the next token: {found.causal} (in rows of data.seq_len={seq_len})"
        )
    if found.attention is not None and choice not in ("auto", "transformers"):
        raise UserError(f"model.attention={choice} doesn't go with {name}: {found.attention}; set it to auto")
    used = "transformers" if found.attention is not None else choice
    if used != "transformers":
        model.set_attn_implementation(attention.NAME)
        attention.mark_sliding(model)
    model.documents_attention = used
    model.own_attention_because = found.attention
    plain_rows = f"model.attention={used}" if used in ("sdpa", "transformers") else None
    model.unpacked_because = found.documents or plain_rows


def support(model: PreTrainedModel, seq_len: int) -> Support:
    """What the family of `model` can do in the layer pattern of its config: known of tested families, else tried.

    Takes half a second for a model of 48 layers; nothing is drawn from the global generators.

    Args:
        model: may be on the meta device, its weights are not looked at.
        seq_len: of the rows to train on: a window that they never fill can't go wrong.
    """
    # Code that comes with a hub model may call itself by a family's name.
    if model.config.model_type in TESTED and type(model).__module__.startswith("transformers."):
        return Support()
    try:
        with torch.no_grad(), torch.device("cpu"):
            return _try(tiny_copy(model, seq_len))
    except Exception as error:  # whatever the family's code raises about small sizes
        reason = f"a tiny copy of it could not be tried ({_words(error)})"
        return Support(attention=reason, documents=reason)


def _try(copy: PreTrainedModel) -> Support:
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    copy.set_attn_implementation("eager")
    rows = _states(copy, ids)
    reason: str | None
    first, second = _states(copy, ids[:1, :FIRST]), _states(copy, ids[:1, FIRST:])
    if not _close(rows[:1, :FIRST], first):
        reason = "tokens see those that come after them"
        return Support(causal=reason, attention=reason, documents=reason)
    reason = _own_only(copy)
    if reason is not None:
        return Support(attention=reason, documents=reason)
    copy.set_attn_implementation(attention.NAME)
    attention.mark_sliding(copy)
    reason = _differs(copy, rows, ids)
    if reason is not None:
        return Support(attention=reason, documents=reason)
    alone = torch.cat([torch.cat([first, second], dim=1), rows[1:]])
    return Support(documents=_differs(copy, alone, ids, **packed_documents(ids)))


def _own_only(copy: PreTrainedModel) -> str | None:
    """Why lmtrain's attention isn't even tried."""
    if not copy._supports_attention_backend:
        return "transformers lets it have no attention but its own"
    config = copy.config.get_text_config()
    return "it chooses the keys to look at itself" if any(getattr(config, name, None) for name in SPARSE) else None


def packed_documents(ids: Tensor) -> dict[str, Any]:
    """position_ids and documents of the rows [2, LENGTH], the first of which holds two."""
    borders = [0, FIRST, LENGTH, 2 * LENGTH]
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)]).view_as(ids)
    documents = Documents(torch.tensor(borders, dtype=torch.int32), len(ids), LENGTH, "slices")
    return {"position_ids": positions, "documents": documents}


def _differs(copy: PreTrainedModel, expected: Tensor, ids: Tensor, **options: Any) -> str | None:
    """Why lmtrain's attention doesn't give the `expected` hidden states [2, T, D]."""
    try:
        found = _states(copy, ids, **options)
    except UserError as error:  # of attention.py, which says what was asked for
        return str(error).split(":")[0]
    except Exception as error:
        return _words(error)
    if _close(found, expected):
        return None
    if options:
        return "it mixes tokens past its attention, or doesn't hand on where documents end"
    return "lmtrain's attention gives other results than its own: it doesn't hand on a window or a bias"


def _states(copy: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return copy.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:120]}" if lines else type(error).__name__
