"""Jinja chat templates: named ones, how messages are rendered with one, which tokens end an answer, and its sandbox.

The sandbox bounds what one operation of a template may cost; jinja2's own bounds `range` alone. Work in one operation
of Python's (a power of 400 million digits, a text repeated ten billion times) can't be interrupted by the time limit,
so it is refused before it begins. transformers makes the sandbox from the class that its module names; that is
BoundedSandbox from when this module is imported.
"""

import contextlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.special_text import special_tokens
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError

ITEMS = 10_000_000  # characters or items that a product may have
BITS = 10_000  # that a product or power of whole numbers may have
_WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose `*`, `**` and `%` raise OverflowError for results beyond ITEMS and BITS."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _too_large(operator, left, right):
            raise OverflowError(f"the result of {operator} would be too large for a chat template")
        return super().call_binop(context, operator, left, right)


def _too_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and bool(_WIDE.search(left))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits > BITS
    items, times = (right, left) if isinstance(left, int) else (left, right)
    return operator == "*" and isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > ITEMS


chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox


Span = tuple[int, int]  # characters [start, end) of a text
PATIENCE = 10.0  # seconds for one conversation, a thousand times what long ones need
QUESTION, ANSWER = "lmtrain-question", "lmtrain-answer"  # stand where a template puts the turns' text
OPEN, CLOSE = "<think>", "</think>"
# What a template raises on turns it isn't made for.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError)
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _TooLong(BaseException):
    """Raised in a template that takes too long; no Exception, which the libraries between may catch."""


class Endless(UserError):
    """A template that takes too long, in whichever way it is given the turns."""


def _too_long(*_: object) -> None:
    raise _TooLong


class Template:
    """A Jinja chat template at work with a tokenizer's special tokens.

    Args:
        text: the template.
        label: what messages call it: "chatml", "the tokenizer's own".

    Raises:
        UserError: the template can't render a question and its answer, or nothing could end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, label: str) -> None:
        self.text, self.label = text, label
        self.has_markers = bool(_MARKERS.search(text))
        # A tokenizer without one of these writes nothing there; some templates fail where the name is unknown.
        self._special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
        self._special |= {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self._thought = "" if "reasoning_content" in text else _thought_key(text)
        self.special_tokens = special_tokens(tokenizer)
        self._in_parts = False
        try:
            self.end_of_turn, self.after_turn = self._end_of_turn()
        except Endless:
            raise
        except UserError as error:  # those of models that also see images may take contents in parts alone
            self._in_parts = True
            try:
                self.end_of_turn, self.after_turn = self._end_of_turn()
            except UserError:
                raise error from None
        # A template without an end-of-turn token: the tokenizer's end of text ends the last answer.
        self.added_end = "" if self.end_of_turn else tokenizer.eos_token
        if not self.end_of_turn and not self.added_end:
            raise UserError(
                f"the chat template ({label}) writes no special token after an answer and the tokenizer has no end of "
                f"text, so the model could never learn to stop: choose another with data.chat_template"
            )

    def prompt(self, messages: list[dict[str, Any]], tools: Any, where: str, ask: bool = True) -> str:
        """The text up to and including the words that ask for an answer; without them where `ask` is false."""
        return self.render_texts([messages], tools, where, add_generation_prompt=ask)[0]

    def differs(self, one: Conversation, other: Conversation, shown: int) -> bool:
        """Whether the first `shown` messages of two conversations read otherwise, or the template refuses the other."""
        try:
            texts = [self.render_texts([c.messages[:shown]], c.tools, c.where)[0] for c in (one, other)]
        except BadRow:
            return True
        return texts[0] != texts[1]

    def _end_of_turn(self) -> tuple[str, str]:
        """What is written after every answer up to its first special token, and what comes after that token."""
        asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        try:
            (text,) = self.render_texts([asked], None, "")
        except BadRow as error:
            raise UserError(
                f"the chat template ({self.label}) can't render a question and its answer: {error.reason}"
            ) from None
        before, found, suffix = text.rpartition(ANSWER)
        if not found or QUESTION not in before:
            raise UserError(f"the chat template ({self.label}) doesn't write out the turns of a conversation")
        ends = re.search("|".join(map(re.escape, self.special_tokens)), suffix) if self.special_tokens else None
        return (suffix[: ends.end()], suffix[ends.end() :]) if ends else ("", suffix)

    def render_texts(
        self,
        chats: list[list[dict[str, Any]]],
        tools: Any,
        where: str,
        add_generation_prompt: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[str]:
        return self._rendered(chats, tools, where, add_generation_prompt=add_generation_prompt, **more)[0]

    def render_marked(self, messages: list[dict[str, Any]], tools: Any, where: str) -> tuple[str, list[Span]]:
        """The whole text and, for templates with markers, the spans they mark."""
        if not self.has_markers:
            return self.render_texts([messages], tools, where)[0], []
        (text,), (marked,) = self._rendered([messages], tools, where, return_assistant_tokens_mask=True)
        return text, [(start, end) for start, end in marked]

    def _rendered(self, chats: list[list[dict[str, Any]]], tools: Any, where: str, **more: Any) -> tuple[Any, Any]:
        """What render_jinja_template gives; raises BadRow where the template refuses the turns."""
        try:
            with self._in_time(where):
                spelt = [self._spelt(messages) for messages in chats]
                return render_jinja_template(
                    conversations=spelt, tools=tools, chat_template=self.text, **self._special, **more
                )
        except _REFUSALS as error:
            reason = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {reason}") from None

    @contextlib.contextmanager
    def _in_time(self, where: str) -> Iterator[None]:
        """Ends a template that loops on and on; in the main thread, the only one that can be interrupted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            yield
        except _TooLong:
            raise Endless(
                f"{where + ': ' if where else ''}the chat template ({self.label}) has not rendered a conversation "
                f"after {PATIENCE:g} seconds; it loops too often: choose another with data.chat_template"
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _spelt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As the template reads them: thoughts under its name for them, contents in parts where it takes no text."""
        if self._thought:
            messages = [
                {**t, self._thought: t["reasoning_content"]} if "reasoning_content" in t else t for t in messages
            ]
        if self._in_parts:
            messages = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
        return messages


def answers_of(messages: list[dict[str, Any]]) -> list[int]:
    """Positions of the assistant turns."""
    return [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]


def thought_of(turn: dict[str, Any]) -> str:
    """What an answer thinks before it speaks: its reasoning_content, or what its content has before </think>."""
    if turn.get("reasoning_content"):
        return str(turn["reasoning_content"]).strip()
    before, closed, _ = turn["content"].partition(CLOSE)
    return before.strip().removeprefix(OPEN).strip() if closed else ""


def _thought_key(text: str) -> str:
    """What a template calls an answer's thought."""
    return next((key for key in ("thinking", "reasoning") if re.search(rf"message\W+(get\W+)?{key}\b", text)), "")


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


def find_template(name: str | None, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
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
