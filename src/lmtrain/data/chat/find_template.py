"""Finds the Jinja text of a chat template: the tokenizer's own, one of lmtrain's, or a file; and sets its variables."""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.data.chat import TABLES
from lmtrain.errors import UserError


def reads(template: str, variable: str) -> bool:
    """Returns whether a template mentions a variable."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None


def with_options(template: str, label: str, options: dict[str, Any], key: str = "data.template_options") -> str:
    """Returns a template with `options`, the value of `key`, as the values of variables that a caller leaves out.

    So whatever renders it later, here or in another program, renders it as in training.

    Raises:
        UserError: the template reads no such variable.
    """
    for name in options:
        if not name.isidentifier() or not reads(template, name):
            raise UserError(f"{key}.{name}: the chat template ({label}) reads no variable of that name")
    said = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in options.items()
    )
    return f"{said}\n{template}" if said else template  # as transformers renders it, the line's end goes


_FOLDER = Path(__file__).parent / "jinja"
NAMED: dict[str, list[str]] = TABLES["templates"]  # the special tokens that each template writes


def find_template(name: str | None, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str, str | None]:
    """Returns the Jinja text of data.chat_template, its label for messages, and the text for rows with tools, if any.

    Args:
        name: None for the tokenizer's own template, auto for that or else alpaca, one of `NAMED`, or a path to a Jinja
            file.

    Raises:
        UserError: there is no such template, or the tokenizer lacks special tokens of a named template.
    """
    known = ", ".join(sorted(NAMED))
    if name == "auto":
        name = None if tokenizer.chat_template else "alpaca"
    # The tokenizer's own.
    if name is None:
        own: Any = tokenizer.chat_template
        named = own if isinstance(own, dict) else {"default": own}
        if isinstance(named.get("default"), str):
            return named["default"], "the tokenizer's own", named.get("tool_use")
        found = f"{tokenizer.name_or_path}: chat_template of the tokenizer is {own!r:.80}, and no Jinja text"
        if own is None:
            found = "the tokenizer has no chat template"
        elif isinstance(own, dict):
            found = f"the tokenizer has the chat templates {', '.join(own)}, and none for every conversation (default)"
        raise UserError(f"{found}: choose one with data.chat_template ({known}, or a Jinja file)")
    # A file.
    if name not in NAMED:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"data.chat_template={name} is neither a file nor one of {known}")
        return path.read_text(encoding="utf-8"), str(path), None
    # One of lmtrain's, whose special tokens the tokenizer must have.
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in NAMED[name] if token not in vocabulary]
    if missing:
        found = f"data.chat_template={name}: the tokenizer has no {' '.join(missing)}"
        added = f"'tokenizer.add_tokens=[{','.join(missing)}]'"
        raise UserError(f"{found}: add them with {added}, or choose one that needs none (alpaca, zephyr, vicuna)")
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), name, None
