"""Replays one step of a run exactly and inspects it: `debug=replay debug.step=N` added to the run's command.

The replay starts from the newest checkpoint at or before that step. Data order, dropout and weights follow from the
checkpoint, so the step is exactly the one that was trained. Nothing in the run's folder is changed.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from rich.console import Console

from lmtrain import terminal
from lmtrain.checkpoints import store
from lmtrain.config.batch import horizon, step_sizes
from lmtrain.config.schema import Config
from lmtrain.distributed import devices
from lmtrain.errors import FINISHED, UserError
from lmtrain.objectives.base import Objective
from lmtrain.run import build, resume
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder.folder import RunDir


def replay(config: Config) -> int:
    """Replays step debug.step; prints its non-finite values, the loss of each micro-batch and the largest gradients."""
    devices.resolve_auto(config)
    run = RunDir(run_dir.locate(config))
    step = config.debug.get("step")
    if not isinstance(step, int) or step < 0:
        raise UserError(f"debug.step={step}: a step counted from 0 is needed")
    if not run.config.exists():
        raise UserError(f"{run.path} holds no run: give the run.dir or run.name of the run to look into")
    if config.data.ring_bytes is not None:
        raise UserError(
            f"debug=replay needs rows that are kept, and those of a stream (data.ring_bytes={config.data.ring_bytes}) "
            f"are gone: steps of runs on prepared data can be replayed"
        )
    devices.set_threads(config.trainer.num_threads, 1)
    terminal.quiet_libraries()
    t = config.trainer
    t.compile = False  # hooks can't observe the modules inside a compiled block
    t.devices, t.num_nodes, t.strategy, t.profiler = 1, 1, "auto", None
    corpus = build.build_corpus(config)
    objective = build.build_objective(config, corpus, step + 1)
    checkpoint, saved = _newest_at_or_before(run.checkpoints, step, _begun_at(config)), None
    if checkpoint is not None:
        saved = resume.trainer_state(checkpoint, objective, corpus, config, print)
        objective.continue_from(saved)
    objective.schedule_steps = _schedule_steps(config, len(build.rows_to_train(config, corpus)), run, step, saved)
    microscope = Microscope(step)
    trainer = build.build_trainer(config, run, [microscope], None, step + 1)
    datamodule = build.build_datamodule(config, corpus, step + 1)
    console = terminal.console()
    console.print(f"replaying step {step} from {checkpoint.name if checkpoint else 'the beginning'}")
    trainer.fit(objective, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
    microscope.show(console, objective)
    return FINISHED


def _begun_at(config: Config) -> Path | None:
    """Returns the checkpoint of another run at which this one began (run.resume=<path>, run.cooldown_from), or None."""
    begun = config.run.cooldown_from or config.run.resume
    return None if begun in (None, "none", "auto") else Path(str(begun)).expanduser().resolve()


def _schedule_steps(config: Config, rows: int, run: RunDir, step: int, saved: dict[str, Any] | None) -> int:
    """Returns the number of steps that the learning rate's schedule spanned at `step`.

    A resume with another trainer.max_steps may have changed it since the checkpoint with the contents `saved`; then the
    next checkpoint holds it, and without one, the last start has followed run.schedule_on_resume.
    """
    if saved is not None and config.budget.minutes is not None:
        return int(saved["schedule_steps"])
    later = next((p for p in store.scan(run.checkpoints) if store.step_of(p) > step and store.damage(p) is None), None)
    if later is not None:
        saved = store.load_trainer_state(later)
    if saved is not None and (later is not None or config.run.schedule_on_resume == "keep"):
        return int(saved["schedule_steps"])
    return horizon(config.trainer.max_steps, config.trainer.max_epochs, rows, step_sizes(config.data))


def _newest_at_or_before(folder: Path, step: int, begun: Path | None) -> Path | None:
    """Returns the newest undamaged checkpoint in `folder` up to `step`, or else `begun`; None: there is none."""
    found = [*([begun] if begun is not None else []), *store.scan(folder)]
    for path in reversed([p for p in found if store.step_of(p) <= step]):
        problem = store.damage(path)
        if problem is None:
            return path
        print(f"checkpoint {path.name} is damaged ({problem}); falling back to the one before, or the beginning")
    return None


class Microscope(pl.Callback):
    """A callback that records one step: module outputs as they are computed, and gradients before clipping."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.not_finite: list[str] = []
        self.gradients: list[tuple[float, str]] = []
        self.micro_batch_losses: list[float] = []
        self.rows: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.global_step != self.step:
            return
        assert isinstance(pl_module, Objective)
        assert trainer.train_dataloader is not None
        self.rows = trainer.train_dataloader.dataset.row_ids(self.step).tolist()
        for name, module in pl_module.model.named_modules():
            module.register_forward_hook(self._hook(name or "loss"))

    def _hook(self, name: str) -> Any:
        def look(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if name == "loss":
                self.micro_batch_losses.append(float(output.loss_sum.detach() / output.n_tokens.clamp(min=1)))
            tensors = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            if any(not torch.isfinite(t).all() for t in tensors) and name not in self.not_finite:
                self.not_finite.append(name)

        return look

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            assert isinstance(pl_module, Objective)
            named = pl_module.model.model.named_parameters()
            self.gradients = [(float(p.grad.norm()), name) for name, p in named if p.grad is not None]

    def show(self, console: Console, module: Objective) -> None:
        bad = [name for norm, name in self.gradients if not norm < float("inf")]
        largest = sorted((g for g in self.gradients if g[0] < float("inf")), reverse=True)[:5]
        rows = [
            ("loss of each micro-batch", ", ".join(f"{loss:.6g}" for loss in self.micro_batch_losses)),
            ("gradient norm", f"{float(module.grad_norm):.6g}"),
            ("update", "skipped" if module.guard.counts()[1] else "applied"),
            ("outputs not finite, first to last", ", ".join(self.not_finite[:5]) or "none"),
            ("gradients not finite", ", ".join(bad[:5]) or "none"),
            ("largest gradients", ", ".join(f"{name} {norm:.3g}" for norm, name in largest)),
            ("(epoch, row) of the step", str(self.rows[:16]) + (" ..." if len(self.rows) > 16 else "")),
        ]
        console.print(terminal.facts(rows, f"step {self.step}"))
