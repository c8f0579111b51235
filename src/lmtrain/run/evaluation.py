"""Scores of a model on text, conversations or pairs, row by row; of two models on the same rows."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.config.options import DPOConfig, LoadedModelConfig
from lmtrain.config.schema import Config
from lmtrain.distributed import process_group as world
from lmtrain.errors import UserError
from lmtrain.losses.preferences import LOSSES, Pairs, preference_losses
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.dpo import loss_options
from lmtrain.outputs import evaluation_data as data
from lmtrain.outputs.generation import positions, sample_texts
from lmtrain.outputs.log_likelihood import Window, negative_log_likelihoods, windows
from lmtrain.outputs.scores import Scores
from lmtrain.outputs.text_metrics import ExactMatch, TextMetrics
from lmtrain.run import subject
from lmtrain.run.subject import Subject


@dataclasses.dataclass
class Evaluated:
    """A model's scores and what it was scored on."""

    scores: Scores
    data: dict[str, Any]
    settings: dict[str, Any]


def evaluate(who: Subject, config: Config, chosen: Config) -> Evaluated:
    """Scores of `who` on the data of `chosen`, by the settings of `config.evaluate`."""
    kind = data.kind_of(chosen.data)
    if kind == "text":
        return _text(who, config, chosen)
    rows = world.together(lambda: data.rows(chosen, who.tokenizer_name))
    longest, most = int(rows.examples.lengths.max()), positions(who.model.model)
    if longest > most:
        raise UserError(f"a row has {longest} tokens and {who.name} positions for {most}: set data.max_length={most}")
    return (_conversations if kind == "conversations" else _pairs)(who, config, chosen, rows)


def _text(who: Subject, config: Config, chosen: Config) -> Evaluated:
    e = config.evaluate
    context, stride = window_sizes(who, config)
    first = start_ids(who.tokenizer) if e.start_token else []
    documents, sizes = data.Documents(chosen, e.limit), list[int]()

    def stretches() -> Iterable[Window]:
        for row, (ids, size) in enumerate(documents.read(who.tokenizer)):
            lost = 0 if first else len(who.tokenizer.decode(ids[:1].tolist()).encode())
            sizes.append(size - lost)  # the bytes of what is scored
            yield from windows(np.concatenate([first, ids]).astype(np.int64), row, context, stride)

    nll, tokens = _sums(who.model, stretches(), config)
    nll, tokens = (np.pad(column, (0, len(sizes) - len(column))) for column in (nll, tokens))
    if not tokens.sum():
        raise UserError("the text to evaluate on has no token to score: is it empty?")
    columns = {"nll": nll, "tokens": tokens, "bits": nll / math.log(2), "bytes": np.array(sizes, dtype=float)}
    ratios = {"loss": ("nll", "tokens"), "bits_per_byte": ("bits", "bytes")}
    scores = Scores(columns, ratios)
    known = {"documents": len(sizes), "tokens": int(tokens.sum()), "bytes": sum(sizes)}
    known["tokens_sha256"] = documents.digest.hexdigest()
    used = {"context": context, "stride": stride, "start_token": first, "precision": e.precision}
    return Evaluated(scores, known, used)


def window_sizes(who: Subject, config: Config) -> tuple[int, int]:
    """(context, stride) in tokens; UserError where the model has no such positions, or a token would see none."""
    most, e = positions(who.model.model), config.evaluate
    context = e.context or min(most, who.own.data.seq_len if who.own is not None else most)
    if context > most:
        raise UserError(f"evaluate.context={context}: {who.name} has positions for {most} tokens")
    if context == 2**31:
        raise UserError("this model has no bound on what it sees at once: set evaluate.context=2048, say")
    stride = e.stride or context // 2
    if stride >= context:
        raise UserError(f"evaluate.stride={stride}: less than evaluate.context={context} is needed")
    return context, stride


def start_ids(tokenizer: Any) -> list[int]:
    """The token a document begins after: the beginning of text, or else the end of the one before."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [] if start is None else [start]


def _sums(model: LanguageModel, stretches: Iterable[Window], config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Negative log-likelihood in nats and number of scored tokens of each row, fp64 [rows]."""
    sums: dict[int, list[float]] = {}
    e, part = config.evaluate, (world.rank(), world.size())
    score = lambda: list(negative_log_likelihoods(model, stretches, e.batch_size, e.precision, part))  # noqa: E731
    mine = world.together(score)
    for row, nll, tokens in itertools.chain.from_iterable(world.gathered(mine)):
        sums.setdefault(row, []).append(nll)
        sums.setdefault(~row, []).append(tokens)
    count = max(sums, default=-1) + 1
    # fsum: exact, so in whatever order the windows came.
    totals = np.array([[math.fsum(sums.get(row, [])), math.fsum(sums.get(~row, []))] for row in range(count)])
    return (totals[:, 0], totals[:, 1]) if count else (np.zeros(0), np.zeros(0))


def _examples(rows: data.Rows, count: int) -> Iterable[Window]:
    for row in range(count):
        yield Window(*rows.examples.read(row), row)


def _conversations(who: Subject, config: Config, chosen: Config, rows: data.Rows) -> Evaluated:
    e = config.evaluate
    count = min(len(rows.examples), e.limit or len(rows.examples))
    nll, tokens = _sums(who.model, _examples(rows, count), config)
    scores = Scores({"nll": nll, "tokens": tokens}, {"loss": ("nll", "tokens")})
    known = {"conversations": count, "tokens": int(tokens.sum()), "rows_fingerprint": rows.fingerprint}
    questions = rows.questions[: min(e.answers, e.limit or e.answers)]
    if questions:
        _add_answers(scores, who, config, questions, rows.end_ids)
        known["answers"] = len(questions)
    return Evaluated(scores, known, {"precision": e.precision, "max_new_tokens": e.max_new_tokens})


def _add_answers(
    scores: Scores, who: Subject, config: Config, questions: list[dict[str, Any]], end_ids: list[int]
) -> None:
    """Greedy answers, and what the metrics make of them."""
    e = config.evaluate
    metrics = TextMetrics(e.metrics, config.run.allow_target, "evaluate.metrics")  # refused before anything is written

    def answer(some: list[dict[str, Any]]) -> list[str]:
        prompts = [q["prompt_ids"] for q in some]
        return sample_texts(
            who.model.model, who.tokenizer, prompts, max_new_tokens=e.max_new_tokens, temperature=0.0, end_ids=end_ids
        )

    batches = [questions[start : start + e.batch_size] for start in range(0, len(questions), e.batch_size)]
    answers = [text for texts in world.shared_out(batches, answer) for text in texts]
    references = [q["reference"] for q in questions]
    scores.whole |= world.from_first(lambda: metrics.score(answers, references))
    scores.texts |= {"prompt": [q["prompt"] for q in questions], "answer": answers, "reference": references}
    if isinstance(metrics.metrics.get("exact_match"), ExactMatch):
        same = [a.strip() == r.strip() for a, r in zip(answers, references, strict=True)]
        scores.columns |= {"exact": np.array(same, dtype=float), "answers": np.ones(len(same))}
        scores.ratios["exact_match"] = ("exact", "answers")
        del scores.whole["exact_match"]


def _pairs(who: Subject, config: Config, chosen: Config, rows: data.Rows) -> Evaluated:
    options = (c.objective for c in (who.own, config) if c is not None)
    objective = next((o for o in options if isinstance(o, DPOConfig)), None)
    if objective is None:
        raise UserError("pairs are judged by a preference loss: set objective=dpo (objective.loss, objective.beta)")
    e, count = config.evaluate, min(len(rows.examples) // 2, config.evaluate.limit or len(rows.examples) // 2)
    nll, tokens = _sums(who.model, _examples(rows, 2 * count), config)
    reference, named = None, "none"
    if LOSSES[str(objective.loss)].has_reference and objective.reference != "none":
        model, named = world.together(lambda: reference_model(who, config))
        reference = -_sums(model, _examples(rows, 2 * count), config)[0]
    scores = pair_scores(-nll, reference, tokens, objective)
    known = {"pairs": count, "rows_fingerprint": rows.fingerprint}
    used = {"precision": e.precision, "loss": objective.loss, "beta": objective.beta, "reference": named}
    return Evaluated(scores, known, used)


def pair_scores(policy: np.ndarray, reference: np.ndarray | None, tokens: np.ndarray, objective: DPOConfig) -> Scores:
    """Loss, accuracy and rewards from log-probabilities of the answers [2 P], chosen and rejected in turn."""
    chosen, rejected = (torch.from_numpy(policy[i::2]) for i in (0, 1))
    lengths = [torch.from_numpy(tokens[i::2]) for i in (0, 1)]
    base = [None, None] if reference is None else [torch.from_numpy(reference[i::2]) for i in (0, 1)]
    losses = preference_losses(str(objective.loss), Pairs(chosen, rejected, *lengths, *base), loss_options(objective))
    margin = (losses.chosen_rewards - losses.rejected_rewards).numpy()
    columns = {
        "loss": losses.total.detach().numpy(),
        "margin": margin,
        "right": (margin > 0) + 0.5 * (margin == 0),  # a model against itself can't tell: one half
        "chosen": losses.chosen_rewards.numpy(),
        "rejected": losses.rejected_rewards.numpy(),
        "pairs": np.ones(len(margin)),
    }
    named = {"loss": "loss", "accuracy": "right", "margin": "margin", "chosen_reward": "chosen",
             "rejected_reward": "rejected"}  # fmt: skip
    return Scores(columns, {score: (column, "pairs") for score, column in named.items()})


def reference_model(who: Subject, config: Config) -> tuple[LanguageModel, str]:
    """evaluate.reference, or the pretrained model that a run began with."""
    if config.evaluate.reference is not None:
        found = subject.load(config.evaluate.reference, "best", config)
        if found.tokenizer.get_vocab() != who.tokenizer.get_vocab():
            raise UserError(f"evaluate.reference={config.evaluate.reference} has another tokenizer than {who.name}")
        return found.model, config.evaluate.reference
    own = who.own
    if own is None or not isinstance(own.model, LoadedModelConfig):
        raise UserError("margins are against a reference: name the model that training began with, evaluate.reference=")
    began = copy.deepcopy(own)
    if began.peft.quantization is None:
        began.trainer.accelerator = "cpu"
    pl.seed_everything(began.seed, verbose=False)
    hf_model = build_trainable_model(began, who.tokenizer)
    subject.place(hf_model, config.trainer.accelerator)
    return LanguageModel(hf_model, own.objective).eval(), f"{own.model.name_or_path}, which the run began with"
