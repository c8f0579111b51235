"""Decodes tokens to the text that people, metrics and rewards read: what was written, with tokens such as <think>."""

from collections.abc import Sequence
from typing import Any

from lmtrain.data.chat.special_text import pattern_of


class AnswerDecoder:
    """Decodes what a model wrote. Only tokens that begin, end or pad a text, or end an answer, are left out.

    Other special tokens are kept: those of tokenizer.add_tokens, and <tool_call> or <think> where a tokenizer marks
    them as special.

    Args:
        end_ids: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        framing = {*end_ids, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
        # An ordinary token that ends an answer, such as a full stop, belongs to its text.
        self.left_out = framing & {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._pattern = pattern_of(tokenizer.convert_ids_to_tokens(sorted(self.left_out)))

    def decode(self, ids: Sequence[int], given: Sequence[int] = ()) -> str:
        """Returns the text of `ids`, or with `given`, the ids before them, what they add to the text of those."""
        kept = ([i for i in part if i not in self.left_out] for part in (given, ids))
        return following(self.tokenizer, *kept)

    def as_decoded(self, text: str) -> str:
        """Returns a text of the data as `decode` would return it after it was tokenized."""
        return self._pattern.sub("", text)


def following(tokenizer: Any, given: list[int], ids: list[int]) -> str:
    """Returns the text that `ids` add to that of the ids before them, all special tokens included.

    Alone, some tokenizers (Llama 2's, Mistral's) decode them without the space that their first word begins with.
    """
    before, whole = (tokenizer.decode(p, clean_up_tokenization_spaces=False) for p in (given, [*given, *ids]))
    return whole.removeprefix(before) if whole.startswith(before) else following(tokenizer, [], ids)
