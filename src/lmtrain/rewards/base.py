"""What a reward is: a class called with completions and the columns of their prompts' rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lmtrain.errors import UserError


class Reward(ABC):
    """Base of all rewards; one of your own is a subclass in a package that run.allow_target opens.

    Its call is that of TRL's reward functions:

        class Shouting(Reward):
            def __init__(self, most: int = 3):
                self.most = most

            def __call__(self, prompts, completions, **columns):
                return [-1.0 if c.count("!") > self.most else 0.0 for c in completions]

    `reward={_target_: my_package.Shouting, most: 2}` names it; the keys beside `_target_` are its arguments.
    """

    @abstractmethod
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[Any]:
        """A finite number for each completion; None where this reward says nothing of it, and it counts as 0.

        An exception is of the completion that it is raised for: where a call of many raises, each is tried alone.

        Args:
            prompts: as they stand in the rows, text or messages.
            completions: text without special tokens.
            columns: the other columns of the rows, a value for each completion; None where a row lacks one. Also
                `completion_ids`, lists of ids with their ending token, and `cut_off`, bool: no ending token came.
        """

    def place(self, device: Any) -> None:  # noqa: B027  # most have nothing to place
        """Called before the first step with the torch.device that is trained on: for a reward that computes there."""

    def content(self) -> str | None:
        """What a resumed run must find unchanged besides the arguments, such as a checksum of files that were read."""
        return None


def needed(columns: dict[str, Sequence[Any]], name: str, who: str) -> Sequence[Any]:
    """The column that a reward reads; UserError where the rows have none of that name."""
    if name not in columns:
        has = ", ".join(sorted(set(columns) - {"completion_ids", "cut_off"})) or "none besides the prompt"
        raise UserError(f"{who} reads the column {name}, and the rows have {has}: set reward.column=...")
    return columns[name]
