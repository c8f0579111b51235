"""A Hugging Face folder from a trained model: safetensors, config, tokenizer, generation config, the run's config."""

import copy
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lmtrain.data.tokenizers import save as save_tokenizer
from lmtrain.errors import RunError, disk_full, reason
from lmtrain.models.attention import generation_mode
from lmtrain.models.quantized import make_trainable_on_cpu
from lmtrain.models.trainable import adapter_of
from lmtrain.run_dir import fsync_dir

# Largest difference of reloaded from live logits: rounding of the stored dtype, grown through the layers. int8: the
# live model also rounds each layer's input, a merged one doesn't. merged: W + s B A in one product rounds otherwise
# than in two; 6e-6 in 30 layers. A wrong merge is off by 0.01 and more.
TOLERANCE = {"float32": 1e-5, "merged": 1e-4, "bfloat16": 0.1, "float16": 0.02, "int8": 0.2}


def export_model(
    model: PreTrainedModel,
    tokenizer: Any,
    folder: Path,
    *,
    dtype: str,
    run_config: Path | None,
    example: torch.Tensor,
    merge: bool = False,
    eos_token_ids: Sequence[int] | None = None,
    chat_template: str | None = None,
) -> Path:
    """Writes `folder` (complete or absent), reloads it and compares its logits with the live model's.

    Args:
        example: int64 [B, T] token ids the comparison is made on.
        merge: add an adapter to its base, which this does to `model` itself; else the adapter alone is written.
        eos_token_ids: at which generation stops, besides those the model came with.
        chat_template: stored with the tokenizer; None leaves it its own.

    Raises:
        RunError: the disk is full, or the reloaded model does not give the live model's logits.
    """
    temporary = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    live, tolerance = logits(model, example), allowed_difference(model, dtype, merge)
    try:
        model.generation_config = generation_config(model, eos_token_ids)
        adapter = adapter_of(model)
        if adapter is not None and not merge:
            from lmtrain.models.adapters import write_adapter

            write_adapter(adapter, temporary, getattr(torch, dtype))
        else:
            write_model(plain(model), temporary, dtype)
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        save_tokenizer(tokenizer, temporary)
        model.generation_config.save_pretrained(temporary)
        if run_config is not None:
            shutil.copyfile(run_config, temporary / "lmtrain_config.yaml")
        compare(live, tolerance, model, temporary, example)
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


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model without adapter: it is merged if it has one."""
    if adapter_of(model) is None:
        return model
    from lmtrain.models.merge import merged

    return merged(model)


def write_model(model: PreTrainedModel, folder: Path, dtype: str) -> None:
    stored = {k: v.detach().to("cpu", getattr(torch, dtype)) for k, v in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=drop_tied(model, stored))
    set_dtype(folder, dtype)


def generation_config(model: PreTrainedModel, eos_token_ids: Sequence[int] | None) -> GenerationConfig:
    """The model's own, with `eos_token_ids` added to where it stops."""
    config = copy.deepcopy(model.generation_config) or GenerationConfig()
    own = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
    ids = [own] if isinstance(own, int) else list(own or [])
    ids += [token for token in eos_token_ids or [] if token not in ids]
    config.eos_token_id = ids[0] if len(ids) == 1 else (ids or None)
    config.bos_token_id = config.bos_token_id if config.bos_token_id is not None else model.config.bos_token_id
    # Some checkpoints set temperature or top_p for greedy decoding, which transformers refuses to write.
    config.do_sample = True
    return config


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


def logits(model: PreTrainedModel, example: torch.Tensor) -> torch.Tensor:
    """fp32 logits [B, T, V] on the CPU of a model in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.no_grad(), generation_mode(model):
        found = model(example.to(model.device)).logits.float().cpu()
    model.train(was_training)
    return found


def allowed_difference(model: PreTrainedModel, dtype: str, merge: bool) -> float:
    """The coarsest rounding among what is stored and what the live model computes in."""
    allowed = [TOLERANCE[dtype], TOLERANCE[str(model.dtype).removeprefix("torch.")]]
    if merge and adapter_of(model) is not None:
        allowed.append(TOLERANCE["merged"])
    quantization: Any = getattr(model.config, "quantization_config", None)
    if merge and getattr(quantization, "load_in_8bit", False):
        allowed.append(TOLERANCE["int8"])
    if merge and getattr(quantization, "load_in_4bit", False):
        allowed.append(TOLERANCE[str(quantization.bnb_4bit_compute_dtype).removeprefix("torch.")])
    return max(allowed)


def compare(live: torch.Tensor, tolerance: float, model: PreTrainedModel, folder: Path, example: torch.Tensor) -> None:
    """Raises RunError unless the folder's model gives the `live` logits on `example`."""
    loaded = logits(load_exported(folder, like=model).to(model.device), example)
    difference = (live - loaded).abs().max().item()
    if not difference <= tolerance * max(1.0, live.abs().max().item()):
        raise RunError(
            f"the export reloads to different logits (by {difference:.2g}, allowed {tolerance:g} of the largest): it "
            f"was not kept; the checkpoints are untouched. Please report this with the run's config.yaml"
        )


def load_exported(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """An exported folder in fp32, its adapter on a base stored as that of `like`."""
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    from peft import AutoPeftModelForCausalLM

    options: dict[str, Any] = {}
    if getattr(like.config, "quantization_config", None) is not None:
        options = {"quantization_config": like.config.quantization_config, "device_map": {"": like.device}}
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).get_base_model()
    make_trainable_on_cpu(model)  # the other way to compute needs widths that divide by 64
    return model
