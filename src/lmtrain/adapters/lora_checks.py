"""What LoRA can't do on a model: checked before and after peft adds its layers."""

import difflib
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters.trainable import NAME
from lmtrain.config.constraints import regular_expression
from lmtrain.errors import UserError


def check_names_match(model: PreTrainedModel, key: str, names: Any) -> None:
    """Raises UserError if a name matches no module; peft accepts a list of which only some names match."""
    if names == "all-linear":
        return
    modules, hint = [name for name, _ in model.named_modules() if name], ""
    if isinstance(names, str):
        hint = ": a pattern must match the whole name; an entry of a list such as [q_proj,v_proj] only its end"
        regular_expression(key, names)
        missing = [] if any(re.fullmatch(names, m) for m in modules) else [names]
    else:
        missing = [n for n in names if not any(matches(m, [n]) for m in modules)]
    if not missing:
        return
    last = sorted({m.rpartition(".")[2] for m in modules if not m.rpartition(".")[2].isdigit()})
    near = difflib.get_close_matches(missing[0].rpartition(".")[2], last, n=3) or last
    raise UserError(f"{key}: {missing[0]!r} matches no module of the model{hint} (there are {', '.join(near)})")


def unfit_layers(model: PreTrainedModel) -> list[str] | None:
    """Returns the names of linear layers to which LoRA can't add, None without one.

    LoRA expects a tensor from a linear layer, and Llama 4's router gives a tuple. The kernels of Mamba read the weights
    of some layers (`self.out_proj.weight`) and call none of them, so an adapter on those would have no effect. Several
    adapters on one matrix, which Zamba's layers share, can't be merged.
    """
    uses = Counter(id(m.weight) for m in model.modules() if isinstance(m, nn.Linear))
    found = []
    for parent, module in model.named_modules():
        kind: Any = type(module)
        read = _weights_read(kind)
        linear = [(name, layer) for name, layer in module.named_children() if isinstance(layer, nn.Linear)]
        unfit = [name for name, m in linear if name in read or uses[id(m.weight)] > 1 or not _gives_tensor(m)]
        found += [f"{parent}.{name}" for name in unfit]
    return found or None


@cache
def _weights_read(cls: type) -> set[str]:
    """Returns the names of the parts whose weights the code of a class in transformers reads itself."""
    own = [c for c in cls.__mro__ if c.__module__.startswith("transformers.models.") and issubclass(c, nn.Module)]
    return {name for c in own for name in re.findall(r"self\.(\w+)\.weight\b(?![.\[])", inspect.getsource(c))}


def _gives_tensor(layer: nn.Linear) -> bool:
    if not type(layer).forward.__module__.startswith("transformers.models."):
        return True
    try:
        with torch.no_grad():
            return isinstance(layer(layer.weight.new_zeros(1, 1, layer.in_features)), Tensor)
    except RuntimeError:  # it takes inputs of another shape
        return False


def matches(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def embedding_names(model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules with a row per token: the input and, if there is one, the output embedding."""
    names = {id(module): name for name, module in model.named_modules()}
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [names[id(table)] for table in tables if table is not None]


def refuse_tied_lora(model: PreTrainedModel) -> None:
    """Raises UserError for LoRA on tied embeddings, which can't be merged, and for DoRA on the output layer.

    The loss is computed without DoRA's normalization of the output layer (see `blocks.output_head`).
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    adapted = [hasattr(m, "lora_A") for m in (head, embedding)]
    if any(adapted) and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        found = "peft.target_modules: the input and output embeddings share one matrix, which LoRA would untie"
        raise UserError(f"{found}: leave them out, or train it in full with peft.modules_to_save=[embed_tokens]")
    if adapted[0] and any(getattr(head, "use_dora", {}).values()):
        found = "peft.use_dora=true on the output layer is not possible"
        raise UserError(f"{found}: train that in full with peft.modules_to_save")


def check_reads_back(peft: PeftModel) -> None:
    """Raises UserError if peft wouldn't load some of the adapter's weights again, since it reads other names for them.

    It renames as transformers does when it reads the base's files, and a rule for `shared_expert.` may also change
    `shared_experts.`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = set_peft_model_state_dict(peft, get_peft_model_state_dict(peft, save_embedding_layers=False))
    if lost.unexpected_keys:
        parts = sorted({key.partition(".lora_")[0].rpartition(".")[2] for key in lost.unexpected_keys})
        found = f"peft doesn't read an adapter on {', '.join(parts)} of a {type(peft.get_base_model()).__name__} back"
        raise UserError(f"{found} from its file: name other modules, as peft.target_modules=[q_proj,v_proj] does")


def check_rows_are_trained(model: PreTrainedModel, new_tokens: Sequence[int]) -> None:
    """Raises UserError if rows of new tokens are frozen: they would be random in training, and lost on loading."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None or hasattr(module, "modules_to_save"):
            continue
        trained = set(module.token_adapter.token_indices[NAME]) if hasattr(module, "token_adapter") else set()
        missing = [token for token in new_tokens if token not in trained]
        if missing:
            found = f"the adapter trains no embedding row for the added token {missing[0]} (of {len(missing)})"
            raise UserError(f"{found}: start from one that was trained with it, or with peft.adapter=null")
