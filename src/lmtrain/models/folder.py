"""Model folders, with or without a memory; loading refuses missing weights, which transformers would draw at random."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from lmtrain.data import hub
from lmtrain.errors import UserError
from lmtrain.models.scalar_head import HEAD, says_scalar_head
from lmtrain.models.wrapper import outermost, text_of

PREFIX = "memory_"  # precedes the base's model_type
ADDED = ("model_type", "architectures", "auto_map", "memory")  # fields that the base's config lacks or has otherwise


def read_config(folder: Path) -> Any:
    """Returns the content of a model folder's config.json, {} if there is none."""
    path = folder.expanduser() / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def change_config(folder: Path, **fields: Any) -> None:
    """Sets fields of a model folder's config.json."""
    text = json.dumps(read_config(folder) | fields, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def with_earlier_names(config: dict[str, Any]) -> dict[str, Any]:
    """Adds to a config the names by which transformers 4, and servers built on it, read what version 5 calls otherwise.

    These are dtypes, numbers of experts (Qwen3 MoE) and rotary frequencies, of which they take a family's defaults.
    """
    nested = {name: value for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)}
    named = config | {name: with_earlier_names(value) for name, value in nested.items()}
    named |= {"torch_dtype": config["dtype"]} if "dtype" in config else {}
    rope, family = config.get("rope_parameters"), config.get("model_type")
    now = CONFIG_MAPPING[family].attribute_map.get("num_experts") if family in CONFIG_MAPPING else None
    named |= {"num_experts": config[now]} if now in config else {}
    if not rope or family not in CONFIG_MAPPING:
        return named
    everywhere, local = rope.get("full_attention", rope) or {}, rope.get("sliding_attention") or {}
    moved = {name: everywhere[name] for name in ("rope_theta", "partial_rotary_factor") if name in everywhere}
    if everywhere.get("rope_type", "default") != "default":
        moved["rope_scaling"] = {name: value for name, value in everywhere.items() if name not in moved}
    moved |= {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    try:  # a family that is not in version 4 may read these names in another way
        plain = {k: v for k, v in config.items() if "{" not in str(v)}  # an infinite number is written as an object
        read = CONFIG_MAPPING[family].from_dict(copy.deepcopy({**plain, "rope_parameters": rope, **moved}))
        same = read.rope_parameters == rope
    except Exception:  # transformers' configs validate themselves, with various exceptions
        same = False
    return named | moved if same else named


def is_exported(folder: Path) -> bool:
    """Returns whether a folder is the export of a model with a memory."""
    try:
        config = read_config(folder)
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and str(config.get("model_type")).startswith(PREFIX) and "memory" in config


def written_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns (model_type of the base, all fields of config.json).

    Raises:
        UserError: the base is not one of transformers' causal language models.
    """
    written = read_config(folder)
    base = str(written["model_type"]).removeprefix(PREFIX)
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"{folder}: a memory of {base}, which is not a causal language model of transformers here")
    return base, written


def base_config(folder: Path) -> PretrainedConfig:
    """Returns the base's config; with it, from_pretrained loads the base's weights and ignores the memory's.

    Raises:
        UserError: see `written_config`.
    """
    base, written = written_config(folder)
    return CONFIG_MAPPING[base].from_dict({name: value for name, value in written.items() if name not in ADDED})


_INDICES = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
_MARKS = {"Linear4bit": "quant_state", "Linear8bitLt": "SCB"}  # bitsandbytes layers: attribute of quantised weights
LAYERS = 10_000  # no model has more; layers are created before weights are read, so a million would take hours


def checked(config: PretrainedConfig, where: str) -> PretrainedConfig:
    """Returns the config unchanged, or raises UserError if it has more layers than any model (LAYERS)."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > LAYERS:
        raise UserError(f"{where}: {layers:,} layers are more than any model has ({LAYERS:,} at most)")
    return config


def export_of(name: str) -> str:
    """Returns the export folder if `name` is a run folder, the merged one if it exists; else `name` unchanged."""
    exports = (Path(name).expanduser() / export for export in ("export_merged", "export"))
    return next((str(path) for path in exports if any(path.glob("*config.json"))), name)


def check_shards(name: str, **options: Any) -> None:
    """Raises UserError if an index of weights names a file outside its folder, which transformers would read.

    Args:
        name: a folder, or a name on the hub, whose index is downloaded.
        options: revision and local_files_only, for the hub.
    """
    for index in filter(None, (hub.optional_file(name, file, **options) for file in _INDICES)):
        try:
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # transformers refuses it
        for file in files:
            parts = PurePath(str(file).replace("\\", "/"))
            if parts.is_absolute() or ".." in parts.parts:
                raise UserError(f"{index} names weights outside its folder ({file}): they are not read")


def from_pretrained(name: str, *, scalar_head: bool | None = None, **options: Any) -> PreTrainedModel:
    """Loads a model with `AutoModelForCausalLM.from_pretrained`, or with the auto class for scalar heads.

    Of a multimodal wrapper, the language model is returned (models/wrapper.py).

    Args:
        name: a folder, or a name on the hub.
        scalar_head: whether the model gets a scalar head, a new one if the files have none; None: as in config.json.
        options: other arguments of from_pretrained. Quantised models are not checked for missing weights, since not all
            of theirs are stored under the parameters' names.

    Raises:
        UserError: the files lack weights of the model, or hold unquantised ones where config.json says that they are
            quantised; config.json has too many layers (see `checked`); or see `check_shards`.
    """
    config = options.get("config")
    kept = {k: v for k, v in options.items() if k in ("revision", "local_files_only")}
    if config is None:
        config = AutoConfig.from_pretrained(name, trust_remote_code=options.get("trust_remote_code"), **kept)
    check_shards(name, **kept)
    checked(config, f"{name}/config.json")
    rewards = says_scalar_head(config) if scalar_head is None else scalar_head
    cls = outermost(config, rewards)
    model, info = cls.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(set(info["missing_keys"]) - ({f"{HEAD}.weight"} if scalar_head else set()))
    if missing and getattr(model.config, "quantization_config", None) is None:
        found = f"{name} lacks weights of the {type(model).__name__} that its config.json describes"
        wanting = f"{missing[0]} ({len(missing)} in all), which would be random numbers"
        raise UserError(f"{found}: {wanting}; export or download it again")
    assert isinstance(model, PreTrainedModel)
    _check_quantised(model, name, options)
    check_finite(model.named_parameters(), name)
    return text_of(model, rewards)


def check_finite(weights: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Raises UserError if weights are NaN or infinite; a pass over the memory, a quarter of the time that loads it."""
    odd, known = [], 0
    for name, weight in weights:
        if weight.is_floating_point() and weight.element_size() > 1 and weight.numel() and not weight.is_meta:
            known += 1
            odd += [] if all(map(torch.isfinite, torch.aminmax(weight.detach()))) else [name]
    if odd:
        found = f"{where} holds weights that are not finite numbers ({odd[0]}; {len(odd)} of {known} tensors)"
        raise UserError(f"{found}: take another checkpoint, or export or download it again")


def _check_quantised(model: PreTrainedModel, name: str, options: dict[str, Any]) -> None:
    """Raises UserError if config.json says that the files' weights are quantised by bitsandbytes, and they are not."""
    for layer, module in model.named_modules() if "quantization_config" not in options else ():
        known = {cls.__name__ for cls in type(module).__mro__} & _MARKS.keys()
        if known and getattr(module.weight, _MARKS[known.pop()], None) is None:
            found = f"{name}/config.json: by its quantization_config {layer} is quantised, and its weights are not"
            raise UserError(f"{found}: take quantization_config out, or download the model again")
