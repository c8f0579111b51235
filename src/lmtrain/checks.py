"""What each key of the config may hold: choices, ranges, lists, names. Imports neither torch nor lightning."""

import difflib
import math
import re
from typing import Any

from lmtrain.errors import UserError
from lmtrain.optim.schedules import check_schedule
from lmtrain.schema import Config
from lmtrain.strategies.rules import STRATEGIES, check_strategy

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
TEXT_METRICS = ("bleu", "rouge", "exact_match")  # those of text_metrics.NAMED, which imports torch
# Those of preference_losses.LOSSES, which imports torch.
PREFERENCE_LOSSES = ("sigmoid", "robust", "ipo", "hinge", "dpop", "kto_pair", "apo_zero", "apo_down", "simpo", "orpo")
REFERENCES = ("auto", "frozen_copy", "adapter_off", "precomputed", "none")
# `_target_` builds any class it names, so only these packages are open unless run.allow_target says more.
TARGET_PACKAGES = ("lmtrain", "torch", "lightning", "transformers", "torchmetrics", "peft")


def check_values(c: Config) -> None:
    """Raises UserError for the first value that is not among its choices, out of its range, or unsafe."""
    _check_choices(c)
    _check_whole_numbers(c)
    _check_numbers(c)
    _check_run(c)
    _check_positions(c)
    _check_names(c)
    _check_peft(c)
    _check_preferences(c)
    _check_targets(c)
    check_strategy(c)


def _choice(key: str, value: Any, options: tuple[str, ...]) -> None:
    if value not in options:
        near = difflib.get_close_matches(str(value), options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={value} is not known{hint} (options: {', '.join(options)})")


def _check_choices(c: Config) -> None:
    _choice("objective.name", c.objective.name, ("causal_lm", "sft", "dpo"))
    _choice("run.schedule_on_resume", c.run.schedule_on_resume, ("keep", "rescale"))
    _choice("model.init", c.model.init, ("scratch", "pretrained"))
    _choice("data.source", c.data.source, ("hub", "files", "python_stdlib", "bins", "mixture"))
    _choice("data.format", c.data.format, ("auto", "text", "jsonl", "json", "parquet", "arrow"))
    if c.data.sample_by is not None:
        _choice("data.sample_by", c.data.sample_by, ("document", "paragraph", "line"))
    _choice("tokenizer.kind", c.tokenizer.kind, ("hub", "bpe", "bytes", "char"))
    short = {"bf16": "bf16-mixed", "fp16": "16-mixed", "16": "16-mixed", "fp32": "32-true", "32": "32-true"}
    if c.trainer.precision in short:
        raise UserError(f"trainer.precision={c.trainer.precision}: write {short[c.trainer.precision]}")
    _choice("trainer.precision", c.trainer.precision, PRECISIONS)
    _choice("trainer.strategy", c.trainer.strategy, STRATEGIES)
    if c.trainer.accelerator == "mps":
        raise UserError(
            "trainer.accelerator=mps: losses and metrics are summed in fp64, which Apple GPUs do not have; "
            "set trainer.accelerator=cpu"
        )
    _choice("trainer.accelerator", c.trainer.accelerator, ("auto", "cpu", "gpu", "cuda"))
    _choice("callbacks.early_stopping.mode", c.callbacks.early_stopping.mode, ("min", "max"))
    _choice("checkpoint.mode", c.checkpoint.mode, ("min", "max"))
    _choice("callbacks.progress.style", c.callbacks.progress.style, ("auto", "rich", "plain", "none"))
    _choice("inspect.split", c.inspect.split, ("train", "val"))
    _choice("export.dtype", c.export.dtype, ("float32", "bfloat16", "float16"))
    for key, value in {
        "trainer.compile": c.trainer.compile,
        "trainer.activation_checkpointing": c.trainer.activation_checkpointing,
        "generate.chat": c.generate.chat,
    }.items():
        if isinstance(value, str):
            _choice(key, value, ("auto",))
    if isinstance(c.trainer.devices, str) and not c.trainer.devices.isdigit():
        _choice("trainer.devices", c.trainer.devices, ("auto",))


def _check_whole_numbers(c: Config) -> None:
    at_least_one = {
        "data.seq_len": c.data.seq_len,
        "data.global_batch_size": c.data.global_batch_size,
        "data.micro_batch_size": c.data.micro_batch_size,
        "data.shard_tokens": c.data.shard_tokens,
        "trainer.max_steps": c.trainer.max_steps,
        "trainer.max_epochs": c.trainer.max_epochs,
        "trainer.val_check_interval": c.trainer.val_check_interval,
        "trainer.limit_val_batches": c.trainer.limit_val_batches,
        "trainer.save_every_n_steps": c.trainer.save_every_n_steps,
        "trainer.log_every_n_steps": c.trainer.log_every_n_steps,
        "trainer.num_nodes": c.trainer.num_nodes,
        "trainer.num_threads": c.trainer.num_threads,
        "model.vocab_multiple_of": c.model.vocab_multiple_of,
        "callbacks.early_stopping.patience": c.callbacks.early_stopping.patience,
        "checkpoint.keep_every": c.checkpoint.keep_every,
        "trainer.max_bad_steps": c.trainer.max_bad_steps,
        "trainer.spike_window": c.trainer.spike_window,
        "checkpoint.keep_last": c.checkpoint.keep_last,
        "data.num_samples": c.data.num_samples,
        "data.num_proc": c.data.num_proc,
        "callbacks.samples.max_new_tokens": c.callbacks.samples.max_new_tokens,
        "callbacks.samples.top_k": c.callbacks.samples.top_k,
        "generate.num_samples": c.generate.num_samples,
        "generate.max_new_tokens": c.generate.max_new_tokens,
        "generate.top_k": c.generate.top_k,
        "inspect.tokens": c.inspect.tokens,
    }
    for key, value in at_least_one.items():
        if value is not None and value < 1:
            raise UserError(f"{key}={value}: at least 1 is needed")
    if not 0 <= c.seed < 2**32:
        raise UserError(f"seed={c.seed}: a whole number from 0 to {2**32 - 1} is needed")
    if c.trainer.devices != "auto" and int(c.trainer.devices) < 1:
        raise UserError(f"trainer.devices={c.trainer.devices}: a number from 1 up, or auto, is needed")


def _check_numbers(c: Config) -> None:
    not_negative: dict[str, float | None] = {
        "trainer.max_restarts": c.trainer.max_restarts,
        "data.num_workers": c.data.num_workers,
        "data.min_length": c.data.min_length,
        "checkpoint.keep_best": c.checkpoint.keep_best,
        "optimizer.lr": c.optimizer.lr,
        "optimizer.weight_decay": c.optimizer.weight_decay,
        "objective.z_loss": c.objective.z_loss,
        "objective.gamma": c.objective.gamma,
        "objective.dpop_lambda": c.objective.dpop_lambda,
        "objective.sft_weight": c.objective.sft_weight,
        "callbacks.samples.rows": c.callbacks.samples.rows,
        "callbacks.samples.every_n_validations": c.callbacks.samples.every_n_validations,
        "callbacks.samples.temperature": c.callbacks.samples.temperature,
        "generate.temperature": c.generate.temperature,
        "inspect.samples": c.inspect.samples,
    }
    for key, number in not_negative.items():
        if number is not None and not 0 <= number < math.inf:
            raise UserError(f"{key}={number}: a number from 0 up is needed")
    clip = c.trainer.gradient_clip_val
    if clip is not None and not clip > 0:
        raise UserError(f"trainer.gradient_clip_val={clip} would leave no gradient: null turns clipping off")
    shares = {
        "model.dropout": c.model.dropout,
        "data.val_fraction": c.data.val_fraction,
        "objective.label_smoothing": c.objective.label_smoothing,
    }
    for key, share in shares.items():
        if not 0 <= share < 1:
            raise UserError(f"{key}={share}: a share from 0 up to (not including) 1 is needed")


def _check_run(c: Config) -> None:
    if c.trainer.max_steps is None and c.trainer.max_epochs is None:
        raise UserError("the run would never end: set trainer.max_steps or trainer.max_epochs")
    time_limit_seconds(c.run.time_limit)
    check_schedule(c.schedule)
    part = r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*"
    if c.run.name is not None and not re.fullmatch(rf"{part}(/{part})*", c.run.name):
        raise UserError(
            f"run.name={c.run.name!r}: use letters, digits, '.', '_', '-', '+' and '/' only, no part starting with '.'"
        )


def _check_positions(c: Config) -> None:
    """Also checked when the model is built; here before any data is prepared."""
    positions = c.model.max_position_embeddings
    if c.model.init == "scratch" and positions is not None and c.data.seq_len > positions >= 1:
        raise UserError(
            f"data.seq_len={c.data.seq_len} exceeds model.max_position_embeddings={positions}: lower the first or "
            f"raise the second"
        )


def _check_peft(c: Config) -> None:
    p = c.peft
    _choice("peft.method", p.method, ("none", "lora"))
    if p.method == "none":
        return
    if c.model.init != "pretrained":
        raise UserError(
            f"peft.method={p.method} adapts a pretrained model: set model=pretrained model.name_or_path=<name or "
            f"folder>, or train all of this one with peft=none"
        )
    for key, value in (("peft.r", p.r), ("peft.alpha", p.alpha)):
        if value is None or value < 1:
            raise UserError(f"{key}={value}: at least 1 is needed")
    if p.dropout is None or not 0 <= p.dropout < 1:
        raise UserError(f"peft.dropout={p.dropout}: a share from 0 up to (not including) 1 is needed")
    _choice("peft.bias", p.bias, ("none", "all", "lora_only"))
    if p.quantization is not None:
        _choice("peft.quantization", p.quantization, ("nf4", "fp4", "int8"))
    begins = ("default", "gaussian", "orthogonal", "pissa", "olora")
    if not re.fullmatch(r"pissa_niter_[1-9]\d*", str(p.init_weights)):
        _choice("peft.init_weights", p.init_weights, begins)
    moves_base = str(p.init_weights).startswith(("pissa", "olora"))
    if moves_base and (p.quantization is not None or p.use_dora):
        other = "peft.use_dora=true" if p.use_dora else f"peft.quantization={p.quantization}"
        raise UserError(
            f"peft.init_weights={p.init_weights} moves part of the base into the adapter, which does not go with "
            f"{other}: set peft.init_weights=default"
        )


def _check_names(c: Config) -> None:
    """Keys that take one name or a list of names, which the schema can't express; names that have to be given."""
    if c.model.init == "pretrained" and not c.model.name_or_path:
        raise UserError("model.init=pretrained needs a model: set model.name_or_path to a hub name or a folder")
    for key, value in {
        "data.path": c.data.path or [],
        "data.val_path": c.data.val_path or [],
        "data.text_column": ["-"] if c.data.conversation_format is not None else c.data.text_column or 0,
    }.items():
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f"{key}={value or None}: a name or a list of names, [a,b], is needed")


def _check_preferences(c: Config) -> None:
    """The keys of objective=dpo and of data=preference..."""
    o, d = c.objective, c.data
    if o.loss is not None:
        _choice("objective.loss", o.loss, PREFERENCE_LOSSES)
        _choice("objective.reference", o.reference, REFERENCES)
        if isinstance(o.length_normalize, str):
            _choice("objective.length_normalize", o.length_normalize, ("auto",))
        if o.label_smoothing >= 0.5:
            raise UserError(f"objective.label_smoothing={o.label_smoothing}: below 0.5, or most labels would be wrong")
        if o.beta is None or not 0 < o.beta < math.inf:
            raise UserError(f"objective.beta={o.beta}: a number above 0 is needed")
    if d.ranking is not None:
        _choice("data.ranking", d.ranking, ("best_worst", "all"))
        _choice("data.train_on", d.train_on, ("assistant", "last_assistant", "completion"))
        _choice("data.on_too_long", d.on_too_long, ("truncate_left", "truncate_right", "drop", "raise"))
        _choice("data.packing", d.packing, ("off",))


def _check_targets(c: Config) -> None:
    samples = c.callbacks.samples
    named = [m for m in samples.metrics if isinstance(m, str)]
    for metric in named:
        _choice("callbacks.samples.metrics", metric, TEXT_METRICS)
    if samples.metrics and (c.objective.name == "causal_lm" or not samples.every_n_validations):
        raise UserError(
            "callbacks.samples.metrics compares answers with references, which are written with objective=sft or dpo "
            "and callbacks.samples.every_n_validations of 1 or more"
        )
    _check_target(c, "callbacks.extra", c.callbacks.extra)
    _check_target(c, "callbacks.samples.metrics", [m for m in samples.metrics if not isinstance(m, str)])


def _check_target(c: Config, key: str, entries: list[Any]) -> None:
    allowed = (*TARGET_PACKAGES, *c.run.allow_target)
    for entry in entries:
        target = str(entry.get("_target_", "")) if isinstance(entry, dict) else ""
        if not target:
            raise UserError(f"{key}: {entry} names no _target_ (package.module.Class)")
        if target.split(".")[0] not in allowed and not any(target.startswith(f"{a}.") for a in allowed):
            raise UserError(
                f"{key}: _target_={target} is outside the known packages ({', '.join(allowed)}); "
                f"if you trust it: run.allow_target=[{target.split('.')[0]}]"
            )


def time_limit_seconds(text: str | None) -> float | None:
    """HH:MM:SS, MM:SS or seconds as seconds."""
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) > 3 or not all(re.fullmatch(r"\d+", p) for p in parts):
        raise UserError(f"run.time_limit={text!r}: write HH:MM:SS, such as 11:50:00")
    return float(sum(int(p) * 60**i for i, p in enumerate(reversed(parts))))
