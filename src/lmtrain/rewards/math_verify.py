"""Mathematical equality of an answer with the reference, by Hugging Face's math-verify (an optional extra)."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from lmtrain.errors import UserError
from lmtrain.rewards.base import Reward, needed


class MathVerify(Reward):
    """A reward of `right` if math-verify finds the answer equal to the reference, as are 1/2, 0.5 and \\frac{1}{2}."""

    def __init__(self, column: str = "answer", right: float = 1.0, wrong: float = 0.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("reward=math_verify needs math-verify: pip install 'lmtrain[math]'")
        self.column, self.right, self.wrong = column, right, wrong

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        import math_verify  # type: ignore[import-not-found,unused-ignore]

        found = []
        for completion, reference in zip(completions, needed(columns, self.column, "MathVerify"), strict=True):
            # math-verify's own timeouts are off, as they set alarm signals, which lmtrain's timeout of rewards uses.
            wanted = math_verify.parse(str(reference), parsing_timeout=None)
            given = math_verify.parse(completion, parsing_timeout=None)
            equal = math_verify.verify(wanted, given, timeout_seconds=None)
            found.append(self.right if equal else self.wrong)
        return found
