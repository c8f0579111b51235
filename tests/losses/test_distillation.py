"""Distillation's chunked divergences against closed forms, for several chunk sizes."""

import pytest
import torch
from torch.nn import functional as F

from lmtrain.losses.distillation import OutputHead, chunked_divergence, divergence

N, D, V, ROWS = 13, 6, 11, 16  # ROWS: rows of the student's embeddings, of which only the first V belong to tokens


def models() -> tuple[torch.Tensor, OutputHead, torch.Tensor, OutputHead]:
    torch.manual_seed(0)
    student, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((N, D), (ROWS, D)))
    bias = torch.randn(ROWS, dtype=torch.float64, requires_grad=True)
    teacher, other = (torch.randn(*shape, dtype=torch.float64) for shape in ((N, 2 * D), (V, 2 * D)))
    return student, OutputHead(weight, bias, 0.7, 3.0), teacher, OutputHead(other)


def log_probs(hidden: torch.Tensor, head: OutputHead, temperature: float) -> torch.Tensor:
    logits = head.scale * hidden @ head.weight[:V].T + (0 if head.bias is None else head.bias[:V])
    if head.softcap:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return F.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_equals_the_closed_form(beta: float, chunk: int) -> None:
    """Each token's divergence and the gradients of hidden states, weight and bias equal the closed form."""
    student, head, teacher, other = models()
    found = chunked_divergence(student, head, teacher, other, vocabulary=V, beta=beta, temperature=1.7,
                               chunk_tokens=chunk)  # fmt: skip
    q, p = log_probs(student, head, 1.7).exp(), log_probs(teacher, other, 1.7).exp()
    m = beta * p + (1 - beta) * q
    expected = {
        0.0: (p * (p / q).log()).sum(-1),
        1.0: (q * (q / p).log()).sum(-1),
        0.3: beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1),
    }[beta]
    torch.testing.assert_close(found, expected)
    weights = torch.linspace(1, 2, N, dtype=torch.float64)
    inputs = (student, head.weight, head.bias)
    for ours, theirs in zip(torch.autograd.grad((weights * found).sum(), inputs),
                            torch.autograd.grad((weights * expected).sum(), inputs), strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    logs = torch.randn(4, 7, dtype=torch.float64).log_softmax(-1)
    for beta in (0.0, 0.5, 1.0):
        torch.testing.assert_close(divergence(logs, logs, beta), torch.zeros(4, dtype=torch.float64))


def test_full_logits_are_never_held() -> None:
    """The largest tensor that the forward saves for the backward is no larger than hidden states and embeddings."""
    student, teacher = torch.randn(4096, 8, requires_grad=True), torch.randn(4096, 8)
    weight = torch.randn(512, 8, requires_grad=True)
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        heads = OutputHead(weight), OutputHead(weight.detach())
        found = chunked_divergence(student, heads[0], teacher, heads[1], vocabulary=512, beta=0.5, temperature=1.0,
                                   chunk_tokens=64)  # fmt: skip
    assert max(kept) <= 4096 * 8
    found.sum().backward()
    assert student.grad is not None
