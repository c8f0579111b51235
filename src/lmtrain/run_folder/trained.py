"""Loads a trained model and its tokenizer from a run's checkpoint, an exported folder or the hub, onto its device."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from lmtrain.adapters import memory_export
from lmtrain.adapters.exported import brings_code
from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.adapters.trainable import check_weights, restore_start, trainable_names
from lmtrain.checkpoints import retention, store
from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.override_text import shell_word
from lmtrain.config.schema import Config
from lmtrain.config.targets import find_class
from lmtrain.data import framing, hub, tokenizers
from lmtrain.data.chat.find_template import find_template, with_options
from lmtrain.errors import RunError, UserError, first_line, nearest
from lmtrain.files import absolute
from lmtrain.models import folder
from lmtrain.models.folder import is_exported
from lmtrain.models.scalar_head import has_scalar_head, padding_of, refuse_scalar_head, set_padding
from lmtrain.objectives.base import Objective
from lmtrain.run_folder.folder import RunDir, checkpoint_names

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "merges.txt")  # without them transformers makes an empty one
_PREFIX = "model.model."  # LightningModule.model (LanguageModel) .model (transformers)


def from_run(
    run: RunDir, which: str, grants: trust.Grants, *, on_host: bool = False, to_read: bool = False
) -> tuple[PreTrainedModel, Any, Path]:
    """Returns the model, the tokenizer and the checkpoint's folder; `which` is best, last or a checkpoint's name.

    With callbacks.ema the model has the averaged weights. `grants` are the permissions the user gave (config/trust.py).

    The model is in fp32 on the CPU; with a quantized base it is on the device of its config's trainer.accelerator,
    unless there is no GPU or `on_host` is set.

    to_read: the run's export may be read in place of the model that it started from, which the hub may not give now;
        not for a caller that writes the export.
    """
    config = rules.load(run.config, grants)
    if to_read and _is_whole(run.export) and _trains_all(config):
        config.model.name_or_path, config.model.revision = str(run.export), None  # type: ignore[attr-defined]
    checkpoint, state, saved = _read(run, which)
    tokenizer = tokenizers.read(run.tokenizer, AutoTokenizer)
    if config.data.source != "bins":  # whose run has them in the tokenizer; that of an earlier version has not
        framing.follow(tokenizer, framing.wanted(tokenizer, config.data))
    if config.peft.quantization is None or on_host or not torch.cuda.is_available():
        config.trainer.accelerator = "cpu"
    config.trainer.strategy = "auto"  # this process holds the whole model
    pl.seed_everything(config.seed, verbose=False)  # for random embeddings of new tokens
    model = build_trainable_model(config, tokenizer)
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}
    check_weights(model, weights)
    model.load_state_dict(weights, strict=trainable_names(model) is None)
    restore_start(model, state.get("adapter_start", {}))
    set_average(model, state)
    folder.check_finite(model.named_parameters(), str(checkpoint))
    cls = find_class(config.objective._target_, "objective", Objective, config.run.allow_target)  # type: ignore[type-abstract]
    cls.settle_model(config, model, tokenizer)
    return model, tokenizer, checkpoint


def _read(run: RunDir, which: str) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    """Returns a checkpoint's folder, trainer state and weights, once the run's tokenizer is found to be theirs.

    The run may be training: if it removes the checkpoint meanwhile, the one that has taken its place is read.
    """
    while True:
        there = checkpoint_names(run.checkpoints)
        try:
            checkpoint = find_checkpoint(run, which)
            state, weights = store.load_trainer_state(checkpoint), store.load_weights(checkpoint)
            check_tokenizer(run, state["fingerprint"])
        except (OSError, UserError, RunError):
            if set(there) <= set(checkpoint_names(run.checkpoints)):  # none was removed
                raise
            continue
        return checkpoint, state, weights


def _trains_all(config: Config) -> bool:
    """Returns whether the checkpoints hold every weight of a model that the run loaded."""
    adds = config.peft.method != "none" or config.peft.quantization or config.memory.num_chapters is not None
    return isinstance(config.model, LoadedModelConfig) and not adds


def _is_whole(export: Path) -> bool:
    """Returns whether an export is a model of transformers' own classes with its weights."""
    try:
        return not brings_code(export) and any(export.glob("*.safetensors"))
    except (OSError, ValueError, TypeError):
        return False


def set_average(model: PreTrainedModel, trainer_state: dict[str, Any]) -> None:
    """Loads the weight average of callbacks=ema from a checkpoint's trainer.pt into `model`, if there is one.

    Raises:
        UserError: the average has parameters that the model lacks.
    """
    state = trainer_state["callbacks"].get("WeightAverage", {})
    average = {name.removeprefix(_PREFIX): value for name, value in state.get("average", {}).items()}
    unknown = average.keys() - dict(model.named_parameters()).keys()
    if unknown:
        raise UserError(f"the checkpoint's average has parameters that the model lacks: {sorted(unknown)[0]}")
    model.load_state_dict(average, strict=False)


def check_tokenizer(run: RunDir, fingerprint: dict[str, Any]) -> None:
    """Compares the run's tokenizer/ with the records in its checkpoints: the ids it gives and the hash of every file.

    Args:
        fingerprint: the fingerprint stored in the checkpoint that is loaded.

    Raises:
        UserError: the tokenizer differs or can't be read.
    """
    known = fingerprint["contents"]["tokenizer"]
    recorded = [c["tokenizer"] for c in retention.manifests(run.checkpoints).values() if c.get("tokenizer")]
    try:
        found = tokenizers.file_hashes(run.tokenizer)
        # The fingerprint knows the tokenizer as it came, so it decides only where no files were recorded.
        unknown = recorded or known is None or "tokenizer.json" not in found
        alike = bool(unknown) or tokenizers.gives_ids_of(run.tokenizer, known)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise UserError(f"{run.tokenizer} can't be read as a tokenizer: {first_line(error)}") from None
    last = recorded[-1] if recorded else found
    names = sorted(name for name in {*found, *last} if found.get(name) != last.get(name))
    if not alike or (recorded and found not in recorded):
        changed = f"({', '.join(names) or 'its ids'} changed)"
        rewritten = f"python -m lmtrain.train {shell_word('run.dir', str(run.path))} run.resume=auto"
        other = f"{run.tokenizer} is not the tokenizer that the model was trained with {changed}"
        raise UserError(f"{other}: put the files back, or let the run rewrite them: {rewritten}")


def find_checkpoint(run: RunDir, which: str) -> Path:
    """Returns the path of checkpoint `which`, if undamaged; best falls back to last if nothing was validated."""
    candidates = [which, "last"] if which == "best" else [which]
    path = next((p for c in candidates if (p := run.checkpoints / c).exists()), None)
    if path is None and candidates[-1] == "last":  # the file system has no symbolic links
        found, best = store.scan(run.checkpoints), (run.read_summary() or {}).get("best")
        named = [p for p in found if which == "best" and f"{run.checkpoints.name}/{p.name}" == best]
        path = next(reversed([*found, *named]), None)
    if path is None:
        there = ", ".join(p.name for p in store.scan(run.checkpoints)) or "none"
        raise UserError(f"{run.path} has no checkpoint {which!r} (there are: {there})")
    path = absolute(path.resolve())
    problem = store.damage(path)
    if problem is not None:
        raise RunError(f"{path} is damaged ({problem}); choose another checkpoint")
    return path


def load(name: str, which: str, grants: trust.Grants) -> tuple[PreTrainedModel, Any]:
    """Loads a model and its tokenizer from a run's folder, a Hugging Face folder or a hub name.

    Args:
        which: the checkpoint, if it is a run.
        grants: permissions the user gave (config/trust.py); without them no code that comes with the weights runs.

    Raises:
        UserError: the model does not exist or can't be loaded, has no tokenizer, or needs its own code, which may not
            run.
        RunError: the weights or the run's checkpoint are damaged.
    """
    # A run?
    path = Path(name).expanduser()
    if (path / "config.yaml").exists():
        model, tokenizer, _ = from_run(RunDir(absolute(path)), which, grants, to_read=True)
        return model, tokenizer
    is_adapter = (path / "adapter_config.json").exists()
    if path.exists() and not is_adapter and not (path / "config.json").exists():
        raise UserError(f"{path} is neither a run (config.yaml) nor a Hugging Face folder (config.json)")
    # Otherwise an adapter, a model with a memory, or any other of a folder or the hub.
    code_runs = bool(grants.get("model.trust_remote_code"))
    offline = not path.exists() and not _on_hub(name, path)
    options: dict[str, Any] = {"local_files_only": offline, "trust_remote_code": code_runs}
    try:
        if is_adapter:
            from lmtrain.adapters.lora_files import load_adapter

            model = load_adapter(path)
        elif path.exists() and is_exported(path):
            model = memory_export.load(path)
            options["config"] = model.config  # else loading the tokenizer needs trust_remote_code
        else:
            model = folder.from_pretrained(name, **options)
        if is_adapter or (path.exists() and is_exported(path)):
            folder.check_finite(model.named_parameters(), name)
        if not path.exists() or any(any(path.glob(names)) for names in _TOKENIZER_FILES):
            tokenizer = tokenizers.usable(AutoTokenizer.from_pretrained(name, **options))
            tokenizers.completed(tokenizer, name, local_files_only=offline)
            if has_scalar_head(model) and (is_adapter or padding_of(model) is None):  # a base may have another
                set_padding(model, tokenizer)
            return model, tokenizer
    except UserError:
        raise
    except Exception as error:  # errors of the hub, transformers, safetensors and pickle share no base class
        if not code_runs and "trust_remote_code" in str(error):
            raise UserError(f"{name} brings its own code: if you trust it, set model.trust_remote_code=true") from error
        if path.exists():
            found = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, SafetensorError):
                found = f"the weights in {name} are damaged ({found}), nothing in it was run"
                raise RunError(f"{found}: export or download it again") from error
            raise UserError(f"{name} holds no model that can be loaded ({found}); nothing in it was run") from error
        raise UserError(f"{name} is not a folder here and can't be loaded from the hub: {first_line(error)}") from error
    raise UserError(f"{path} has no tokenizer (tokenizer.json): copy the one its model was trained with there")


def _on_hub(name: str, path: Path) -> bool:
    """Returns True if the hub has `name`, False if the hub is unreachable, in which case a cached copy may exist.

    Raises:
        UserError: `name` is a path that does not exist, or the hub has no accessible model of that name.
    """
    if name.startswith(("/", ".", "~")) or (path.parent != Path() and (path.parent.exists() or name.count("/") > 1)):
        near = nearest(path)
        hint = f"; did you mean {near}?" if near else "; python -m lmtrain.runs lists the runs"
        raise UserError(f"{name}: no such folder{hint}")
    return hub.commit_of("model", name, None)[0] is not None


def load_asked(config: Config) -> tuple[PreTrainedModel, Any]:
    """Loads run_dir's model at generate.checkpoint, on its device, and its tokenizer."""
    assert config.run_dir is not None
    model, tokenizer = load(config.run_dir, config.generate.checkpoint, trust.granted(config))
    refuse_scalar_head(model, "writing")
    if options := config.generate.template_options:
        text, label, _ = find_template(None, tokenizer)
        tokenizer.chat_template = with_options(text, label, options, "generate.template_options")
    place(model, config.trainer.accelerator)
    return model, tokenizer


def place(hf_model: Any, accelerator: str) -> None:
    """Moves a model to the GPU if there is one, unless accelerator is cpu; a quantized model stays on its device."""
    stays = getattr(hf_model.config, "quantization_config", None) is not None
    if accelerator != "cpu" and torch.cuda.is_available() and not stays:
        hf_model.to("cuda")
