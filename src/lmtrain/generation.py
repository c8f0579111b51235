"""Text from a model: a prompt in, its continuation out."""

from typing import Any

import torch
from transformers import PreTrainedModel

from lmtrain.models.attention import generation_mode


def sample_text(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str | list[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end_ids: list[int] | None = None,
    together: bool = False,
) -> str:
    """The continuation of `prompt` (without it), at most max_new_tokens tokens; temperature 0 is greedy.

    The prompt is cut from the left so that prompt and continuation fit the model's positions. The global random
    generators are left as they were found.

    Args:
        prompt: text, or token ids.
        end_ids: tokens that end the text; None for those the model's own generation config names.
        together: all ranks generate the same text, each holding a part of the model.
    """
    if isinstance(prompt, str):
        prompt = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = prompt or [tokenizer.eos_token_id]
    room = model.config.max_position_embeddings - max_new_tokens
    ids = ids[-max(1, room) :]
    input_ids = torch.tensor([ids], device=model.device)
    settings: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        settings = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
    if end_ids is not None:
        settings["eos_token_id"] = end_ids
    devices = [model.device] if model.device.type == "cuda" else []
    was_training = model.training
    model.eval()
    with torch.random.fork_rng(devices), torch.no_grad(), generation_mode(model):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max(1, min(max_new_tokens, model.config.max_position_embeddings - len(ids))),
            pad_token_id=tokenizer.eos_token_id,
            remove_invalid_values=True,  # a model whose loss went to nan still gives (meaningless) text, not an error
            synced_gpus=together,  # none may stop before the others: they need its part
            **settings,
        )
    model.train(was_training)
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
