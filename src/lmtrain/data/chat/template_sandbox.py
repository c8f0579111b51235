"""A sandbox for chat templates that also limits the cost of a single operation; jinja2's own limits only `range`.

A single Python operation (a power with 400 million digits, a text repeated ten billion times) can't be interrupted by
the time limit, so it is refused before it starts. transformers creates its sandbox from a class in its module's
namespace; importing this module replaces that class by BoundedSandbox.
"""

import re
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from lmtrain.data.chat.beginnings import TracedTemplate, refuse_later_message

ITEMS = 10_000_000  # maximum length of a repeated text or sequence
BITS = 10_000  # maximum number of bits of a product or power of integers
_WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose `*`, `**` and `%` raise OverflowError for results larger than ITEMS or BITS allow."""

    intercepted_binops = frozenset({"*", "**", "%"})
    template_class = TracedTemplate

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, LoopContext):  # read for each message by many templates, all its attributes are safe
            if attr in ("last", "nextitem"):
                refuse_later_message()
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if too_large(operator, left, right):
            raise OverflowError(f"the result of {operator} would be too large for a chat template")
        return super().call_binop(context, operator, left, right)


def too_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and bool(_WIDE.search(left))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits > BITS
    items, times = (right, left) if isinstance(left, int) else (left, right)
    return operator == "*" and isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > ITEMS


chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox
