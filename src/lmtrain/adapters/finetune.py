"""The model a run trains: built or loaded, its vocabulary grown by added tokens, quantised, with its adapter."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lmtrain.adapters import memory_adapter, quantized
from lmtrain.adapters.trainable import base_identity, base_parameters, trainable_names
from lmtrain.config.checks import trains_base
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema import Config
from lmtrain.config.strategies import context_parallel
from lmtrain.data.store.contents import Facts
from lmtrain.models import context, split
from lmtrain.models.build import build_model


def build_trainable_model(config: Config, tokenizer: Any, in_files: bool = False) -> PreTrainedModel:
    """The model of `config` with what is trained marked `requires_grad`; draws from the global generator if scratch.

    Args:
        in_files: as of `build_model`.

    Raises:
        UserError: see `build_model`, `adapters.attach`, `split.check` and `context.check`.
    """
    memory_adapter.check_chosen(config)
    new_tokens = new_token_ids(config, tokenizer)
    t = config.trainer
    to_host = t.strategy == "fsdp"  # whose ranks take their parts from there: a device need not hold the whole base
    loading = quantized.loading_options(config.peft, t.precision, t.accelerator, to_host=to_host)
    with quantized.quantising(config.peft, t.accelerator, to_host):
        model = build_model(
            config.model,
            len(tokenizer),
            tokenizer.eos_token_id,
            config.data.seq_len,
            new_tokens=new_tokens,
            allow_target=config.run.allow_target,
            scalar_head=config.objective.scalar_head,
            in_files=in_files,
            **loading,
        )
    quantized.check_shared_out(model, t.strategy)
    if model.device.type == "meta":
        quantized.quantise_shapes(model, loading)
    if config.peft.method != "none":
        quantized.make_trainable_on_cpu(model)
    if config.peft.method == "lora":
        from lmtrain.adapters import lora as adapters

        assert isinstance(config.model, LoadedModelConfig)  # checked
        base = config.model.name_or_path or ""
        adapters.attach(model, config.peft, base, config.model.revision, new_tokens, config.seed)
    if config.memory.num_chapters is not None:
        memory_adapter.attach(model, config)
    if trains_base(config):
        for parameter in base_parameters(model):  # beside what was added to it: the {name: base} of optimizer.groups
            parameter.requires_grad_(True)
    if t.strategy == "fsdp_tp":
        split.check(model, t.fsdp.tensor_parallel_size)
    if context_parallel(t) > 1:
        context.check(model, context_parallel(t))
    return model


def new_token_ids(config: Config, tokenizer: Any) -> Sequence[int]:
    """Ids of the tokens the model has not seen in pretraining: tokenizer.add_tokens, and those of peft.adapter."""
    ids = set(tokenizer.convert_tokens_to_ids(config.tokenizer.add_tokens or []))
    if config.peft.adapter:
        from lmtrain.adapters import lora as adapters

        ids |= set(adapters.adapter_token_ids(config.peft.adapter))
    return sorted(ids)


def starting_weights(config: Config, model: PreTrainedModel) -> dict[str, Any]:
    """What the names of pretrained weights stand for.

    A frozen base is read whole, since a checkpoint leaves it out, else some of the files: enough to tell models apart.
    """
    if not isinstance(config.model, LoadedModelConfig):
        return {"model.name_or_path": None, "peft.adapter": None}
    frozen = trainable_names(model) is not None
    adapter = None
    if config.peft.adapter:
        from lmtrain.adapters import lora as adapters

        adapter = adapters.file_identity(config.peft.adapter)
    name = config.model.name_or_path or ""
    whole = Facts(config.data.cache_dir) if frozen else None
    return {"model.name_or_path": base_identity(model, name, whole), "peft.adapter": adapter}
