"""What the plan and `inspect` say of rows that are taken."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Remark:
    """What is to be said of a row that is taken; `lost`: a field of it that the model never sees."""

    text: str
    lost: bool = False
