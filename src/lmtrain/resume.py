"""Where a run continues: the checkpoint, whether it belongs to this run, and what is cut back to its step."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lmtrain import checkpoint as store
from lmtrain import run_dir
from lmtrain.callbacks.metrics import Metrics
from lmtrain.errors import UserError
from lmtrain.loggers import write_again
from lmtrain.run_dir import RunDir
from lmtrain.schema import Config

if TYPE_CHECKING:
    from lmtrain.build import Run


def find(config: Config, folder: RunDir, tell: Callable[[str], None]) -> Path | None:
    """The checkpoint run.resume asks for, undamaged; `tell` gets what the user should know.

    Raises:
        UserError: a path given by hand does not exist or is damaged.
    """
    mode = run_dir.resume_mode(config)
    if mode == "none":
        return None
    if mode == "auto":
        newest = store.newest_complete(folder.checkpoints, tell)
        if newest is None and config.run.resume == "auto":
            tell(f"run.resume=auto: no checkpoint in {folder.checkpoints} yet, so this is a fresh start")
        return newest
    path = Path(mode).expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"run.resume={mode}: no such checkpoint folder; run.resume=auto takes the newest of run.dir")
    if (path / "checkpoints").is_dir():
        raise UserError(f"run.resume={mode} is a run: continue it with run.dir={mode} run.resume=auto")
    problem = store.damage(path)
    if problem is not None:
        raise UserError(
            f"run.resume={mode} is not a complete checkpoint ({problem}); run.resume=auto takes the newest one"
        )
    newer = [p for p in store.scan(folder.checkpoints) if store.step_of(p) > store.step_of(path)]
    if newer and path.parent == folder.checkpoints.resolve():
        raise UserError(
            f"run.resume={mode}: this run has gone on to {newer[-1].name}, which would be taken for its newest "
            f"checkpoint. Give the new branch another run.name, or remove what comes after {path.name} from "
            f"{path.parent}"
        )
    return path


def read_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """trainer.pt of a checkpoint; its tensors are mapped, not read."""
    return torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)


def check_fingerprint(
    checkpoint: Path, theirs: dict[str, Any], ours: dict[str, Any], allow_change: list[str] | None
) -> None:
    """Refuses to continue a run whose data, tokenizer, model, seed or batch changed: it would not be that run."""
    allowed = allow_change or []
    unknown = [name for name in allowed if name not in ours]
    if unknown:
        raise UserError(f"run.allow_change={unknown} is not known (options: {', '.join(ours)})")
    changed = {k: (theirs.get(k), ours[k]) for k in ours if ours[k] != theirs.get(k) and k not in allowed}
    if changed:
        listed = "; ".join(f"{key} (then {then}, now {now})" for key, (then, now) in changed.items())
        raise UserError(
            f"{checkpoint} was trained with other settings: {listed}. Put them back to continue it exactly, give this "
            f"run another run.name, or, knowing that it is not the same run any more, set "
            f"run.allow_change=[{','.join(changed)}]"
        )


def fit_schedule(run: "Run", schedule_steps: int, tell: Callable[[str], None]) -> None:
    """When the run was made longer or shorter: keep the schedule it began with, or stretch it; said aloud."""
    if schedule_steps == run.total_steps:
        return
    rule = run.config.run.schedule_on_resume
    if rule == "keep":
        run.objective.schedule_steps = schedule_steps
        tell(
            f"the run now has {run.total_steps:,} steps; its learning rate keeps the schedule planned for "
            f"{schedule_steps:,} (run.schedule_on_resume=rescale stretches it)"
        )
    else:
        tell(f"the learning rate's schedule, planned for {schedule_steps:,} steps, now spans {run.total_steps:,}")


def knows_validation(checkpoint: Path) -> bool:
    """Whether its step was validated before it was saved. If one was due there, the resumed run begins with it."""
    state = read_trainer_state(checkpoint)["callbacks"][Metrics.__name__]
    return state["last_val"].get("step") == store.step_of(checkpoint)


def let_last_validation_run(run: "Run", checkpoint: Path | None) -> None:
    """Lightning skips a fit whose steps are done: it is told of one more, and callbacks/validation.py takes it back."""
    if checkpoint is not None and store.step_of(checkpoint) == run.total_steps and not knows_validation(checkpoint):
        run.trainer.fit_loop.epoch_loop.max_steps = run.total_steps + 1


def rewind(run: "Run", checkpoint: Path | None) -> str | None:
    """Sweeps leftovers and cuts the run's logs back to the checkpoint's step; returns where it continues, in words."""
    step = store.step_of(checkpoint) if checkpoint is not None else 0
    validated = checkpoint is not None and knows_validation(checkpoint)
    if run.trainer.is_global_zero:  # the others would sweep away what rank 0 is writing
        store.sweep(run.dir.path)
        store.sweep(run.dir.checkpoints)
        for newer in [p for p in store.scan(run.dir.checkpoints) if store.step_of(p) > step]:
            shutil.rmtree(newer)  # damaged, or it would be continued: it must not count for what is kept
        run_dir.cut_back(run.dir.metrics, step, validated)
        run_dir.cut_back(run.dir.samples, step, validated)
        run.dir.summary.unlink(missing_ok=True)
        write_again(run.trainer.loggers, run.dir)
    return f"continues after step {step:,} ({checkpoint})" if checkpoint is not None else None
