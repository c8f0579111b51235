"""The training step every objective shares: one Lightning batch is one optimizer step.

`training_step` gets the micro-batches of a whole step, counts their trained tokens, sums the loss over all of them and
divides by that count once, so accumulation, ragged lengths, a short last step and the number of devices change nothing.
Objectives say only what the loss of a micro-batch is.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters.trainable import adapter_of, check_weights, restore_start, trainable_names, without_frozen
from lmtrain.config import schema
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.data.order import step_seed
from lmtrain.distributed import dtensor as layout
from lmtrain.distributed.devices import agreed, data_parallel, total
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import RunError
from lmtrain.models.denoising import set_mask_token
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.guard import StepGuard
from lmtrain.objectives.parts import Definition, LossParts, StepResult, add_sums
from lmtrain.objectives.routing import routed
from lmtrain.objectives.start_check import FirstSteps, check_judged, weights_move
from lmtrain.optim.groups import set_lr
from lmtrain.optim.skipping import can_skip
from lmtrain.strategies.placement import placement_of


class Objective(pl.LightningModule):
    """Base of all objectives: scales, clips, steps, and hands numbers to the callbacks through `last_step`.

    A subclass says what the loss of a micro-batch is, and how many units of weight (tokens, pairs) it holds:
        class WeightedLM(Objective):
            Options = WeightedLMOptions  # a dataclass derived from config.schema.ObjectiveConfig

            def count_tokens(self, batch): return (batch["labels"] != IGNORE).sum()
            def micro_batch_loss(self, batch): return LossParts(loss_sum, n_tokens, {"loss": loss_sum.detach()})

    `objective._target_` names it, and the keys beside it are the fields of its `Options` (docs/extending.md).
    """

    Options: ClassVar[type[schema.ObjectiveConfig]] = schema.ObjectiveConfig
    definitions: ClassVar[Mapping[str, Definition]] = {}  # of the means it reports, as named in LossParts.sums

    model: LanguageModel
    first_steps: Sequence[FirstSteps] = ()  # of a run that began in this process, until they were looked at
    loss_is_nll = True  # whether the mean loss is nats per token, so that a perplexity can be made of it

    def __init__(
        self,
        model: LanguageModel,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        schedule: Callable[[int, int | None], float],
        *,
        seed: int,
        total_steps: int,
        gradient_clip_val: float | None,
        guard: StepGuard,
        fingerprint: dict[str, Any],
        stop: StopRequest | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.call_model: Callable[..., Any] = model.__call__  # a strategy may put its own forward around it
        self._make_optimizer, self.schedule = make_optimizer, schedule
        self._optimizer = make_optimizer(model.model)
        self._group_settings = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        self.seed, self.total_steps = seed, total_steps
        self.schedule_steps = total_steps  # what the schedule spans; differs where a resumed run was made longer
        self.gradient_clip_val = gradient_clip_val
        self.guard = guard
        self.step_loss: Tensor | None = None  # the running step's mean loss, where the guard looks for spikes
        self.fingerprint = fingerprint  # plain containers: what a resumed run must share with this one
        self.logs_itself = True  # callbacks/metrics.py takes it over in a run of lmtrain's
        self.grad_norm = torch.zeros(())
        self.last_step: StepResult | None = None
        self.val_sums: dict[int, dict[str, Tensor]] = {}  # by validation loader
        self.stop = stop if stop is not None else StopRequest()

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Called once, before a checkpoint is read: takes its options from `config.objective`, looks at model and data.

        Raises:
            UserError: the options, the model and the data don't go together.
        """

    @classmethod
    def settle_model(cls, config: Config, model: PreTrainedModel, tokenizer: Any) -> None:
        """Sets how the model attends and writes text, here from left to right; called before `prepare`.

        Also called wherever a run's model is loaded again.
        """
        set_mask_token(model, None)

    def continue_from(self, saved: dict[str, Any]) -> None:
        """Called before training where a run continues, with all that its checkpoint holds but the weights."""

    @abstractmethod
    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        """The loss of one micro-batch, as sums over its trained tokens (or pairs), never as means.

        Called in training, where it must not depend on the other micro-batches of its step but through `look_ahead`,
        and in validation. The base class runs the backward pass and divides by the `count_tokens` of the whole step,
        over all ranks. Example:

            out = self.call_model(**batch)  # a LanguageModelOutput
            return LossParts(self.scale * out.loss_sum, out.n_tokens, {"loss": self.scale * out.nll_sum})

        Args:
            batch: what the data's row format reads, on the model's device. Of text: input_ids, int64 [B, T]; labels,
                int64 [B, T], the token after each input, -100 where none is trained on; where rows hold several
                documents also position_ids, int64 [B, T], and cu_seqlens, int32 [documents + 1].

        Returns:
            LossParts of 0-dim tensors on that device. Its `sums` hold "loss" and what `validation_names` names. A loss
            that is not finite leaves out the step; an exception ends the run.
        """

    @abstractmethod
    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """What the sums of a micro-batch are divided by, int64 []: trained tokens, or pairs; known before its forward.

        A micro-batch of `Rows.empty()`, which trains nothing, must count 0. `batch` is in host memory or on the device.
        """

    def look_ahead(self, micro_batches: list[dict[str, Tensor]], n_tokens: Tensor) -> None:
        """Called before the losses of a step, with all micro-batches of this rank: for what a loss needs of them all.

        Every rank calls it. What it does must draw nothing from a generator.

        Args:
            n_tokens: what the step's sums are divided by, of all ranks, 0-dim.
        """

    def means_of(self, sums: dict[str, Any], n_tokens: Any) -> dict[str, Any]:
        """What is reported of a step or a validation, from its sums over all ranks and what they are divided by.

        All are numbers, or all 0-dim tensors, which must not be waited for.
        """
        count = n_tokens.clamp(min=1) if isinstance(n_tokens, Tensor) else max(n_tokens, 1)
        return {name: value / count for name, value in sums.items()}

    def count_seen(self, batch: dict[str, Tensor]) -> Tensor:
        """Tokens of a micro-batch that are not padding: what tokens_seen and tokens_per_s count."""
        return batch["seen"] if "seen" in batch else self.count_tokens(batch)

    def validation_names(self) -> list[str]:
        """Names of the means that a validation reports."""
        return ["loss"]

    def plan_rows(self) -> list[tuple[str, str]]:
        """(name, words) of what the plan should say about the objective."""
        return []

    def configure_model(self) -> None:
        """Called when the ranks are connected: the first one's weights come to all, in parts where they are sharded."""
        placement = placement_of(self.trainer)
        if placement.replaces_parameters:
            self._optimizer.param_groups.clear()  # they hold the whole parameters
        placement.place(self)
        if placement.replaces_parameters:
            self._optimizer = self._make_optimizer(self.model.model)
        self.on_placed()

    def on_placed(self) -> None:
        """Called when the parameters are where they will be trained, with their first values."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Counts a step's tokens over all ranks while it is in host memory; a request to stop rides along.

        Where ranks share rows, each goes on with its slice of them.
        """
        context = self.model.context
        if context is not None and "micro_batches" in batch:
            batch["micro_batches"] = [context.slice_of(mb) for mb in batch["micro_batches"]]
        elif context is not None:
            batch = context.slice_of(batch)
        if "micro_batches" in batch:
            parts = [torch.stack([self.count_tokens(mb), self.count_seen(mb)]) for mb in batch["micro_batches"]]
            counts, self.stop.agreed = agreed(self.trainer, torch.stack(parts).sum(0), self.stop.asked())
            batch["n_tokens"], batch["seen"] = counts
        return batch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        step, micro_batches = int(batch["step"]), batch["micro_batches"]
        if step != self.trainer.global_step:
            raise RunError(f"the loader gave step {step} where {self.trainer.global_step} is due: please report this")
        if step == 0:
            self.first_steps = self.looks(micro_batches[0])
        self.seed_step(step)
        optimizer = self.optimizers()
        self.set_rate(step)

        n_tokens, seen = batch["n_tokens"], batch["seen"]
        # Gradients are averaged over the ranks that compute different tokens; times their number makes that the sum.
        part = data_parallel(self.trainer)
        scale = part.size * part.slices / n_tokens.clamp(min=1)

        placement = placement_of(self.trainer)
        sums: dict[str, Tensor] = {}
        self.look_ahead(micro_batches, n_tokens)
        for i, micro_batch in enumerate(routed(self, step, micro_batches, n_tokens)):
            placement.sync_gradients(self.model, last=i == len(micro_batches) - 1)
            parts = self.micro_batch_loss(micro_batch)
            self.manual_backward(parts.loss_sum * scale)
            add_sums(sums, parts.sums)
        if self.guard.spike_factor is not None:
            self.step_loss = total(self.trainer, sums["loss"]) / n_tokens.clamp(min=1)
        self.judged_step = -1
        optimizer.step()  # type: ignore[union-attr]  # clips first, in on_before_optimizer_step
        if placement.steps_itself:
            self.grad_norm = placement.grad_norm()
            self.guard.judge(step, None, self.grad_norm)
        else:
            check_judged(self._optimizer, step, self.judged_step)
            optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
        lr = self._optimizer.param_groups[0]["lr"]
        self.last_step = StepResult(self.trainer.global_step, batch["rows"], lr, self.grad_norm, n_tokens, seen, sums)
        if self.first_steps:
            self._look_at_start(self.trainer.global_step)

    def looks(self, batch: dict[str, Tensor]) -> list[FirstSteps]:
        """What is looked at after the first steps of a run; called before them, with the run's first micro-batch.

        It must draw nothing from a generator, or only what `seed_step` puts back.
        """
        # Shards are gathered and freed between steps: what a parameter holds then is no sign of what was trained.
        sharded = placement_of(self.trainer).steps_itself or any(map(layout.is_part, self.model.parameters()))
        return [] if sharded else [weights_move(self)]

    def _look_at_start(self, step: int) -> None:
        """Raises RunError where what must be true of the first steps is not."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_logged = step == 1 or (every > 0 and step % every == 0)
        self.first_steps = [s for s in self.first_steps if not s.over(step, rates, self.grad_norm, is_logged)]

    def set_rate(self, step: int) -> None:
        """The learning rate that the schedule has for the step, counted from 0."""
        set_lr(self._optimizer, self.schedule(step, self.schedule_steps))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.logs_itself:
            self.log_dict(self.step_tensors())  # Lightning reads them from the device where it shows them
        # After every callback, so after the checkpoint. Lightning would validate once more before stopping.
        if self.trainer.should_stop:
            raise StopIteration

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips the global gradient norm and drops a bad step; called after unscaling, in every precision."""
        self.judged_step = self.trainer.global_step
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = layout.total_norm(gradients)
        if self.gradient_clip_val is not None:
            layout.clip(optimizer, self.gradient_clip_val, norm)
        self.grad_norm = norm.detach().to(self.device)  # under fsdp.cpu_offload gradients are in host memory
        bad = self.guard.judge(self.trainer.global_step, self.step_loss, self.grad_norm)
        if norm.device.type == "cuda" and can_skip(optimizer):
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # it leaves weights and state alone, no host sync
        elif bad:
            optimizer.zero_grad(set_to_none=True)  # parameters without a gradient are left alone

    def seed_step(self, step: int) -> None:
        """Dropout and all else random in a step follow from (seed, step, part): nothing to save, nothing to lose.

        Ranks that compute the same tokens draw the same: what they compute alike must stay alike.
        """
        seed = step_seed(self.seed, step, self.trainer.global_rank // data_parallel(self.trainer).copies)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)

    def on_validation_start(self) -> None:
        self.model.validates = True

    def on_validation_end(self) -> None:
        self.model.validates = False

    def on_validation_epoch_start(self) -> None:
        self.val_sums = {}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        parts = self.micro_batch_loss(batch)
        sums = self.val_sums.setdefault(dataloader_idx, {})
        add_sums(sums, {**parts.sums, "n_tokens": parts.n_tokens})

    def validation_means(self, loader: int = 0) -> dict[str, float]:
        """Token-weighted means over all ranks' rows of a validation loader; every rank must call it."""
        sums = self.val_sums[loader]
        names = sorted(sums)
        totals = total(self.trainer, torch.stack([sums[n].double() for n in names]))
        values = dict(zip(names, totals.tolist(), strict=True))
        return self.means_of(values, values.pop("n_tokens"))

    def on_validation_epoch_end(self) -> None:
        if self.logs_itself:
            self.log_means("val")

    def log_means(self, stage: str) -> None:
        """Logs the means of each loader as <stage>/..., of those of data.val_sets as <stage>/<its name>/..."""
        names = list(getattr(getattr(self.trainer, "datamodule", None), "val_sets", {}))
        for loader in sorted(self.val_sums):
            name = names[loader] if loader < len(names) else str(loader or "")
            prefix = f"{stage}/{name}/" if name else f"{stage}/"
            means = {f"{prefix}{key}": value for key, value in self.validation_means(loader).items()}
            self.log_dict(means, add_dataloader_idx=False)

    def step_means(self) -> dict[str, float]:
        """train/loss and the rest of the last step, lr and grad_norm: every rank must call it."""
        return {name: float(value) for name, value in self.step_tensors().items()}

    def step_tensors(self) -> dict[str, Tensor]:
        """As `step_means`, 0-dim, on the device."""
        last = self.last_step
        assert last is not None
        names = sorted(last.sums)
        sums = total(self.trainer, torch.stack([last.sums[n].double() for n in names]))
        found = self.means_of(dict(zip(names, sums, strict=True)), last.n_tokens)
        means = {f"train/{name}": mean for name, mean in found.items()}
        return {**means, "lr": torch.tensor(last.lr, dtype=torch.float64), "grad_norm": last.grad_norm}

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """`trainer.test` reads the rows that are validated on, or a loader of the caller's."""
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.log_means("test")

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """What the model says of a micro-batch: here the means that a validation reports, 0-dim, and `n_tokens`."""
        self.look_ahead([batch], self.count_tokens(batch))
        parts = self.micro_batch_loss(batch)
        return self.means_of(parts.sums, parts.n_tokens) | {"n_tokens": parts.n_tokens}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = without_frozen(self, checkpoint["state_dict"])
        adapter = adapter_of(self.model.model)
        checkpoint["adapter_start"] = adapter.start if adapter is not None else {}
        checkpoint["fingerprint"] = self.fingerprint
        checkpoint["schedule_steps"] = self.schedule_steps
        checkpoint["guard"] = self.guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_weights(self, checkpoint["state_dict"])
        self.strict_loading = trainable_names(self) is None  # what is frozen is not in it
        restore_start(self.model.model, checkpoint.get("adapter_start", {}))
        self.guard.load_state_dict(checkpoint["guard"])

    def on_train_start(self) -> None:
        self.guard.to(self.device)
        # A checkpoint brings its own rates and decays; those of this run's config hold.
        for group, settings in zip(self._optimizer.param_groups, self._group_settings, strict=True):
            group.update(settings)
