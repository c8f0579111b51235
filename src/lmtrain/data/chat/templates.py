"""Encodes conversations and texts as token ids with a loss mask.

A conversation is rendered with its chat template and then tokenized as one text, without added special tokens: only the
template decides whether a text begins with BOS. A plain text gets the BOS token if the tokenizer adds one to texts, and
the end-of-text token after its completion. Examples longer than data.max_length are shortened, split or dropped.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig
from lmtrain.data import framing
from lmtrain.data.chat.conversations import Completion, Conversation
from lmtrain.data.chat.find_template import find_template, reads, with_options
from lmtrain.data.chat.jinja_rendering import answers_of
from lmtrain.data.chat.rendering import LABELS, ChatTemplate, Rendered, check_tools, unshown
from lmtrain.data.chat.replies import Replies
from lmtrain.data.chat.special_text import (
    AnswerDecoder,
    PlainText,
    control_tokens,
    pattern_of,
    special_tokens,
    strings_of,
)
from lmtrain.data.chat.turns import BadRow, Remark
from lmtrain.data.fast_ids import TextIds
from lmtrain.data.tokenizers import plain_backend
from lmtrain.errors import UserError


@dataclass(frozen=True)
class Example:
    """Token ids, whether each is trained on (as a target, so never the first), and the number of tokens cut off."""

    input_ids: list[int]
    trained: list[bool]
    cut: int = 0


def fit(
    ids: list[int], trained: list[bool], borders: list[int], cfg: DataConfig, where: str, kept: int = 0
) -> list[Example]:
    """Returns one example; data.on_too_long may make it none or several if it is longer than data.max_length.

    Args:
        borders: ascending positions in `ids` where split cuts if it can; elsewhere it cuts only if it must.
        kept: how many first ids stay when those after them are cut off (BOS).

    Raises:
        BadRow: the example is longer and data.on_too_long is raise.
    """
    most, policy = cfg.max_length, cfg.on_too_long
    if most is None or len(ids) <= most:
        return [Example(ids, trained)]
    if policy == "truncate_right":
        return [Example(ids[:most], trained[:most], len(ids) - most)]
    if policy == "truncate_left":
        return [Example(*cut_left(ids, trained, len(ids) - most, kept if kept < most else 0), len(ids) - most)]
    if policy == "drop":
        return []
    if policy == "raise":
        found = f"it has {len(ids)} tokens and data.max_length is {most}"
        raise BadRow(where, f"{found}: raise it, or let long rows be cut with data.on_too_long=truncate_right")
    return _split(ids, trained, borders, most)


def cut_left(ids: list[int], trained: list[bool], count: int, kept: int) -> tuple[list[int], list[bool]]:
    """Cuts `count` ids off the beginning, behind the first `kept`; what then follows these is not trained on."""
    after = kept + count
    return ids[:kept] + ids[after:], [*trained[:kept], *[False][: len(ids) - after], *trained[after + 1 :]]


def _split(ids: list[int], trained: list[bool], borders: list[int], most: int) -> list[Example]:
    pieces, start = [], 0
    while start < len(ids):
        end = min(start + most, len(ids))
        if end < len(ids):
            end = max((border for border in borders if start < border <= end), default=end)
        pieces.append(Example(ids[start:end], [False, *trained[start + 1 : end]]))
        start = end
    return pieces


Encoding = tuple[list[int], list[bool], list[int]]  # ids, label mask, borders at which to split


class ChatEncoder:
    """Encodes conversations and plain texts as token ids and label masks, according to `cfg`.

    Args:
        tokenizer: a fast tokenizer.
        cfg: chat_template, allow_special_text, train_on, max_length and on_too_long are used.

    Attributes:
        remarks: notes about the current row, since `begin_row`.
        texts: the number of texts its conversation became, more than one if the template rewrites earlier turns.

    Raises:
        UserError: the template is unknown or doesn't fit the tokenizer, or a conversation is encoded without one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cfg: DataConfig) -> None:
        self.tokenizer, self.cfg = tokenizer, cfg
        # Plain texts need no template, so it is not an error here if neither config nor tokenizer names one.
        self._template = self.chat if cfg.chat_template or tokenizer.chat_template else None
        self._start = framing.wanted(tokenizer, cfg)
        every = f"{self._template.text}{self._template.tool_use or ''}" if self._template else ""
        self._special, self._control = map(pattern_of, (special_tokens(tokenizer), control_tokens(tokenizer, every)))
        self._plain = PlainText(tokenizer, every) if cfg.allow_special_text is False else None
        backend = plain_backend(tokenizer)
        backend.encode_special_tokens = tokenizer.split_special_tokens
        self._ids = TextIds(backend)
        self._replies: Replies | None = None
        self.begin_row()

    @property
    def template(self) -> str | None:
        """The Jinja text of the chat template, or None if neither the config nor the tokenizer names one."""
        return self._template.text if self._template else None

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the tokens besides the rows, the settings and the tokenizer's rules."""
        special = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        more = {"tool_use": self._template.tool_use} if self._template and self._template.tool_use else {}
        return {"template": self.template, "special_tokens": special, **more}

    def begin_row(self) -> None:
        """Resets `remarks` and `texts` for a new row."""
        self.remarks: list[Remark] = []
        self.texts = 1

    def encode(self, sample: Conversation | Completion) -> list[Example]:
        """Returns a sample's examples: one, none if it is dropped as too long, or several if it is split or rewritten.

        Raises:
            BadRow: the template refuses the row, or it is too long and data.on_too_long is raise.
            UserError: this conversation's answers can't be located in the template's text (see rendering.py).
        """
        if isinstance(sample, Completion):
            found: list[Encoding] = [(*self.completion(sample), [])]
        else:
            found = self._conversation(sample)
        examples = []
        for ids, trained, borders in found:
            trained[:1] = [False] * len(trained[:1])  # no token before it predicts it
            examples += fit(ids, trained, borders, self.cfg, sample.where, self.beginning(ids))
        return examples

    def pair(self, conversation: Conversation, prompt: int) -> tuple[list[int], list[bool]]:
        """Returns the token ids of a prompt and its answer, uncut, and which of them the answer is scored by.

        By data.train_on these are the assistant turns after the prompt (assistant), the last of them (last_assistant),
        everything after the generation prompt of the first (completion), or all tokens (all).

        Args:
            conversation: the turns of the prompt, which all answers to it share, and those of the answer, of which the
                first is the assistant's.
            prompt: how many of the turns are the prompt's.
        """
        conversation = self._masked(conversation)
        turns = [turn for turn in answers_of(conversation.messages) if turn >= prompt]
        turns = turns[-1:] if self.cfg.train_on == "last_assistant" else turns
        check_tools(self.chat, conversation)
        rendered = self.chat.render_one(conversation, turns)
        self._note(conversation, [rendered], turns)
        ids, trained, _ = self._encoded(rendered, conversation)
        return ids, trained

    def beginning(self, ids: list[int]) -> int:
        """Returns how many first ids stand before a text or chat, such as BOS; the chat template may write it."""
        start, bos = self._start, [self.tokenizer.bos_token_id]
        if start and ids[: len(start)] == start:
            return len(start)
        return int(ids[:1] == bos and "bos_token" in (self.template or ""))

    def completion(self, sample: Completion) -> tuple[list[int], list[bool]]:
        """Works like `pair` for plain text: a prompt with the tokenizer's BOS, a completion with the end of text.

        The first token is never scored, as no token before it predicts it.
        """
        text = sample.prompt + sample.completion
        self._note_special_text(self._special.findall(text))
        ids, offsets = self._tokens(self._plain.mask(text, sample.where, True) if self._plain else text)
        first, _ = _tokens_of(offsets, (len(sample.prompt), len(sample.prompt) + len(sample.completion)))
        if self.cfg.train_on == "all":
            first = 0
        begun = framing.begun(ids, self._start)
        first += len(begun) - len(ids)
        whole = framing.ended(begun, self.tokenizer)
        return whole, [0 < i >= first for i in range(len(whole))]

    def note_prompt(self, asked: Conversation) -> None:
        """Adds the notes about a prompt, the turns before the last; raises BadRow if its tools are never shown."""
        check_tools(self.chat, asked)
        given = replace(asked, messages=asked.messages[:-1])
        text = self.chat.prompt(given.messages, given.tools, given.where, **given.options)
        self._note(given, [Rendered(text, len(given.messages))], [])

    def prompt_ids(self, sample: Conversation | Completion, ask: bool = True) -> list[int]:
        """Returns the ids from which a model generates the last answer; without generation prompt if not `ask`."""
        if isinstance(sample, Completion):
            prompt = self._plain.mask(sample.prompt, sample.where, True) if self._plain else sample.prompt
            return framing.begun(self._tokens(prompt)[0], self._start)
        asked = self._masked(sample)
        messages = asked.messages[: answers_of(asked.messages)[-1]]
        return self._tokens(self.chat.prompt(messages, asked.tools, asked.where, ask, **asked.options))[0]

    def replies(self, tools: list[dict[str, Any]] | None) -> Replies:
        """Returns what renders the turns between the answers of a conversation with these tools."""
        if self._replies is None or self._replies.tools != (tools or None):
            self._replies = Replies(self.chat, tools or None)
        return self._replies

    def reply_ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        ended_by: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Returns the ids between an answer and the next: the turns that follow it, and what asks for an answer.

        Args:
            ended_by: the id that the answer ended with; None: the template's end of turn (see replies.py).
            options: variables of the template, as of the conversation's row.

        Raises:
            UserError: the template refuses such turns.
        """
        said = messages if self._plain is None else self._plain.mask(messages, "a turn of the environment")
        end = None if ended_by is None else self.tokenizer.decode([ended_by])
        return self._tokens(self.replies(tools).text(said, end, **options))[0]

    def as_decoded(self, content: str) -> str:
        """Returns an answer of the data as `AnswerDecoder` would return one that the model wrote."""
        return content if self._plain else self._decoder.as_decoded(content)

    def end_of_turn_ids(self) -> list[int]:
        """Returns the ids that end an answer: the template's end-of-turn token and the tokenizer's end of text."""
        return end_ids(self.tokenizer, self._template)

    @cached_property
    def _decoder(self) -> AnswerDecoder:
        return AnswerDecoder(self.tokenizer, self.end_of_turn_ids())

    @cached_property
    def chat(self) -> ChatTemplate:
        text, label, tool_use = find_template(self.cfg.chat_template, self.tokenizer)
        options = self.cfg.template_options or {}
        if tool_use:
            tool_use = with_options(tool_use, label, {k: v for k, v in options.items() if reads(tool_use, k)})
        return ChatTemplate(self.tokenizer, with_options(text, label, options), label, tool_use)

    def _conversation(self, sample: Conversation) -> list[Encoding]:
        sample, answers = self._masked(sample), [i for i in answers_of(sample.messages) if i >= sample.given]
        asked = {"assistant": answers, "last_assistant": answers[-1:], "completion": answers[:1], "all": []}
        turns = asked[str(self.cfg.train_on)]
        check_tools(self.chat, sample)
        if self.cfg.train_on == "completion":
            texts = [self.chat.render_one(sample, turns)]
        else:
            texts = self.chat.render(sample, turns)
        # Of several, texts without a trained answer are only prefixes of others.
        texts = [text for text in texts if self._learned(text, sample)] or texts[-1:]
        self.texts = len(texts)
        self._note(sample, texts, turns if self.cfg.train_on in ("assistant", "last_assistant") else answers)
        return [self._encoded(text, sample) for text in texts]

    def _masked(self, sample: Conversation) -> Conversation:
        """Masks special tokens in texts if data.allow_special_text=false; adds a remark if there are any.

        Also adds one for each variable of the row that the template doesn't read. An answer's own end of turn at its
        end is none of its text: the template writes it.
        """
        for name in sample.options:
            if not reads(f"{self.chat.text}{self.chat.tool_use or ''}", name):
                words = f"{name} of chat_template_kwargs, which the chat template ({self.chat.label})"
                self.remarks.append(Remark(f"{words} never shows the model", lost=True))

        found = []
        for turn in [*sample.messages, {"tools": sample.tools}]:
            said = {key: turn[key] for key in turn.keys() & {"content"} if turn.get("role") == "assistant"}
            found += self._special.findall(" ".join(said.values()))
            others = {key: value for key, value in turn.items() if key not in {*said, "role"}}
            found += self._control.findall(" ".join(strings_of(list(others.values()))))
        self._note_special_text(found)
        if self._plain is None:
            return replace(sample, messages=[self._without_end(turn) for turn in sample.messages]) if found else sample
        messages, tools = (self._plain.mask(value, sample.where) for value in (sample.messages, sample.tools))
        return replace(sample, messages=messages, tools=tools)

    def _encoded(self, rendered: Rendered, sample: Conversation) -> Encoding:
        ids, offsets = self._tokens(rendered.text)
        trained = [False] * len(ids)
        for span in self._learned(rendered, sample):
            first, last = _tokens_of(offsets, span)
            trained[first:last] = [True] * (last - first)
        return ids, trained, [_tokens_of(offsets, (0, border))[1] for border in rendered.borders]

    def _learned(self, rendered: Rendered, sample: Conversation) -> list[tuple[int, int]]:
        if self.cfg.train_on == "all":
            return [(0, len(rendered.text))]
        if self.cfg.train_on == "completion":
            return [(next(iter(rendered.answers.values()))[0], len(rendered.text))]
        return [span for turn, span in rendered.answers.items() if sample.messages[turn].get("train", True)]

    def _note(self, sample: Conversation, texts: list[Rendered], learned: list[int]) -> None:
        """Adds the notes about a conversation to `remarks`."""
        learned = [turn for turn in learned if sample.messages[turn].get("train", True)]
        for name in unshown(self.chat, sample, texts, learned):
            words = f"{name}, which the chat template ({self.chat.label}) never shows the model"
            self.remarks.append(Remark(words, lost=name not in LABELS))
        self.remarks += [Remark(words) for text in texts for words in text.remarks]

    def _without_end(self, turn: dict[str, Any]) -> dict[str, Any]:
        if turn["role"] != "assistant":
            return turn
        ends = tuple(self.tokenizer.convert_ids_to_tokens(self.end_of_turn_ids()))
        content = turn["content"].rstrip()
        end = next((end for end in ends if content.endswith(end)), None)
        return turn if end is None else {**turn, "content": content.removesuffix(end)}

    def _note_special_text(self, tokens: list[str]) -> None:
        found = sorted(set(tokens))
        if found:
            read = "as text" if self._plain else "as the tokens themselves (false: as text)"
            words = f"special tokens written in their text ({' '.join(found)}), read {read} by data.allow_special_text"
            self.remarks.append(Remark(words))

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a text, and the characters [start, end) of each token."""
        if self._plain:
            return self._plain.encode(text)
        return self._ids.with_offsets(text)


def own_template(tokenizer: PreTrainedTokenizerFast) -> ChatTemplate | None:
    """Returns the chat template saved with the tokenizer, as with those of trained models, or None."""
    return ChatTemplate(tokenizer, *find_template(None, tokenizer)) if tokenizer.chat_template else None


def end_ids(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate | None) -> list[int]:
    """Returns the ids that end an answer: the template's end-of-turn token and the tokenizer's end of text."""
    ends = tokenizer(template.end_of_turn, add_special_tokens=False)["input_ids"][-1:] if template else []
    eos = tokenizer.eos_token_id
    return ends + ([eos] if eos is not None and eos not in ends else [])


def user_turn(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, text: str, system: str | None) -> list[int]:
    """Returns the token ids of a conversation that asks for an answer to the user turn `text`."""
    messages = [{"role": "system", "content": system}] if system else []
    try:
        asked = template.prompt([*messages, {"role": "user", "content": text}], None, "prompt")
    except BadRow as bad:
        raise UserError(f"a prompt can't be put into a conversation: {bad.reason}") from None
    return tokenizer(asked, add_special_tokens=False)["input_ids"]


def leaves_out_bos(tokenizer: Any) -> bool:
    """Returns whether a chat begins without the BOS token that plain text begins with."""
    template, start = own_template(tokenizer), framing.start_of(tokenizer)
    try:
        return template is not None and user_turn(tokenizer, template, "a", None)[: len(start)] != start
    except UserError:  # the template rejects such a turn
        return False


def _tokens_of(offsets: list[tuple[int, int]], span: tuple[int, int]) -> tuple[int, int]:
    """Returns the tokens [first, last) that overlap `span`, including one that begins before it.

    Starts and ends of offsets ascend, so only the first and last token are searched for. All tokens between them count,
    even tokens of white space, which may have no characters of their own in the offsets.
    """
    first = bisect_right(offsets, span[0], key=lambda offset: offset[1])
    return first, bisect_left(offsets, span[1], lo=first, key=lambda offset: offset[0])
