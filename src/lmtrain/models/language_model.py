"""A transformers causal language model that returns its loss, computed from hidden states in chunks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.log_probs import chunked_log_probs
from lmtrain.losses import chunked_cross_entropy, router_load_balancing_loss
from lmtrain.models.documents import Documents, Prefixes, choose_method
from lmtrain.models.head import output_head
from lmtrain.schema import Objective

# loss_chunk_tokens=auto: logits of one chunk, in the dtype they are multiplied in. Smaller chunks cost time (the
# weight's gradient is summed once per chunk), larger ones only memory.
AUTO_CHUNK_BYTES = 256 * 2**20
# Families whose logits are known to be the output embedding of the last hidden state; others are compared once.
KNOWN_FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


class LanguageModelOutput(NamedTuple):
    """Sums over the tokens of a micro-batch that carry a label."""

    loss_sum: Tensor  # 0-dim fp32, what backward starts from: all terms of the loss
    nll_sum: Tensor  # 0-dim fp32, detached: negative log-likelihood alone
    n_tokens: Tensor  # 0-dim int64
    aux: dict[str, Tensor]  # detached 0-dim means of a router's losses; empty without one


class LogProbs(NamedTuple):
    """What `LanguageModel.log_probs` gives."""

    tokens: Tensor  # [C] fp32, differentiable
    router_loss: Tensor | None  # 0-dim, differentiable: to be added to the mean loss; None without a router
    aux: dict[str, Tensor]  # as of LanguageModelOutput


class LanguageModel(nn.Module):
    """Wraps `model`, which keeps its own parameter names under `model.`.

    The whole loss is in `forward`, output embedding included, so that a sharded root module is gathered for it.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        if model.base_model is model or model.get_output_embeddings() is None:
            raise UserError(
                f"{type(model).__name__} has no decoder and output embedding of its own: it can't be trained"
            )
        self.model = model
        self.z_loss, self.label_smoothing = objective.z_loss or 0.0, objective.label_smoothing
        self.chunk_tokens = _checked_chunk(objective.loss_chunk_tokens)
        self.logit_scale, self.logit_softcap = _logit_transform(model)
        config = model.config.get_text_config()
        self.router_coefficient = getattr(config, "router_aux_loss_coef", None) or 0.0
        self.num_experts_per_tok = getattr(config, "num_experts_per_tok", 0)
        self.has_router = "router_logits" in (getattr(model.base_model, "_can_record_outputs", None) or {})
        self.attention_dropout = attention_dropout(config)
        self.mixes_outside_attention = any(isinstance(m, nn.Conv1d) for m in model.modules())  # Mamba, LFM2, ...
        self._blocks = decoder_blocks(model)
        if config.model_type not in KNOWN_FAMILIES:
            self._compare_logits()

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        learned: Tensor | None = None,
    ) -> LanguageModelOutput:
        """The loss of one micro-batch.

        Args:
            input_ids: [B, T] int64.
            labels: [B, T] int64, the token that follows each input, -100 where none is trained on.
            position_ids: [B, T] int64, position of each token in its document; counted along the row if None.
            cu_seqlens: [n_docs + 1] int32 starts of documents in the flattened B * T tokens, row borders included;
                None where each row is one sequence.
            learned: [n] int64, where in the flattened tokens there is a label; None to make every token's logits.
        """
        hidden, router_logits = self.hidden_states(input_ids, position_ids, cu_seqlens)
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        if learned is not None and len(learned):
            hidden, labels = hidden[learned], labels[learned]
        hidden, weight, bias = output_head(self.model, hidden)
        loss = chunked_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            chunk_tokens=self._chunk(weight, hidden),
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
            logit_softcap=self.logit_softcap,
            logit_scale=self.logit_scale,
            compiled=self._compiled(),
        )
        loss_sum = loss.loss_sum
        aux: dict[str, Tensor] = {}
        if router_logits:
            router_loss, aux = self._router_loss(router_logits)
            loss_sum = loss_sum + router_loss * loss.n_tokens
        return LanguageModelOutput(loss_sum, loss.nll_sum, loss.n_tokens, aux)

    def log_probs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        prefixes: Prefixes | None,
        *,
        scored: Tensor,
        before: Tensor,
    ) -> LogProbs:
        """Log-probabilities of single tokens; the others' logits are never computed.

        Args:
            input_ids, position_ids, cu_seqlens: as of `forward`.
            prefixes: documents that go on from the one before.
            scored: [C] int64, positions (of the flattened B * T) of the tokens asked about.
            before: [C] int64, positions of the tokens that come just before them.
        """
        hidden, router_logits = self.hidden_states(input_ids, position_ids, cu_seqlens, prefixes)
        hidden, weight, bias = output_head(self.model, hidden.flatten(0, 1).index_select(0, before))
        targets = input_ids.flatten().index_select(0, scored)
        tokens = chunked_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            chunk_tokens=self._chunk(weight, hidden),
            logit_softcap=self.logit_softcap,
            logit_scale=self.logit_scale,
            compiled=self._compiled(),
        )
        return LogProbs(tokens, *(self._router_loss(router_logits) if router_logits else (None, {})))

    def _router_loss(self, router_logits: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """What a router adds to the mean loss, and what is reported of it: per layer and chosen expert, 1 if even."""
        loss = router_load_balancing_loss(router_logits, self.num_experts_per_tok)
        even = loss.detach() / (len(router_logits) * self.num_experts_per_tok)
        return self.router_coefficient * loss, {"aux/router_loss": even}

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        prefixes: Prefixes | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Last hidden states [B, T, D], and per layer router logits [B * T, E] of a mixture of experts."""
        options: dict[str, Any] = {}
        if position_ids is not None:
            options["position_ids"] = position_ids
        if cu_seqlens is not None:
            options["documents"] = self._documents(cu_seqlens, input_ids, prefixes)
        if self.has_router:
            options["output_router_logits"] = True
        out = self.model.base_model(input_ids=input_ids, use_cache=False, **options)
        return out.last_hidden_state, getattr(out, "router_logits", None) or ()

    def _documents(self, cu_seqlens: Tensor, input_ids: Tensor, prefixes: Prefixes | None) -> Documents:
        if self.mixes_outside_attention:
            raise UserError(
                f"{type(self.model).__name__} mixes neighbouring tokens outside attention, so packed documents would "
                f"see each other: set data.isolate_documents=false"
            )
        device = input_ids.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else self.model.dtype
        dropout = self.attention_dropout if self.training else 0.0
        choice = getattr(self.model, "documents_attention", "transformers")
        method = choose_method(choice, device, dtype, dropout)
        return Documents(cu_seqlens, input_ids.shape[0], input_ids.shape[1], method, prefixes)

    def _compiled(self) -> bool:
        """Whether `compile_model` was called on the model: then the loss is compiled too."""
        return bool(self._blocks) and self._blocks[0]._compiled_call_impl is not None

    def _chunk(self, weight: Tensor, hidden: Tensor) -> int:
        if isinstance(self.chunk_tokens, int):
            return self.chunk_tokens
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        return max(1, AUTO_CHUNK_BYTES // (weight.shape[0] * dtype.itemsize))

    @torch.no_grad()
    def _compare_logits(self) -> None:
        """Raises UserError unless transformers' own logits of a few tokens are those the loss is computed from."""
        device = self.model.device
        if device.type == "meta":
            return
        ids = torch.arange(8, device=device).remainder(self.model.config.get_text_config().vocab_size)[None]
        training = self.model.training
        self.model.eval()
        theirs = self.model(input_ids=ids, use_cache=False).logits
        ours = self.model.get_output_embeddings()(self.hidden_states(ids)[0]) * self.logit_scale
        if self.logit_softcap is not None:
            ours = self.logit_softcap * torch.tanh(ours / self.logit_softcap)
        self.model.train(training)
        difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        if not difference <= 1e-3 * largest:
            raise UserError(
                f"{type(self.model).__name__} makes its logits in a way lmtrain doesn't know (off by {difference:.3g}, "
                f"the largest is {largest:.3g}): this family can't be trained"
            )


def _checked_chunk(value: int | str) -> int | str:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise UserError(f"objective.loss_chunk_tokens={value}: auto, or a number of tokens from 1 up")


def _logit_transform(model: PreTrainedModel) -> tuple[float, float | None]:
    """(factor of the logits, their soft cap), for the families whose config names them."""
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None):  # Granite
        scale /= config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere
        scale *= config.logit_scale
    return scale, getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later


def attention_dropout(config: Any) -> float:
    """Dropout on attention weights, by the names families have for it."""
    return float(getattr(config, "attn_pdrop", None) or getattr(config, "attention_dropout", None) or 0.0)


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, in order: the modules transformers itself never splits over devices."""
    names = set(model._no_split_modules or ())
    # By all class names: fully_shard makes a module's class a subclass of what it was.
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Keeps only each block's input and recomputes the rest in backward (Chen et al. 2016)."""
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} has no activation checkpointing: set trainer.activation_checkpointing=false"
        )
    # Its name since transformers 5.18, and the one before.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # The reentrant kind loses gradients where a block's input needs none, as under LoRA.
    enable({"use_reentrant": False})


def compile_model(model: PreTrainedModel) -> None:
    """torch.compile of every block, in place, so that parameter names stay; blocks of one shape share the code."""
    for block in decoder_blocks(model):
        block.compile()
