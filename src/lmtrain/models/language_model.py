"""A wrapper around a transformers causal language model that computes the loss from hidden states in chunks."""

import contextlib
import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F
from transformers import PreTrainedModel

from lmtrain.config.schema import RouterConfig
from lmtrain.distributed.dtensor import laid_out
from lmtrain.errors import UserError
from lmtrain.losses.cross_entropy import IGNORE_INDEX, CrossEntropy, chunked_cross_entropy
from lmtrain.losses.distillation import OutputHead, chunked_divergence
from lmtrain.losses.log_probs import chunked_log_probs
from lmtrain.models import mixers
from lmtrain.models.attention import SLIDES, autocast_dtype
from lmtrain.models.blocks import at_head, decoder_blocks, evaluating, let_grow
from lmtrain.models.context import Context
from lmtrain.models.documents import ALONE, Documents, Inputs, Prefixes, choose_method
from lmtrain.models.rotary import Lengths
from lmtrain.models.routers import Logits, RouterLosses, Routers
from lmtrain.models.scalar_head import HEAD, has_scalar_head

# Bytes of one chunk's logits, in the dtype of their matrix product. Smaller chunks cost
# time (the weight's gradient is summed once per chunk), larger ones only memory, of which a large GPU has enough.
SMALLEST_CHUNK_BYTES, LARGEST_CHUNK_BYTES, CHUNKS_PER_CARD = 256 * 2**20, 2 * 2**30, 64
# Families whose logits are known to be the output layer applied to the last hidden state; others are compared once.
KNOWN_FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@cache
def auto_chunk_bytes(device_type: str, card_bytes: int | None = None) -> int:
    """Returns the bytes for one chunk's logits: 1.25 GiB on a GPU of 80 GiB (`card_bytes`; None: the current GPU's)."""
    if device_type != "cuda" or (card_bytes is None and not torch.cuda.is_available()):
        return SMALLEST_CHUNK_BYTES
    if card_bytes is None:
        card_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min(LARGEST_CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, card_bytes // CHUNKS_PER_CARD))


class LanguageModelOutput(NamedTuple):
    """Sums over the tokens of a micro-batch that carry a label."""

    loss_sum: Tensor  # 0-dim fp32, differentiable: all terms of the loss
    nll_sum: Tensor  # 0-dim fp32, detached: negative log-likelihood alone
    n_tokens: Tensor  # 0-dim int64
    aux: dict[str, Tensor]  # detached 0-dim means of the router's losses and metrics; empty without a router


class LogProbs(NamedTuple):
    """The result of `LanguageModel.log_probs`, of `scores`, where `tokens` are rewards, and of `divergence`."""

    tokens: Tensor  # [C] fp32, differentiable
    router_loss: Tensor | None  # 0-dim, differentiable, to be added to the mean loss; None without a router
    aux: dict[str, Tensor]  # as in LanguageModelOutput


class LanguageModel(nn.Module):
    """A wrapper around `model`, whose parameters keep their names under the prefix `model.`.

    `forward` computes the whole loss, output layer included, so that a sharded root module is gathered for it.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, router: RouterConfig | None = None) -> None:
        super().__init__()
        self.has_scalar_head = has_scalar_head(model)
        has_head = self.has_scalar_head or model.get_output_embeddings() is not None
        if model.base_model is model or not has_head:
            part = f"{model.base_model_prefix!r}, as transformers calls its decoder" if has_head else "output embedding"
            raise UserError(f"{type(model).__name__} has no {part}: it can't be trained")
        self.model = model
        self.logit_scale, self.logit_softcap = _logit_transform(model)
        config = model.config.get_text_config()
        self.routers = Routers(model)
        self.router_losses = RouterLosses(model, self.routers, router)
        self.has_router = self.routers.of_experts
        self.attention_dropout = attention_dropout(config)
        slides = any(getattr(module, SLIDES, False) for module in model.modules())
        self.window = getattr(config, "sliding_window", None) if slides else None
        self.reach = mixers.reach(model)
        # No cap on attention scores (Gemma 2) and no sink (gpt-oss), which fused kernels don't support.
        has_sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
        self.plain_softmax = not getattr(config, "attn_logit_softcapping", None) and not has_sinks
        self.validates = False  # True during validation
        self.same_tokens: DeviceMesh | None = None  # ranks that compute the same hidden states, and split the loss
        self.context: Context | None = None  # set under context parallelism: inputs are slices of rows
        self.lengths = Lengths(model)
        self._blocks = decoder_blocks(model)
        if config.model_type not in KNOWN_FAMILIES:
            self._compare_logits()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Converts the model and leaves in fp32 the buffers that transformers loads in fp32.

        These are the frequencies of rotary embeddings and those that a family names. Rounded to bf16, a frequency is
        wrong by up to 2^-9 of itself: the angle of position 2,048 by several radians.
        """
        names = ("inv_freq", *(getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()))
        buffers = [(m, name, b) for m in self.modules() for name, b in m.named_buffers(recurse=False)]
        kept = [b.is_floating_point() and any(part in name for part in names) for _, name, b in buffers]
        exact = list(itertools.compress(buffers, kept))
        super()._apply(fn, recurse)
        for module, name, before in exact:
            now = getattr(module, name)
            if torch.finfo(now.dtype).bits < torch.finfo(before.dtype).bits:
                setattr(module, name, before.to(now.device))
        return self

    @property
    def unpacked_because(self) -> str | None:
        """The reason why rows can't hold several documents that are kept apart; None if they can."""
        return getattr(self.model, "unpacked_because", None)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        learned: Tensor | None = None,
        row_lengths: Tensor | None = None,
        real: Tensor | None = None,
    ) -> LanguageModelOutput:
        """Computes the loss of one micro-batch.

        Args:
            input_ids: [B, T] int64; `position_ids`, `cu_seqlens`, `row_lengths` and `real` are those of `Inputs`.
            labels: [B, T] int64, the token that follows each input, -100 where none is trained on.
            learned: [n] int64, positions of the labelled tokens in the flattened B * T; None: logits of all tokens are
                computed.
        """
        inputs = Inputs(input_ids, position_ids, cu_seqlens, row_lengths=row_lengths, real=real)
        hidden, router_logits = self.hidden_states(inputs)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if learned is not None and len(learned):
            hidden, labels = hidden.index_select(0, learned), labels.index_select(0, learned)
        loss = at_head(self.model, partial(self._cross_entropy, labels=labels), hidden)
        router_loss, aux = self.router_losses(router_logits)
        loss_sum = loss.loss_sum if router_loss is None else loss.loss_sum + router_loss * loss.n_tokens
        return LanguageModelOutput(loss_sum, loss.loss_sum.detach(), loss.n_tokens, aux)

    def _cross_entropy(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> CrossEntropy:
        """Computes the loss of all tokens [N]; the ranks of `same_tokens`, if set, share the computation."""
        of_rows = partial(
            chunked_cross_entropy,
            chunk_tokens=self._chunk(weight, hidden),
            logit_softcap=self.logit_softcap,
            logit_scale=self.logit_scale,
            compiled=self._compiled(),
        )
        if self.same_tokens is None:
            return of_rows(hidden, weight, labels, bias=bias)
        return shared_cross_entropy(of_rows, hidden, weight, bias, labels, self.same_tokens)

    def log_probs(
        self, inputs: Inputs, *, scored: Tensor, before: Tensor, targets: Tensor | None = None, temperature: float = 1.0
    ) -> LogProbs:
        """Computes log-probabilities of selected tokens, without the logits at other positions.

        Args:
            scored: [C] int64, positions (in the flattened B * T) of the selected tokens.
            before: [C] int64, positions of the tokens just before the selected ones, whose logits predict them.
            targets: [C] int64, the ids to score instead of those in `input_ids`.
            temperature: divides the logits.
        """
        hidden, router_logits = self.hidden_states(inputs)
        wanted = inputs.input_ids.flatten().index_select(0, scored) if targets is None else targets

        def of_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return chunked_log_probs(
                hidden,
                weight,
                wanted,
                bias=bias if bias is None or temperature == 1 else bias / temperature,
                chunk_tokens=self._chunk(weight, hidden),
                # cap * tanh(x / cap) / t is (cap / t) * tanh((x / t) / (cap / t))
                logit_softcap=None if self.logit_softcap is None else self.logit_softcap / temperature,
                logit_scale=self.logit_scale / temperature,
                compiled=self._compiled(),
            )

        tokens = at_head(self.model, of_head, hidden.flatten(0, 1).index_select(0, before))
        return LogProbs(tokens, *self.router_losses(router_logits))

    def divergence(
        self,
        inputs: Inputs,
        *,
        at: Tensor,
        teacher_hidden: Tensor,
        teacher: OutputHead,
        vocabulary: int,
        beta: float,
        temperature: float,
    ) -> LogProbs:
        """Computes the divergences of this model's next-token distributions from a teacher's (losses.distillation).

        They are in `tokens`, [N].

        Args:
            at: [N] int64, positions (in the flattened B * T) whose next-token distributions are compared.
            teacher_hidden: [N, D'], the teacher's hidden states at these positions.
            teacher: the teacher's output head.
            vocabulary: number of tokens that both vocabularies share.
            beta: selects the divergence.
            temperature: applied to both distributions.
        """
        hidden, router_logits = self.hidden_states(inputs)

        def of_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            head = OutputHead(weight, bias, self.logit_scale, self.logit_softcap)
            return chunked_divergence(
                hidden, head, teacher_hidden, teacher, vocabulary=vocabulary, beta=beta, temperature=temperature,
                chunk_tokens=max(1, self._chunk(weight, hidden) // 2),
            )  # fmt: skip

        each = at_head(self.model, of_head, hidden.flatten(0, 1).index_select(0, at))
        return LogProbs(each, *self.router_losses(router_logits))

    def scores(self, inputs: Inputs, *, at: Tensor) -> LogProbs:
        """Computes the scalar head's output at selected tokens, in `tokens`; in fp32, whatever trainer.precision is.

        Args:
            at: [N] int64, positions (in the flattened B * T) of the tokens at which the head is read.
        """
        hidden, router_logits = self.hidden_states(inputs)
        weight: Tensor = getattr(self.model, HEAD).weight  # [1, D]; with an adapter, its trained copy
        found = (hidden.flatten(0, 1).index_select(0, at).float() * weight.float()).sum(-1)
        return LogProbs(found, *self.router_losses(router_logits))

    def hidden_states(self, inputs: Inputs) -> tuple[Tensor, Logits]:
        """Returns the last hidden states [B, T, D], and the router logits, with entries only for existing routers.

        Padding has no router logits, and a prefix that several documents share has them for each, as if repeated.
        """
        input_ids, position_ids, cu_seqlens, prefixes, _, real = inputs
        self.lengths.read(inputs)
        options: dict[str, Any] = {}
        if position_ids is not None:
            options["position_ids"] = position_ids
        if cu_seqlens is not None:
            options["documents"] = self._documents(cu_seqlens, input_ids, prefixes)
        elif self.window is not None and self.window < self._whole_shape(input_ids)[1]:
            options["documents"] = self._whole_rows(input_ids)
        if self.routers.by_transformers:
            options["output_router_logits"] = True
        eager = self._has_compiled_blocks() and not self._compiled()
        with torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext():
            out = self.model.base_model(input_ids=input_ids, use_cache=False, **options)
        self.lengths.tokens = None  # text is generated as by transformers
        logits = self.routers.take(out)
        routed = real if prefixes is None else prefixes.kv_index
        if routed is not None:
            logits = {kind: tuple(x.index_select(0, routed) for x in xs) for kind, xs in logits.items()}
        return out.last_hidden_state, logits

    def _documents(self, cu_seqlens: Tensor, input_ids: Tensor, prefixes: Prefixes | None) -> Documents:
        if self.unpacked_because is not None:
            found = f"{type(self.model).__name__} can't isolate packed documents: {self.unpacked_because}"
            raise UserError(f"{found}; {ALONE}")
        device = input_ids.device
        method = self._method(device)
        if self._compiled():
            let_grow(cu_seqlens, *(prefixes or ()))
        bias_dtype = self._attention_dtype(device) if device.type == "cuda" and self.plain_softmax else None
        return Documents(cu_seqlens, *self._whole_shape(input_ids), method, prefixes, bias_dtype, self.reach)

    def _whole_shape(self, input_ids: Tensor) -> tuple[int, int]:
        """Returns (B, T) of whole rows; with context parallelism the inputs are slices of them."""
        rows, length = input_ids.shape
        return rows, length * (1 if self.context is None else self.context.size)

    def _whole_rows(self, input_ids: Tensor) -> Documents | None:
        """Returns each row as one document if flash attention can run, which needs no mask for windows; else None."""
        rows, length = self._whole_shape(input_ids)
        choice = getattr(self.model, "documents_attention", "transformers")
        if not input_ids.is_cuda or choice not in ("auto", "varlen") or self._method(input_ids.device) != "varlen":
            return None
        starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=input_ids.device)
        return Documents(starts, rows, length, "varlen")

    def _method(self, device: torch.device) -> str:
        """Returns the method that keeps documents apart in this forward."""
        dropout = self.attention_dropout if self.training else 0.0
        choice = getattr(self.model, "documents_attention", "transformers")
        return choose_method(choice, device, self._attention_dtype(device), dropout, self.plain_softmax)

    def _attention_dtype(self, device: torch.device) -> torch.dtype:
        """Returns the dtype of attention's matrix products."""
        return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else self.model.dtype

    def _has_compiled_blocks(self) -> bool:
        """Returns whether `compile_model` was called on the model."""
        return bool(self._blocks) and self._blocks[0]._compiled_call_impl is not None

    def _compiled(self) -> bool:
        """Returns whether blocks and loss run compiled now.

        They don't in validation on a CPU, where compiling separate code takes longer than it saves in some minutes.
        """
        return self._has_compiled_blocks() and not (self.validates and self.model.device.type == "cpu")

    def _chunk(self, weight: Tensor, hidden: Tensor) -> int:
        return max(1, auto_chunk_bytes(hidden.device.type) // (weight.shape[0] * autocast_dtype(hidden).itemsize))

    @torch.no_grad()
    def _compare_logits(self) -> None:
        """Raises UserError unless transformers' logits for a few tokens equal those that the loss is computed from."""
        device = self.model.device
        if device.type == "meta":
            return
        ids = torch.arange(8, device=device).remainder(self.model.config.get_text_config().vocab_size)[None]
        try:
            with evaluating(self.model):
                theirs = self.model(input_ids=ids, use_cache=False).logits
                if self.has_scalar_head:
                    ours = self.scores(
                        Inputs(ids), at=torch.tensor([ids.numel() - 1], dtype=torch.int64, device=device)
                    ).tokens
                    theirs = theirs.flatten()
                else:
                    ours = self.model.get_output_embeddings()(self.hidden_states(Inputs(ids))[0]) * self.logit_scale
        except Exception as error:  # a family's code may raise anything
            reason = str(error).partition("\n")[0][:120]
            found = f"{type(self.model).__name__} can't read plain rows of tokens ({type(error).__name__}: {reason})"
            raise UserError(f"{found}: this family can't be trained with its config as it is") from error
        if self.logit_softcap is not None and not self.has_scalar_head:
            ours = self.logit_softcap * torch.tanh(ours / self.logit_softcap)
        difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        if not difference <= 1e-3 * largest:
            found = f"{type(self.model).__name__} computes its logits in a way that lmtrain doesn't support"
            off = f"lmtrain's differ by {difference:.3g}, the largest is {largest:.3g}"
            raise UserError(f"{found} ({off}): this family can't be trained")


def shared_cross_entropy(
    of_rows: Callable[..., CrossEntropy],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    mesh: DeviceMesh,
) -> CrossEntropy:
    """Computes the loss of tokens that all ranks of `mesh` have; each rank computes an equal share of it.

    Every rank gets the full gradient of `hidden`. For `weight` and `bias` it gets the gradient of its share times the
    number of ranks, so that the mean over the ranks is the full gradient, as for parameters whose gradient is the same
    on all ranks.

    Args:
        of_rows: computes the loss from hidden states, weight, labels and the keyword `bias`.
        hidden: [N, D].
        weight: [V, D].
        bias: [V].
        labels: [N] int64, -100 where there is none.
        mesh: one-dimensional.
    """
    ranks = mesh.size()
    n_tokens = (labels != IGNORE_INDEX).sum()
    padding = -len(labels) % ranks
    hidden = laid_out(F.pad(hidden, (0, 0, 0, padding)), mesh, Replicate(), Shard(0))  # [N / ranks, D]
    labels = F.pad(labels, (0, padding), value=IGNORE_INDEX).chunk(ranks)[mesh.get_local_rank()]
    bias = None if bias is None else _scaled_gradient(bias, ranks)
    own = of_rows(hidden, _scaled_gradient(weight, ranks), labels, bias=bias)
    return CrossEntropy(laid_out(own.loss_sum, mesh, Partial(), Replicate()), n_tokens)


def _scaled_gradient(x: Tensor, factor: int) -> Tensor:
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * factor)
    return x


def _logit_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """Returns (factor, soft cap) of the logits, which some families' configs define."""
    config = model.config.get_text_config()
    # Cohere multiplies them, Granite divides them.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    # The names in Gemma 2 and later, RecurrentGemma and xLSTM.
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return scale, next((getattr(config, name) for name in caps if getattr(config, name, None)), None)


def attention_dropout(config: Any) -> float:
    """Returns the dropout on attention weights, which families name differently."""
    return float(getattr(config, "attn_pdrop", None) or getattr(config, "attention_dropout", None) or 0.0)
