"""Special tokens in the contents of a conversation and in what a model wrote.

`AnswerDecoder` decodes tokens to the text that people, metrics and rewards read, with tokens such as <think>.
`PlainText` encodes special tokens in contents as plain text (data.allow_special_text=false).

A chat template writes special tokens around contents, and a tokenizer can't tell the template's "<|im_end|>" from one
in the contents. So those in contents are masked before rendering: every character of the token's text is replaced by a
character of a private-use plane. In the rendered text, the template's tokens are then masked with a character of
another such plane, which a copy of the tokenizer knows as that token, and those in contents are unmasked. Masks are as
long as the text they replace, so character positions stay valid throughout. A text that already holds such a character
is refused: it could spell a special token.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from lmtrain.data.chat.turns import BadRow
from lmtrain.data.tokenizers import plain_backend

# The upper halves of the two private-use planes of Unicode; icon fonts use the lower ones.
_IN_CONTENT, _BY_TEMPLATE = 0xF8000, 0x108000


class PlainText:
    """Encodes rendered conversations whose contents were masked with `mask`.

    Args:
        template: the text of the chat template. Added tokens that it writes are masked too where no answer has them:
            <think> and <tool_call> of many tokenizers aren't flagged as special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, template: str = "") -> None:
        flagged = special_tokens(tokenizer)
        special = control_tokens(tokenizer, template)
        self._numbers = {token: i for i, token in enumerate(special)}
        self._pattern, self._in_answers = pattern_of(special), pattern_of(flagged)
        last = max(0, len(special) - 1)
        masks = [f"{chr(first)}-{chr(first + last)}" for first in (_IN_CONTENT, _BY_TEMPLATE)]
        self._reserved = re.compile(f"[{''.join(masks)}]")
        self._backend = plain_backend(tokenizer, sorted({*special} - {*flagged}))
        settings = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        self._ids: dict[int, int] = {}
        for token in special:
            names = ("lstrip", "rstrip", "single_word", "normalized")
            kept = {name: getattr(settings[token], name) for name in names} if token in settings else {}
            alias = _masked(token, _BY_TEMPLATE + self._numbers[token])
            self._backend.add_tokens([AddedToken(alias, special=False, **kept)])
            number = self._backend.token_to_id(alias)
            assert number is not None  # just added
            self._ids[number] = tokenizer.convert_tokens_to_ids(token)

    def mask(self, value: Any, where: str, is_answer: bool = False) -> Any:
        """Returns messages or tools with the special tokens in their strings masked, except in roles.

        is_answer: the value is what an assistant says, in which only tokens that are flagged as special are masked:
            it may write a template's own marks, such as those of its reasoning.

        Raises:
            BadRow: a string holds a character that masks are made of.
        """
        if isinstance(value, str):
            if found := self._reserved.search(value):
                held = f"a text holds the private-use character U+{ord(found[0]):X}"
                raise BadRow(where, f"{held}, which data.allow_special_text=false reserves")
            pattern = self._in_answers if is_answer else self._pattern
            return pattern.sub(lambda found: _masked(found[0], _IN_CONTENT + self._numbers[found[0]]), value)
        if isinstance(value, list):
            return [self.mask(item, where) for item in value]
        if isinstance(value, dict):
            said = value.get("role") == "assistant"
            return {
                self.mask(key, where): item if key == "role" else self.mask(item, where, said and key == "content")
                for key, item in value.items()
            }
        return value

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a rendered text, and the characters [start, end) of each token."""
        text = self._pattern.sub(lambda found: _masked(found[0], _BY_TEMPLATE + self._numbers[found[0]]), text)
        for token, number in self._numbers.items():
            text = text.replace(_masked(token, _IN_CONTENT + number), token)
        found = self._backend.encode(text, add_special_tokens=False)
        return [self._ids.get(i, i) for i in found.ids], found.offsets


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Returns the texts of a tokenizer's special tokens, longest first."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return _longest_first({*added, *tokenizer.all_special_tokens})


def control_tokens(tokenizer: PreTrainedTokenizerFast, template: str) -> tuple[str, ...]:
    """Returns the texts of the special tokens and of the added tokens that a template writes, longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
    return _longest_first({*special_tokens(tokenizer), *(token for token in added if token in template)})


def strings_of(value: Any) -> Iterator[str]:
    """Yields the strings in a value of lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    for item in value if isinstance(value, list | dict) else ():
        yield from strings_of(item)
    for item in value.values() if isinstance(value, dict) else ():
        yield from strings_of(item)


def pattern_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches the texts of tokens; it matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, _longest_first(tokens))) or r"(?!)")


def _longest_first(tokens: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


def _masked(token: str, character: int) -> str:
    return chr(character) * len(token)


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
