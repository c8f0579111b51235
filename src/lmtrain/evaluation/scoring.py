"""Scores a model on text, conversations or pairs, row by row, from the exact log-likelihoods of their tokens."""

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch

from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.config.targets import find_class
from lmtrain.data.chat.turns import is_exact
from lmtrain.data.examples.pair_rows import margins_of
from lmtrain.data.examples.rows import padded
from lmtrain.data.framing import before_documents
from lmtrain.data.tokenizers import shows_numbers
from lmtrain.distributed import process_group as world
from lmtrain.errors import UserError
from lmtrain.evaluation import data, subject
from lmtrain.evaluation.results import Evaluated, Scores
from lmtrain.evaluation.subject import Subject
from lmtrain.generation.sampling import Continuation, continuations, positions
from lmtrain.generation.text_metrics import ExactMatch, TextMetrics
from lmtrain.losses.preferences import Pairs, PreferenceLosses, bradley_terry
from lmtrain.models.attention import generation_mode
from lmtrain.models.documents import Inputs
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.scalar_head import refuse_scalar_head, scores_of
from lmtrain.objectives.base import Objective
from lmtrain.run_folder.trained import place

_AHEAD = 16  # number of batches whose windows are sorted by length together, which keeps padding small


class Window(NamedTuple):
    """A window of tokens [T] that the model sees at once, and which are scored, bool [T]; the first never is."""

    ids: np.ndarray
    scored: np.ndarray
    row: int  # the document, conversation or answer they belong to


def windows(ids: np.ndarray, row: int, context: int, stride: int, given: int = 1) -> Iterator[Window]:
    """Yields a document's windows; each token but the first `given` is scored once, in the first window that holds it.

    After the first window, every scored token has at least `context - stride` tokens of context.
    """
    done = given
    for begin in range(0, max(1, len(ids)), stride):
        end = min(begin + context, len(ids))
        if end > done:
            yield Window(ids[begin:end], np.arange(begin, end) >= done, row)
            done = end
        if end == len(ids):
            return


def negative_log_likelihoods(
    model: LanguageModel,
    stretches: Iterable[Window],
    batch_size: int,
    precision: str = "float32",
    part: tuple[int, int] = (0, 1),
) -> Iterator[tuple[int, float, int]]:
    """Yields (row, summed negative log-likelihood in nats, number of scored tokens) of each window, in any order.

    Windows are padded on the right, where scored tokens can't attend to the padding, so the batch size changes the
    results by no more than rounding.

    Args:
        precision: float32, or bfloat16 (autocast of matrix products; log-probabilities stay fp32).
        part: (i, n) scores every n-th batch from the i-th on; n callers together score the same batches as one caller.
    """
    device = model.model.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    for batch in islice(_batches(stretches, batch_size), part[0], None, part[1]):
        with torch.inference_mode(), autocast:
            sums = _summed(model, batch, device)
        for window, total in zip(batch, sums, strict=True):
            yield window.row, total, int(window.scored.sum())


def _batches(stretches: Iterable[Window], batch_size: int) -> Iterator[list[Window]]:
    waiting = iter(stretches)
    while some := list(islice(waiting, batch_size * _AHEAD)):
        some.sort(key=lambda window: -len(window.ids))
        for start in range(0, len(some), batch_size):
            yield some[start : start + batch_size]


def _summed(model: LanguageModel, batch: list[Window], device: torch.device) -> list[float]:
    laid = padded([(window.ids, window.scored) for window in batch])
    input_ids, at = laid["input_ids"].to(device), laid["learned"].to(device)  # at: before each scored token
    inputs = Inputs(input_ids, row_lengths=laid["row_lengths"].to(device))
    found = model.log_probs(inputs, scored=at + 1, before=at).tokens.double()
    sums = torch.zeros(len(batch), dtype=torch.float64, device=device)
    return (-sums.index_add(0, at // input_ids.shape[1], found)).tolist()


def evaluate(who: Subject, config: Config, chosen: Config) -> Evaluated:
    """Scores `who` on the data of `chosen` with the settings of `config.evaluate`."""
    kind = data.kind_of(chosen)
    if kind != "pairs":
        refuse_scalar_head(who.model.model, "text to score")
    if kind == "text":
        return _text(who, config, chosen)
    rows = world.together(lambda: data.rows(chosen, who.tokenizer_name))
    longest, most = int(rows.examples.lengths.max()), positions(who.model.model)
    if longest > most:
        raise UserError(f"a row has {longest} tokens and {who.name} positions for {most}: set data.max_length={most}")
    there = len(rows.examples) // (2 if kind == "pairs" else 1)
    count = min(there, config.evaluate.limit or there)
    if kind == "conversations":
        found = _conversations(who, config, rows, count)
    else:
        found = (_rewarded if who.model.has_scalar_head else _pairs)(who, config, rows, count)
    found.all_in_order = not rows.left_out and not rows.is_split
    return found


def _text(who: Subject, config: Config, chosen: Config) -> Evaluated:
    e = config.evaluate
    context, stride = window_sizes(who, config)
    first = before_documents(who.tokenizer) if e.start_token else []
    documents, sizes = data.ScoredDocuments(chosen, e.limit), list[int]()

    def stretches() -> Iterable[Window]:
        for row, (ids, size) in enumerate(documents.read(who.tokenizer)):
            lost = 0 if first else data.bytes_of(int(ids[0]), who.tokenizer)
            sizes.append(size - lost)  # bytes of the scored text
            yield from windows(np.concatenate([first, ids]).astype(np.int64), row, context, stride, max(1, len(first)))

    # The documents' log-likelihoods; the last ones may have no token to score.
    nll, tokens = _sums(who.model, stretches(), config)
    nll, tokens = (np.pad(column, (0, len(sizes) - len(column))) for column in (nll, tokens))
    if not tokens.sum():
        raise UserError("the text to evaluate on has no token to score: is it empty?")

    # The scores, per byte only where all characters are known to the tokenizer.
    columns: dict[str, np.ndarray] = {"nll": nll, "tokens": tokens}
    ratios = {"loss": ("nll", "tokens")}
    known = {"documents": len(sizes), "tokens": int(tokens.sum())}
    if not shows_numbers(who.tokenizer):
        columns |= {"bits": nll / math.log(2), "bytes": np.array(sizes, dtype=float)}
        ratios["bits_per_byte"] = ("bits", "bytes")
        known["bytes"] = sum(sizes)
    scores = Scores(columns, ratios)
    if documents.unknown:  # their loss is that of one token, whichever characters they are
        known["unknown characters"] = documents.unknown
    known["tokens_sha256"] = documents.digest.hexdigest()
    used = {"context": context, "stride": stride, "start_token": first, "precision": e.precision}
    return Evaluated(scores, known, used)


def window_sizes(who: Subject, config: Config) -> tuple[int, int]:
    """Returns (context, stride) in tokens; UserError if context exceeds the model's positions or stride >= context."""
    most, e = positions(who.model.model), config.evaluate
    context = e.context or min(most, who.own.data.seq_len if who.own is not None else most)
    if context > most:
        raise UserError(f"evaluate.context={context}: {who.name} has positions for {most} tokens")
    if context == 2**31:
        raise UserError("this model has no fixed context length: set evaluate.context=2048, for example")
    stride = e.stride or context // 2
    if stride >= context:
        raise UserError(f"evaluate.stride={stride}: less than evaluate.context={context} is needed")
    return context, stride


def _sums(model: LanguageModel, stretches: Iterable[Window], config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Returns the negative log-likelihood in nats and the number of scored tokens of each row, fp64 [rows] each."""
    found: dict[int, list[tuple[float, int]]] = {}
    e, part = config.evaluate, (world.rank(), world.size())
    mine = world.together(lambda: list(negative_log_likelihoods(model, stretches, e.batch_size, e.precision, part)))
    for row, nll, tokens in itertools.chain.from_iterable(world.gathered(mine)):
        found.setdefault(row, []).append((nll, tokens))
    totals = np.zeros((max(found, default=-1) + 1, 2))
    for row, of_windows in found.items():
        # fsum is exactly rounded, so the order of the windows does not matter.
        totals[row] = [math.fsum(column) for column in zip(*of_windows, strict=True)]
    return totals[:, 0], totals[:, 1]


def _examples(rows: data.ScoredRows, count: int) -> Iterable[Window]:
    for row in range(count):
        ids, learned = rows.examples.read(row)
        learned[:1] = False  # of a user's row format
        yield Window(ids, learned, row)


def _conversations(who: Subject, config: Config, rows: data.ScoredRows, count: int) -> Evaluated:
    e = config.evaluate
    nll, tokens = _sums(who.model, _examples(rows, count), config)
    scores = Scores({"nll": nll, "tokens": tokens}, {"loss": ("nll", "tokens")})
    name = "examples of conversations" if rows.is_split else "conversations"
    known = {name: count, "tokens": int(tokens.sum()), "rows_fingerprint": rows.fingerprint}
    questions = dict(islice(((row, q) for row, q in rows.questions.items() if row < count), e.answers))
    if questions:
        scores.answered = list(questions)
        _add_answers(scores, who, config, list(questions.values()), rows.end_ids)
        known["answers"] = len(questions)
    return Evaluated(scores, known, {"precision": e.precision, "max_new_tokens": e.max_new_tokens})


def _add_answers(
    scores: Scores, who: Subject, config: Config, questions: list[dict[str, Any]], end_ids: list[int]
) -> None:
    """Generates greedy answers and adds them and their metrics to `scores`."""
    e = config.evaluate
    metrics = TextMetrics(e.metrics, config.run.allow_target, "evaluate.metrics")  # raises before answers are made

    def answer(some: list[dict[str, Any]]) -> list[Continuation]:
        prompts = [q["prompt_ids"] for q in some]
        return continuations(
            who.model.model, who.tokenizer, prompts, max_new_tokens=e.max_new_tokens, temperature=0.0, end_ids=end_ids
        )

    batches = [questions[start : start + e.batch_size] for start in range(0, len(questions), e.batch_size)]
    made = [one for some in world.shared_out(batches, answer) for one in some]
    answers = [one.text for one in made]
    references, prompts = [q["reference"] for q in questions], [q["prompt"] for q in questions]
    scores.whole |= world.from_first(lambda: metrics.score(answers, references, prompts))
    scores.texts |= {"prompt": prompts, "answer": answers, "reference": references}
    scores.columns["cut_off"] = np.array([one.cut for one in made], dtype=float)
    if isinstance(metrics.metrics.get("exact_match"), ExactMatch):
        same = [is_exact(a, r) for a, r in zip(answers, references, strict=True)]
        scores.columns |= {"exact": np.array(same, dtype=float), "answers": np.ones(len(same))}
        scores.ratios["exact_match"] = ("exact", "answers")
        del scores.whole["exact_match"]


def _pairs(who: Subject, config: Config, rows: data.ScoredRows, count: int) -> Evaluated:
    judge, options = _judge_of_pairs(who, config)
    nll, tokens = _sums(who.model, _examples(rows, 2 * count), config)
    reference, named = None, "none"
    if options.reference_in_use() != "none":
        model, named = world.together(lambda: reference_model(who, config))
        reference = -_sums(model, _examples(rows, 2 * count), config)[0]
    scores = pair_scores(-nll, reference, tokens, lambda pairs: judge(options, pairs))
    known = {"pairs": count, "rows_fingerprint": rows.fingerprint}
    said = {name: getattr(options, name) for name in ("loss", "beta") if hasattr(options, name)}
    return Evaluated(scores, known, {"precision": config.evaluate.precision, **said, "reference": named})


def _judge_of_pairs(who: Subject, config: Config) -> tuple[Callable[[Any, Pairs], PreferenceLosses], ObjectiveConfig]:
    """Returns the `pair_losses` of the model's own objective, or of that of the command, and its options."""
    for own in (c for c in (who.own, config) if c is not None):
        cls = find_class(own.objective._target_, "objective", Objective, config.run.allow_target)  # type: ignore[type-abstract]
        if cls.pair_losses is not Objective.pair_losses:
            return cls.pair_losses, own.objective
    raise UserError("pairs are judged by a preference loss: set objective=dpo (objective.loss, objective.beta)")


def pair_scores(
    policy: np.ndarray,
    reference: np.ndarray | None,
    tokens: np.ndarray,
    judge: Callable[[Pairs], PreferenceLosses],
) -> Scores:
    """Computes loss, accuracy and rewards from answer log-probabilities [2 P], alternating chosen and rejected."""
    chosen, rejected = (torch.from_numpy(policy[i::2]) for i in (0, 1))
    lengths = [torch.from_numpy(tokens[i::2]) for i in (0, 1)]
    base = [None, None] if reference is None else [torch.from_numpy(reference[i::2]) for i in (0, 1)]
    losses = judge(Pairs(chosen, rejected, *lengths, *base))
    return of_pairs(losses.total.detach(), losses.chosen_rewards, losses.rejected_rewards)


def of_pairs(loss: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor) -> Scores:
    """Builds the scores from each pair's loss [P] and the rewards of its chosen and rejected answers, [P] each."""
    margin = (chosen - rejected).numpy()
    columns = {
        "loss": loss.numpy(),
        "margin": margin,
        "right": (margin > 0) + 0.5 * (margin == 0),  # a model compared with itself has margin 0, so one half
        "chosen": chosen.numpy(),
        "rejected": rejected.numpy(),
        "pairs": np.ones(len(margin)),
    }
    named = {"loss": "loss", "accuracy": "right", "margin": "margin", "chosen_reward": "chosen",
             "rejected_reward": "rejected"}  # fmt: skip
    return Scores(columns, {score: (column, "pairs") for score, column in named.items()})


def _rewarded(who: Subject, config: Config, rows: data.ScoredRows, count: int) -> Evaluated:
    """Scores pairs by the rewards that a model with a scalar head assigns to their answers."""
    rewards = _rewards(who, rows, 2 * count, config)
    objectives = (c.objective for c in (who.own, config) if c is not None)
    options = next((o for o in objectives if o.scalar_head), None)
    margins = margins_of(rows.examples)
    margin = None if margins is None else torch.from_numpy(margins[:count])
    center = getattr(options, "center_rewards_coefficient", 0.0)
    loss = bradley_terry(rewards[::2], rewards[1::2], margin, center)
    scores = of_pairs(loss, rewards[::2], rewards[1::2])
    known = {"pairs": count, "rows_fingerprint": rows.fingerprint}
    return Evaluated(scores, known, {"precision": config.evaluate.precision})


def _rewards(who: Subject, rows: data.ScoredRows, count: int, config: Config) -> torch.Tensor:
    """Returns the rewards of the first `count` answers, fp64 [count]; the batches are divided among the ranks."""
    e, model = config.evaluate, who.model.model
    batches = [range(start, min(start + e.batch_size, count)) for start in range(0, count, e.batch_size)]

    def rewards_of(batch: range) -> list[float]:
        return scores_of(model, [rows.examples.read(i)[0].tolist() for i in batch]).tolist()

    autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=e.precision == "bfloat16")
    with autocast, generation_mode(model):
        found = world.shared_out(batches, rewards_of)
    return torch.tensor([reward for batch in found for reward in batch], dtype=torch.float64)


def reference_model(who: Subject, config: Config) -> tuple[LanguageModel, str]:
    """Returns the reference model and its name: evaluate.reference, or the pretrained model the run started from."""
    if config.evaluate.reference is not None:
        found = subject.load(config.evaluate.reference, "best", config)
        if found.tokenizer.get_vocab() != who.tokenizer.get_vocab():
            raise UserError(f"evaluate.reference={config.evaluate.reference} has another tokenizer than {who.name}")
        return found.model, config.evaluate.reference
    own = who.own
    if own is None or not isinstance(own.model, LoadedModelConfig):
        raise UserError("margins need a reference: name the model that training began with, evaluate.reference=")
    began = copy.deepcopy(own)
    if began.peft.quantization is None:
        began.trainer.accelerator = "cpu"
    pl.seed_everything(began.seed, verbose=False)
    hf_model = build_trainable_model(began, who.tokenizer)
    place(hf_model, config.trainer.accelerator)
    return LanguageModel(hf_model).eval(), f"{own.model.name_or_path}, which the run began with"
