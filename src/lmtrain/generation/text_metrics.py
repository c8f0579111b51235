"""Text metrics that compare generated answers with references: named torchmetrics metrics or a user's own class."""

import ast
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torchmetrics import MeanMetric, Metric
from torchmetrics.text import BLEUScore, CHRFScore
from transformers import AutoModel, AutoTokenizer

from lmtrain.config.targets import build_target
from lmtrain.data.chat.turns import is_exact
from lmtrain.errors import UserError


class ExactMatch(MeanMetric):
    """The share of answers that equal their reference, ignoring leading and trailing white space."""

    def update(self, preds: list[str], target: list[str]) -> None:  # type: ignore[override]
        same = [float(is_exact(p, t)) for p, t in zip(preds, target, strict=True)]
        super().update(torch.tensor(same, dtype=torch.float32))


def reading(text: str) -> str:
    """Says how many lines the longest beginning of a text has that parses as Python; a last, cut line is left out."""
    lines = text.splitlines()[:-1]
    right = next((n for n in range(len(lines), 0, -1) if _parses("\n".join(lines[:n]))), 0)
    return f"parses: {right} of {len(lines)} lines"


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes in the text
            ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


class BertScore(MeanMetric):
    """BERTScore F1 (Zhang et al. 2020, arXiv:1904.09675) with the encoder's last layer, averaged over the answers.

    Each token is matched with the most similar token of the other text. The implementation of torchmetrics is not used,
    as it mixes up the pairs of a batch: it sorts answers and references by length separately and does not sort back.

    Args:
        encoder: hub name or folder of the encoder.
    """

    def __init__(self, encoder: str) -> None:
        super().__init__(nan_strategy="disable")  # a NaN is no answer to leave out
        self.tokenizer = AutoTokenizer.from_pretrained(encoder)
        self.encoder = AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()

    def update(self, preds: list[str], target: list[str]) -> None:  # type: ignore[override]
        for answer, reference in zip(preds, target, strict=True):
            similar = self._states(answer) @ self._states(reference).T  # [answer tokens, reference tokens]
            score = torch.tensor(0.0, dtype=torch.float32)
            if similar.numel():
                precision, recall = similar.amax(1).mean(), similar.amax(0).mean()
                score = 2 * precision * recall / (precision + recall)
            super().update(score)

    @torch.no_grad()
    def _states(self, text: str) -> torch.Tensor:
        """Returns normalized hidden states of the text's tokens [T, H], without the special tokens of the tokenizer."""
        longest = min(512, self.tokenizer.model_max_length)
        cut = {"truncation": True, "max_length": longest}
        found = self.tokenizer(text, return_tensors="pt", return_special_tokens_mask=True, **cut)
        own = found.pop("special_tokens_mask")[0] == 0
        return torch.nn.functional.normalize(self.encoder(**found).last_hidden_state[0, own], dim=-1)


# ROUGE's F1 (Lin 2004), 0 to 1: of the longest common subsequence (rougeLsum would need nltk and its downloads), of
# single words, of pairs of words.
_ROUGE = {"rouge": "rougeL", "rouge1": "rouge1", "rouge2": "rouge2"}
NAMED: dict[str, dict[str, Any]] = {
    # BLEU with sacreBLEU's own tokenization (Post 2018), 0 to 1.
    "bleu": {"_target_": "torchmetrics.text.SacreBLEUScore"},
    **{name: {"_target_": "torchmetrics.text.ROUGEScore", "rouge_keys": kind} for name, kind in _ROUGE.items()},
    "exact_match": {"_target_": "lmtrain.generation.text_metrics.ExactMatch"},
}
BERTSCORE = "bertscore:"  # prefix of the encoder's hub name or folder

_ANY = ["a word"], ["a word"], [""]  # an answer, its reference and its prompt, to see whether a metric takes them


def _target_of(entry: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name and the target (class and arguments) of a requested metric."""
    if not isinstance(entry, str):
        return entry["_target_"].rpartition(".")[2], entry
    if entry.startswith(BERTSCORE):
        encoder = entry.removeprefix(BERTSCORE)
        return "bertscore", {"_target_": "lmtrain.generation.text_metrics.BertScore", "encoder": encoder}
    return entry, NAMED[entry]


class TextMetrics:
    """The metrics set by `key`, callbacks.samples.metrics or evaluate.metrics; custom ones are named after their class.

    Raises:
        UserError: a metric can't be built, two share a name, or one does not accept two lists of texts.
    """

    def __init__(
        self, entries: list[Any], allow_target: Sequence[str] = (), key: str = "callbacks.samples.metrics"
    ) -> None:
        self.metrics: dict[str, Metric] = {}
        for entry in entries:
            name, target = _target_of(entry)
            if name in self.metrics:
                raise UserError(f"{key} names {name} twice")
            try:
                self.metrics[name] = build_target(target, key, Metric, allow_target)
                # Only rank 0 computes scores, so a metric that synchronized with the other ranks would wait forever.
                self.metrics[name].distributed_available_fn = lambda: False
                self._one(name, *_ANY)
            except OSError as error:
                said = " ".join(str(error).split())
                raise UserError(f"{key}: {entry}: the encoder can't be loaded ({said}): a folder or hub name") from None
            except (ImportError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
                why = f"{name} is not a metric of answers and references, two lists of texts"
                raise UserError(f"{key}: {why} ({type(error).__name__}: {error})") from error

    def names(self) -> list[str]:
        """Returns the names of the values that `score` reports."""
        return list(self.score(*_ANY)) if self.metrics else []

    def score(self, answers: list[str], references: list[str], prompts: list[str] | None = None) -> dict[str, float]:
        """Returns each metric over all answers; several values of one metric are named <metric>_<value's name>."""
        found: dict[str, float] = {}
        for name in self.metrics:
            found |= self._one(name, answers, references, prompts or [""] * len(answers))
        return found

    def _one(self, name: str, answers: list[str], references: list[str], prompts: list[str]) -> dict[str, float]:
        metric = self.metrics[name]
        metric.reset()
        # These expect a list of references per answer; a plain string would be read as a list of characters.
        several = isinstance(metric, BLEUScore | CHRFScore)
        asked = {"prompts": prompts} if getattr(metric, "takes_prompts", False) else {}
        metric.update(answers, [[r] for r in references] if several else references, **asked)
        value = metric.compute()
        if not isinstance(value, dict):
            return {name: mean(value)}
        if name in _ROUGE:
            return {name: mean(value[f"{_ROUGE[name]}_fmeasure"])}
        return {f"{name}_{key}": mean(number) for key, number in value.items()}


def mean(value: Any) -> float:
    """Returns the mean of a number or of per-row values; of a tuple (total, per-row values), returns the total."""
    if isinstance(value, tuple):
        value = value[0]
    return float(torch.as_tensor(value, dtype=torch.float64).mean())
