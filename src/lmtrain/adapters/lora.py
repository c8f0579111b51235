"""LoRA and its variants through peft: small trained matrices added to the frozen weights of a pretrained model.

peft puts its layers into the transformers model in place, so the rest of the code sees the same model: same class, same
`base_model`, more named parameters (`...q_proj.lora_A.default.weight`). `adapter_of(model)` returns the adapter.

LoRA: Hu et al. 2021, arXiv:2106.09685; rsLoRA: arXiv:2312.03732; DoRA: arXiv:2402.09353; PiSSA: arXiv:2404.02948.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters import lora_checks
from lmtrain.adapters.lora_files import SCALAR, continued
from lmtrain.adapters.trainable import ATTRIBUTE, NAME, Adapter
from lmtrain.config.schema import PeftConfig
from lmtrain.errors import UserError, first_line
from lmtrain.models.scalar_head import has_scalar_head

# Initializations that subtract the initial A and B from the base weight, which becomes W - s B A.
_MOVES_BASE = ("pissa", "olora")


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
        peft = continued(model, cfg, new_tokens) if cfg.adapter else _new(model, cfg, new_tokens)
    lora_checks.refuse_tied_lora(model)
    lora_checks.check_reads_back(peft)
    lora_checks.check_rows_are_trained(model, new_tokens)
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
    lora_checks.check_names_match(model, "peft.target_modules", targets)
    lora_checks.check_names_match(model, "peft.modules_to_save", also_trained)
    tables, keep_tied = lora_checks.embedding_names(model), False
    if lora_checks.is_tied(model):
        # A trained copy of a tied embedding stays tied, so that merging is exact; peft needs the output layer's name.
        keep_tied = any(lora_checks.matches(name, also_trained) for name in tables)
        if keep_tied:  # in this order, each once: otherwise peft trains two copies that drift apart
            also_trained = [name for name in also_trained if not lora_checks.matches(tables[1], [name])]
            also_trained += [name for name in tables if not lora_checks.matches(name, also_trained)]
        tables = tables[:1]
    rows = {name: list(new_tokens) for name in tables if not lora_checks.matches(name, also_trained)}
    config = LoraConfig(
        # Of a model with a scalar head, peft trains and saves a copy of the head.
        task_type=SCALAR if has_scalar_head(model) else "CAUSAL_LM",
        r=cfg.r, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, use_rslora=cfg.use_rslora, use_dora=cfg.use_dora,
        target_modules=targets, exclude_modules=lora_checks.unfit_layers(model) if targets == "all-linear" else None,
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


def _lora_weights(model: nn.Module) -> dict[str, Tensor]:
    names = (".lora_A.", ".lora_B.")
    return {n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters() if any(part in n for part in names)}
