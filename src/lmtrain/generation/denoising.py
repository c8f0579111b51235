"""Text from a model that predicts masked tokens: a continuation that is all masks is uncovered step by step.

Sahoo et al. 2024 (arXiv:2406.07524); which tokens are uncovered is Nie et al. 2025's choice (arXiv:2502.09992, section
2.4, low-confidence remasking): those whose prediction the model is most confident of.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmtrain.models.attention import generation_mode

STEPS = 32  # of a text; with fewer tokens one a step


@torch.no_grad()
def denoise(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    *,
    mask_id: int,
    n_ids: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
    steps: int = STEPS,
) -> list[int]:
    """`new_tokens` ids that follow those of the prompt.

    Each step predicts all tokens that are still masked, and keeps the share 1 / (steps left) of them whose predictions
    have the highest probability.

    Args:
        model: in evaluation mode.
        mask_id: never predicted.
        n_ids: ids from here on are no token's, and never predicted.
        temperature: 0 takes the likeliest token.
        top_k: draws among the k likeliest; None among all.
        generator: on the model's device.
    """
    ids = torch.tensor([prompt + [mask_id] * new_tokens], device=model.device)
    masked = torch.zeros_like(ids[0], dtype=torch.bool)  # by place: the prompt may hold the mask's id
    masked[len(prompt) :] = True
    steps = min(steps, new_tokens)
    with generation_mode(model):
        for step in range(steps):
            places = masked.nonzero()[:, 0]  # [M]
            logits = model(input_ids=ids, use_cache=False).logits[0, places].float()  # [M, V]
            logits[:, n_ids:] = -torch.inf
            logits[:, mask_id] = -torch.inf
            tokens, confidence = _draw(logits, temperature, top_k, generator)
            kept = confidence.topk(-(-len(places) // (steps - step))).indices
            ids[0, places[kept]] = tokens[kept]
            masked[places[kept]] = False
    return ids[0, len(prompt) :].tolist()


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token for each row of logits [M, V], int64 [M], and its probability under them, [M]."""
    probabilities = torch.nan_to_num(logits.softmax(-1), 1.0)  # of a model whose loss went to nan: any token
    if temperature == 0:
        tokens = probabilities.argmax(-1)
    else:
        best = probabilities.topk(min(top_k or probabilities.shape[1], probabilities.shape[1]))
        weights = (best.values / best.values[:, :1]) ** (1 / temperature)
        chosen = torch.multinomial(weights, 1, generator=generator)
        tokens = best.indices.gather(1, chosen)[:, 0]
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0]
