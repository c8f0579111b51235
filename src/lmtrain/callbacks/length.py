"""The planned length of a run, which a time budget changes while it trains."""

from typing import NamedTuple


class Length(NamedTuple):
    steps: int
    at_most: int  # the most steps that a time budget may extend it to
    validated: int  # rows that each validation reads


class DependsOnLength:
    """A callback whose `total_steps` is set anew when the length changes."""

    total_steps: int
