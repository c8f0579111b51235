"""Looks up names and revisions on the Hugging Face Hub and detects an unreachable hub within seconds.

`datasets` and `transformers` retry an unreachable hub for half a minute or more. Therefore the commit hash of a name is
requested first, in one request without retries; the hash also identifies what is loaded afterwards.
"""

import os
import re
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import errors as hub_errors

from lmtrain.errors import UserError, first_line


def endpoint() -> str:
    """Returns the URL of the hub: HF_ENDPOINT, or huggingface.co by default."""
    return str(huggingface_hub.constants.ENDPOINT)


def optional_file(name_or_path: str, file: str, **options: Any) -> Path | None:
    """Returns the path of a file of a folder, or of its copy from the hub; None if there is none or no answer.

    Args:
        options: revision and local_files_only.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    try:
        return Path(huggingface_hub.hf_hub_download(name_or_path, file, **options))
    except (hub_errors.HfHubHTTPError, hub_errors.LocalEntryNotFoundError, OSError, ValueError):
        return None


def commit_of(
    kind: Literal["dataset", "tokenizer", "model"], name: str, revision: str | None
) -> tuple[str | None, str]:
    """Returns the commit hash that the name and revision of a dataset, tokenizer or model resolve to, and "".

    Without an answer, within HF_HUB_ETAG_TIMEOUT seconds (10 unless set) or offline, it is None and the reason. Then a
    cached copy may do.

    Raises:
        UserError: the hub answers that the name or revision doesn't exist or that access is denied.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision, ""
    api = huggingface_hub.HfApi()
    what = "model or tokenizer" if kind == "tokenizer" else kind  # a model's name is looked up for its tokenizer first
    log_in = "set HF_TOKEN or run `hf auth login`"
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        info = ask(name, revision=revision, timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT)
    except hub_errors.GatedRepoError:
        raise UserError(f"{what} {name!r} is gated: accept its terms at {endpoint()}, then {log_in}") from None
    except hub_errors.RevisionNotFoundError:
        raise UserError(f"{what} {name!r} has no revision {revision!r} on {endpoint()}") from None
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise UserError(f"{what} {name!r} doesn't exist on {endpoint()}, or is private (then {log_in})") from None
    except Exception as error:  # versions of huggingface_hub differ in their HTTP library and thus in its errors
        return None, first_line(error)
    return str(info.sha), ""


def explain_unreachable(kind: str, name: str, reason: str) -> str:
    """Returns the error message for a name that can't be fetched and isn't cached."""
    instead = {
        "dataset": "other text with data=python_stdlib or data.path=<files>",
        "tokenizer": "tokenizer.name_or_path=<local folder>, or tokenizer=bpe (trained on the data) or tokenizer=bytes",
        "model": "model.name_or_path=<folder of a downloaded one>, or a model from scratch, model=gpt_nano",
    }[kind]
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    found = f"{kind} {name!r} can't be fetched: {endpoint()} doesn't answer ({reason}), and there is no copy in {cache}"
    return f"{found}. Set HF_ENDPOINT to a mirror, HF_HOME to a folder with a cached copy, or choose {instead}"
