"""The base class of objectives with a reference: log-probabilities of answers under policy and reference."""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain.adapters.trainable import adapter_of, disabled
from lmtrain.config.batch import horizon, step_sizes
from lmtrain.config.fingerprint import of_model
from lmtrain.config.schema import Config
from lmtrain.config.strategies import SHARING, check_frozen_copy
from lmtrain.data.corpus import Corpus
from lmtrain.data.loaders import rows_used
from lmtrain.distributed import process_group as world
from lmtrain.models.blocks import evaluating
from lmtrain.models.language_model import LogProbs
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import inputs_of
from lmtrain.objectives.reference import Choice, FrozenCopy, Precomputed, choose, first_values_hash
from lmtrain.objectives.start_check import FirstSteps, answers_move, check_agreement


def why_not_precomputed(config: Config, corpus: Corpus | None) -> str:
    """Returns why auto can't precompute the reference's log-probabilities before training; "" if it can."""
    if corpus is None:
        return "the rows of this objective can't store log-probabilities"
    if world.size() > 1 and config.trainer.strategy in SHARING:
        return f"{config.trainer.strategy} shares out a model that may be too large for a single rank"
    return "those of data.val_sets are not computed before training" if config.data.val_sets else ""


def why_online_is_less(config: Config, corpus: Corpus | None) -> str:
    """Returns why a reference forward in each step is less work than one pass over all pairs; "" if it is not."""
    if corpus is None:
        return ""
    t, sizes = config.trainer, step_sizes(config.data)
    rows = len(corpus.train)
    steps = horizon(t.max_steps, t.max_epochs, rows_used(config, rows), sizes)
    val = 0 if corpus.val is None else len(corpus.val)
    each = val if t.limit_val_batches is None else min(val, t.limit_val_batches * config.data.micro_batch_size)
    validated = each * max(1, steps // (t.val_check_interval or steps))
    read = sizes.before(steps) + validated
    return f"the run reads {read:,} pairs, fewer than the {rows + val:,} there are" if read < rows + val else ""


class ReferenceObjective(Objective):
    """Base class: a row is a prompt with `answers` answers, one or more; `prepare` calls `settle_reference`."""

    loss_is_nll = False
    answers: int

    def settle_reference(self, wanted: str, config: Config, corpus: Corpus | None = None) -> None:
        """Sets `reference`, resolving auto; the reference is the model as it is now, before a checkpoint is read.

        Args:
            wanted: auto, frozen_copy, adapter_off, precomputed or none.
            corpus: data whose rows can store a `reference`, log-probabilities [rows, answers]; None if they can't.

        Raises:
            UserError: see `reference.choose`.
        """
        self.wanted, self._config, self._corpus = wanted, config, corpus
        why_online = why_not_precomputed(config, corpus) or why_online_is_less(config, corpus)
        self._use(world.from_first(lambda: choose(wanted, self.model.model, why_online)))
        # On resume the model is built again: it must be the one that the run started with.
        if self.reference != "none":
            self.fingerprint["contents"]["reference"] = world.from_first(lambda: first_values_hash(self.model))

    def _use(self, choice: Choice) -> None:
        config = self._config
        self.reference, self.why_reference = choice
        self.frozen_copy: FrozenCopy | None = None
        self.precomputed: Precomputed | None = None
        if self.reference == "frozen_copy":
            check_frozen_copy(config.trainer)
        if self.reference == "precomputed":
            contents = {name: self.fingerprint["contents"][name] for name in ("data", "model")}
            self.precomputed = Precomputed(config.data.cache_dir, {**contents, **of_model(config)})

    def continue_from(self, saved: dict[str, Any]) -> None:
        """Keeps what auto chose when the run began, as frozen_copy and precomputed differ by rounding."""
        began = saved.get("reference", "frozen_copy")  # in earlier versions auto never meant precomputed
        either = {"frozen_copy", "precomputed"}
        if self.wanted != "auto" or began == self.reference or {began, self.reference} != either:
            return
        if began == "frozen_copy" or not why_not_precomputed(self._config, self._corpus):
            self._use(Choice(began, "as the run began"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["reference"] = self.reference

    def describe_reference(self) -> str:
        """Returns a description of the reference for the plan."""
        return self.reference + (f" ({self.why_reference})" if self.why_reference else "")

    def check_start(self, batch: dict[str, Tensor]) -> Tensor:
        """Checks that policy and reference agree; returns log-probabilities [rows, answers] of the first micro-batch.

        Raises:
            RunError: the policy's log-probabilities differ from the reference's.
        """
        return check_agreement(self, batch, ["answer"] * self.answers)[0]

    def first_checks(self, batch: dict[str, Tensor]) -> list[FirstSteps]:
        if self.reference == "none":
            return super().first_checks(batch)
        return [answers_move(self, batch, self.check_start(batch)), *super().first_checks(batch)]

    def setup(self, stage: str) -> None:
        """Precomputes the reference's log-probabilities if wanted, before a checkpoint is read into the model."""
        if self.precomputed is None or self._corpus is None:
            return
        # All rows, even those that this run doesn't read: later runs find them in the cache.
        splits: dict[str, Any] = {"train": self._corpus.train, "val": self._corpus.val}
        splits = {name: rows for name, rows in splits.items() if rows is not None}
        self.precomputed.find(self.model, splits, self._reference_of)

    def _reference_of(self, rows: Any, chosen: np.ndarray) -> np.ndarray:
        """Computes answer log-probabilities [n, answers] fp64 of the `chosen` rows, int64 [n], under this model."""
        precision: Any = self.trainer.precision_plugin
        device, size = self.trainer.strategy.root_device, self._config.data.micro_batch_size
        model = precision.convert_module(self.model).to(device)
        found = []
        with torch.no_grad(), evaluating(model), precision.forward_context():
            for start in range(0, len(chosen), size):
                some = chosen[start : start + size]
                batch = rows.read(np.stack([np.zeros_like(some), some], axis=1))
                found.append(self.answer_log_probs({k: v.to(device) for k, v in batch.items()})[0].cpu())
        return torch.cat(found).numpy()

    def on_placed(self) -> None:
        if self.reference == "frozen_copy":
            self.frozen_copy = FrozenCopy(self.model)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        adapter = adapter_of(self.model.model)
        if self.frozen_copy is not None and adapter is not None:
            # PiSSA's last bits differ between machines; base and initial values must come from the same one.
            self.frozen_copy.replace({f"model.{name}": value for name, value in adapter.start.items()})

    def token_log_probs(self, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, LogProbs]:
        """Returns fp64 log-probabilities [C] of the answers' tokens under this model, and the forward's output."""
        where: dict[str, Any] = {name: batch[name] for name in ("scored", "before")}
        out = self.model.log_probs(inputs_of(batch), **where, temperature=temperature)
        # In fp32, hundreds of terms added one by one lose 1e-3, and a value in the hundreds is only exact to 3e-5.
        return out.tokens.double(), out

    def answer_log_probs(self, batch: dict[str, Tensor]) -> tuple[Tensor, LogProbs]:
        """Returns summed fp64 log-probabilities [rows, answers] under this model, and the forward's output."""
        exact, out = self.token_log_probs(batch)
        sums = torch.zeros(len(batch["lengths"]), device=exact.device, dtype=exact.dtype)
        return sums.index_add(0, batch["answer"], exact).view(-1, self.answers), out

    def reference_log_probs(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Returns summed log-probabilities [rows, answers] under the reference, or None for losses without one."""
        if self.reference == "none":
            return None
        if self.reference == "precomputed":
            return batch["reference"].view(torch.float64)
        with torch.no_grad(), evaluating(self.model), self._reference_weights():
            return self.answer_log_probs(batch)[0]

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Returns `log_probs` of each answer, summed over its tokens, fp64 [rows, answers]; DPO: (chosen, rejected)."""
        return {"log_probs": self.answer_log_probs(batch)[0]}

    def _reference_weights(self) -> AbstractContextManager[None]:
        return self.frozen_copy.in_place() if self.frozen_copy is not None else disabled(self.model.model)
