"""Tiny random models of transformers' families, each saved as a folder with a tokenizer of characters."""

import contextlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from family_variants import ALWAYS, EXCLUDED, LAYERS, NEEDED, Variant, build, config_of
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.models.probe import TESTED, enlarge, shrink

QUESTIONS = ["how far", "and back", "is it old", "who was there", "why", "are you sure"]
ANSWERS = ["ten miles", "as far again", "older than you", "all of us", "nobody knows that", "yes"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}q {{ m.content }}{% else %} a {% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %} a {% endif %}"
)
# All examples are in the one row of every step.
END = 23  # the id of the token that ends texts, see tokenizer_of
LARGE = 100_000_000  # parameters


def names() -> list[str]:
    """Returns the model types of all causal language models and multimodal wrappers, each once."""
    return list(dict.fromkeys([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]))


def is_multimodal(name: str) -> bool:
    return name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES


def tokenizer_of(folder: Path) -> Any:
    """Returns a tokenizer of the characters in the chats."""
    cfg = TokenizerConfig(kind="char")
    text = "".join([*QUESTIONS, *ANSWERS, "q a"])
    made = tokenizers.load_or_train(cfg, lambda _: iter([text]), tokenizers.identity(cfg))
    made.chat_template = TEMPLATE
    tokenizers.save(made, folder)
    assert made.eos_token_id == END
    return made


def save_base(name: str, folder: Path) -> type:
    """Saves a tiny random model of a model type; returns its class."""
    torch.manual_seed(0)
    if is_multimodal(name):
        config = tiny_wrapper(name)
        with torch.device("meta"):
            size = AutoModelForMultimodalLM.from_config(config).num_parameters()
        if size > LARGE:
            raise ValueError(f"its towers' sizes have other names: {size:,} parameters")
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        enlarge(model)
    else:
        encoder = "is_decoder" in CONFIG_MAPPING[name]().to_dict()
        config = config_of(Variant(name, {"is_decoder": True} if encoder else {}))
        if name in TESTED or name in EXCLUDED:  # layers of other families differ more
            with contextlib.suppress(Exception):  # the layers of some families can't be cut to another number
                fields = config.to_dict()
                fields |= {key: 2 for key in ("decoder_layers", "encoder_layers") if key in fields}
                fields.pop("num_layers_per_stack", None)  # HRM's, from which it counts num_hidden_layers
                config = config.from_dict(fields | {"num_hidden_layers": 2})
        settle(config)
        model = build(config)
    with torch.no_grad():  # smaller weights, so that the layers don't enlarge rounding errors
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(0.5)
    model.save_pretrained(folder)
    return type(model)


def settle(config: Any) -> None:
    """Leaves out losses of routers, as the loss compared is the cross-entropy, and names the tokenizer's end."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(part, "router_aux_loss_coef", None):
            part.router_aux_loss_coef = 0.0
        part.eos_token_id = part.bos_token_id = END
        if hasattr(part, "forced_eos_token_id"):
            part.forced_eos_token_id = None


def tiny_wrapper(name: str) -> Any:
    """Returns a small config of a wrapper whose language model has as many layers as a pattern of layers is long."""
    config = CONFIG_MAPPING[name](**NEEDED.get(name, {}))
    with contextlib.suppress(Exception):  # the layers of some families can't be cut to another number
        fields = config.to_dict()
        fields["text_config"] = shallow(fields["text_config"])
        config = config.from_dict(fields)
    config = shrink(config, ALWAYS)
    settle(config)
    return config


def shallow(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns a config's fields with LAYERS layers, and with no more entries in what it lists layer by layer."""
    found, depth = fields | {"num_hidden_layers": LAYERS}, fields["num_hidden_layers"]
    for key, value in fields.items():
        if isinstance(value, list) and len(value) == depth:
            found[key] = value[:LAYERS]
        elif isinstance(value, dict) and all(str(layer).isdigit() for layer in value):
            found[key] = {layer: one for layer, one in value.items() if int(layer) < LAYERS}
    return found


def load(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForMultimodalLM if is_multimodal(config.model_type) else AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
