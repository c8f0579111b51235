"""Sums of two numbers of two or three digits, computed on the fly: a task whose answers can be checked.

Numbers are padded to three digits and written from their last digit to their first, the order in which they are added:
small transformers learn that many times faster (Lee et al. 2023, "Teaching arithmetic to small transformers").

A tenth of all sums are held out, the same ones for text, answers and prompts: no stage trains on them. `data.source`
names the class (conf/experiment/grpo_arithmetic.yaml).
"""

from collections.abc import Iterator
from typing import Any

from lmtrain.data.order import mix64
from lmtrain.data.sources.pieces import Piece

HELD_OUT = 10  # one sum in this many is held out
_SMALLEST, _COUNT = 10, 990  # numbers from 10 to 999


class Sums:
    """A source of sums: 12 + 345 as text is "210+543=753".

    As a row it is {prompt: "210+543=", completion: "<753>", answer: "753"}.
    """

    label, resolved = "sums", "1"
    settings: dict[str, Any]
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, number: int = 20_000, held_out: int = 500, seed: int = 0) -> None:
        """
        Args:
            number: number of sums to train on.
            held_out: number of sums to validate on.
            seed: other seeds draw other sums; which sums are held out does not depend on it.
        """
        self.numbers, self.seed = {"train": number, "val": held_out}, seed
        self.settings = {"kind": "sums", "number": number, "held_out": held_out, "seed": seed}

    def terms(self, split: str) -> Iterator[tuple[int, int]]:
        """Yields the two numbers of each sum, drawn with replacement from those of the split."""
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
    """Returns the number's three digits in reverse order: 12 becomes "210"."""
    return f"{number:03}"[::-1]
