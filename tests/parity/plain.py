"""Short training loops from transformers, peft, torch.optim.AdamW and the papers' formulas, without lmtrain's code.

They read the raw rows, have no micro-batches, packing, ranks or compiled code, and use all rows in every step: what a
run computes must not depend on any of these. Only the random bits below half-precision weights are
lmtrain's.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from lmtrain.optim.half import HALF as HALVES
from lmtrain.optim.half import first_rest, join

LR, BETAS, EPS, DECAY, CLIP = 2e-3, (0.9, 0.95), 1e-3, 0.1, 0.5
EOS = 256  # of the byte tokenizer, whose other ids are the bytes
BETA = 0.1
IGNORE = -100
# The dtypes of matrix products. On a CPU, Lightning replaces 16-mixed by bf16-mixed, with a warning.
HALF = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.bfloat16, "16-true": torch.half}


@dataclass
class Trained:
    """Results of a run: losses and gradient norms per step, and the final trained weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Plain:
    """A model being trained, its reference (for preferences), and the precision in which both compute."""

    model: nn.Module
    reference: nn.Module | None
    precision: str
    adapted: bool

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        # Half-precision bases with fp32 adapters compute in half precision, like fp32 weights in mixed precision.
        half = HALF.get(self.precision)
        if half is not None and (self.precision.endswith("-mixed") or self.adapted):
            with torch.autocast("cpu", half, cache_enabled=False):
                yield
        else:
            yield


def to_precision(model: nn.Module, precision: str) -> nn.Module:
    """Converts the weights to `precision`'s dtype; an adapter's own weights stay fp32, except in 64-true."""
    dtype = {"64-true": torch.double, "bf16-true": torch.bfloat16, "16-true": torch.half}.get(precision)
    if dtype is not None:
        own = ("lora_", ".memory.", ".memory_bank.") if dtype != torch.double else ()
        for name, parameter in model.named_parameters():
            if not any(part in name for part in own):
                parameter.data = parameter.data.to(dtype)
        for _, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    return model


def exact_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Computes Vaswani et al. 2017, eq. 1, in fp32 for any weight dtype, as runs do for short rows on a CPU.

    query [B, H, T, D]; key, value [B, H_kv, T, D]; the mask is added to the scores, causal if None; [B, T, H, D].
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else value.dtype
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    causal = torch.full((length, length), float("-inf")).triu(1)
    with torch.autocast("cpu", enabled=False):
        q, k, v = query.float(), key.float().repeat_interleave(groups, 1), value.float().repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * kwargs["scaling"] + (causal if attention_mask is None else attention_mask)
        return (scores.softmax(-1) @ v).to(dtype).transpose(1, 2), None


AttentionInterface.register("exact", exact_attention)


def attention_of(objective: str, precision: str) -> str:
    """Returns the transformers attn_implementation that rounds as a run does; in full precision none rounds."""
    if precision not in HALF:
        return "eager"
    return "sdpa" if objective == "mdlm" else "exact"


def encoded(text: str) -> list[int]:
    return list(text.encode())


def padded(examples: list[list[int]]) -> Tensor:
    """Returns int64 [B, T], padded on the right, where no earlier token of a causal model sees it."""
    longest = max(len(ids) for ids in examples)
    return torch.tensor([ids + [EOS] * (longest - len(ids)) for ids in examples])


def token_log_probs(model: nn.Module, ids: Tensor, **inputs: Any) -> Tensor:
    """Returns log p of each token after the first, given those before it: fp32 or fp64 [B, T - 1]."""
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[:, :-1]
    logits = logits if logits.dtype == torch.double else logits.float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def answer_log_probs(model: nn.Module, prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    """Returns log p of each whole answer after its prompt, fp64 [B]."""
    ids = padded([p + a for p, a in zip(prompts, answers, strict=True)])
    log_probs = token_log_probs(model, ids)
    scored = torch.zeros(log_probs.shape, dtype=torch.bool)
    for row, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        scored[row, len(p) - 1 : len(p) + len(a) - 1] = True
    return (log_probs.double() * scored).sum(1)


def log_ratios(plain: Plain, prompts: list[list[int]], answers: list[list[int]]) -> Tensor:
    """Returns log p of each answer minus the reference's, fp64 [B]; without a reference, the policy's alone."""
    policy = answer_log_probs(plain.model, prompts, answers)
    if plain.reference is None:
        return policy
    with torch.no_grad():
        reference = answer_log_probs(plain.reference, prompts, answers)
    return policy - reference


Draws = list[list[Any]]  # per step, a run's random draws, which the plain loop reuses
Loss = Callable[[Plain, int], Tensor]  # the loss of a step over all rows, a mean over the objective's unit


def language_model(examples: list[tuple[list[int], list[bool]]]) -> Loss:
    """Returns the mean negative log-likelihood of the tokens marked in each example; examples are independent."""
    ids = padded([ids for ids, _ in examples])
    learned = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (_, marks) in enumerate(examples):
        learned[row, : len(marks)] = torch.tensor(marks)
    learned[:, 0] = False  # nothing precedes it

    def loss(plain: Plain, step: int) -> Tensor:
        return -token_log_probs(plain.model, ids)[learned[:, 1:]].mean()

    return loss


def dpo(pairs: list[tuple[list[int], list[int], list[int]]]) -> Loss:
    """Returns the loss of Rafailov et al. 2023, eq. 7, for (prompt, chosen, rejected)."""
    prompts = [p for p, _, _ in pairs] * 2
    answers = [c for _, c, _ in pairs] + [r for _, _, r in pairs]

    def loss(plain: Plain, step: int) -> Tensor:
        chosen, rejected = log_ratios(plain, prompts, answers).chunk(2)
        return -F.logsigmoid(BETA * (chosen - rejected)).mean()

    return loss


def kto(rows: list[tuple[list[int], list[int], bool]], draws: Draws) -> Loss:
    """Returns the loss of Ethayarajh et al. 2024, eq. 8, for (prompt, answer, desirable).

    z is the mean log-ratio of all prompts, each with another row's answer, at least 0. The mismatched pairs are random:
    `draws` has (row, other row) per step, and each row occurs exactly once on each side.
    """
    prompts, answers = [p for p, _, _ in rows], [a for _, a, _ in rows]
    for step in draws:
        assert all(row != other for row, other in step)
        assert [sorted(side) for side in zip(*step, strict=True)] == [list(range(len(rows)))] * 2
    sign = torch.tensor([1.0 if good else -1.0 for _, _, good in rows], dtype=torch.double)

    def loss(plain: Plain, step: int) -> Tensor:
        others = dict(draws[step])
        strange = [answers[others[row]] for row in range(len(rows))]
        ratios = log_ratios(plain, prompts, answers)
        with torch.no_grad():
            z = log_ratios(plain, prompts, strange).mean().clamp(min=0)
        return (1 - torch.sigmoid(BETA * sign * (ratios - z))).mean()

    return loss


def mdlm(draws: Draws, mask_id: int) -> Loss:
    """Returns the loss of Nie et al. 2025, eq. 3: hidden tokens' cross-entropies divided by the time, per token.

    draws: by step and micro-batch (ids [B, T], hidden bool [B, T], times [B, 1]).
    """

    def loss(plain: Plain, step: int) -> Tensor:
        ids, hidden, times = (torch.cat(parts) for parts in zip(*draws[step], strict=True))
        seen = torch.zeros(ids.shape[0], 1, ids.shape[1], ids.shape[1])  # added to the scores: all see all tokens
        seen = seen.to(next(plain.model.parameters()).dtype)
        logits = plain.model(input_ids=ids.masked_fill(hidden, mask_id), attention_mask=seen, use_cache=False).logits
        logits = logits if logits.dtype == torch.double else logits.float()
        nll = -logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return (nll * hidden / times).sum() / ids.numel()

    return loss


def train(plain: Plain, loss: Loss, steps: int) -> Trained:
    """Runs `steps` steps of AdamW at a constant rate, with weight decay on matrices and clipping of the global norm.

    Half-precision weights are roundings of float32 weights, which are what is updated.
    """
    trained = {name: p for name, p in plain.model.named_parameters() if p.requires_grad}
    matrices = [p for p in trained.values() if p.ndim >= 2]
    vectors = [p for p in trained.values() if p.ndim < 2]
    exact = {p: in_float32(p, place) for place, p in enumerate([*matrices, *vectors])}
    groups = [
        {"params": [exact[p] for p in matrices], "weight_decay": DECAY},
        {"params": [exact[p] for p in vectors], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    found = Trained()
    for step in range(steps):
        with plain.computing():
            value = loss(plain, step)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP)
        for p, full in exact.items():
            full.grad = None if p.grad is None else p.grad.to(full.dtype)
        optimizer.step()
        for p, full in exact.items():
            p.data.copy_(full.detach())
            p.grad = None
        found.losses.append(value.item())
        found.norms.append(norm.item())
    found.weights = {name: p.detach().clone() for name, p in trained.items()}
    return found


def in_float32(parameter: nn.Parameter, place: int) -> nn.Parameter:
    """Returns the weights that a run begins with: itself, or float32 ones, at random, that round to half precision."""
    if parameter.dtype not in HALVES:
        return parameter
    rest = first_rest(parameter, place)
    return nn.Parameter(join(parameter.detach().float(), rest.int()))


def frozen(model: nn.Module) -> nn.Module:
    """Returns a copy that is never trained."""
    return copy.deepcopy(model).requires_grad_(False)
