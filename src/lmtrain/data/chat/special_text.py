"""Special tokens written out in the text of a conversation, read as plain text (data.allow_special_text=false).

A chat template writes special tokens and puts contents between them, and a tokenizer can't tell "<|im_end|>" of the
one from that of the other. So those of contents are masked before rendering: every character of the token's text is
replaced by one of a private-use plane. In the rendered text those of the template are then masked by another, which
a copy of the tokenizer knows as that token, and those of contents are unmasked. Masks are as long as what they stand
for, so places of characters hold throughout.
"""

import copy
import re
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

_IN_CONTENT, _BY_TEMPLATE = 0xF0000, 0x100000  # where the two private-use planes of Unicode begin


class PlainText:
    """Encodes rendered conversations whose contents went through `mask`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        special = special_tokens(tokenizer)
        self._numbers = {token: i for i, token in enumerate(special)}
        self._pattern = special_pattern(tokenizer)
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # their own texts are text
        settings = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self._ids: dict[int, int] = {}
        for token in special:
            names = ("lstrip", "rstrip", "single_word", "normalized")
            kept = {name: getattr(settings[token], name) for name in names} if token in settings else {}
            alias = _masked(token, _BY_TEMPLATE + self._numbers[token])
            self._backend.add_tokens([AddedToken(alias, special=False, **kept)])
            self._ids[self._backend.token_to_id(alias)] = tokenizer.convert_tokens_to_ids(token)

    def mask(self, value: Any) -> Any:
        """The same messages or tools, special tokens in their strings masked; roles are the template's business."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: _masked(found[0], _IN_CONTENT + self._numbers[found[0]]), value)
        if isinstance(value, list):
            return [self.mask(item) for item in value]
        if isinstance(value, dict):
            return {key: item if key == "role" else self.mask(item) for key, item in value.items()}
        return value

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a rendered text, and the characters [start, end) that each stands for."""
        text = self._pattern.sub(lambda found: _masked(found[0], _BY_TEMPLATE + self._numbers[found[0]]), text)
        for token, number in self._numbers.items():
            text = text.replace(_masked(token, _IN_CONTENT + number), token)
        found = self._backend.encode(text, add_special_tokens=False)
        return [self._ids.get(i, i) for i in found.ids], found.offsets


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """The texts of a tokenizer's special tokens, longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*added, *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token)))


def special_pattern(tokenizer: PreTrainedTokenizerFast) -> re.Pattern[str]:
    """Matches them; nothing where there are none."""
    return re.compile("|".join(map(re.escape, special_tokens(tokenizer))) or r"(?!)")


def reference_of(question: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    """The answer that stands in the data, as a model's answer is decoded: without the special tokens in it.

    Those of contents that went through a template are plain text (`PlainText`) and stay.
    """
    return question["reference"] if question["chat"] else special_pattern(tokenizer).sub("", question["reference"])


def _masked(token: str, character: int) -> str:
    return chr(character) * len(token)
