"""LoRA and its variants through peft: small trained matrices added to the frozen weights of a pretrained model, or
merged into them.

peft puts its layers into the transformers model in place, so the rest of the code sees the same model: same class, same
`base_model`, more named parameters (`...q_proj.lora_A.default.weight`). `adapter_of(model)` returns the adapter.

LoRA: Hu et al. 2021, arXiv:2106.09685; rsLoRA: arXiv:2312.03732; DoRA: arXiv:2402.09353; PiSSA: arXiv:2404.02948.
"""

import copy
import difflib
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, auto, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft import PeftConfig as StoredConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.save_and_load import load_peft_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters import quantized
from lmtrain.adapters.memory import attach_memory
from lmtrain.adapters.memory_adapter import memory_of
from lmtrain.adapters.trainable import ATTRIBUTE, NAME, Adapter, adapter_of
from lmtrain.config.constraints import regular_expression
from lmtrain.config.schema import PeftConfig
from lmtrain.errors import UserError, first_line
from lmtrain.models.folder import check_finite, check_shards
from lmtrain.models.scalar_head import auto_class, has_scalar_head
from lmtrain.models.wrapper import ATTRIBUTE as WRAPPER
from lmtrain.models.wrapper import Wrapper, text_of, wrapper_of

# Initializations that subtract the initial A and B from the base weight, which becomes W - s B A.
_MOVES_BASE = ("pissa", "olora")
SCALAR = "SEQ_CLS"  # peft's task type of a model with a scalar head


def attach(
    model: PreTrainedModel, cfg: PeftConfig, base: str, revision: str | None, new_tokens: Sequence[int], seed: int
) -> Adapter:
    """Freezes the model and attaches the LoRA adapter of `cfg` to it.

    The adapter's weights are fp32 and depend on `seed` alone; the state of the global random generator is preserved.

    Args:
        base: hub name or folder of the model's weights, written into the adapter's config.
        new_tokens: ids whose embedding rows are trained and saved with the adapter.

    Raises:
        UserError: targets match no module, an existing adapter doesn't fit, or LoRA is on one side of tied embeddings.
    """
    with torch.random.fork_rng([]), warnings.catch_warnings():
        torch.manual_seed(seed)
        warnings.simplefilter("ignore", UserWarning)  # the reported conditions are checked here, or intended
        peft = _continued(model, cfg, new_tokens) if cfg.adapter else _new(model, cfg, new_tokens)
    _refuse_tied_lora(model)
    _check_comes_back(peft)
    _check_rows_are_trained(model, new_tokens)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    model.train()
    config = peft.peft_config[NAME]
    folder = Path(base).expanduser()
    config.base_model_name_or_path, config.revision = str(folder.absolute()) if folder.is_dir() else base, revision
    moved = str(config.init_lora_weights).startswith(_MOVES_BASE) and not cfg.adapter
    adapter = Adapter(peft, _lora_weights(model) if moved else {})
    # Set without nn.Module's __setattr__: the adapter's parameters are the model's and must not be registered twice.
    model.__dict__[ATTRIBUTE] = adapter
    return adapter


def _new(model: PreTrainedModel, cfg: PeftConfig, new_tokens: Sequence[int]) -> PeftModel:
    targets, also_trained = cfg.target_modules, list(cfg.modules_to_save or [])
    _check_names_match(model, "peft.target_modules", targets)
    _check_names_match(model, "peft.modules_to_save", also_trained)
    tables, keep_tied = _tables(model), False
    if _is_tied(model):
        # A trained copy of a tied embedding stays tied, so that merging is exact; peft needs the output layer's name.
        keep_tied = any(_matches(name, also_trained) for name in tables)
        if keep_tied:  # in this order, each once: otherwise peft trains two copies that drift apart
            also_trained = [name for name in also_trained if not _matches(tables[1], [name])]
            also_trained += [name for name in tables if not _matches(name, also_trained)]
        tables = tables[:1]
    rows = {name: list(new_tokens) for name in tables if not _matches(name, also_trained)}
    config = LoraConfig(
        # Of a model with a scalar head, peft trains and saves a copy of the head.
        task_type=SCALAR if has_scalar_head(model) else "CAUSAL_LM",
        r=cfg.r, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, use_rslora=cfg.use_rslora, use_dora=cfg.use_dora,
        target_modules=targets, exclude_modules=_unfit(model) if targets == "all-linear" else None,
        modules_to_save=also_trained or None, bias=cfg.bias, ensure_weight_tying=keep_tied,
        init_lora_weights=True if cfg.init_weights == "default" else cfg.init_weights,
        trainable_token_indices=rows if new_tokens and rows else None,
    )  # fmt: skip
    try:
        return get_peft_model(model, config)
    except Exception as error:  # peft raises AttributeError where its other initializations need a single matrix
        remedy = ""
        if cfg.init_weights not in ("default", "gaussian"):
            remedy = f" (peft.init_weights={cfg.init_weights}): set peft.init_weights=default, or leave stacked "
            remedy += "experts out, as peft.target_modules=[q_proj,v_proj] does"
        raise UserError(f"peft refuses this adapter: {first_line(error)}{remedy}") from error


def _continued(model: PreTrainedModel, cfg: PeftConfig, new_tokens: Sequence[int]) -> PeftModel:
    """Loads an existing adapter onto the model, to train it further."""
    name = str(cfg.adapter)
    try:
        config = StoredConfig.from_pretrained(name)
        if not isinstance(config, LoraConfig):
            raise UserError(f"peft.adapter={name} is a {config.peft_type.value} adapter: only LoRA can be continued")
        if has_scalar_head(model) != (config.task_type == SCALAR):
            does = "predicts tokens" if has_scalar_head(model) else "gives rewards"
            raise UserError(
                f"peft.adapter={name} is of a model that {does}, and this run trains another kind: merge it into its "
                f"base (export.merge=true) and start from that"
            )
        config.lora_dropout = cfg.dropout
        names = _inner(name, config, model)
        peft = PeftModel.from_pretrained(model, name, is_trainable=True, config=config, key_mapping=names)
        check_finite(((n, p) for n, p in peft.named_parameters() if p.requires_grad), name)
        held = set(load_peft_weights(name, device="cpu", key_mapping=names))
    except UserError:
        raise
    except Exception as error:  # the hub's, safetensors' and pickle's errors share no base class
        raise UserError(
            f"peft.adapter={name} can't be loaded onto this model ({first_line(error)}): give the folder with its "
            f"adapter_config.json or its hub name, and the base it was trained on as model.name_or_path"
        ) from error
    expected = set(get_peft_model_state_dict(peft, save_embedding_layers=False))
    if odd := sorted(expected ^ held):
        what = "lacks" if odd[0] in expected else "contains weights that match no part of the model:"
        raise UserError(
            f"peft.adapter={name} {what} {odd[0]} (and {len(odd) - 1} more): merge it into its base with peft's "
            f"merge_and_unload and start from that model"
        )
    return peft


def adapter_token_ids(name: str) -> list[int]:
    """Returns ids of the tokens whose rows an existing adapter trains; none if it has none or can't be read."""
    try:
        rows = StoredConfig.from_pretrained(name).trainable_token_indices
    except (OSError, ValueError, AttributeError):  # `attach` reports the error
        return []
    lists = rows.values() if isinstance(rows, dict) else [rows or []]
    return sorted({token for ids in lists for token in ids})


def _check_names_match(model: PreTrainedModel, key: str, names: Any) -> None:
    """Raises UserError if a name matches no module; peft accepts a list of which only some names match."""
    if names == "all-linear":
        return
    modules, hint = [name for name, _ in model.named_modules() if name], ""
    if isinstance(names, str):
        hint = ": a pattern must match the whole name; an entry of a list such as [q_proj,v_proj] only its end"
        regular_expression(key, names)
        missing = [] if any(re.fullmatch(names, m) for m in modules) else [names]
    else:
        missing = [n for n in names if not any(_matches(m, [n]) for m in modules)]
    if not missing:
        return
    last = sorted({m.rpartition(".")[2] for m in modules if not m.rpartition(".")[2].isdigit()})
    near = difflib.get_close_matches(missing[0].rpartition(".")[2], last, n=3) or last
    raise UserError(f"{key}: {missing[0]!r} matches no module of the model{hint} (there are {', '.join(near)})")


def _unfit(model: PreTrainedModel) -> list[str] | None:
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


def _matches(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_tied(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _tables(model: PreTrainedModel) -> list[str]:
    """Returns the names of the modules with a row per token: the input and, if there is one, the output embedding."""
    names = {id(module): name for name, module in model.named_modules()}
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    return [names[id(table)] for table in tables if table is not None]


def _refuse_tied_lora(model: PreTrainedModel) -> None:
    """Raises UserError for LoRA on tied embeddings, which can't be merged, and for DoRA on the output layer.

    The loss is computed without DoRA's normalization of the output layer (see `blocks.output_head`).
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    adapted = [hasattr(m, "lora_A") for m in (head, embedding)]
    if any(adapted) and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        raise UserError(
            "peft.target_modules: this model's input and output embeddings share one matrix (tied weights), and "
            "LoRA on either of them would untie them: leave them out, or train the matrix in full with "
            "peft.modules_to_save=[embed_tokens]"
        )
    if adapted[0] and any(getattr(head, "use_dora", {}).values()):
        raise UserError(
            "peft.use_dora=true on the output layer is not possible: leave it out of peft.target_modules, or train "
            "it in full with peft.modules_to_save"
        )


def _check_comes_back(peft: PeftModel) -> None:
    """Raises UserError if peft wouldn't load some of the adapter's weights again, since it reads other names for them.

    It renames as transformers does when it reads the base's files, and a rule for `shared_expert.` may also change
    `shared_experts.`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = set_peft_model_state_dict(peft, get_peft_model_state_dict(peft, save_embedding_layers=False))
    if lost.unexpected_keys:
        parts = sorted({key.partition(".lora_")[0].rpartition(".")[2] for key in lost.unexpected_keys})
        raise UserError(
            f"peft doesn't read an adapter on {', '.join(parts)} of a {type(peft.get_base_model()).__name__} back from "
            f"its file: name other modules, as peft.target_modules=[q_proj,v_proj] does"
        )


def _check_rows_are_trained(model: PreTrainedModel, new_tokens: Sequence[int]) -> None:
    """Raises UserError if rows of new tokens are frozen: they would be random in training, and lost on loading."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is None or hasattr(module, "modules_to_save"):
            continue
        trained = set(module.token_adapter.token_indices[NAME]) if hasattr(module, "token_adapter") else set()
        missing = [token for token in new_tokens if token not in trained]
        if missing:
            raise UserError(
                f"the adapter trains no embedding row for the added token {missing[0]} (of {len(missing)}): start from "
                f"an adapter that was trained with it, or begin a new one (peft.adapter=null)"
            )


def _lora_weights(model: nn.Module) -> dict[str, Tensor]:
    names = (".lora_A.", ".lora_B.")
    return {n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters() if any(part in n for part in names)}


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
        config.r, config.lora_alpha, config.use_rslora = 2 * config.r, scaling * 2 * config.r, False
        config.init_lora_weights = True
    wrapper = wrapper_of(adapter.peft.get_base_model())
    if wrapper is not None and config.task_type != SCALAR:
        weights = _outer(config, weights, adapter.peft.get_base_model(), wrapper)
    weights = {k: v.detach().to("cpu", dtype).contiguous().clone() for k, v in weights.items()}
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


_OF_BASE = "base_model.model."  # before the base model's names in an adapter's files


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


def gives_rewards(folder: Path) -> bool:
    """Returns whether the adapter in a folder belongs to a model with a scalar head."""
    return StoredConfig.from_pretrained(str(folder)).task_type == SCALAR


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
    if gives_rewards(folder):
        cls, options = auto.AutoPeftModelForSequenceClassification, options | {"num_labels": 1}
    model = cls.from_pretrained(folder, **options).get_base_model()
    return model if whole else text_of(model)


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Merges the adapter into the base in fp32; an unquantised model is changed in place and can't be trained further.

    A quantised base is dequantised first, since rounding 4-bit weights would lose the small update.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return _dequantized_twin(model) if quantized.is_quantized(model) else model
    if quantized.is_quantized(model):
        twin = _dequantized_twin(model)
        peft = get_peft_model(twin, copy.deepcopy(adapter.config))
        set_peft_model_state_dict(peft, get_peft_model_state_dict(adapter.peft, save_embedding_layers=False))
    else:
        twin, peft = model.float(), adapter.peft
    twin.__dict__.pop(ATTRIBUTE, None)
    plain = peft.merge_and_unload(adapter_names=[NAME])
    plain._hf_peft_config_loaded = False
    return plain


def _dequantized_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of the frozen base, without LoRA but with its memory, in fp32 on the CPU."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    twin = auto_class(has_scalar_head(model)).from_config(config, dtype=torch.float32)
    settings = memory_of(model)
    if settings is not None:
        attach_memory(twin, settings)
    layers = dict(model.named_modules())
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        quantised = type(parameter).__name__ in ("Params4bit", "Int8Params")  # a bitsandbytes layer's weight
        plain = re.sub(r"\.(base_layer|original_module|token_adapter)", "", name)
        owner = name.rpartition(".")[0]
        state[plain] = quantized.dequantized(layers[owner]) if quantised else parameter.detach().cpu().float()
    twin.load_state_dict(state, strict=False)
    twin.__dict__[WRAPPER] = wrapper_of(model)
    if hasattr(model, "generation_config"):  # models with a scalar head have none
        twin.generation_config = model.generation_config
    return twin
