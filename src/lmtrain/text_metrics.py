"""How near a model's answers are to the references: torchmetrics' text metrics by name, or a user's own."""

from typing import Any

import torch
from torchmetrics import Metric
from torchmetrics.text import BLEUScore

from lmtrain.errors import UserError
from lmtrain.targets import build_target


class ExactMatch(Metric):
    """The share of answers that are their reference, but for white space around them."""

    right: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: list[str], target: list[str]) -> None:
        self.right += sum(p.strip() == t.strip() for p, t in zip(preds, target, strict=True))
        self.seen += len(target)

    def compute(self) -> torch.Tensor:
        return self.right / self.seen


NAMED: dict[str, dict[str, Any]] = {
    # BLEU with sacreBLEU's own tokenization (Post 2018), 0 to 1.
    "bleu": {"_target_": "torchmetrics.text.SacreBLEUScore"},
    # ROUGE-L, F1 (Lin 2004), 0 to 1. rougeLsum would need nltk and its downloads.
    "rouge": {"_target_": "torchmetrics.text.ROUGEScore", "rouge_keys": "rougeL"},
    "exact_match": {"_target_": "lmtrain.text_metrics.ExactMatch"},
}
_CHOSEN = {"rouge": "rougeL_fmeasure"}  # the one of several numbers that a name stands for


class TextMetrics:
    """The metrics of callbacks.samples.metrics; a user's own goes by its class's name.

    Raises:
        UserError: one can't be built, two share a name, or one does not take two lists of texts.
    """

    def __init__(self, entries: list[Any]) -> None:
        self.metrics: dict[str, Metric] = {}
        for entry in entries:
            name = entry if isinstance(entry, str) else entry["_target_"].rpartition(".")[2]
            if name in self.metrics:
                raise UserError(f"callbacks.samples.metrics names {name} twice")
            try:
                self.metrics[name] = build_target(NAMED[name] if isinstance(entry, str) else entry)
                # The first rank alone scores: a metric that looked for the others would wait for ever.
                self.metrics[name].distributed_available_fn = lambda: False
                self._one(name, ["a word"], ["a word"])
            except (ImportError, AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
                raise UserError(
                    f"callbacks.samples.metrics: {name} is no metric of answers and references, two lists of texts "
                    f"({type(error).__name__}: {error})"
                ) from error

    def names(self) -> list[str]:
        """What `score` reports."""
        return list(self.score(["a word"], ["a word"])) if self.metrics else []

    def score(self, answers: list[str], references: list[str]) -> dict[str, float]:
        """Each metric over all answers; one that gives several numbers has them as <name>_<number's name>."""
        found: dict[str, float] = {}
        for name in self.metrics:
            found |= self._one(name, answers, references)
        return found

    def _one(self, name: str, answers: list[str], references: list[str]) -> dict[str, float]:
        metric = self.metrics[name]
        metric.reset()
        # BLEU takes a list of references for each answer, and a text alone for a list of letters.
        metric.update(answers, [[r] for r in references] if isinstance(metric, BLEUScore) else references)
        value = metric.compute()
        if not isinstance(value, dict):
            return {name: float(value)}
        if name in _CHOSEN:
            return {name: float(value[_CHOSEN[name]])}
        return {f"{name}_{key}": float(number) for key, number in value.items()}
