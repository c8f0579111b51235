"""The `lmtrain export` command: writes a run's checkpoint as a Hugging Face folder and uploads it to the hub."""

import json
import re
from pathlib import Path

import huggingface_hub
import torch
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError

from lmtrain import errors, terminal
from lmtrain.checkpoints import store
from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.schema import Config, ExportConfig
from lmtrain.data.chat.templates import end_ids, own_template
from lmtrain.data.hub import endpoint
from lmtrain.errors import RunError, UserError, first_line
from lmtrain.exports import model_card
from lmtrain.exports.hf_folder import command_for, export_model
from lmtrain.files import absolute
from lmtrain.generation.sampling import positions
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir


def export(config: Config) -> int:
    """Writes <run_dir>/export, or export_merged, from the checkpoint export.checkpoint; returns the exit code."""
    terminal.quiet_libraries()
    check_upload(config.export)
    assert config.run_dir is not None
    grants = trust.granted(config)
    run = RunDir(absolute(config.run_dir))
    model, tokenizer, checkpoint = trained.from_run(run, config.export.checkpoint, grants)
    chats = rules.load(run.config, grants).data.rows != "text"
    generator = torch.Generator().manual_seed(config.seed)
    example = torch.randint(len(tokenizer), (1, min(32, positions(model))), generator=generator)
    ends, step = end_ids(tokenizer, own_template(tokenizer)) if chats else None, store.step_of(checkpoint)
    e = config.export
    folder = export_model(run, model, tokenizer, e, merge=e.merge, example=example, eos_token_ids=ends, step=step)
    print(terminal.visible(f"{folder}  (from {checkpoint.name}; {model_card.reader(folder)} reads it)"))
    if config.export.push_to is not None:
        print(f"uploaded to {push(folder, config.export, step)}")
    return errors.FINISHED


LEFT_OUT = "lmtrain_config.yaml"  # contains local paths; the model card lists the settings


def check_upload(export: ExportConfig) -> None:
    """Raises UserError if an upload would fail for lack of a valid name or a token; makes no network requests."""
    name = export.push_to
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII):
        raise UserError(f"export.push_to={name}: the hub's names are <user or organisation>/<name>")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError(f"export.push_to={name}: HF_HUB_OFFLINE is set, so nothing can be uploaded")
    if huggingface_hub.get_token() is None:
        raise UserError(f"export.push_to={name} needs a token that may write: set HF_TOKEN or run `hf auth login`")


def push(folder: Path, export: ExportConfig, step: int) -> str:
    """Uploads `folder` in one commit, creating the repository if it does not exist; returns the repository's URL.

    Args:
        step: the step of the weights.

    Raises:
        RunError: the hub refused the upload or did not answer; the folder is left unchanged.
    """
    name, public = str(export.push_to), [] if export.push_private else ["export.push_private=false"]
    api, message = huggingface_hub.HfApi(endpoint=endpoint()), f"{folder.parent.name}, step {step}"
    try:
        made = api.create_repo(name, private=export.push_private, exist_ok=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LEFT_OUT)
        added = [CommitOperationAdd(path.relative_to(folder).as_posix(), _public(path)) for path in files]
        api.create_commit(name, added, commit_message=message)
    except Exception as error:  # huggingface_hub's HTTP library, and thus its errors, differ between versions
        known = isinstance(error, HfHubHTTPError | OSError | ValueError)
        if not known and not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        again = command_for(folder, export, step, f"export.push_to={name}", *public)
        found = f"{folder} is written but not uploaded to {endpoint()}/{name}: {first_line(error)}"
        raise RunError(f"{found}. To try again: {again}") from error
    return str(made)


def _public(path: Path) -> Path | bytes:
    """Returns a file to upload: an adapter's config without the name of a base that is a folder of this machine."""
    if path.name != "adapter_config.json":
        return path
    config = json.loads(path.read_text(encoding="utf-8"))
    base = config["base_model_name_or_path"]
    if not Path(base or "").is_absolute():
        return path
    found = f"the adapter's base is {base}, a folder of this machine, so the upload names none"
    terminal.note(f"{found}: give its readers the base too, or upload the merged model (export.merge=true)")
    return json.dumps(config | {"base_model_name_or_path": None}, indent=2, sort_keys=True).encode()
