"""Tests on a tiny copy of a model, before a run, what its family supports: whether lmtrain's attention gives the same
results as transformers', whether it keeps packed documents apart, and whether a token sees only what comes before it.

The config alone doesn't show this. A decoder layer may drop the keyword that carries the document boundaries; a family
may mix tokens by something other than softmax attention (Mamba, linear or lightning attention, convolutions), or use
attention features that lmtrain's lacks. In each case training would silently go on with a wrong loss.
"""

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lmtrain.config import safe_yaml
from lmtrain.errors import UserError
from lmtrain.models import attention, mixers
from lmtrain.models.denoising import mask_token
from lmtrain.models.documents import Documents, Inputs, Prefixes
from lmtrain.models.rotary import KIND, Lengths

# Two rows of equal length, the first with two documents, which are all longer than the copy's window.
FIRST, LENGTH = 7, 18
PREFIX = 3  # tokens of the first document that the second one may share
LONG = 10**6  # a row length longer than every attention window
# Settings of families with sparse attention, where an indexer selects the keys a query sees; only long rows show it.
SPARSE = ("index_topk", "index_topk_blocks")
# Relative to the largest value in the hidden states. Attending to one token too many or too few changes them by 1e-2 or
# more, a different order of fp32 sums by 1e-6 in most families and by 3e-4 in the deepest.
TOLERANCE = 2e-3
MIXED = 5e-3  # delta rules enlarge rounding errors more; which layers leak is compared layer by layer, to 1e-5
MIXES = "it mixes tokens outside of attention, or doesn't pass the borders of documents on to it"
OWN = "transformers supports only the model's own attention for it"


class Support(NamedTuple):
    """What a model family supports: None for what works, else the reason it doesn't, as words to put after a colon."""

    causal: str | None = None  # a token sees only those before it; if not, the others are not tried
    attention: str | None = None  # lmtrain's attention gives the same results as the model's own
    documents: str | None = None  # lmtrain's attention keeps packed documents apart
    mixers: Mapping[str, str] = MappingProxyType({})  # layers that mixers.py has to change for that


_KNOWN: dict[Any, Support] = {}  # by the class of the model and all that its tiny copy depends on


def set_attention(choice: str, model: PreTrainedModel, seq_len: int) -> None:
    """Makes the model use lmtrain's attention, or keeps its own attention if the family needs that.

    Sets the model attributes that LanguageModel and the plan read: `documents_attention`, the method that keeps packed
    documents apart, or "transformers"; `own_attention_because` and `unpacked_because`, each None or a reason; `mixers`,
    the layers changed by mixers.py.

    Args:
        choice: model.attention.
        seq_len: tokens per training row.

    Raises:
        UserError: tokens see those that come after them, or the family doesn't support an explicit choice.
    """
    name, found = type(model).__name__, support(model, seq_len)
    if found.causal is not None:
        why = f"{found.causal} (in rows of data.seq_len={seq_len}){_if_said(model)}"
        raise UserError(f"{name} can't be trained to predict the next token: {why}")
    if found.attention is not None and choice not in ("auto", "transformers"):
        raise UserError(f"model.attention={choice} doesn't go with {name}: {found.attention}; set it to auto")
    used = "transformers" if found.attention is not None else choice
    if used != "transformers":
        attention.use_attention(model)
        mixers.keep_apart(model, found.mixers)
        model.mixers = found.mixers
    else:  # such layers pass masks of sliding windows, for which cuDNN's kernel must not be taken: MASKED_KERNELS
        torch.backends.cuda.enable_cudnn_sdp(False)
        model.mixers = {}
    model.documents_attention = used
    model.own_attention_because = found.attention
    plain_rows = f"model.attention={used}" if used in ("sdpa", "transformers") else None
    model.unpacked_because = found.documents or plain_rows


def check_causal(model: PreTrainedModel, doing: str) -> None:
    """Raises UserError if tokens see those that come after them, for a caller (`doing`) that scores the next token."""
    found = support(model, LONG).causal
    if found is not None:
        raise UserError(f"{type(model).__name__}: {found}, and {doing} asks for the next token{_if_said(model)}")


def _if_said(model: PreTrainedModel) -> str:
    said = getattr(model.config.get_text_config(), "is_causal", True) is False
    return "; its config.json says is_causal: false: correct that if it was trained from left to right" if said else ""


def support(model: PreTrainedModel, seq_len: int) -> Support:
    """Returns what the family of `model` supports with its config, by a test on a tiny copy.

    If a family in TESTED can't be built so small, all is supported. Takes 0.1 seconds for a model of a few layers,
    one for 48; draws nothing from the global random generators.

    Args:
        model: may be on the meta device, since its weights are not read.
        seq_len: length of the training rows: a window that they never exceed is not tested.
    """
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            key = type(model), str(shrink(model.config, seq_len).to_dict())
            if key not in _KNOWN:
                _KNOWN[key] = _Trial(tiny_copy(model, seq_len)).support()
            return _KNOWN[key]
    except Exception as error:  # the family's code may raise anything about small sizes
        # Code that comes with a hub model may use the name of a tested family.
        if model.config.model_type in TESTED and type(model).__module__.startswith("transformers."):
            return Support()
        reason = f"a tiny copy of it could not be tried ({_words(error)})"
        return Support(attention=reason, documents=reason)


class _Trial:
    """A tiny copy, two rows, and the hidden states that the copy gives with its own attention for them, for each of
    the two documents in the first row, and for the second behind a prefix that it shares with the first."""

    def __init__(self, copy: PreTrainedModel) -> None:
        self.copy, self.lengths = copy, Lengths(copy)
        self.ids = ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        copy.set_attn_implementation("eager")
        self.rows, self.first, self.second = map(self.states, (ids, ids[:1, :FIRST], ids[:1, FIRST:]))
        self.prefixed = self.states(torch.cat([ids[:1, :PREFIX], ids[:1, FIRST:]], dim=1))

    def states(self, ids: Tensor, **options: Any) -> Tensor:
        return self.copy.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state

    def support(self) -> Support:
        if not self.is_causal():
            return Support(causal="tokens see those that come after them")
        reason = self.attention_differs()
        if reason is not None:
            return Support(attention=reason, documents=reason)
        try:
            changed = self.leaking()
            mixers.keep_apart(self.copy, changed)
            left = self.leaking() if changed else {}
        except Exception as error:
            return Support(documents=_words(error))
        reason = MIXES if left else self.documents_differ(MIXED if changed else TOLERANCE)
        if reason is not None and not self.copy._supports_attention_backend:
            return Support(attention=OWN, documents=OWN)
        return Support(documents=reason, mixers=changed if reason is None else {})

    def is_causal(self) -> bool:
        """Returns whether the first document's states stay the same without the second, and with another one."""
        if getattr(self.copy.config, "use_bidirectional_attention", None) is True:  # PaliGemma's; eager ignores it
            return False
        altered = torch.cat([self.ids[:, :FIRST], (self.ids[:, FIRST:] + 1) % VOCAB], dim=1)
        alike = self.lengths.limit is not None or _close(self.first, self.rows[:1, :FIRST])
        return alike and _close(self.states(altered)[:, :FIRST], self.rows[:, :FIRST])

    def attention_differs(self) -> str | None:
        """Makes the copy use lmtrain's attention; returns why that gives other results, or None."""
        config = self.copy.config.get_text_config()
        if any(getattr(config, name, None) for name in SPARSE):
            return "it uses sparse attention: it chooses itself which keys a token attends to"
        attention.use_attention(self.copy)
        return self.differs(self.rows)

    def leaking(self) -> dict[str, str]:
        """Returns the layers that mix tokens across the border of the documents, with what mends each."""
        packed = self.packed()
        return mixers.find(self.copy, lambda: self.states(self.ids, **packed), packed["documents"])

    def documents_differ(self, tolerance: float) -> str | None:
        """Returns why packed documents, the second also behind a prefix, get other states than alone, or None."""
        reason = None
        # Where rotary frequencies follow a document's length, prefixes aren't shared beyond some length.
        shared = [] if self.lengths.limit is not None else [(PREFIX, self.prefixed[:, PREFIX:])]
        for prefix, states in ((0, self.second), *shared):
            expected = torch.cat([torch.cat([self.first, states], dim=1), self.rows[1:]])
            reason = reason or self.differs(expected, tolerance, **self.packed(prefix))
        return reason

    def packed(self, prefix: int = 0) -> dict[str, Any]:
        """Returns position_ids and documents for the rows, the first of which has two documents.

        prefix: number of the first document's tokens that the second one sees.
        """
        borders = [0, FIRST, LENGTH, 2 * LENGTH]
        begins = [0, prefix, 0]
        spans = zip(pairwise(borders), begins, strict=True)
        positions = torch.cat([torch.arange(stop - start) + at for (start, stop), at in spans]).view_as(self.ids)
        keys = torch.cat([torch.arange(FIRST), torch.arange(prefix), torch.arange(FIRST, 2 * LENGTH)])
        starts = torch.tensor(borders, dtype=torch.int32)
        more = torch.tensor([0, 0, prefix, prefix], dtype=torch.int32)
        seen = Prefixes(torch.tensor(begins, dtype=torch.int64), keys, starts + more)
        self.lengths.read(Inputs(self.ids, cu_seqlens=starts))
        reach = mixers.reach(self.copy)
        documents = Documents(starts, 2, LENGTH, "slices", seen if prefix else None, reach=reach)
        return {"position_ids": positions, "documents": documents}

    def differs(self, expected: Tensor, tolerance: float = TOLERANCE, **options: Any) -> str | None:
        """Returns why lmtrain's attention doesn't give the `expected` hidden states [2, T, D], or None if it does."""
        try:
            found = self.states(self.ids, **options)
        except UserError as error:  # raised by attention.py, which names the unsupported feature
            return str(error).split(":")[0]
        except Exception as error:
            return _words(error)
        if _close(found, expected, tolerance):
            return None
        if options:
            return MIXES
        return "lmtrain's attention gives different results than the model's own, which may use a window or bias"


def _close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def last_line(error: Exception) -> str:
    """Returns the last line of an error's message, which gives the reason in transformers' long ones, or its type."""
    return ([line.strip()[:120] for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {last_line(error)}"


_NAMES = safe_yaml.table(__file__, "probe.yaml")
_GROUPS = ("tested", "chosen_experts", "key_heads", "windows", "dropouts")
TESTED, CHOSEN_EXPERTS, KEY_HEADS, WINDOWS, DROPOUTS = (tuple(_NAMES[key].split()) for key in _GROUPS)
SIZE_OF = {name: size for size, names in _NAMES["sizes"].items() for name in names.split()}
VOCAB, HIDDEN, HEADS, HEAD_DIM = 64, 32, 4, 8  # as in probe.yaml
WINDOW = 4  # sliding window of the copy, small enough to matter within a few tokens


def shrink(config: PretrainedConfig, seq_len: int) -> PretrainedConfig:
    """Returns `config` with small widths and the same number of layers, for `tiny_copy`.

    A window that rows of seq_len tokens exceed becomes small, any other larger than the copy's rows.
    """
    fields = config.to_dict()
    for name in ("quantization_config", "dtype", "torch_dtype"):
        fields.pop(name, None)
    small = _shrunk(fields, seq_len)
    try:
        return type(config).from_dict(small | {"pad_token_id": None})
    except StrictDataclassError:  # the family requires a number
        return type(config).from_dict(small | {"pad_token_id": 0})


def _shrunk(fields: dict[str, Any], seq_len: int) -> dict[str, Any]:
    small = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = _shrunk(value, seq_len)
        elif name in SIZE_OF:
            small[name] = _sized(value, SIZE_OF[name])
        elif name in CHOSEN_EXPERTS:
            small[name] = _sized(value, min(value or 2, 2))
        elif name in WINDOWS and _is_number(value):
            small[name] = WINDOW if value < seq_len else 2 * SIZE_OF["max_position_embeddings"]
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id") and _is_number(value):
            small[name] = 0
    return small | _dependent(fields, seq_len)


def _dependent(fields: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """Returns the copy's sizes that depend on other sizes."""
    small: dict[str, Any] = {}
    heads = next((fields[name] for name in ("num_attention_heads", "n_head") if _is_number(fields.get(name))), 0)
    for name in KEY_HEADS:
        if _is_number(fields.get(name)):
            small[name] = HEADS if fields[name] >= heads else 1 if fields[name] == 1 else HEADS // 2
    if _is_number(fields.get("attention_hidden_size")):  # Zamba's attention has twice the hidden size
        times = max(1, fields["attention_hidden_size"] // fields["hidden_size"])
        small |= {"attention_hidden_size": times * HIDDEN, "attention_head_dim": times * HEAD_DIM}
    if "mamba_headdim" in fields:  # Zamba 2
        small["n_mamba_heads"] = HEADS
    if _is_number(fields.get("qk_rope_head_dim")) and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = SIZE_OF["qk_rope_head_dim"]
    return small | _longrope(fields, small, seq_len)


def _longrope(fields: dict[str, Any], small: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """Returns the copy's rotary embedding if it depends on the length: its documents are shorter and longer."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type") != KIND:
        return {}
    name = "original_max_position_embeddings"
    width = int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])
    own = small.get("head_dim", HEAD_DIM)
    longest = FIRST + 1 if rope[name] < seq_len else SIZE_OF["max_position_embeddings"]
    factors = {kind: rope[kind][: len(rope[kind]) * own // width] for kind in ("short_factor", "long_factor")}
    return {"rope_parameters": rope | factors | {name: longest}} | ({name: longest} if name in fields else {})


def _sized(value: Any, size: int) -> Any:
    """Replaces a number by `size`, in a list every number; other values such as None stay."""
    if isinstance(value, list | tuple):
        return [_sized(item, size) for item in value]
    return size if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def tiny_copy(model: PreTrainedModel, seq_len: int) -> PreTrainedModel:
    """Builds a small model of the class of `model`, with vocabulary 64 and width 32, on the CPU in fp32, in eval mode.

    Draws nothing from the global random generators. Errors of the family's code about the small sizes are not caught.

    Args:
        seq_len: length of the training rows; a sliding window that they never exceed is not made small.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        config = shrink(model.config, seq_len)
        if mask_token(model) is not None:  # masked diffusion has an attention of its own, all others set is_causal
            config.is_causal = True
        small = type(model)._from_config(config, dtype=torch.float32)
        enlarge(small)
    return small.eval()


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    """Draws random matrices, large enough that the tokens a token sees have a visible effect on its output."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
