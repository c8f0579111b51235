"""Divergences between a student's and a teacher's next-token distributions, from hidden states in chunks.

Logits are computed for one chunk of tokens at a time, and again in the backward pass, so that the full logits of
neither model are ever held.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class OutputHead(NamedTuple):
    """The output layer, which turns a model's last hidden states into logits."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def log_probs(self, hidden: Tensor, vocabulary: int, temperature: float) -> Tensor:
        """Computes log-probabilities [N, vocabulary], normalised over the first `vocabulary` tokens, fp32 or fp64."""
        logits = (hidden * self.scale) @ self.weight[:vocabulary].t()
        if self.bias is not None:
            logits = logits + self.bias[:vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return (logits / temperature).log_softmax(-1)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Computes the generalised Jensen-Shannon divergence of log-probabilities [N, V], in nats, [N].

    Agarwal et al. 2024, arXiv:2306.13649, eq. 1, with the mixture `M = beta P + (1 - beta) Q` of teacher P and student
    Q: `beta KL(P || M) + (1 - beta) KL(Q || M)`. This vanishes at both ends, so beta = 0 means KL(P || Q), the forward
    KL, which covers all that the teacher may say, and beta = 1 means KL(Q || P), which seeks the teacher's main modes.
    """
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    weights = torch.tensor([beta, 1 - beta], dtype=student.dtype, device=student.device).log()
    mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Computes KL(p || q) from log-probabilities, with 0 log 0 = 0."""
    return (p.exp() * (p - q).masked_fill(p == -torch.inf, 0.0)).sum(-1)


def chunked_divergence(
    student_hidden: Tensor,
    student: OutputHead,
    teacher_hidden: Tensor,
    teacher: OutputHead,
    *,
    vocabulary: int,
    beta: float,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """Computes `divergence` for N tokens, [N], differentiable in the student's hidden states and head.

    Args:
        student_hidden: [N, D].
        teacher_hidden: [N, D'].
        vocabulary: number of tokens that both models know, first in both vocabularies; rows beyond it are padding.
        beta: 0 to 1.
        temperature: both models' logits are divided by it.
        chunk_tokens: number of tokens whose logits are held at once.
    """

    def of_chunk(hidden: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        head = student._replace(weight=weight, bias=bias)
        with torch.no_grad():
            target = teacher.log_probs(other, vocabulary, temperature)
        return divergence(head.log_probs(hidden, vocabulary, temperature), target, beta)

    found = []
    for start in range(0, len(student_hidden), chunk_tokens):
        some = slice(start, start + chunk_tokens)
        inputs = (student_hidden[some], teacher_hidden[some], student.weight, student.bias)
        found.append(checkpoint(of_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(found) if found else student_hidden.sum(-1)  # no tokens: empty, but differentiable
