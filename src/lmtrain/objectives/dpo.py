"""Direct preference optimisation and its relatives: chosen answers become likelier than rejected ones.

A micro-batch is what `data.pair_rows.PairRows` reads: all its answers in one forward without padding, log-probabilities
of their tokens only. The unit of weight is the pair.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmtrain import world
from lmtrain.models.documents import Prefixes
from lmtrain.models.language_model import LogProbs
from lmtrain.models.trainable import adapter_of
from lmtrain.objectives.base import LossParts, Objective
from lmtrain.objectives.reference import FrozenCopy, Precomputed, choose, evaluating, first_values_hash
from lmtrain.objectives.start_check import check_start
from lmtrain.preference_losses import LOSSES, LossOptions, Pairs, preference_losses
from lmtrain.schema import Config
from lmtrain.schema import Objective as ObjectiveConfig
from lmtrain.strategies.zero_config import check_frozen_copy


def loss_options(cfg: ObjectiveConfig) -> LossOptions:
    """The options of a loss from the config; length_normalize=auto is what the loss's paper does."""
    per_token = LOSSES[str(cfg.loss)].per_token if cfg.length_normalize == "auto" else bool(cfg.length_normalize)
    return LossOptions(
        beta=float(cfg.beta or 0.0),
        label_smoothing=cfg.label_smoothing,
        gamma=float(cfg.gamma or 0.0),
        dpop_lambda=float(cfg.dpop_lambda or 0.0),
        sft_weight=float(cfg.sft_weight or 0.0),
        length_normalize=per_token,
    )


class DPO(Objective):
    """`prepare` says, before training, what the loss and the reference are."""

    loss_is_nll = False

    def prepare(self, config: Config, data_fingerprint: str) -> None:
        """Settles the reference: the model as it is, before a checkpoint is read.

        Raises:
            UserError: see `reference.choose`.
        """
        self.loss, self.options = str(config.objective.loss), loss_options(config.objective)
        self.reference = world.from_first(lambda: choose(config.objective, self.model.model))
        if self.reference == "frozen_copy":
            check_frozen_copy(config.trainer)
        self.frozen_copy: FrozenCopy | None = None
        self.precomputed: Precomputed | None = None
        if self.reference == "precomputed":
            identity = {"data": data_fingerprint, "precision": config.trainer.precision}
            self.precomputed = Precomputed(config.data.cache_dir, identity)
        # On resume the model is built anew: it has to be the one the run started with.
        self.fingerprint["reference"] = None
        if self.reference != "none":
            self.fingerprint["reference"] = world.from_first(lambda: first_values_hash(self.model))

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["pairs"]

    def validation_names(self) -> list[str]:
        names = ["loss", *(f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy"))]
        names += ["logps/chosen", "logps/rejected", *(["kl"] if self.reference != "none" else [])]
        names += ["aux/preference_loss", "aux/sft_loss"] if self.options.sft_weight else []
        return [*names, "aux/router_loss"] if self.model.has_router else names

    def plan_rows(self) -> list[tuple[str, str]]:
        shown = {k: v for k, v in self.options._asdict().items() if k in self._loss_keys() and v}
        words = ", ".join([self.loss, *(f"{key}={value:g}" for key, value in shown.items())])
        return [("loss", f"{words}; reference: {self.reference}")]

    def _loss_keys(self) -> list[str]:
        flips = ["label_smoothing"]
        own = {"sigmoid": flips, "robust": flips, "simpo": ["gamma"], "dpop": ["dpop_lambda"]}
        return ["beta", "sft_weight", "length_normalize", *own.get(self.loss, [])]

    def setup(self, stage: str) -> None:
        """Computes the reference's log-probabilities, before a checkpoint is read into the model."""
        if self.precomputed is None:
            return
        datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        splits = {"train": datamodule.train_rows, "val": datamodule.val_rows}
        splits = {name: rows for name, rows in splits.items() if rows is not None}
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        self.precomputed.find(
            self.model, splits, lambda rows: self._reference_of_all(rows, datamodule.micro_batch_size), say
        )

    def _reference_of_all(self, rows: Any, micro_batch_size: int) -> np.ndarray:
        """Log-probabilities of all rows' answers under the model as it is, [n, 2] fp64."""
        precision: Any = self.trainer.precision_plugin
        device = self.trainer.strategy.root_device
        model = precision.convert_module(self.model).to(device)
        found = []
        with torch.no_grad(), evaluating(model), precision.forward_context():
            for start in range(0, len(rows), micro_batch_size):
                index = np.arange(start, min(start + micro_batch_size, len(rows)))
                batch = rows.read(np.stack([np.zeros_like(index), index], axis=1))
                found.append(self.answer_log_probs({k: v.to(device) for k, v in batch.items()})[0].cpu())
        return torch.cat(found).numpy()

    def on_placed(self) -> None:
        if self.reference == "frozen_copy":
            self.frozen_copy = FrozenCopy(self.model)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        adapter = adapter_of(self.model.model)
        if self.frozen_copy is not None and adapter is not None:
            # Another machine's PiSSA differs in its last bits; base and first values have to be of one machine.
            self.frozen_copy.replace({f"model.{name}": value for name, value in adapter.start.items()})

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        if self.trainer.global_step == 0 and self.reference != "none":
            check_start(self, batch["micro_batches"][0])
        super().training_step(batch, batch_idx)

    def answer_log_probs(self, batch: dict[str, Tensor]) -> tuple[Tensor, LogProbs]:
        """Summed log-probabilities [P, 2] (chosen, rejected) fp64 under the model as it is, and all tokens'."""
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "cu_seqlens", "scored", "before")}
        prefixes = Prefixes(batch["prefix_lengths"], batch["kv_index"], batch["cu_kv"]) if "kv_index" in batch else None
        out = self.model.log_probs(**inputs, prefixes=prefixes)
        # One by one, hundreds of terms lose 1e-3 in fp32, and a sum of hundreds is itself known to 3e-5 only.
        exact = out.tokens.double()
        sums = torch.zeros(len(batch["lengths"]), device=exact.device, dtype=exact.dtype)
        return sums.index_add(0, batch["answer"], exact).view(-1, 2), out

    def reference_log_probs(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Summed log-probabilities [P, 2] under the reference, None for losses without one."""
        if self.reference == "none":
            return None
        if self.reference == "precomputed":
            return batch["reference"]
        with torch.no_grad(), evaluating(self.model), self._reference_weights():
            return self.answer_log_probs(batch)[0]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.frozen_copy is not None:
            with self.frozen_copy.in_place():
                yield
        else:
            from lmtrain.models.adapters import disabled

            with disabled(self.model.model):
                yield

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        reference = self.reference_log_probs(batch)
        policy, out = self.answer_log_probs(batch)
        pairs = as_pairs(policy, reference, batch["lengths"])
        losses = preference_losses(self.loss, pairs, self.options)
        n = batch["pairs"]
        real = (n > 0).to(policy.dtype)  # the pair of an empty micro-batch weighs nothing
        means = {
            "rewards/chosen": losses.chosen_rewards,
            "rewards/rejected": losses.rejected_rewards,
            "rewards/margin": losses.chosen_rewards - losses.rejected_rewards,
            "rewards/accuracy": (losses.chosen_rewards > losses.rejected_rewards).to(policy.dtype),
            "logps/chosen": pairs.chosen.detach(),
            "logps/rejected": pairs.rejected.detach(),
        }
        if reference is not None:
            means["kl"] = kl_per_token(policy.detach() - reference, batch["lengths"].view(-1, 2))
        if self.options.sft_weight:
            means |= {"aux/preference_loss": losses.preference, "aux/sft_loss": losses.sft}
        loss_sum = losses.total.sum() * real
        sums = {name: value.sum() * real for name, value in means.items()}
        sums |= {"loss": loss_sum.detach(), **{name: value * n for name, value in out.aux.items()}}
        if out.router_loss is not None:
            loss_sum = loss_sum + out.router_loss * n
        return LossParts(loss_sum, n, sums)


def as_pairs(policy: Tensor, reference: Tensor | None, lengths: Tensor) -> Pairs:
    """Log-probabilities [P, 2] and the answers' numbers of tokens [2P] as `Pairs`."""
    tokens = lengths.view(-1, 2)
    columns = (None, None) if reference is None else (reference[:, 0], reference[:, 1])
    return Pairs(policy[:, 0], policy[:, 1], tokens[:, 0], tokens[:, 1], *columns)


def kl_per_token(log_ratio: Tensor, tokens: Tensor) -> Tensor:
    """KL(policy || reference) per token, estimated on the two answers of each pair: [P] from [P, 2] and [P, 2].

    `exp(-r) - 1 + r` for the mean log-ratio r of an answer's tokens (Schulman 2020, "Approximating KL divergence", k3):
    never negative, 0 where both agree. The answers are the data's, not the policy's, so it tells how far the policy
    has moved on them rather than how far it has moved.
    """
    r = log_ratio / tokens
    return (torch.expm1(-r) + r).mean(1)
