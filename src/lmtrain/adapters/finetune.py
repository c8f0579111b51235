"""Builds the model that a run trains: loads it or draws it, extends its vocabulary, quantises it, adds its adapter."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lmtrain.adapters import memory_adapter, quantized
from lmtrain.adapters.trainable import adapter_identity, base_identity, base_parameters, trainable_names
from lmtrain.config.checks import trains_base
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema import Config
from lmtrain.config.strategies import context_parallel
from lmtrain.data.store.contents import Facts
from lmtrain.models import context, split
from lmtrain.models.build import build_model


def build_trainable_model(config: Config, tokenizer: Any, in_files: bool = False) -> PreTrainedModel:
    """Builds the model of `config`, with `requires_grad` set on the parameters that are trained.

    A model from scratch draws its weights from the global random generator.

    Args:
        in_files: as in `build_model`.

    Raises:
        UserError: see `build_model`, `lora.attach`, `memory_adapter.attach`, `split.check` and `context.check`.
    """
    memory_adapter.check_chosen(config)
    new_tokens = new_token_ids(config, tokenizer)
    t = config.trainer
    to_host = t.strategy == "fsdp"  # its ranks take their shards from host memory: no device holds the whole base
    loading = quantized.loading_options(config.peft, t.precision, t.accelerator, to_host=to_host)
    with quantized.quantising(config.peft, t.accelerator, to_host):
        model = build_model(
            config.model, len(tokenizer), tokenizer.eos_token_id, config.data.seq_len, new_tokens=new_tokens,
            allow_target=config.run.allow_target, scalar_head=config.objective.scalar_head, in_files=in_files, **loading
        )  # fmt: skip
    quantized.check_shared_out(model, t.strategy)
    if model.device.type == "meta":
        quantized.quantise_shapes(model, loading)
    # The adapters, each frozen base being trained only if optimizer.groups says so.
    if config.peft.method != "none":
        quantized.make_trainable_on_cpu(model)
    if config.peft.method == "lora":
        from lmtrain.adapters import lora as adapters

        assert isinstance(config.model, LoadedModelConfig)  # ensured by the config checks
        base = config.model.name_or_path or ""
        adapters.attach(model, config.peft, base, config.model.revision, new_tokens, config.seed)
    if config.memory.num_chapters is not None:
        memory_adapter.attach(model, config)
    if trains_base(config):
        for parameter in base_parameters(model):  # the group {name: base} of optimizer.groups, trained with the adapter
            parameter.requires_grad_(True)
    if t.strategy == "fsdp_tp":
        split.check(model, t.fsdp.tensor_parallel_size)
    if context_parallel(t) > 1:
        context.check(model, context_parallel(t))
    return model


def new_token_ids(config: Config, tokenizer: Any) -> Sequence[int]:
    """Returns ids of tokens the model has not seen in pretraining: tokenizer.add_tokens, and those of peft.adapter."""
    ids = set(tokenizer.convert_tokens_to_ids(config.tokenizer.add_tokens or []))
    if config.peft.adapter:
        from lmtrain.adapters import lora_files

        ids |= set(lora_files.adapter_token_ids(config.peft.adapter))
    return sorted(ids)


def starting_weights(config: Config, model: PreTrainedModel) -> dict[str, Any]:
    """Returns identities of the weights named by model.name_or_path and peft.adapter.

    A frozen base's files are hashed in full, since checkpoints leave it out; otherwise samples of the files are hashed,
    which is enough to tell models apart.
    """
    if not isinstance(config.model, LoadedModelConfig):
        return {"model.name_or_path": None, "peft.adapter": None}
    adapter = adapter_identity(config.peft.adapter) if config.peft.adapter else None
    name = config.model.name_or_path or ""
    whole = Facts(config.data.cache_dir) if trainable_names(model) is not None else None
    return {"model.name_or_path": base_identity(model, name, whole), "peft.adapter": adapter}
