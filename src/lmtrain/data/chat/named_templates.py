"""Chat templates by name: data/chat/jinja/<name>.jinja, each the published format of the models named here."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lmtrain.errors import UserError

_FOLDER = Path(__file__).parent / "jinja"
# The tokens that each template writes and that must be one token each, besides beginning and end of text.
NAMED: dict[str, tuple[str, ...]] = {
    "alpaca": (),  # Stanford Alpaca; an end of text after each answer
    "chatml": ("<|im_start|>", "<|im_end|>"),  # OpenAI's ChatML; tool calls as Hermes writes them
    "gemma": ("<start_of_turn>", "<end_of_turn>"),  # Gemma 1 to 3; the system turn goes into the first user turn
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),  # Llama 3, without its tool calls
    "mistral": (),  # Mistral 7B Instruct v0.1 to v0.3; the system turn goes into the first user turn
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),  # Phi-3
    "vicuna": (),  # Vicuna 1.1 and later
    "zephyr": (),  # Zephyr 7B; its <|user|> is plain text, an end of text ends each turn
}


def find(name: str | None, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The Jinja text of data.chat_template, and what messages call it.

    Args:
        name: None for the tokenizer's own, one of `NAMED`, or a path to a Jinja file.

    Raises:
        UserError: there is none, or the tokenizer lacks tokens that a named template is made of.
    """
    known = ", ".join(sorted(NAMED))
    if name is None:
        try:
            own = tokenizer.get_chat_template()
            if not isinstance(own, str):
                raise UserError(
                    f"{tokenizer.name_or_path}: chat_template of the tokenizer is {own!r:.80}, and no Jinja text: "
                    f"choose one with data.chat_template ({known}, or a Jinja file)"
                )
            return own, "the tokenizer's own"
        except ValueError:
            raise UserError(
                f"the tokenizer has no chat template: choose one with data.chat_template ({known}, or a Jinja file)"
            ) from None
    if name not in NAMED:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"data.chat_template={name} is neither a file nor one of {known}")
        return path.read_text(encoding="utf-8"), str(path)
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in NAMED[name] if token not in vocabulary]
    if missing:
        raise UserError(
            f"data.chat_template={name} is made of the tokens {' '.join(NAMED[name])}, and the tokenizer has no "
            f"{' '.join(missing)}: add them with 'tokenizer.add_tokens=[{','.join(missing)}]', or choose a template "
            f"that needs none (alpaca, zephyr, vicuna)"
        )
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), name
