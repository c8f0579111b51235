"""Renders a conversation once and reads the texts of its beginnings off it, where the chat template allows that.

The answers of a conversation are found by rendering it up to each of them. A template that writes something for each
message, in order, writes the same for every longer conversation, so one rendering has all of these texts: it takes
three quarters of the time at 10 turns and a third at 50.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jinja2


class NeedsLaterMessages(BaseException):
    """Raised where a template may write something else for a longer conversation. Templates catch every Exception."""


class MessageReader:
    """Stands for `messages` in a template and notes which pieces of text it has written before it reads each message.

    A template may go through the messages once, in order, and read single ones (`messages[0]`) up to the current one.
    What else it asks of them, such as their number or the last one, depends on later messages: NeedsLaterMessages.

    ends: the ascending numbers of messages of the beginnings, the last of which is all messages.
    """

    def __init__(self, ends: list[int]) -> None:
        self._shortest = ends[0]
        self._longest = ends[-1]
        self._start = 0  # messages[start:], which templates use behind a system turn
        self._all: list[Any] = []
        self._pieces: list[str] = []
        self._borders: dict[int, int] = {}  # number of pieces written before each message, and before the rest

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._all = variables["messages"]
        for piece in template.generate(**variables | {"messages": self}):
            self._pieces.append(piece)
        return "".join(self._pieces)

    def text(self, shown: int) -> str:
        """Returns the text of the first `shown` messages; raises NeedsLaterMessages if the pieces don't tell it."""
        borders = self._borders
        has_gaps = any(a == b for a, b in itertools.pairwise(borders.values()))  # nothing was written for a message
        if self._longest not in borders or has_gaps:
            raise NeedsLaterMessages
        return "".join(self._pieces[: borders[shown]] + self._pieces[borders[self._longest] :])

    def __iter__(self) -> Iterator[Any]:
        if self._borders or self._start >= self._shortest:  # a second pass, or one that shorter beginnings don't have
            raise NeedsLaterMessages
        for i in range(self._start, self._longest):
            self._borders[i] = len(self._pieces)
            yield self._all[i]
        self._borders[self._longest] = len(self._pieces)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and at.stop is at.step is None and isinstance(at.start, int) and at.start >= 0:
            rest = copy.copy(self)  # which notes in the same lists
            rest._start += at.start
            return rest
        # Messages that every beginning has, and those up to the current one while the template goes through them.
        current = -1 if self._longest in self._borders else max(self._borders, default=-1)
        if isinstance(at, int) and 0 <= at < max(self._shortest, current + 1) - self._start:
            return self._all[self._start + at]
        raise NeedsLaterMessages

    def _refuse(self, *_: object) -> Any:
        raise NeedsLaterMessages

    # As there is no number of messages, and no other use of them, that all beginnings share.
    __len__ = __eq__ = __repr__ = _refuse


_reader: ContextVar[MessageReader | None] = ContextVar("reader", default=None)


class TracedTemplate(jinja2.Template):
    """A template whose `messages` are the MessageReader of `reading`, if there is one."""

    def render(self, *args: Any, **variables: Any) -> str:
        reader = _reader.get()
        return super().render(*args, **variables) if reader is None else reader.render(self, variables)


@contextlib.contextmanager
def reading(reader: MessageReader) -> Iterator[None]:
    """Lets the reader stand for the messages of what is rendered in the block."""
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)


def refuse_later_message() -> None:
    """Raises NeedsLaterMessages if a reader notes what the template that is being rendered reads."""
    if _reader.get() is not None:
        raise NeedsLaterMessages
