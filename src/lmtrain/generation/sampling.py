"""Text generation: continues prompts from left to right, or by iterative unmasking for masked diffusion models."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmtrain.config.schema import GenerateConfig
from lmtrain.data import framing
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.errors import UserError
from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import evaluating
from lmtrain.models.denoising import mask_token


class Continuation(NamedTuple):
    """What a model wrote after a prompt. cut: its tokens were used up before it had written one that ends a text."""

    text: str
    cut: bool


def positions(model: PreTrainedModel) -> int:
    """Returns the maximum number of tokens the model accepts, or 2**31 if it has no position limit (Mamba)."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def settings_of(g: GenerateConfig) -> dict[str, Any]:
    """Returns the arguments of `continuations` that config.generate sets."""
    return {"max_new_tokens": g.max_new_tokens, "temperature": g.temperature, "top_k": g.top_k}


def sample_text(model: PreTrainedModel, tokenizer: Any, prompt: str | list[int], **settings: Any) -> str:
    """Returns the continuation of one prompt; takes the keyword arguments of `continuations`."""
    return sample_texts(model, tokenizer, [prompt], **settings)[0]


def sample_texts(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[str | list[int]], **settings: Any
) -> list[str]:
    """Returns the texts of `continuations`, whose arguments it takes."""
    return [found.text for found in continuations(model, tokenizer, prompts, **settings)]


def continuations(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[str | list[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    end_ids: list[int] | None = None,
    together: bool = False,
    no_repeat: int | None = None,
) -> list[Continuation]:
    """Returns the continuations (without the prompts) of up to max_new_tokens tokens each; temperature 0 is greedy.

    A masked diffusion model generates the texts one after the other. All other models generate them as one batch with
    left padding and an attention mask, so a greedy text is the same as for its prompt alone. Prompts are truncated on
    the left, behind what stands before a text, so that prompt and continuation fit the model's positions. The state of
    the global random generators is preserved.

    Args:
        prompts: texts or lists of token ids.
        end_ids: ids of the tokens that end a text; None for those in the model's own generation config.
        no_repeat: a sequence of this many tokens is generated at most once in a text; not by a masked diffusion model.
        together: whether all ranks generate the same texts, each rank holding a shard of the model.
    """
    room = max(1, positions(model) - max_new_tokens)
    start = framing.start_of(tokenizer)
    rows = [framing.last_of(prompt_tokens(tokenizer, prompt), room, start) for prompt in prompts]
    _check_ids(model, rows)
    mask_id = mask_token(model)
    with evaluating(model):
        if mask_id is None:
            settings = sampling(temperature, top_k, end_ids)
            # synced_gpus keeps every rank running until all are done, since the others need its shard of the model.
            # A model whose loss became NaN gives (meaningless) text, not an error.
            settings |= {"synced_gpus": together, "remove_invalid_values": True, "no_repeat_ngram_size": no_repeat or 0}
            return continued(model, tokenizer, rows, max_new_tokens, seed, **settings)
        generator = torch.Generator(model.device).manual_seed(seed)
        settings = {"mask_id": mask_id, "temperature": temperature, "top_k": top_k, "generator": generator}
        return _denoised(model, tokenizer, rows, max_new_tokens, end_ids, **settings)


def continued(
    model: PreTrainedModel, tokenizer: Any, rows: list[list[int]], max_new_tokens: int, seed: int, **settings: Any
) -> list[Continuation]:
    """Returns the continuations of rows of token ids, as one batch; `settings` are arguments of `model.generate`.

    A model that can't be given positions may count the padding (BART), or read it (RWKV): then each row is a batch.
    """
    if len(rows) > 1 and "position_ids" not in inspect.signature(model.forward).parameters:
        return [continued(model, tokenizer, [row], max_new_tokens, seed, **settings)[0] for row in rows]
    # Padded on the left, so that all rows go on at the same place.
    longest = max(map(len, rows))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    left = [(longest - len(row), row) for row in rows]
    input_ids = torch.tensor([[pad] * n + row for n, row in left], dtype=torch.int64, device=model.device)
    mask = torch.tensor([[0] * n + [1] * len(row) for n, row in left], dtype=torch.int64, device=model.device)
    # Drawn from the seed; the random state outside stays as it is.
    devices = [model.device] if model.device.type == "cuda" else []
    most = max(1, min(max_new_tokens, positions(model) - longest))
    with torch.random.fork_rng(devices), torch.no_grad(), generation_mode(model):
        torch.manual_seed(seed)
        output = model.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=most,
            pad_token_id=tokenizer.eos_token_id,
            tokenizer=tokenizer,  # for stop strings in the model's own generation config
            **settings,
        )
    ends = settings.get("eos_token_id", model.generation_config.eos_token_id)
    ends = ends if isinstance(ends, list) else [ends]
    decoder, written = AnswerDecoder(tokenizer, ends), output[:, longest:].tolist()
    return [
        Continuation(decoder.decode(ids, row), cut=len(ids) >= most and not set(ends) & set(ids))
        for row, ids in zip(rows, written, strict=True)
    ]


def _denoised(
    model: PreTrainedModel, tokenizer: Any, rows: list[list[int]], max_new_tokens: int, end_ids: list[int] | None,
    **settings: Any,
) -> list[Continuation]:  # fmt: skip
    """Generates each text at the full allowed length and truncates it at the first end token."""
    ends = set(end_ids if end_ids is not None else [tokenizer.eos_token_id])
    texts, decoder = [], AnswerDecoder(tokenizer, list(ends))
    for row in rows:
        length = max(1, min(max_new_tokens, positions(model) - len(row)))
        ids = denoise(model, row, length, n_ids=len(tokenizer), **settings)
        end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        texts.append(Continuation(decoder.decode(ids[:end], row), cut=end == len(ids)))
    return texts


def _check_ids(model: Any, rows: list[list[int]]) -> None:
    """Raises UserError if the model has no embedding for an id, which means that the tokenizer is another model's."""
    highest, known = max(max(row) for row in rows), getattr(model.config, "vocab_size", None)
    if known is not None and highest >= known:
        found = f"the tokenizer gives the id {highest}, and the model has {known:,} embeddings"
        raise UserError(f"{found}: take the one it was trained with")


def prompt_tokens(tokenizer: Any, prompt: str | list[int]) -> list[int]:
    """Returns the ids of a prompt: of a text, what stands before one (framing.py) and the tokenizer's ids.

    If there are none, they are the end-of-text token, after which a document begins.
    """
    ids = framing.text_ids(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not ids and tokenizer.eos_token_id is None:
        raise UserError("the prompt is empty, and the tokenizer has no end-of-text token to begin with: give a prompt")
    return ids or [tokenizer.eos_token_id]


def sampling(temperature: float, top_k: int | None, end_ids: list[int] | None) -> dict[str, Any]:
    """Returns arguments of `generate`; temperature 0 is greedy, end_ids=None uses the model's own generation config.

    Beams and the number of texts per prompt are fixed at 1, since a downloaded config could exhaust the memory by
    asking for a million beams.
    """
    settings: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
    if temperature > 0:
        settings |= {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
    return settings | ({"eos_token_id": end_ids} if end_ids is not None else {})


STEPS = 32  # denoising steps per text; with fewer new tokens, one step per token


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
    """Generates `new_tokens` ids after the prompt by iterative unmasking (Sahoo et al. 2024, arXiv:2406.07524).

    The tokens to unmask are chosen by low-confidence remasking (Nie et al. 2025, arXiv:2502.09992, section 2.4): those
    whose predictions the model is most confident of.

    Each step predicts all tokens that are still masked and keeps the 1 / (steps left) of them whose predictions have
    the highest probability.

    Args:
        model: a masked diffusion model in evaluation mode.
        mask_id: the id of the mask token, which is never predicted.
        n_ids: the size of the vocabulary; ids from here on belong to no token and are never predicted.
        temperature: the sampling temperature; 0 takes the most likely token.
        top_k: samples from the k most likely tokens; None samples from all.
        generator: a random generator on the model's device.
    """
    ids = torch.tensor([prompt + [mask_id] * new_tokens], dtype=torch.int64, device=model.device)
    masked = torch.zeros_like(ids[0], dtype=torch.bool)  # tracked by position, since the prompt may contain mask_id
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
    """Returns a token for each row of logits [M, V], int64 [M], and its probability under those logits, [M]."""
    probabilities = torch.nan_to_num(logits.softmax(-1), 1.0)  # if the loss became NaN, any token will do
    if temperature == 0:
        tokens = probabilities.argmax(-1)
    else:
        best = probabilities.topk(min(top_k or probabilities.shape[1], probabilities.shape[1]))
        weights = (best.values / best.values[:, :1]) ** (1 / temperature)
        tokens = best.indices.gather(1, torch.multinomial(weights, 1, generator=generator))[:, 0]
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0]
