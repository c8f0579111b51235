"""Writes a trained model as a Hugging Face folder: safetensors, config, tokenizer, generation config, run config."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from lmtrain.adapters import memory_export
from lmtrain.adapters.memory_adapter import memory_of
from lmtrain.adapters.quantized import is_quantized, make_trainable_on_cpu
from lmtrain.adapters.trainable import adapter_of
from lmtrain.checkpoints.store import name_of
from lmtrain.config import safe_yaml
from lmtrain.config.override_text import bare_or_quoted, written
from lmtrain.config.schema import ExportConfig
from lmtrain.data.framing import start_of
from lmtrain.data.tokenizers import save as save_tokenizer
from lmtrain.errors import RunError, UserError, did_you_mean
from lmtrain.exports import model_card
from lmtrain.files import read_regular, replacing
from lmtrain.models import wrapper
from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import evaluating
from lmtrain.models.denoising import mark_folder, mask_token
from lmtrain.models.flops import parameter_counts
from lmtrain.models.folder import change_config, is_exported, read_config, with_earlier_names
from lmtrain.models.scalar_head import has_scalar_head, padding_of
from lmtrain.run_folder.folder import RunDir
from lmtrain.secrets import command, shown_in

# Largest allowed difference between reloaded and live logits: rounding of the stored dtype, amplified by the layers.
# int8: the live model also rounds each layer's input, a merged one doesn't. merged: one product with W + s B A rounds
# differently than two products; 6e-6 in 30 layers. A wrong merge is off by 0.01 or more.
TOLERANCE = {"float64": 1e-5, "float32": 1e-5, "merged": 1e-4, "bfloat16": 0.1, "float16": 0.02, "int8": 0.2}


def export_model(
    run: RunDir,
    model: PreTrainedModel,
    tokenizer: Any,
    cfg: ExportConfig,
    *,
    merge: bool,
    example: torch.Tensor,
    eos_token_ids: Sequence[int] | None,
    step: int,
) -> Path:
    """Writes the run's export, complete or not at all, after reloading it and comparing its logits with the model's.

    Args:
        merge: whether to merge the adapter into its base, which modifies `model`; else the adapter alone is written.
        example: int64 [B, T] token ids on which the logits are compared.
        eos_token_ids: ids at which generation stops, in addition to the model's own.
        step: the step of the weights, for the model card.

    Raises:
        UserError: transformers' GenerationConfig rejects export.generation, or see `check_model`.
        RunError: the disk is full, or the reloaded model's logits differ from the live model's.
    """
    check_model(run, model, merge)
    settings = generation_config(model, tokenizer, eos_token_ids, cfg.generation)
    folder = run.export_merged if merge else run.export
    whole = merge or memory_of(model) is not None
    live, tolerance = logits(model, example), allowed_difference(model, cfg.dtype, whole)
    again = command_for(folder, cfg, step)
    remedy = f"the checkpoints are untouched, so once there is room {again} writes it"
    with replacing(folder, f"the export {folder}", remedy) as temporary:
        write_weights(model, temporary, cfg.dtype, merge)
        if has_scalar_head(model):
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # as in config.json, for batches
            tokenizer.padding_side = "right"  # transformers would count positions from the padding on the left
        save_tokenizer(tokenizer, temporary)
        say_how_texts_begin(tokenizer, temporary / "tokenizer_config.json")
        # save_pretrained rejects settings of some published models, such as a temperature with greedy decoding.
        if not has_scalar_head(model):
            settings.to_json_file(temporary / "generation_config.json", keys_to_pop=["compile_config"])
        write_config(run.config, temporary / "lmtrain_config.yaml")
        size, chat = parameter_counts(model)[0], bool(tokenizer.chat_template)
        begins = bool(start_of(tokenizer))
        model_card.write(temporary, run.config, chat=chat, begins=begins, parameters=size, step=step)
        compare(live, tolerance, model, temporary, example)
    return folder


def say_how_texts_begin(tokenizer: Any, file: Path) -> None:
    """Adds to a tokenizer_config.json what tokenizer.json says too: llama.cpp begins texts of some models anyway."""
    if tokenizer.bos_token is not None:
        config = json.loads(file.read_text(encoding="utf-8")) | {"add_bos_token": bool(start_of(tokenizer))}
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def command_for(folder: Path, cfg: ExportConfig, step: int, *more: str) -> str:
    """Returns the command that writes a run's export `folder` again: from the same step, with the same settings."""
    words = [f"run_dir={bare_or_quoted(str(folder.parent))}", f"export.checkpoint={name_of(step)}"]
    words += ["export.merge=true"] if folder.name == RunDir(folder.parent).export_merged.name else []
    words += [f"export.dtype={cfg.dtype}"] if cfg.dtype != "float32" else []
    words += [f"export.generation={written(cfg.generation)}"] if cfg.generation else []
    return command("export", [*words, *more])


def write_config(run_config: Path, file: Path) -> None:
    """Copies the run's config into the export, with logins and signatures removed from URLs."""
    text = read_regular(run_config)
    public = shown_in(config := safe_yaml.plain(text))
    file.write_text(text if public == config else safe_yaml.dumped(public), "utf-8")


def write_weights(model: PreTrainedModel, folder: Path, dtype: str, merge: bool) -> None:
    """Writes the adapter alone, or the whole model if it has none, has a memory, or `merge` merges the adapter."""
    adapter = adapter_of(model)
    if adapter is None or merge or memory_of(model) is not None:
        write_model(plain(model), folder, dtype)
        return
    from lmtrain.adapters.lora_files import write_adapter

    write_adapter(adapter, folder, getattr(torch, dtype))


def check_model(run: RunDir, model: PreTrainedModel, merge: bool) -> None:
    """Raises UserError if the model has a memory that can't be exported, or if `merge` is set and it has no adapter."""
    if memory_of(model) is None:
        if merge and adapter_of(model) is None:
            raise UserError(f"export.merge=true has no effect here: {run.path} trained no adapter, so leave it out")
        return
    memory_export.check_exportable(model)
    if merge:
        raise UserError("export.merge=true: a memory can't be merged into its base: leave export.merge out")


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with its LoRA adapter merged and its base dequantized; a memory stays in it."""
    if adapter_of(model) is None and not (is_quantized(model) and memory_of(model) is not None):
        return model
    from lmtrain.adapters.lora_merge import merged

    return merged(model)


def write_model(model: PreTrainedModel, folder: Path, dtype: str) -> None:
    every = {k: v.detach().to("cpu", getattr(torch, dtype)) for k, v in model.state_dict().items()}
    state = drop_tied(model, every)
    own = getattr(model, "generation_config", None)  # a model with a scalar head has none
    model.generation_config = GenerationConfig()  # export_model writes it
    try:
        settings = memory_of(model)
        if settings is not None:
            memory_export.write(model, settings, state, folder)
        elif wrapper.comes_whole(model):
            wrapper.write(model, state, {name: t for name, t in every.items() if name not in state}, folder)
        else:
            model.save_pretrained(folder, state_dict=state)
    finally:
        model.generation_config = own
    change_config(folder, **with_earlier_names(read_config(folder) | {"dtype": dtype}))
    if mask_token(model) is not None:
        mark_folder(folder)


def generation_config(
    model: PreTrainedModel, tokenizer: Any, eos_token_ids: Sequence[int] | None, changes: dict[str, Any] | None
) -> GenerationConfig:
    """Returns the model's generation config with `eos_token_ids` added to its end tokens and `changes` applied.

    Raises:
        UserError: `changes` has a field that GenerationConfig lacks, or values that it rejects.
    """
    config = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    own = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
    ids = [own] if isinstance(own, int) else list(own or [])
    ids += [token for token in eos_token_ids or [] if token not in ids]
    config.eos_token_id = ids[0] if len(ids) == 1 else (ids or None)
    config.bos_token_id = config.bos_token_id if config.bos_token_id is not None else model.config.bos_token_id
    if config._from_model_config and config.pad_token_id is None:  # no pretrained config defines padding
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ids), None)
    _say_that_it_samples(config)
    config._from_model_config = None  # else transformers would rebuild it from config.json
    if changes:
        set_fields(config, changes)
    return config


# Values that change nothing; 50 is transformers' former default.
_NEUTRAL = {"temperature": (None, 1), "top_p": (None, 1), "min_p": (None, 0), "top_k": (None, 0, 50)}


def _say_that_it_samples(config: GenerationConfig) -> None:
    """Sets do_sample if it is unset but a sampling field is set; without it transformers would decode greedily."""
    if config.do_sample is None and any(getattr(config, n, None) not in values for n, values in _NEUTRAL.items()):
        config.do_sample = True


def set_fields(config: GenerationConfig, changes: dict[str, Any]) -> None:
    """Applies export.generation to `config`; UserError if transformers rejects it."""
    for name, value in changes.items():
        if name.startswith("_") or not hasattr(config, name):
            hint = did_you_mean(name, (n for n in vars(config) if not n.startswith("_")))
            raise UserError(f"export.generation.{name}: GenerationConfig of transformers has no such field{hint}")
        setattr(config, name, value)
    _say_that_it_samples(config)
    mode = {"do_sample": config.do_sample, "num_beams": config.num_beams}
    try:  # only the user's fields, in the model's mode: the base's own settings may be invalid
        GenerationConfig(**{**mode, **changes}).validate(strict=True)
    except (ValueError, TypeError) as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise UserError(f"export.generation={changes}: {what}") from None


def drop_tied(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the state dict without the copies of tied weights, which a Hugging Face file stores once."""
    tied = (getattr(model.config, "tie_word_embeddings", False) and getattr(model, "_tied_weights_keys", None)) or {}
    return {name: tensor for name, tensor in state.items() if name not in tied}


def logits(model: PreTrainedModel, example: torch.Tensor) -> torch.Tensor:
    """Computes the model's logits in evaluation mode; fp32 [B, T, V] on the CPU."""
    with torch.no_grad(), evaluating(model), generation_mode(model):
        return model(input_ids=example.to(model.device), use_cache=False).logits.float().cpu()


def allowed_difference(model: PreTrainedModel, dtype: str, merge: bool) -> float:
    """Returns the tolerance of the coarsest rounding among the stored dtype and the live model's computation."""
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
    """Raises RunError unless the reloaded model's logits on `example` match `live` within the tolerance."""
    loaded = logits(load_exported(folder, like=model).to(model.device), example)
    difference = (live - loaded).abs().max().item()
    if not difference <= tolerance * max(1.0, live.abs().max().item()):
        found = f"the export reloads to different logits (by {difference:.2g}, allowed {tolerance:g} of the largest)"
        raise RunError(f"{found} and was not kept; the checkpoints are. Please report this with the run's config.yaml")


def load_exported(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """Loads an exported folder in fp32; an adapter gets a base quantized like that of `like`."""
    if is_exported(folder):
        return memory_export.load(folder, dtype=torch.float32)
    if like.is_remote_code():  # the exported source code is that of this class
        return type(like).from_pretrained(folder, dtype=torch.float32)
    if not (folder / "adapter_config.json").exists():
        config = AutoConfig.from_pretrained(folder)
        return wrapper.outermost(config, has_scalar_head(like)).from_pretrained(folder, dtype=torch.float32)
    from lmtrain.adapters.lora_files import load_adapter

    options: dict[str, Any] = {}
    if getattr(like.config, "quantization_config", None) is not None:
        options = {"quantization_config": like.config.quantization_config, "device_map": {"": like.device}}
    model = load_adapter(folder, whole=True, dtype=torch.float32, **options)
    if has_scalar_head(like):
        model.config.get_text_config().pad_token_id = padding_of(like)
    make_trainable_on_cpu(model)  # the AVX512-BF16 kernel needs widths divisible by 64
    return model
