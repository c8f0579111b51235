"""Export of a model with a memory as a Hugging Face folder: weights, config, and a modeling file without lmtrain.

transformers loads the folder with trust_remote_code=True, which runs modeling_memory.py; lmtrain loads it without
running code from the folder.
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmtrain.adapters import memory
from lmtrain.adapters.memory import MemorySettings, attach_memory
from lmtrain.errors import UserError
from lmtrain.models.folder import PREFIX, change_config, check_shards, written_config

MODELING = "modeling_memory"
# The modeling file: its licence, the source of `memory`, and two classes.
_TEMPLATE = Path(__file__).with_name(f"{MODELING}.txt")


def check_exportable(model: PreTrainedModel) -> None:
    """Raises UserError unless the model's class is one of transformers' own, which the modeling file can import."""
    name = type(model).__name__.removeprefix("FSDP")
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model.config.model_type) != name:
        found = f"a memory of {name}, no class of transformers' own, can't be exported"
        raise UserError(f"{found}: set export.enabled=false")


def modeling_file(config: PreTrainedConfig) -> str:
    """Returns the text of modeling_memory.py for this base config: the source of `memory`, and two classes."""
    names = {"config": type(config).__name__, "model": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]}
    code = inspect.getsource(memory)
    imports = f"from torch import Tensor, nn\nfrom transformers import {names['config']}, {names['model']}\n"
    code = code.replace("from torch import Tensor, nn\n", imports, 1)
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.format(code=code, **names, model_type=PREFIX + config.model_type)


def write(model: PreTrainedModel, settings: MemorySettings, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes weights, config.json and modeling_memory.py.

    Args:
        model: a transformers model with a memory and no other adapter, which passed `check_exportable`.
        state: the weights to store, tied ones once.
    """
    model.save_pretrained(folder, state_dict=state)
    classes = {"AutoConfig": "MemoryConfig", "AutoModelForCausalLM": "MemoryForCausalLM"}
    change_config(
        folder,
        model_type=PREFIX + model.config.model_type,
        architectures=["MemoryForCausalLM"],
        auto_map={auto: f"{MODELING}.{name}" for auto, name in classes.items()},
        memory=dataclasses.asdict(settings),
    )
    (folder / f"{MODELING}.py").write_text(modeling_file(model.config), encoding="utf-8")


def settings_in(folder: Path) -> MemorySettings:
    """Returns the settings of the memory in a folder that `write` made.

    Raises:
        UserError: the base is not one of transformers' models, or the memory's fields are not those of MemorySettings.
    """
    _, written = written_config(folder)
    try:
        return MemorySettings(**{**written["memory"], "layers": tuple(written["memory"]["layers"])})
    except (TypeError, KeyError) as error:
        raise UserError(f"{folder}/config.json: memory is not what lmtrain writes ({error})") from None


@torch.no_grad()
def load_memory(model: PreTrainedModel, folder: Path) -> None:
    """Copies the weights of an exported memory into the memory of `model`, which has the same shape.

    Raises:
        UserError: the folder lacks some of these weights.
    """
    new = {name: p for name, p in model.named_parameters() if ".memory." in name or ".memory_bank." in name}
    for file in sorted(folder.expanduser().glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in new.keys() & set(weights.keys()):
                new.pop(name).copy_(weights.get_tensor(name))
    if new:
        raise UserError(f"{folder}: its weights lack {min(new)} of its memory: export it again")


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """Loads the model of a folder that `write` made, with lmtrain's own code; `options` are those of from_pretrained.

    Raises:
        UserError: see `settings_in` and `check_shards`.
    """
    check_shards(str(folder))
    base, _ = written_config(folder)
    settings = settings_in(folder)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[base])

    def start(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        attach_memory(self, settings)

    config_class = CONFIG_MAPPING[base]
    own_config = type("MemoryConfig", (config_class,), {"model_type": PREFIX + base})
    own_class = type("MemoryForCausalLM", (model_class,), {"__init__": start, "config_class": own_config})
    return own_class.from_pretrained(folder, **options)  # type: ignore[attr-defined]
