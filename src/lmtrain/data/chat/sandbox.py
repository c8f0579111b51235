"""The sandbox that chat templates run in, which bounds what one operation of a template may cost.

jinja2's own bounds `range` alone. Work in one operation of Python's (a power of 400 million digits, a text repeated ten
billion times) can't be interrupted by the time limit, so it is refused before it begins. transformers makes the sandbox
from the class that its module names; that is this one from when this module is imported.
"""

import re
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

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
