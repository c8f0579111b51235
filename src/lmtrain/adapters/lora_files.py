"""LoRA adapters as files: written for peft, and read to continue them or to load their model.

An adapter of a language model inside a multimodal wrapper is written under the wrapper's names, and read under the
language model's own.
"""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, auto, get_peft_model_state_dict
from peft import PeftConfig as StoredConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.save_and_load import load_peft_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters.trainable import NAME, Adapter
from lmtrain.config.schema import PeftConfig
from lmtrain.errors import UserError, first_line
from lmtrain.models.folder import check_finite, check_shards
from lmtrain.models.scalar_head import has_scalar_head
from lmtrain.models.wrapper import Wrapper, text_of, wrapper_of

SCALAR = "SEQ_CLS"  # peft's task type of a model with a scalar head
_OF_BASE = "base_model.model."  # before the base model's names in an adapter's files


def continued(model: PreTrainedModel, cfg: PeftConfig, new_tokens: Sequence[int]) -> PeftModel:
    """Loads an existing adapter onto the model, to train it further."""
    name = str(cfg.adapter)
    try:
        config = StoredConfig.from_pretrained(name)
        if not isinstance(config, LoraConfig):
            raise UserError(f"peft.adapter={name} is a {config.peft_type.value} adapter: only LoRA can be continued")
        if has_scalar_head(model) != (config.task_type == SCALAR):
            does = "predicts tokens" if has_scalar_head(model) else "gives rewards"
            raise UserError(f"peft.adapter={name} is of a model that {does}: merge it first (export.merge=true)")
        # Its weights go under the names of this model.
        config.lora_dropout = cfg.dropout
        names = _inner(name, config, model)
        peft = PeftModel.from_pretrained(model, name, is_trainable=True, config=config, key_mapping=names)
        check_finite(((n, p) for n, p in peft.named_parameters() if p.requires_grad), name)
        held = set(load_peft_weights(name, device="cpu", key_mapping=names))
    except UserError:
        raise
    except Exception as error:  # the hub's, safetensors' and pickle's errors share no base class
        found = f"peft.adapter={name} can't be loaded onto this model ({first_line(error)})"
        advice = "give its folder or hub name, and the base it was trained on as model.name_or_path"
        raise UserError(f"{found}: {advice}") from error
    # peft takes what fits and is silent about the rest.
    expected = set(get_peft_model_state_dict(peft, save_embedding_layers=False))
    if odd := sorted(expected ^ held):
        what = "lacks" if odd[0] in expected else "contains weights that match no part of the model:"
        raise UserError(f"peft.adapter={name} {what} {odd[0]} (and {len(odd) - 1} more): start from the merged model")
    return peft


def adapter_token_ids(name: str) -> list[int]:
    """Returns ids of the tokens whose rows an existing adapter trains; none if it has none or can't be read."""
    try:
        rows = StoredConfig.from_pretrained(name).trainable_token_indices
    except (OSError, ValueError, AttributeError):  # `attach` reports the error
        return []
    lists = rows.values() if isinstance(rows, dict) else [rows or []]
    return sorted({token for ids in lists for token in ids})


def write_adapter(adapter: Adapter, folder: Path, dtype: torch.dtype) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, as `PeftModel.from_pretrained` reads them.

    They apply to the original base: if the initial B0 A0 was subtracted from it, the rank doubles, as
    `B A - B0 A0 = [B, -B0] [A; A0]`.
    """
    config = copy.deepcopy(adapter.config)
    weights = get_peft_model_state_dict(adapter.peft, save_embedding_layers=False)
    config.inference_mode = True
    if adapter.start:
        for name, first in adapter.start.items():
            key = f"base_model.model.{name.replace(f'.{NAME}.', '.')}"
            first = first.to(weights[key])
            is_b = ".lora_B." in name
            weights[key] = torch.cat([weights[key], -first if is_b else first], dim=1 if is_b else 0)
        scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
        config.r *= 2
        config.lora_alpha = scaling * config.r
        config.use_rslora = False
        config.init_lora_weights = True
    wrapper = wrapper_of(adapter.peft.get_base_model())
    if wrapper is not None and config.task_type != SCALAR:
        weights = _outer(config, weights, adapter.peft.get_base_model(), wrapper)
    weights = {k: v.detach().to("cpu", dtype).contiguous().clone() for k, v in weights.items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _outer(config: LoraConfig, weights: dict[str, Tensor], model: nn.Module, wrapper: Wrapper) -> dict[str, Tensor]:
    """Renames the parts of a language model as in its wrapper, in `config` too; returns the weights under such names.

    The targets become a pattern for exactly the adapted modules: the tower has modules of the same names.
    """
    # Stacked experts are named by config.target_parameters.
    own = [name for name, m in model.named_modules() if hasattr(m, "lora_A") and not isinstance(m, ParamWrapper)]
    config.exclude_modules = None
    config.target_modules = "|".join(sorted(re.escape(wrapper.outer(name)) for name in own))
    saved = [name for name, module in model.named_modules() if hasattr(module, "modules_to_save")]
    _rename(config, saved, wrapper.outer)
    # By these AutoPeftModel finds the wrapper's class; AutoPeftModelForCausalLM may load the language model alone.
    config.task_type = None
    config.auto_mapping = {"base_model_class": wrapper.cls.__name__, "parent_library": wrapper.cls.__module__}
    return {_OF_BASE + wrapper.outer(name.removeprefix(_OF_BASE)): tensor for name, tensor in weights.items()}


def _rename(config: LoraConfig, saved: Sequence[str], renamed: Callable[[str], str]) -> None:
    config.modules_to_save = [renamed(name) for name in saved] or None
    if isinstance(rows := config.trainable_token_indices, dict):
        config.trainable_token_indices = {renamed(name): ids for name, ids in rows.items()}


def _inner(name: str, config: LoraConfig, model: nn.Module) -> dict[str, str] | None:
    """Gives the config of a wrapper's adapter the language model's names; returns {pattern: name}, None for others."""
    wrapper = wrapper_of(model)
    if wrapper is None:
        return None
    names = {rf"^{re.escape(there)}(?=\.)": here for here, there in wrapper.prefixes}
    keys = load_peft_weights(name, device="cpu", key_mapping=names)
    config.target_modules = {k.removeprefix(_OF_BASE).partition(".lora_A")[0] for k in keys if ".lora_A" in k}
    _rename(config, config.modules_to_save or [], wrapper.inner)
    config.task_type, config.auto_mapping = "CAUSAL_LM", None
    return names


def load_adapter(folder: Path, *, whole: bool = False, **options: Any) -> PreTrainedModel:
    """Loads an exported adapter onto its base model, of a wrapper onto its language model.

    Args:
        whole: return a wrapper whole instead.
        options: those of from_pretrained.

    Raises:
        UserError: see `check_shards`, and `text_of`.
    """
    stored = StoredConfig.from_pretrained(str(folder))
    check_shards(str(stored.base_model_name_or_path), revision=stored.revision)
    cls: Any = auto.AutoPeftModel if stored.auto_mapping else auto.AutoPeftModelForCausalLM
    if stored.task_type == SCALAR:
        cls, options = auto.AutoPeftModelForSequenceClassification, options | {"num_labels": 1}
    model = cls.from_pretrained(folder, **options).get_base_model()
    return model if whole else text_of(model)
