"""Divergences between a student's and a teacher's next tokens, from hidden states in chunks.

Logits are made a chunk of tokens at a time, and made again in the backward, so that the full logits of neither model
are ever held.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class OutputHead(NamedTuple):
    """What makes logits of a model's last hidden states."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def log_probs(self, hidden: Tensor, vocabulary: int, temperature: float) -> Tensor:
        """Log-probabilities [N, vocabulary] of the first `vocabulary` tokens among themselves, fp32 or fp64."""
        logits = (hidden * self.scale) @ self.weight[:vocabulary].t()
        if self.bias is not None:
            logits = logits + self.bias[:vocabulary]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return (logits / temperature).log_softmax(-1)


def divergence(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence of log-probabilities [N, V], in nats, [N].

    Agarwal et al. 2024, arXiv:2306.13649, eq. 1, with the mixture `M = beta P + (1 - beta) Q` of teacher P and student
    Q: `beta KL(P || M) + (1 - beta) KL(Q || M)`. As that vanishes at both ends, beta = 0 is KL(P || Q), the forward
    one, which covers all that the teacher may say, and beta = 1 is KL(Q || P), which seeks what it mostly says.
    """
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    weights = torch.tensor([beta, 1 - beta], dtype=student.dtype, device=student.device).log()
    mixture = torch.logaddexp(teacher + weights[0], student + weights[1])
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities, 0 log 0 being 0."""
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
    """`divergence` of N tokens, [N], differentiable in the student's hidden states and head.

    Args:
        student_hidden: [N, D].
        teacher_hidden: [N, D'].
        vocabulary: tokens that both know, the first of each: rows beyond it are padding.
        beta: 0 to 1.
        temperature: both models' logits are divided by it.
        chunk_tokens: tokens whose logits are held at once.
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
    return torch.cat(found) if found else student_hidden.sum(-1)  # of no tokens, with a gradient of nothing
