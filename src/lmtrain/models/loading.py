"""Loads configs and weights of pretrained models from folders and the hub, and explains what could not be loaded."""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lmtrain.config.options import LoadedModelConfig
from lmtrain.data import hub
from lmtrain.errors import UserError
from lmtrain.models import folder, weight_files


def load_pretrained(
    cfg: LoadedModelConfig, config: PretrainedConfig, scalar_head: bool, in_files: bool, loading: dict[str, Any]
) -> PreTrainedModel:
    """Loads the model in fp32, or with `in_files` leaves its weights in their files if these can supply them."""
    load = functools.partial(from_hub, folder.from_pretrained, cfg, config=config, scalar_head=scalar_head)
    if in_files and weight_files.may_leave(config, str(cfg.name_or_path)):
        model: PreTrainedModel = load(dtype="auto")
        if weight_files.leave(model, str(cfg.name_or_path)):
            return model
        del model  # its memory is needed for the weights
    # The checkpoint's own dtype is often bf16, too coarse for small updates.
    return load(dtype=torch.float32, **loading)


def from_hub(function: Any, cfg: LoadedModelConfig, **options: Any) -> Any:
    name = str(cfg.name_or_path)
    is_path = Path(name).is_dir() or name.startswith((".", "/", "~"))
    # A single request first, since transformers would retry an unreachable hub for half a minute.
    unreachable = "" if is_path else hub.commit_of("model", name, cfg.revision)[1]
    options |= {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    try:
        return function(name, local_files_only=bool(unreachable), **options)
    except Exception as error:  # the hub's, requests' and transformers' errors share no base class
        if unreachable:
            raise UserError(hub.explain_unreachable("model", name, unreachable)) from error
        raise error if isinstance(error, UserError) else UserError(_explain_loading(cfg, error)) from error


def _explain_loading(cfg: LoadedModelConfig, error: Exception) -> str:
    name = str(cfg.name_or_path)
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        return f"model.name_or_path={name} is an adapter: name its base there, and set peft=lora peft.adapter={name}"
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if "trust_remote_code" in str(error):
        return f"model.name_or_path={name} brings its own code: if you trust it, set model.trust_remote_code=true"
    if Path(name).is_dir():
        return f"model.name_or_path={name} is a folder without a model that loads ({reason})"
    if name.startswith((".", "/", "~")):
        return f"model.name_or_path={name}: no such folder"
    found = f"model.name_or_path={name} can't be loaded from {hub.endpoint()} ({reason})"
    return f"{found}: check the spelling, the network or HF_ENDPOINT, or run `hf auth login` for a gated model"
