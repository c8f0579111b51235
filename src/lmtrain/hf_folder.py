"""A Hugging Face folder from a trained model: safetensors, config, tokenizer, generation config, the run's config."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lmtrain.data.tokenizers import save as save_tokenizer
from lmtrain.errors import RunError, disk_full, reason
from lmtrain.models.attention import generation_mode
from lmtrain.run_dir import fsync_dir

# Largest difference of reloaded from live logits: rounding of the stored dtype, grown through the layers.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}


def export_model(
    model: PreTrainedModel, tokenizer: Any, folder: Path, *, dtype: str, run_config: Path | None, example: torch.Tensor
) -> Path:
    """Writes `folder` (complete or absent), reloads it and compares its logits with the live model's.

    Args:
        example: int64 [B, T] token ids the comparison is made on.

    Raises:
        RunError: the disk is full, or the reloaded model does not give the live model's logits.
    """
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        stored = {k: v.detach().to("cpu", getattr(torch, dtype)) for k, v in model.state_dict().items()}
        model.save_pretrained(temporary, state_dict=drop_tied(model, stored))
        save_tokenizer(tokenizer, temporary)
        set_dtype(temporary, dtype)
        GenerationConfig(
            eos_token_id=model.config.eos_token_id, bos_token_id=model.config.bos_token_id, do_sample=True
        ).save_pretrained(temporary)
        if run_config is not None:
            shutil.copyfile(run_config, temporary / "lmtrain_config.yaml")
        compare(model, temporary, example, dtype)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync_dir(folder.parent)
    except Exception as error:
        if not isinstance(error, OSError) and not disk_full(error):
            raise
        raise RunError(
            f"cannot write the export {folder}: {reason(error)}; the checkpoints are untouched, so once there is room "
            f"python -m lmtrain.export run_dir={folder.parent} writes it"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def drop_tied(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the copies of tied weights: a Hugging Face file holds them once."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return state
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in state.items() if name not in tied}


def set_dtype(folder: Path, dtype: str) -> None:
    """config.json names the dtype the weights are stored in, which is what from_pretrained loads by default."""
    import json

    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


def compare(model: PreTrainedModel, folder: Path, example: torch.Tensor, dtype: str) -> None:
    """Raises RunError unless the folder's model gives the live model's logits on `example`."""
    reloaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(model.device).eval()
    was_training = model.training
    model.eval()
    example = example.to(model.device)
    with torch.no_grad(), generation_mode(model):
        live, loaded = model(example).logits.float(), reloaded(example).logits.float()
    model.train(was_training)
    difference = (live - loaded).abs().max().item()
    if not difference <= TOLERANCE[dtype] * max(1.0, live.abs().max().item()):
        raise RunError(
            f"the export reloads to different logits (by {difference:.2g}, allowed {TOLERANCE[dtype]:g} of the "
            f"largest): it was not kept; the checkpoints are untouched. Please report this with the run's config.yaml"
        )
