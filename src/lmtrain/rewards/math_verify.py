"""Mathematical equality of an answer with the reference, by Hugging Face's math-verify (an optional extra)."""

import importlib.util
import re
from decimal import Decimal
from typing import Any

from lmtrain.errors import UserError
from lmtrain.rewards.base import ComparedWithReference


def delimited(reference: str) -> str:
    """Returns a formula between dollar signs, without which math-verify reads only its numbers: of 2\\pi the 2.

    A text, which has words outside of commands, and a formula that has delimiters are returned unchanged.
    """
    has_words = re.search(r"[A-Za-z]{2}", re.sub(r"\\text\{[^}]*\}|\\[A-Za-z]+", "", reference))
    has_delimiters = any(mark in reference for mark in ("$", r"\(", r"\[", r"\boxed"))
    return reference if has_words or has_delimiters else f"${reference}$"


class MathVerify(ComparedWithReference):
    """A reward of `right` if math-verify finds the answer equal to the reference, as are 1/2, 0.5 and \\frac{1}{2}."""

    def __init__(self, column: str = "answer", right: float = 1.0, wrong: float = 0.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("reward=math_verify needs math-verify: pip install 'lmtrain[math]'")
        super().__init__(column, right, wrong)

    def is_right(self, completion: str, reference: Any) -> bool:
        import math_verify  # type: ignore[import-not-found,unused-ignore]

        # math-verify's own timeouts are off, as they set alarm signals, which lmtrain's timeout of rewards uses.
        is_float = isinstance(reference, float)  # math-verify doesn't read 1e-05
        text = f"{Decimal(repr(reference)):f}" if is_float else str(reference).strip()
        wanted = math_verify.parse(delimited(text), parsing_timeout=None)
        wanted = wanted or math_verify.parse(f"${text}$", parsing_timeout=None)
        if not wanted:
            raise ValueError(f"the column {self.column} holds nothing that math-verify can read: {text[:80]!r}")
        given = math_verify.parse(completion, parsing_timeout=None)
        return bool(math_verify.verify(wanted, given, timeout_seconds=None))
