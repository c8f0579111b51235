"""Mathematical equality of an answer with the reference, by Hugging Face's math-verify (an optional extra)."""

import importlib.util
from typing import Any

from lmtrain.errors import UserError
from lmtrain.rewards.base import ComparedWithReference


class MathVerify(ComparedWithReference):
    """A reward of `right` if math-verify finds the answer equal to the reference, as are 1/2, 0.5 and \\frac{1}{2}."""

    def __init__(self, column: str = "answer", right: float = 1.0, wrong: float = 0.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("reward=math_verify needs math-verify: pip install 'lmtrain[math]'")
        super().__init__(column, right, wrong)

    def is_right(self, completion: str, reference: Any) -> bool:
        import math_verify  # type: ignore[import-not-found,unused-ignore]

        # math-verify's own timeouts are off, as they set alarm signals, which lmtrain's timeout of rewards uses.
        wanted = math_verify.parse(str(reference), parsing_timeout=None)
        given = math_verify.parse(completion, parsing_timeout=None)
        return bool(math_verify.verify(wanted, given, timeout_seconds=None))
