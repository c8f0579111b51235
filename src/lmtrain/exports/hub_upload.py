"""An exported folder as a repository of the Hugging Face Hub (export.push_to), through huggingface_hub."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from lmtrain.config.schema import ExportConfig
from lmtrain.data.hub import endpoint, first_line
from lmtrain.errors import RunError, UserError

LEFT_OUT = ["lmtrain_config.yaml"]  # it names folders of this machine; the model card has the settings


def check(export: ExportConfig) -> None:
    """Raises UserError where an upload would fail for want of a name or a token; asks nothing over the network."""
    name = export.push_to
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", name, re.ASCII):
        raise UserError(f"export.push_to={name}: the hub's names are <user or organisation>/<name>")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError(f"export.push_to={name}: HF_HUB_OFFLINE is set, so nothing can be uploaded")
    if huggingface_hub.get_token() is None:
        raise UserError(f"export.push_to={name} needs a token that may write: set HF_TOKEN or run `hf auth login`")


def push(folder: Path, export: ExportConfig, message: str) -> str:
    """Uploads `folder` in one commit; returns the repository's address. A repository that is not there is made.

    Raises:
        RunError: the hub refused, or did not answer. The folder stays as it is.
    """
    name = str(export.push_to)
    api = huggingface_hub.HfApi(endpoint=endpoint())
    try:
        made = api.create_repo(name, private=export.push_private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=LEFT_OUT)
    except Exception as error:  # the HTTP library behind huggingface_hub, and its errors, differ between versions
        known = isinstance(error, HfHubHTTPError | OSError | ValueError)
        if not known and not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        raise RunError(
            f"{folder} is written but not uploaded to {endpoint()}/{name}: {first_line(error)}. To try again: "
            f"python -m lmtrain.export run_dir={folder.parent} export.push_to={name}"
        ) from error
    return str(made)
