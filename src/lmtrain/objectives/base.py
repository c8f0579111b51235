"""The training step that all objectives share: one Lightning batch is one optimizer step.

`training_step` gets the micro-batches of a whole step, counts their trained tokens, sums the loss over all of them and
divides by that count once, so accumulation, varying lengths, a short last step and the number of devices change
nothing. An objective only defines the loss of a micro-batch.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters.trainable import adapter_of, check_weights, restore_start, trainable_names, without_frozen
from lmtrain.config import schema
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.data.order import step_seed
from lmtrain.distributed import dtensor as layout
from lmtrain.distributed.devices import agreed, data_parallel, total, trainer_steps
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import RunError, UserError
from lmtrain.losses.preferences import Pairs, PreferenceLosses
from lmtrain.models.denoising import set_mask_token
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.parts import LossParts, StepResult, add_sums, means_over
from lmtrain.objectives.routing import routed
from lmtrain.objectives.start_check import FirstSteps, WeightsMove, check_judged, name_unreached
from lmtrain.optim.groups import set_lr
from lmtrain.optim.skipping import StepGuard, can_skip
from lmtrain.strategies.choose import fill_in
from lmtrain.strategies.placement import placement_of


class Objective(pl.LightningModule):
    """Base class of all objectives: runs backward, clips, steps, and passes results to callbacks as `last_step`.

    A subclass defines the loss of a micro-batch, and how many units (tokens, pairs) it is averaged over:
        class WeightedLM(Objective):
            Options = WeightedLMOptions  # a dataclass derived from config.schema.ObjectiveConfig

            def count_tokens(self, batch): return (batch["labels"] != IGNORE).sum()
            def micro_batch_loss(self, batch): return LossParts(loss_sum, n_tokens, {"loss": loss_sum.detach()})

    `objective._target_` names the class, and the keys beside it are the fields of its `Options` (docs/extending.md).
    """

    Options: ClassVar[type[schema.ObjectiveConfig]] = schema.ObjectiveConfig
    reported: ClassVar[tuple[str, ...]] = ()  # names in LossParts.sums of the means it reports (docs/metrics.md)

    model: LanguageModel
    first_steps: Sequence[FirstSteps] = ()  # pending checks of a run that began in this process
    loss_is_nll = True  # whether the mean loss is in nats per token, so that exp(loss) is a perplexity

    def __init__(
        self,
        model: LanguageModel,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        schedule: Callable[[int, int], float],
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
        self.call_model: Callable[..., Any] = model.__call__  # a strategy may wrap it in its own forward
        self._make_optimizer, self.schedule = make_optimizer, schedule
        self._optimizer = make_optimizer(model.model)
        self._group_settings = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        self.seed, self.total_steps = seed, total_steps
        self.schedule_steps = total_steps  # length of the schedule; differs if a resumed run was extended
        self.most_lr = math.inf  # the largest factor of the learning rate until the schedule is below it
        self.gradient_clip_val = gradient_clip_val
        self.guard = guard
        self.fingerprint = fingerprint  # plain containers: what a resumed run must have in common with this one
        self.logs_itself = True  # in lmtrain's own runs callbacks/metrics.py logs instead
        self.grad_norm = torch.zeros((), dtype=torch.float32)
        self.last_step: StepResult | None = None
        self.val_sums: dict[int, dict[str, Tensor]] = {}  # per validation loader
        self.stop = stop if stop is not None else StopRequest()

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Reads the options from `config.objective`, checks model and data; called once, before a checkpoint is read.

        Raises:
            UserError: the options, the model and the data are incompatible.
        """

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **arguments: Any) -> Any:
        """Works as Lightning's if `arguments` are those of the constructor, which a checkpoint does not hold.

        Raises:
            UserError: they are missing.
        """
        if "model" not in arguments:
            found = f"{cls.__name__}.load_from_checkpoint: a checkpoint holds weights, not the objective"
            made = "make it with run = lmtrain.build(lmtrain.compose([...]))"
            raise UserError(f"{found}: {made}, and pass ckpt_path={str(checkpoint_path)!r} to trainer.fit or validate")
        return super().load_from_checkpoint(checkpoint_path, *args, **arguments)

    @classmethod
    def settle_model(cls, config: Config, model: PreTrainedModel, tokenizer: Any) -> None:
        """Sets how the model attends and generates text, here from left to right; called before `prepare`.

        It is also called wherever a run's model is loaded again.
        """
        set_mask_token(model, None)

    def continue_from(self, saved: dict[str, Any]) -> None:
        """Adapts to a resumed run; called before training with the contents of its checkpoint, except the weights."""

    @abstractmethod
    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        """Computes the loss of one micro-batch, as sums over its trained tokens (or pairs), never as means.

        Called in training, where it must not depend on the other micro-batches of its step except through `look_ahead`,
        and in validation. The base class runs the backward pass and divides by the `count_tokens` of the whole step,
        over all ranks. Example:

            out = self.call_model(**batch)  # a LanguageModelOutput
            return LossParts(self.scale * out.loss_sum, out.n_tokens, {"loss": self.scale * out.nll_sum})

        Args:
            batch: what the data's row format reads, on the model's device. For text: input_ids, int64 [B, T]; labels,
                int64 [B, T], the token after each input, -100 where it is not trained on; if rows hold several
                documents also position_ids, int64 [B, T], and cu_seqlens, int32 [documents + 1].

        Returns:
            LossParts of 0-dim tensors on that device. Its `sums` hold "loss" and what `validation_names` names. A loss
            that is not finite causes the step to be skipped; an exception ends the run.
        """

    @abstractmethod
    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        """Counts what the sums of a micro-batch are divided by, trained tokens or pairs, int64 []; needs no forward.

        A micro-batch of `Rows.empty()`, which trains nothing, must count 0. `batch` is in host memory or on the device.
        """

    def look_ahead(self, micro_batches: list[dict[str, Tensor]], n_tokens: Tensor) -> None:
        """Computes what the losses of a step need from all micro-batches of this rank; called before the losses.

        Every rank calls it. It must not draw from a random generator.

        Args:
            n_tokens: what the step's sums are divided by, over all ranks, 0-dim.
        """

    def means_of(self, sums: dict[str, Any], n_tokens: Any) -> dict[str, Any]:
        """Computes the reported means of a step or validation from sums over all ranks and what they are divided by.

        All values are numbers, or all are 0-dim tensors; then the code must not wait for the device.
        """
        return means_over(sums, n_tokens)

    def count_seen(self, batch: dict[str, Tensor]) -> Tensor:
        """Counts the tokens of a micro-batch without padding, for tokens_seen and tokens_per_s."""
        return batch["seen"] if "seen" in batch else self.count_tokens(batch)

    def validation_names(self) -> list[str]:
        """Returns the names of the means that a validation reports: those of `reported` and of the routers."""
        if not self.reported:
            return ["loss"]
        return [*self.reported, *self.model.router_losses.names()]

    @staticmethod
    def pair_losses(options: Any, pairs: Pairs) -> PreferenceLosses:
        """Computes the losses of pairs from their log-probabilities, in training and for lmtrain.evaluate.

        Raises:
            NotImplementedError: the objective, whose options these are, doesn't compare answers in pairs.
        """
        raise NotImplementedError

    def plan_rows(self) -> list[tuple[str, str]]:
        """Returns (name, text) rows that describe the objective in the plan."""
        return []

    def configure_model(self) -> None:
        """Places the parameters once the ranks are connected: rank 0's weights go to all ranks, sharded if needed."""
        placement = placement_of(self.trainer)
        if placement.replaces_parameters:
            self._optimizer.param_groups.clear()  # they refer to the unsharded parameters
        placement.place(self)
        if placement.replaces_parameters:
            self._optimizer = self._make_optimizer(self.model.model)
        self.on_placed()

    def on_placed(self) -> None:
        """Called when the parameters are where they will be trained, with their initial values."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Counts a step's tokens over all ranks while it is in host memory; agrees on stop requests in the same call.

        Under context parallelism, each rank continues with its slice of the rows.
        """
        context = self.model.context
        if "micro_batches" not in batch:  # a validation's
            return batch if context is None else context.slice_of(batch)
        if context is not None:
            batch["micro_batches"] = [context.slice_of(mb) for mb in batch["micro_batches"]]
        counted = [(int(self.count_tokens(mb)), int(self.count_seen(mb))) for mb in batch["micro_batches"]]
        counts = torch.tensor([sum(each) for each in zip(*counted, strict=True)], dtype=torch.int64)
        counts, self.stop.agreed = agreed(self.trainer, counts, self.stop.asked())
        batch["n_tokens"], batch["seen"] = counts
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        # Lightning would look at each value of the batch to find out that it is there.
        return {**batch} if device.type == "cpu" else super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Trains a step; returns its mean loss on this rank, 0-dim, of which the mean over the ranks is train/loss."""
        if "micro_batches" not in batch:
            found = f"{type(self).__name__} trains whole steps, and this loader gives micro-batches"
            raise UserError(f"{found}: pass its run's data, fit(run.objective, datamodule=run.datamodule)")
        step, micro_batches = int(batch["step"]), batch["micro_batches"]
        if step != self.trainer.global_step:
            raise RunError(f"the loader gave step {step} where {self.trainer.global_step} is due: please report this")
        if step == 0:
            self.first_steps = self.first_checks(micro_batches[0])
        self.seed_step(step)
        optimizer = self.optimizers()
        self.set_rate(step)

        n_tokens, seen = batch["n_tokens"], batch["seen"]
        # Gradients are averaged over the ranks that compute different tokens; multiplied by their number they are sums.
        part = data_parallel(self.trainer)
        # Not as an integer, whose quotients have torch's default dtype: in bf16-true only 8 bits.
        count = n_tokens.clamp(min=1).to(torch.promote_types(self.dtype, torch.float32))  # type: ignore[arg-type]
        scale = part.size * part.slices / count

        placement = placement_of(self.trainer)
        sums: dict[str, Tensor] = {}
        self.look_ahead(micro_batches, n_tokens)
        for i, micro_batch in enumerate(routed(self, step, micro_batches, n_tokens)):
            placement.sync_gradients(self.model, last=i == len(micro_batches) - 1)
            parts = self.micro_batch_loss(micro_batch)
            self.manual_backward(parts.loss_sum * scale)
            add_sums(sums, parts.sums)
        if step == 0:
            name_unreached(self)
            if not placement.steps_itself:
                fill_in(self.model.model, self.trainer.precision)
        self.judged_step = -1
        optimizer.step()  # type: ignore[union-attr]  # clips first, in on_before_optimizer_step
        if placement.steps_itself:
            self.grad_norm = placement.grad_norm()
            self.guard.judge(step, self.grad_norm)
        else:
            check_judged(self._optimizer, step, self.judged_step)
            optimizer.zero_grad(set_to_none=True)  # type: ignore[union-attr]
        lr = self._optimizer.param_groups[0]["lr"]
        self.last_step = StepResult(self.trainer.global_step, batch["rows"], lr, self.grad_norm, n_tokens, seen, sums)
        if self.first_steps:
            self._look_at_start(self.trainer.global_step)
        if self.logs_itself:
            self.log_dict(self.step_tensors())  # Lightning reads them from the device only to show them
        return {"loss": sums["loss"] * scale}

    def _lr_factor(self, step: int) -> float:
        factor = self.schedule(step, self.schedule_steps)
        if factor <= self.most_lr:
            self.most_lr = math.inf
        return min(factor, self.most_lr)

    def set_schedule(self, step: int, steps: int) -> None:
        """Sets the schedule's number of steps before `step`; a learning rate that is falling doesn't rise by that."""
        last, planned = (self.schedule(at, self.schedule_steps) for at in (step - 1, step))
        if step and planned <= last:
            self.most_lr = min(last, self.most_lr)
        self.schedule_steps = steps

    def first_checks(self, batch: dict[str, Tensor]) -> list[FirstSteps]:
        """Returns the checks to run after the first steps of a run; called before them, with the first micro-batch.

        It must not draw from a random generator, except from those that `seed_step` reseeds.
        """
        sharded = any(map(layout.is_part, self.model.parameters()))
        # A strategy that steps itself keeps the weights that are trained to itself.
        return [] if placement_of(self.trainer).steps_itself else [WeightsMove(self, sharded)]

    def _look_at_start(self, step: int) -> None:
        """Runs the pending checks of the first steps; raises RunError if one fails."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_logged = step == 1 or (every > 0 and step % every == 0)
        self.first_steps = [s for s in self.first_steps if not s.over(step, rates, self.grad_norm, is_logged)]

    def set_rate(self, step: int) -> None:
        """Sets the learning rate that the schedule gives for the step, counted from 0."""
        set_lr(self._optimizer, self._lr_factor(step))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        # All callbacks have run, so the checkpoint is saved. Lightning would validate once more before stopping.
        if self.trainer.should_stop:
            raise StopIteration

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips the global gradient norm and skips a bad step; called after unscaling, in every precision."""
        self.judged_step = self.trainer.global_step
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = layout.total_norm(gradients)
        if self.gradient_clip_val is not None:
            layout.clip(optimizer, self.gradient_clip_val, norm)
        self.grad_norm = norm.to(self.device)  # under fsdp.cpu_offload gradients are in host memory
        bad = self.guard.judge(self.trainer.global_step, self.grad_norm)
        if norm.device.type == "cuda" and can_skip(optimizer):
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # skips the update without a host sync
        elif bad:
            optimizer.zero_grad(set_to_none=True)  # parameters without a gradient are not updated
        for first in self.first_steps:
            first.before_update()

    def seed_step(self, step: int) -> None:
        """Seeds the generators from (seed, step, rank), so that no generator state needs saving.

        Ranks that compute the same tokens get the same seed, because their results must be identical.
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
        """Returns the token-weighted means over all ranks' rows of a validation loader; every rank must call it."""
        sums = self.val_sums[loader]
        names = sorted(sums)
        totals = total(self.trainer, torch.stack([sums[n].double() for n in names]))
        values = dict(zip(names, totals.tolist(), strict=True))
        return self.means_of(values, values.pop("n_tokens"))

    def on_validation_epoch_end(self) -> None:
        if self.logs_itself:
            self.log_means("val")

    def log_means(self, stage: str) -> None:
        """Logs the means of each loader as <stage>/..., those of data.val_sets as <stage>/<its name>/..."""
        names = list(getattr(getattr(self.trainer, "datamodule", None), "val_sets", {}))
        for loader in sorted(self.val_sums):
            name = names[loader] if loader < len(names) else str(loader or "")
            prefix = f"{stage}/{name}/" if name else f"{stage}/"
            means = {f"{prefix}{key}": value for key, value in self.validation_means(loader).items()}
            self.log_dict(means, add_dataloader_idx=False)

    def step_means(self) -> dict[str, float]:
        """Returns train/loss and the other means of the last step, lr and grad_norm; every rank must call it."""
        return {name: float(value) for name, value in self.step_tensors().items()}

    def step_tensors(self) -> dict[str, Tensor]:
        """Returns the same values as `step_means`, as 0-dim tensors, without waiting for the device."""
        last = self.last_step
        if last is None:
            raise UserError("step_means: no step has been trained yet; validate() measures the model as it is")
        names = sorted(last.sums)
        sums = total(self.trainer, torch.stack([last.sums[n].double() for n in names]))
        found = self.means_of(dict(zip(names, sums, strict=True)), last.n_tokens)
        means = {f"train/{name}": mean for name, mean in found.items()}
        return {**means, "lr": torch.tensor(last.lr, dtype=torch.float64), "grad_norm": last.grad_norm}

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Validates a micro-batch; `trainer.test` reads the validation rows, or a loader that the caller passes."""
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        self.log_means("test")

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Returns the outputs for a micro-batch: here the means that a validation reports, 0-dim, and `n_tokens`."""
        self.look_ahead([batch], self.count_tokens(batch))
        parts = self.micro_batch_loss(batch)
        return self.means_of(parts.sums, parts.n_tokens) | {"n_tokens": parts.n_tokens}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = without_frozen(self, checkpoint["state_dict"])
        adapter = adapter_of(self.model.model)
        checkpoint["adapter_start"] = adapter.start if adapter is not None else {}
        checkpoint["fingerprint"] = self.fingerprint
        checkpoint["schedule_steps"], checkpoint["most_lr"] = self.schedule_steps, self.most_lr
        checkpoint["guard"] = self.guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_weights(self, checkpoint["state_dict"])
        self.strict_loading = trainable_names(self) is None  # frozen weights are not in it
        restore_start(self.model.model, checkpoint.get("adapter_start", {}))
        self.guard.load_state_dict(checkpoint["guard"])
        if checkpoint["schedule_steps"] == self.schedule_steps:  # a larger budget begins a longer schedule
            self.most_lr = checkpoint.get("most_lr", math.inf)

    def on_train_start(self) -> None:
        if self.logs_itself:  # the user's own Trainer, whose length is the run's
            if any(isinstance(c, StochasticWeightAveraging) for c in self.trainer.callbacks):  # type: ignore[attr-defined]
                raise UserError("StochasticWeightAveraging sets the learning rate too: use EMAWeightAveraging")
            self.total_steps = self.schedule_steps = trainer_steps(self.trainer, self.total_steps)
        self.guard.to(self.device)
        # A checkpoint restores its own learning rates and weight decays; those of this run's config take precedence.
        for group, settings in zip(self._optimizer.param_groups, self._group_settings, strict=True):
            group.update(settings)
