"""Folders of weights: with a memory or without; checked to hold all weights, as transformers draws what lacks."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmtrain.errors import UserError
from lmtrain.models.scalar_head import HEAD, auto_class, says_scalar_head

PREFIX = "memory_"  # before the base's model_type
ADDED = ("model_type", "architectures", "auto_map", "memory")  # what config.json has beside, or unlike, the base's


def is_exported(folder: Path) -> bool:
    """Whether a folder is the export of a model with a memory."""
    try:
        config = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and str(config.get("model_type")).startswith(PREFIX) and "memory" in config


def written_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """(model_type of the base, all that config.json holds).

    Raises:
        UserError: the base is none of transformers' causal language models.
    """
    written = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
    base = str(written["model_type"]).removeprefix(PREFIX)
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"{folder}: a memory of {base}, which is not a causal language model of transformers here")
    return base, written


def base_config(folder: Path) -> PretrainedConfig:
    """The config of the base; with it, from_pretrained reads the base's weights and leaves the memory's.

    Raises:
        UserError: as `written_config`.
    """
    base, written = written_config(folder)
    return CONFIG_MAPPING[base].from_dict({name: value for name, value in written.items() if name not in ADDED})


_MARKS = {"Linear4bit": "quant_state", "Linear8bitLt": "SCB"}  # of bitsandbytes: what its quantised weights have
LAYERS = 10_000  # no model has more; each is made before weights are looked for, so a million of them take hours


def checked(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The config; UserError for one with more layers than any model has."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > LAYERS:
        raise UserError(f"{where}: {layers:,} layers are more than any model has ({LAYERS:,} at most)")
    return config


def export_of(name: str) -> str:
    """The export of a run, where a run is named: merged, if there is one; else the name as it is."""
    exports = (Path(name).expanduser() / export for export in ("export_merged", "export"))
    return next((str(path) for path in exports if any(path.glob("*config.json"))), name)


def from_pretrained(name: str, *, scalar_head: bool | None = None, **options: Any) -> PreTrainedModel:
    """`AutoModelForCausalLM.from_pretrained`, or that of models with a scalar head.

    Args:
        name: a folder, or a name of the hub.
        scalar_head: whether it is to have one, new where the files hold none; None: as config.json says.
        options: its other arguments. Of a quantised model not all weights are there by their names, so none is missed.

    Raises:
        UserError: the files lack weights of the model, or its config.json has layers without end.
    """
    config = options.get("config")
    if config is None:
        kept = {k: v for k, v in options.items() if k in ("revision", "trust_remote_code", "local_files_only")}
        config = checked(AutoConfig.from_pretrained(name, **kept), f"{name}/config.json")
    cls = auto_class(says_scalar_head(config) if scalar_head is None else scalar_head)
    model, info = cls.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(set(info["missing_keys"]) - ({f"{HEAD}.weight"} if scalar_head else set()))
    if missing and getattr(model.config, "quantization_config", None) is None:
        raise UserError(
            f"{name} lacks weights of the {type(model).__name__} that its config.json describes: {missing[0]} "
            f"({len(missing)} in all), which would be random numbers; export or download it again"
        )
    assert isinstance(model, PreTrainedModel)
    _check_quantised(model, name, options)
    return model


def _check_quantised(model: PreTrainedModel, name: str, options: dict[str, Any]) -> None:
    """Raises UserError where config.json says that bitsandbytes has quantised the files' weights, and it hasn't."""
    for layer, module in model.named_modules() if "quantization_config" not in options else ():
        known = {cls.__name__ for cls in type(module).__mro__} & _MARKS.keys()
        if known and getattr(module.weight, _MARKS[known.pop()], None) is None:
            raise UserError(
                f"{name}/config.json: by its quantization_config the weights are quantised, and those of {layer} are "
                f"not: take quantization_config out, or download the model again"
            )
