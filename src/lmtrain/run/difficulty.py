"""The order of a difficulty curriculum: rows scored once, by their text or by the loss of a model, and kept."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmtrain.config import trust
from lmtrain.config.constraints import TRAJECTORY
from lmtrain.config.difficulty import DIFFICULTY, rows_in_order
from lmtrain.config.keys import values
from lmtrain.config.precision import outside_fp8
from lmtrain.config.schema import Config
from lmtrain.data import difficulty
from lmtrain.data.corpus import Corpus
from lmtrain.data.difficulty import Score, Stretch
from lmtrain.data.order import Rows, permute
from lmtrain.data.store.prepared import key_hash
from lmtrain.data.store.progress import RowProgress
from lmtrain.data.text.windows import IGNORE
from lmtrain.data.tokenizers import tokenizer_hash, vocab_size
from lmtrain.distributed import process_group as world
from lmtrain.errors import UserError
from lmtrain.models.denoising import refuse_denoising
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.reference import weights_hash
from lmtrain.outputs.generation import positions
from lmtrain.run import subject, trained

# Raised when the same rows come to have other scores, so that those kept before are not used any more.
SCORES_VERSION = 1


def order_rows(config: Config, corpus: Corpus) -> None:
    """Sets `corpus.easy_first` where data.curriculum.by=difficulty: one process scores the rows, the others wait.

    Raises:
        UserError: see `score_rows`.
    """
    if config.data.curriculum.by == DIFFICULTY:
        chosen, scores = world.together(lambda: score_rows(config, corpus))
        ordered = lambda: difficulty.easy_first(chosen, scores, config.data.curriculum.buckets)  # noqa: E731
        # Of the first rank: what machines without a common cache computed may differ in the last bits.
        corpus.easy_first = world.from_first(ordered)


def score_rows(config: Config, corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """The rows that the curriculum orders, int64 [n], as they would come without it, and their scores, fp32 [n].

    Raises:
        UserError: data.curriculum.model can't be loaded, has another tokenizer or too few positions; the cache can't
            be written.
    """
    data, rows = config.data, corpus.train
    count = rows_in_order(data, len(rows))
    chosen = permute(np.arange(count), len(rows), config.seed, 0)
    make_score, weights = _score(config, corpus, chosen)
    # Which rows there are and what the first epoch cuts out of the text: all of the trajectory but how it is batched.
    unread = ("global_batch_size", "batch_warmup.", "curriculum.")
    shapes = {k: v for k, v in values(data, TRAJECTORY).items() if not k.startswith(unread)}
    key = {"version": SCORES_VERSION, "data": corpus.fingerprint, "settings": shapes, "seed": config.seed,
           "rows": count, "score": data.curriculum.score, "weights": weights,
           "tokenizer": tokenizer_hash(corpus.tokenizer)}  # fmt: skip
    folder = Path(data.cache_dir).expanduser() / f"difficulty-{data.curriculum.score}-{key_hash(key)[:12]}"
    progress = RowProgress(True)
    try:
        return chosen, difficulty.scored_once(folder, chosen, make_score, progress)
    finally:
        progress.stop()
        if config.trainer.accelerator == "cuda":
            torch.cuda.empty_cache()  # the model's memory


def _score(config: Config, corpus: Corpus, chosen: np.ndarray) -> tuple[Callable[[RowProgress], Score], str | None]:
    """What makes the score of rows, where it is needed, and the hash of the weights it depends on."""
    rows, tokenizer, name = corpus.train, corpus.tokenizer, config.data.curriculum.score
    if name == "length":
        return lambda _: difficulty.lengths(rows), None
    if name == "compression":
        return lambda _: difficulty.compression(rows, tokenizer), None
    if name == "rarity":
        return lambda progress: difficulty.rarity(rows, chosen, vocab_size(tokenizer), progress), None
    model, bf16 = _load(config, corpus), "bf16" in outside_fp8(config.trainer.precision)
    score = functools.partial(losses, model, rows, config.data.micro_batch_size, bf16)
    return lambda _: score, weights_hash(model)


def _load(config: Config, corpus: Corpus) -> LanguageModel:
    name = str(config.data.curriculum.model)
    hf_model, tokenizer = trained.load(name, "best", trust.granted(config))
    refuse_denoising(hf_model, "data.curriculum.model")
    if tokenizer.get_vocab() != corpus.tokenizer.get_vocab():
        ours = config.tokenizer.name_or_path or config.tokenizer.kind
        raise UserError(
            f"data.curriculum.model={name} has another tokenizer ({len(tokenizer):,} tokens) than this run's, {ours} "
            f"({len(corpus.tokenizer):,} tokens): its ids mean other tokens. Choose a model with the run's, or set "
            f"tokenizer=hub tokenizer.name_or_path={name}"
        )
    most, longest = positions(hf_model), _longest(config, corpus.train)
    if longest > most:
        raise UserError(
            f"data.curriculum.model={name} has positions for {most:,} tokens, and a row has {longest:,}: choose "
            f"another model, or lower data.{'seq_len' if config.data.rows == 'text' else 'max_length'}"
        )
    if config.trainer.accelerator == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    subject.place(hf_model, config.trainer.accelerator)
    return LanguageModel(hf_model, config.objective).eval()


def _longest(config: Config, rows: Rows) -> int:
    """Tokens the model sees at once, at most."""
    examples: Any = getattr(rows, "examples", None)
    if examples is None or config.data.packing not in (None, "off"):
        return config.data.seq_len
    return int(examples.lengths.max())


def losses(model: LanguageModel, rows: Rows, micro_batch_size: int, bf16: bool, chosen: np.ndarray) -> np.ndarray:
    """The mean loss of each row's learned tokens in nats, fp32 [n]; 0 for a row without any."""
    found = [(n, s) for n, row in enumerate(chosen.tolist()) for s in difficulty.stretches(rows, row)]
    found.sort(key=lambda pair: -len(pair[1].ids))  # near lengths together: little is padding
    device, sums, counts = model.model.device, np.zeros(len(chosen)), np.zeros(len(chosen))
    for batch in _batches(found, micro_batch_size):
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            owner, nll = _token_losses(model, batch, device)
        np.add.at(sums, owner, nll)
        np.add.at(counts, owner, 1)
    return (sums / np.maximum(1, counts)).astype(np.float32)


def _batches(found: list[tuple[int, Stretch]], size: int) -> Iterator[list[tuple[int, Stretch]]]:
    return (found[start : start + size] for start in range(0, len(found), size))


def _token_losses(
    model: LanguageModel, batch: list[tuple[int, Stretch]], device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Of each learned token: whose it is, int64 [C], and its loss in nats, fp64 [C]."""
    longest = max(len(s.ids) for _, s in batch)
    ids, targets = np.zeros((len(batch), longest), dtype=np.int64), np.full((len(batch), longest), IGNORE)
    for b, (_, s) in enumerate(batch):
        ids[b, : len(s.ids)], targets[b, : len(s.ids)] = s.ids, s.targets
    at = np.flatnonzero(targets != IGNORE)
    owner = np.array([n for n, _ in batch], dtype=np.int64)[at // longest]
    if len(at) == 0:
        return owner, np.zeros(0)
    inputs, places, wanted = (torch.from_numpy(a).to(device) for a in (ids, at, targets.flatten()[at]))
    tokens = model.log_probs(inputs, None, None, None, scored=places, before=places, targets=wanted).tokens
    return owner, -tokens.double().cpu().numpy()
