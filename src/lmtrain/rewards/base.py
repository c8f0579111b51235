"""The interface of rewards: classes or functions called with completions and the columns of their prompts' rows."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from lmtrain.data.examples.prompt_rows import RESERVED
from lmtrain.errors import UserError


class Reward(ABC):
    """Base class of all rewards; your own is a subclass, or a function, in a package that run.allow_target allows.

    It is called like TRL's reward functions:

        class Shouting(Reward):
            def __init__(self, most: int = 3):
                self.most = most

            def __call__(self, prompts, completions, **columns):
                return [-1.0 if c.count("!") > self.most else 0.0 for c in completions]

    `reward={_target_: my_package.Shouting, most: 2}` selects it; the keys beside `_target_` are its arguments.
    """

    @abstractmethod
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[Any]:
        """Returns a finite number for each completion, or None where this reward doesn't apply, see `scoring`.

        An exception is attributed to the completion it is raised for: if a call with many raises, each is tried alone.

        Args:
            prompts: as in the rows, text or messages.
            completions: text, with the tokens that the model wrote, but for those that end an answer or pad it.
            columns: the other columns of the rows, one value per completion; None where a row lacks one. Also
                `completion_ids`, lists of ids with their ending token, `cut_off`, bool: there is no ending token, and
                `turn_start`, what the prompt has written of the answer, such as "<think>\\n".
        """

    def place(self, device: Any) -> None:  # noqa: B027  # most have nothing to place
        """Called before the first step with the torch.device used for training, for rewards that compute on it."""

    def content(self) -> str | None:
        """Returns what a resumed run must find unchanged besides the arguments, such as a checksum of read files."""
        return None


class FunctionReward(Reward):
    """A function of the user's with TRL's signature, called as TRL calls it.

    So it gets each completion to a prompt of messages as messages, [{"role": "assistant", "content": the text}], and
    each completion to a text prompt as text. A function without ** gets the columns that it names only.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], arguments: dict[str, Any], key: str) -> None:
        """
        Args:
            arguments: values for some of the function's parameters.
            key: the config key, for messages.

        Raises:
            UserError: the function has no parameter `completions`, or none for an argument.
        """
        self.function, self.arguments = function, arguments
        parameters = inspect.signature(function).parameters.values()
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.required = [p.name for p in parameters if p.name in self.names and p.default is p.empty]
        for name in (*([] if self.takes_all else ["completions"]), *arguments):
            if name not in self.names:
                raise UserError(f"{key}: the function {label(self)} has no parameter {name}, but {self.names}")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[Any]:
        said = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, completions, strict=True)
        ]
        given: dict[str, Any] = {**columns, "prompts": prompts, "completions": said, **self.arguments}
        for name in self.required:
            needed(given, name, label(self), "give the parameter a default, or let the rows have the column")
        return self.function(**{name: v for name, v in given.items() if self.takes_all or name in self.names})


def label(reward: Reward) -> str:
    """Returns the name of a reward in the plan and in messages."""
    return reward.function.__name__ if isinstance(reward, FunctionReward) else type(reward).__name__


class ComparedWithReference(Reward):
    """Base class of rewards of `right` if a completion is right by a reference in a column of its row, else `wrong`.

    They are None, no opinion, where a row has no reference, such as the rows of another source in a mixture.
    """

    def __init__(self, column: str = "answer", right: float = 1.0, wrong: float = 0.0) -> None:
        self.column, self.right, self.wrong = column, right, wrong

    @abstractmethod
    def is_right(self, completion: str, reference: Any) -> bool:
        """Returns whether the completion is right."""

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        pairs = zip(completions, needed(columns, self.column, type(self).__name__), strict=True)
        return [None if pair[1] is None else self.right if self.is_right(*pair) else self.wrong for pair in pairs]


def needed(
    columns: dict[str, Sequence[Any]], name: str, who: str, remedy: str = "set reward.column=..."
) -> Sequence[Any]:
    """Returns the column that a reward reads; raises UserError if the rows have none of that name."""
    if name not in columns:
        has = ", ".join(sorted(set(columns) - RESERVED)) or "none besides the prompt"
        raise UserError(f"{who} reads the column {name}, and the rows have {has}: {remedy}")
    return columns[name]
