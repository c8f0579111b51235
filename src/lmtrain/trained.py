"""A trained model and its tokenizer: from a run's checkpoint, from an exported folder or from the hub."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lmtrain import checkpoint as store
from lmtrain import config as rules
from lmtrain.errors import UserError
from lmtrain.models.finetune import build_trainable_model
from lmtrain.models.trainable import check_names, restore_start, trainable_names
from lmtrain.resume import read_trainer_state
from lmtrain.run_dir import RunDir

_PREFIX = "model.model."  # LightningModule.model (LanguageModel) .model (transformers)


def from_run(run: RunDir, which: str) -> tuple[PreTrainedModel, Any, Path]:
    """Model, tokenizer and the checkpoint's folder; `which` is best, last or a checkpoint's name.

    The model is fp32 and on the CPU; one with a quantised base is where its training was, if that is here.
    """
    config = rules.load(run.config)
    checkpoint = find_checkpoint(run, which)
    tokenizer = AutoTokenizer.from_pretrained(run.tokenizer)
    if config.peft.quantization is None or not torch.cuda.is_available():
        config.trainer.accelerator = "cpu"
    pl.seed_everything(config.seed, verbose=False)  # what is drawn for a vocabulary that grew
    model = build_trainable_model(config, tokenizer)
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in store.load_weights(checkpoint).items()}
    check_names(model, weights)
    model.load_state_dict(weights, strict=trainable_names(model) is None)
    restore_start(model, read_trainer_state(checkpoint).get("adapter_start", {}))
    return model, tokenizer, checkpoint


def find_checkpoint(run: RunDir, which: str) -> Path:
    """The undamaged checkpoint called `which`; best falls back to last where nothing was validated."""
    candidates = [which, "last"] if which == "best" else [which]
    path = next((p for c in candidates if (p := run.checkpoints / c).exists()), None)
    if path is None and candidates[-1] == "last":  # a file system without links
        path = next(reversed(store.scan(run.checkpoints)), None)
    if path is None:
        there = ", ".join(p.name for p in store.scan(run.checkpoints)) or "none"
        raise UserError(f"{run.path} has no checkpoint {which!r} (there are: {there})")
    path = path.resolve()
    problem = store.damage(path)
    if problem is not None:
        raise UserError(f"{path} is damaged ({problem}); choose another checkpoint")
    return path


def load(name: str, which: str) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer from a run's folder, a Hugging Face folder or a hub name."""
    path = Path(name).expanduser()
    if (path / "config.yaml").exists():
        model, tokenizer, _ = from_run(RunDir(path.absolute()), which)
        return model, tokenizer
    is_adapter = (path / "adapter_config.json").exists()
    if path.exists() and not is_adapter and not (path / "config.json").exists():
        raise UserError(f"{path} is neither a run (config.yaml) nor a Hugging Face folder (config.json)")
    if not path.exists() and name.startswith(("/", ".", "~")):
        raise UserError(f"{name}: no such folder")
    try:
        if is_adapter:
            from peft import AutoPeftModelForCausalLM

            adapted = AutoPeftModelForCausalLM.from_pretrained(path).get_base_model()
            return adapted, AutoTokenizer.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise UserError(f"{name} is no folder here and can't be had from the hub: {error}") from None
