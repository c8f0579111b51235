"""The grid: what can be combined when a run is composed, and for each cell whether it is refused, and with which words.

A new objective, kind of reference, adapter or precision is a word in one of these lists and, where it computes
something new, a formula in plain.py. tests/parity/test_grid.py compares the lists with conf/ and the schema.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

# conf/objective; custom is not an objective but the place for one of a user's own.
OBJECTIVES = ("causal_lm", "sft", "dpo", "kto", "mdlm")
# config.options.REFERENCES, of objectives that have one; the others have "-".
REFERENCES = ("-", "auto", "frozen_copy", "adapter_off", "precomputed", "none")
# conf/peft, and settings of it that compute something else.
ADAPTERS: dict[str, list[str]] = {
    "none": [],
    "lora": ["peft=lora"],
    "pissa": ["peft=lora", "peft.init_weights=pissa"],
    "dora": ["peft=lora", "peft.use_dora=true"],
    "continued": ["peft=lora"],  # peft.adapter: an adapter that was trained before
    "qlora": ["peft=qlora"],
    "qlora_8bit": ["peft=qlora_8bit"],
    "memory": ["peft=memory"],
    "memory_lora": ["peft=memory_lora"],
}
# config.schema_trainer.PRECISIONS, but auto, which is one of them.
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "fp8")
# How rows lie in a micro-batch, and so which attention computes them.
PATHS: dict[str, list[str]] = {
    "plain": ["data.isolate_documents=false", "data.packing=null"],  # windows of text
    "packed": ["data.isolate_documents=true", "data.packing=best_fit_decreasing"],
    "padded": ["data.isolate_documents=true", "data.packing=off"],
    "unpadded": [],  # answers one after the other, as pairs and single answers always are
    "unshared": ["data.share_prompts=false"],  # and of pairs each with its own prompt
}
COMPILE = ("eager", "compiled")
SPLITS = ("whole", "split")  # a step in one micro-batch a rank, or in several
RANKS = (1, 2)


class Cell(NamedTuple):
    objective: str
    reference: str
    adapter: str
    precision: str
    path: str
    compile: str
    split: str
    ranks: int

    @property
    def id(self) -> str:
        return "/".join(map(str, self))


# What the quick suite walks, and the slow one with each other; the nightly one walks all. A compiled cell takes
# seconds (COMPILED).
CORE_REFERENCES = ("-", "frozen_copy", "adapter_off", "precomputed", "none")
CORE_ADAPTERS = ("none", "lora", "pissa", "continued")
CORE_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
AXES = (OBJECTIVES, REFERENCES, tuple(ADAPTERS), PRECISIONS, tuple(PATHS), COMPILE, SPLITS, RANKS)
CORE = (OBJECTIVES, CORE_REFERENCES, CORE_ADAPTERS, CORE_PRECISIONS, tuple(PATHS), ("eager",), SPLITS, RANKS)

HAS_REFERENCE = ("dpo", "kto")
PATHS_OF = {
    "causal_lm": ("plain", "packed", "padded"),
    "sft": ("packed", "padded"),
    "dpo": ("unpadded", "unshared"),
    "kto": ("unpadded",),
    "mdlm": ("plain", "packed", "padded"),
}


def means_something(cell: Cell) -> bool:
    """Whether such a run can be written down at all."""
    return (cell.reference != "-") == (cell.objective in HAS_REFERENCE) and cell.path in PATHS_OF[cell.objective]


def refusal(cell: Cell) -> str | None:
    """Words of the message with which the cell is refused; None where it trains. In the order they are looked at."""
    c = cell
    quantized = c.adapter.startswith("qlora")
    if c.objective == "mdlm" and c.path != "plain":
        return "objective=mdlm trains a model that attends in both directions over whole rows"
    if c.objective == "kto" and c.reference in ("precomputed", "none"):
        return "objective.reference"
    if c.precision == "fp8" and quantized:
        return "trainer.precision=fp8 does not go with peft.quantization"
    if c.precision == "fp8" and c.objective in HAS_REFERENCE:
        return "trainer.precision=fp8 does not go with objective="
    if c.precision == "fp8":
        return "trainer.precision=fp8"
    if c.reference == "adapter_off" and c.adapter in ("none", "pissa", "continued"):
        return "objective.reference=adapter_off: "
    return None


# Cells that are wrong today, with the reason; none may be left when the fault is repaired.
FAULTS: list[tuple[Callable[[Cell], bool], str]] = []


# What the quick suite compiles: a loss over labels, one over hidden tokens and one over answers, each in a precision.
# (Lightning's bf16-true rounds floating-point inputs; of precomputed log-probabilities -148.51 must not become -149.)
COMPILED = [
    Cell("causal_lm", "-", "none", "32-true", "packed", "compiled", "split", 1),
    Cell("mdlm", "-", "continued", "bf16-mixed", "plain", "compiled", "split", 1),
    Cell("dpo", "precomputed", "none", "bf16-true", "unshared", "compiled", "whole", 1),
]


def cells() -> Iterator[Cell]:
    """All that mean something."""
    return (cell for cell in map(Cell._make, itertools.product(*AXES)) if means_something(cell))


def each_value(candidates: list[Cell]) -> list[Cell]:
    """A few of the candidates in which each value stands that stands in any; greedy, the same every time."""
    left = {pair for cell in candidates for pair in enumerate(cell)}
    chosen = []
    while left:
        chosen.append(max(candidates, key=lambda cell: len(left & set(enumerate(cell)))))
        left -= set(enumerate(chosen[-1]))
    return chosen


def pairwise(candidates: list[Cell]) -> list[Cell]:
    """A few of the candidates in which any two values meet that meet in any; greedy, the same every time."""
    numbers: dict[object, int] = {}
    masks = []  # of each candidate, a bit for every two values that meet in it
    for cell in candidates:
        met = itertools.combinations(enumerate(cell), 2)
        masks.append(sum(1 << numbers.setdefault(pair, len(numbers)) for pair in met))
    left = (1 << len(numbers)) - 1
    chosen = []
    while left:
        best = max(range(len(masks)), key=lambda i: (masks[i] & left).bit_count())
        chosen.append(candidates[best])
        left &= ~masks[best]
    return chosen


def sample(candidates: list[Cell], count: int) -> list[Cell]:
    """Some of the candidates, the same every time."""
    return random.Random(0).sample(candidates, count)
