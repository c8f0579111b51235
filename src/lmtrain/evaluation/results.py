"""A model's scores per row with bootstrap confidence intervals, printed as a table and written to evaluations/."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from lmtrain.config.schema import Config
from lmtrain.errors import UserError, writing
from lmtrain.evaluation.subject import Subject
from lmtrain.files import absolute, json_line, strict_json, write_atomic
from lmtrain.run.summary import versions
from lmtrain.run_folder.links import refuse_link_at
from lmtrain.secrets import shown, shown_in


@dataclasses.dataclass
class Scores:
    """A model's scores on the rows of an evaluation, each a document, conversation or pair.

    columns: named arrays of per-row values, [rows] each.
    ratios: maps a score to the columns (numerator, denominator); the score is the ratio of their sums.
    whole: scores that are computed over all rows at once, such as BLEU.
    texts: named texts of each row, such as the generated answers.
    answered: the rows of those columns and texts that are shorter, which have a value for these rows only.
    """

    columns: dict[str, np.ndarray]
    ratios: dict[str, tuple[str, str]]
    whole: dict[str, float] = dataclasses.field(default_factory=dict)
    texts: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    answered: list[int] = dataclasses.field(default_factory=list)

    def parts(self, score: str) -> tuple[np.ndarray, np.ndarray]:
        return self.columns[self.ratios[score][0]], self.columns[self.ratios[score][1]]

    def has_interval(self, score: str) -> bool:
        """Returns whether several rows give the score; one row, such as a file of text, tells nothing of its spread."""
        return score in self.ratios and int(np.count_nonzero(self.parts(score)[1])) > 1

    def values(self) -> dict[str, float]:
        """Returns every score, and the perplexity if there is a loss per token."""
        found: dict[str, float] = {}
        for score in self.ratios:
            numerator, denominator = self.parts(score)
            found[score] = float(numerator.sum() / denominator.sum())
            if score == "loss" and "nll" in self.columns:
                found["perplexity"] = math.exp(min(700.0, found["loss"]))
        return found | self.whole


@dataclasses.dataclass
class Evaluated:
    """A model's scores, the data it was scored on, and the settings used.

    all_in_order: whether the n-th scored row is the n-th of the data, as none was left out or split.
    """

    scores: Scores
    data: dict[str, Any]
    settings: dict[str, Any]
    all_in_order: bool = True


class Interval(NamedTuple):
    value: float
    low: float  # bounds of the 95 % confidence interval
    high: float


def interval(scores: Scores, score: str, resamples: int, seed: int, other: Scores | None = None) -> Interval:
    """Returns the score, or its difference `scores - other` on the same rows, with its percentile bootstrap interval.

    Rows are drawn with replacement, the same rows for both models (Efron and Tibshirani 1993; Koehn 2004).
    """
    pairs = [scores.parts(score)] + ([other.parts(score)] if other is not None else [])
    rows, generator = len(pairs[0][0]), np.random.default_rng(seed)
    drawn = np.empty(resamples)
    for i in range(resamples):
        weights = np.bincount(generator.integers(rows, size=rows), minlength=rows)
        drawn[i] = _difference(pairs, weights)
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(_difference(pairs, np.ones(rows)), float(low), float(high))


def _difference(pairs: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> float:
    sums = [(float(weights @ numerator), float(weights @ denominator)) for numerator, denominator in pairs]
    # Of rows without a token, or of another task, nothing can be said: nanpercentile leaves such draws out.
    values = [numerator / denominator if denominator else math.nan for numerator, denominator in sums]
    return values[0] - (values[1] if len(values) > 1 else 0.0)


@dataclasses.dataclass
class Results:
    """The results of one model, or of two on the same rows; `words` describes the evaluation data."""

    config: Config
    words: str
    models: list[tuple[Subject, Evaluated]]

    def check_same_rows(self) -> None:
        """Raises UserError if the two models' rows can't be compared one by one."""
        (_, first), (_, second) = self.models
        counts = [len(next(iter(found.scores.columns.values()))) for found in (first, second)]
        if counts[0] != counts[1]:
            raise UserError(f"the models read {counts[0]} and {counts[1]} rows: too long ones were dropped or split")
        same = first.data.get("rows_fingerprint") == second.data.get("rows_fingerprint")
        if not same and not (first.all_in_order and second.all_in_order):
            found = "the models have other tokenizers or chat templates, and rows of the data were left out or split"
            advice = "set a larger data.max_length, or evaluate on a file without those rows (lmtrain.inspect has them)"
            raise UserError(f"{found}, so it isn't known which of their rows belong together: {advice}")

    def table(self) -> Table:
        table = Table(title=f"{shown(self.words)}: {self._size()}", title_justify="left", box=None, padding=(0, 2))
        table.add_column("score", style="bold")
        for who, _ in self.models:
            table.add_column(f"{who.name} ({who.label})", justify="right", overflow="fold")
        if len(self.models) > 1:
            table.add_column("difference (95 %)", justify="right")
        for score in self.models[0][1].scores.values():
            cells = [self._cell(found.scores, score) for _, found in self.models]
            table.add_row(score, *cells, *([self._difference_cell(score)] if len(self.models) > 1 else []))
        return table

    def _size(self) -> str:
        known = self.models[0][1].data
        return ", ".join(f"{value:,} {name}" for name, value in known.items() if isinstance(value, int))

    def _interval(self, scores: Scores, score: str, other: Scores | None = None) -> Interval:
        return interval(scores, score, self.config.evaluate.resamples, self.config.seed, other)

    def _cell(self, scores: Scores, score: str) -> str:
        if len(self.models) > 1 or not scores.has_interval(score):
            return f"{scores.values()[score]:.4f}"
        found = self._interval(scores, score)
        return f"{found.value:.4f} ({found.low:.4f} to {found.high:.4f})"

    def comparable(self, score: str) -> bool:
        """Returns whether the models' scores are comparable; losses per token are not if the vocabularies differ."""
        if score not in self.models[0][1].scores.ratios or score not in self.models[1][1].scores.ratios:
            return False
        vocabularies = [who.tokenizer.get_vocab() for who, _ in self.models]
        return score != "loss" or vocabularies[0] == vocabularies[1]

    def _difference_cell(self, score: str) -> str:
        if not self.comparable(score):
            return "other tokens" if score == "loss" else ""
        found = self._compared(score)
        spread = f" ({found['low']:+.4f} to {found['high']:+.4f})" if "low" in found else ""
        return f"{found['value']:+.4f}{spread}"

    def _compared(self, score: str) -> dict[str, float]:
        """Returns how much more the first model scores than the second, with an interval where several rows give it."""
        first, second = (found.scores for _, found in self.models)
        found = self._interval(first, score, second)
        return found._asdict() if first.has_interval(score) else {"value": found.value}

    def as_dict(self) -> dict[str, Any]:
        who, found = self.models[0]
        tree = {"model": who.identity(), **self._of(found), "data": {"what": self.words, **found.data}}
        if len(self.models) > 1:
            other, theirs = self.models[1]
            differences = {score: self._compared(score) for score in found.scores.ratios if self.comparable(score)}
            tree |= {"against": {"model": other.identity(), **self._of(theirs)}, "difference": differences}
        return tree | {"versions": versions()}

    def _of(self, found: Evaluated) -> dict[str, Any]:
        scores = found.scores
        intervals = {score: self._interval(scores, score)[1:] for score in scores.ratios if scores.has_interval(score)}
        return {"scores": scores.values(), "intervals_95": intervals, "settings": found.settings}

    def write(self) -> Path:
        """Writes the results and the rows file, returns the path of the former; UserError if writing fails."""
        e, who = self.config.evaluate, self.models[0][0]
        base = who.folder or absolute(self.config.run.root)
        folder = absolute(e.dir) if e.dir else base / "evaluations"
        if not e.dir:
            refuse_link_at(folder, base)
        tree = shown_in(self.as_dict())
        with writing(str(folder), "; set evaluate.dir to another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            name = e.name or _free(folder, f"{who.label}-{_label(self.words)}", tree, who.folder is not None)
            write_atomic(folder / f"{name}.rows.jsonl", "".join(map(json_line, self._rows())))
            write_atomic(folder / f"{name}.json", strict_json(tree, indent=2, ensure_ascii=False) + "\n")
        return folder / f"{name}.json"

    def _rows(self) -> list[dict[str, Any]]:
        """Returns a dict for each document, conversation or pair, with the second model's values under `against`."""
        tables = [_rows_of(found.scores) for _, found in self.models]
        if len(tables) > 1:
            for row, other in zip(*tables, strict=True):
                row["against"] = other
        return tables[0]


def _free(folder: Path, name: str, tree: dict[str, Any], in_run: bool) -> str:
    """Returns the name, with a number if a file of that name has the results of another evaluation.

    Args:
        tree: the results to write.
        in_run: whether the folder is the run's own, in which the model is always that run's.
    """

    def of(found: Any) -> list[Any]:
        against = found.get("against", {}).get("model", {})
        own = None if in_run else found["model"]["name"]
        return [own, against.get("name"), against.get("checkpoint"), found["data"]["what"]]

    for number in itertools.count(1):
        numbered = name if number == 1 else f"{name}-{number}"
        file = folder / f"{numbered}.json"
        # A file without these keys is none of lmtrain's and is left alone too.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            if not file.exists() or of(json.loads(file.read_text(encoding="utf-8"))) == of(tree):
                break
    return numbered


def _rows_of(scores: Scores) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in next(iter(scores.columns.values()))]
    for name, values in (scores.columns | scores.texts).items():
        for row, value in zip(range(len(rows)) if len(values) == len(rows) else scores.answered, values, strict=True):
            rows[row][name] = value if isinstance(value, str) else float(value)
    return rows


def _label(words: str) -> str:
    """Returns a file name part for the data: letters, digits, dots, underscores and dashes, at most 60 characters."""
    parts = ["val"] if words.startswith("validation") else words.removeprefix("all of ").split(", ")
    # The query of a URL grants access; it is no part of the name.
    named = "-".join((part.partition("?")[0] if "://" in part else part).rpartition("/")[2] for part in parts)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", named).strip("-")[:60]
