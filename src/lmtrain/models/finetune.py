"""The model a run trains: built or loaded, its vocabulary grown by added tokens, quantised, with its adapter."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lmtrain.models import quantized, split
from lmtrain.models.build import build_model
from lmtrain.models.trainable import base_identity, trainable_names
from lmtrain.schema import Config


def build_trainable_model(config: Config, tokenizer: Any) -> PreTrainedModel:
    """The model of `config` with what is trained marked `requires_grad`; draws from the global generator if scratch.

    Raises:
        UserError: see `build_model`, `adapters.attach` and `split.check`.
    """
    new_tokens = new_token_ids(config, tokenizer)
    model = build_model(
        config.model,
        len(tokenizer),
        tokenizer.eos_token_id,
        config.data.seq_len,
        new_tokens=new_tokens,
        **quantized.loading_options(config.peft, config.trainer.precision, config.trainer.accelerator),
    )
    if config.peft.method != "none":
        from lmtrain.models import adapters

        quantized.make_trainable_on_cpu(model)
        base = adapters.base_name(config.model.name_or_path or "")
        adapters.attach(model, config.peft, base, config.model.revision, new_tokens, config.seed)
    if config.trainer.strategy == "fsdp_tp":
        split.check(model, config.trainer.fsdp.tensor_parallel_size)
    return model


def new_token_ids(config: Config, tokenizer: Any) -> Sequence[int]:
    """Ids of the tokens the model has not seen in pretraining: tokenizer.add_tokens, and those of peft.adapter."""
    ids = set(tokenizer.convert_tokens_to_ids(config.tokenizer.add_tokens or []))
    if config.peft.adapter:
        from lmtrain.models import adapters

        ids |= set(adapters.adapter_token_ids(config.peft.adapter))
    return sorted(ids)


def frozen_identity(config: Config, model: PreTrainedModel) -> dict[str, Any]:
    """Fingerprint entries of what a checkpoint leaves out; all None where everything is trained."""
    if trainable_names(model) is None:
        return {"model.base": None, "peft": None}
    peft = {k: v for k, v in vars(config.peft).items() if k != "adapter" and v is not None}
    if config.peft.adapter:
        from lmtrain.models import adapters

        peft["adapter"] = adapters.file_identity(config.peft.adapter)
    return {"model.base": base_identity(model, config.model.name_or_path or ""), "peft": peft}
