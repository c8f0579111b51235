"""Sums of two numbers of two or three digits, written as they are needed: a task whose answers can be checked.

Numbers are filled to three digits and written from their last digit to their first, as they are added: small
transformers learn that many times faster (Lee et al. 2023, "Teaching arithmetic to small transformers").

A tenth of all sums are held out, the same for text, answers and prompts: no stage trains on them. `data.source` names
the class (conf/experiment/grpo_arithmetic.yaml).
"""

from collections.abc import Iterator
from typing import Any

from lmtrain.data.order import mix64
from lmtrain.data.sources.pieces import Piece

HELD_OUT = 10  # one sum in so many
_SMALLEST, _COUNT = 10, 990  # numbers from 10 to 999


class Sums:
    """12 + 345 is "210+543=753" as text, {prompt: "210+543=", completion: "<753>", answer: "753"} as a row."""

    label, resolved = "sums", "1"
    settings: dict[str, Any]
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, number: int = 20_000, held_out: int = 500, seed: int = 0) -> None:
        """
        Args:
            number: sums to train on.
            held_out: sums to validate on.
            seed: other seeds draw other sums; which are held out does not depend on it.
        """
        self.numbers, self.seed = {"train": number, "val": held_out}, seed
        self.settings = {"kind": "sums", "number": number, "held_out": held_out, "seed": seed}

    def terms(self, split: str) -> Iterator[tuple[int, int]]:
        """The two numbers of each sum, drawn with replacement from those of the split."""
        draw, found = 0, 0
        while found < self.numbers[split]:
            draw += 1
            a, b = (_SMALLEST + mix64(self.seed, split == "val", draw, which) % _COUNT for which in (0, 1))
            if (mix64(a, b) % HELD_OUT == 0) == (split == "val"):
                found += 1
                yield a, b

    def pieces(self, name: str) -> Iterator[Piece]:
        return (Piece(f"{written(a)}+{written(b)}={written(a + b)}", ends=True) for a, b in self.terms(name))

    def text_bytes(self, name: str) -> int:
        return 12 * self.numbers[name]

    def records(self, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return (
            (f"sum {i}", {"prompt": f"{written(a)}+{written(b)}=", "completion": f"<{said}>", "answer": said})
            for i, (a, b) in enumerate(self.terms(name))
            for said in [written(a + b)]
        )


def written(number: int) -> str:
    """12 is 210."""
    return f"{number:03}"[::-1]
