"""Arguments of Lightning's Trainer that go straight to it, by its own names, and answers for those that don't.

docs/lightning.md has the whole signature. Imports no torch.
"""

from dataclasses import dataclass
from typing import Annotated

from lmtrain.config.constraints import MACHINE, SHOWN, TRAJECTORY, choice, not_negative


@dataclass(kw_only=True)
class LightningConfig:
    fast_dev_run: Annotated[bool | int, SHOWN, not_negative]
    overfit_batches: Annotated[int, TRAJECTORY, not_negative]
    profiler: Annotated[str | None, SHOWN, choice("simple", "advanced", "pytorch")]
    detect_anomaly: Annotated[bool, MACHINE]
    benchmark: Annotated[bool, MACHINE]
    inference_mode: Annotated[bool, MACHINE]


# What Lightning's other arguments are here, or why they are not.
ANSWERS = {
    "logger": "logger=tensorboard, wandb, csv or many; metrics.jsonl is always written",
    "callbacks": "callbacks.extra=[{_target_: ...}]",
    "min_epochs": "callbacks.early_stopping.patience, the only thing that ends a run before trainer.max_steps",
    "min_steps": "callbacks.early_stopping.patience, the only thing that ends a run before trainer.max_steps",
    "max_time": "run.time_limit=HH:MM:SS: the run saves, ends with exit code 75 and can go on",
    "limit_train_batches": "trainer.max_steps (a batch is a step), or trainer.overfit_batches for the same few rows",
    "limit_test_batches": "trainer.limit_val_batches: a run has no test loop, data.val_path names what is validated on",
    "limit_predict_batches": "generate.num_samples of lmtrain.generate: a run has no predict loop",
    "num_sanity_val_steps": "trainer.val_before_training=true, whose numbers are kept",
    "enable_checkpointing": "checkpoint.keep_last: a run always saves, or it could not go on",
    "enable_progress_bar": "callbacks.progress.style=none",
    "enable_model_summary": "the plan, which shows the model; callbacks.extra takes Lightning's ModelSummary",
    "gradient_clip_algorithm": "trainer.gradient_clip_val, which clips the global norm, of all parts of all ranks",
    "use_distributed_sampler": "nothing: each rank reads its share of a step, which follows from seed and step",
    "barebones": "callbacks.samples.every_n_validations=0 and logger=none: without callbacks a run can't save or go on",
    "plugins": "trainer.precision and trainer.strategy",
    "sync_batchnorm": "nothing: the models have no batch norm",
    "reload_dataloaders_every_n_epochs": "nothing: an epoch's order follows from seed and step",
    "default_root_dir": "run.root, or run.dir",
    "enable_autolog_hparams": "nothing: every logger gets the whole config",
    "model_registry": "lmtrain.export, which writes a Hugging Face folder",
}
