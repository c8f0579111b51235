"""The grid of settings that can be combined in a run, and for each cell whether it is refused, with which message.

A new objective, kind of reference, adapter or precision is an entry in one of these lists and, where it computes
something new, a formula in plain.py. tests/parity/test_grid.py compares the lists with conf/ and the schema.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

# conf/objective, without custom (a user's own objective) and those that are tested elsewhere (see test_grid.py).
OBJECTIVES = ("causal_lm", "sft", "dpo", "kto", "mdlm")
# config.options.REFERENCES, for objectives that have a reference; the others have "-".
REFERENCES = ("-", "auto", "frozen_copy", "adapter_off", "precomputed", "none")
# conf/peft, and settings of it that change the computation.
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
# config.schema_trainer.PRECISIONS, without auto, which stands for one of them.
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true", "fp8")
# How rows are laid out in a micro-batch, which determines the attention that is used.
PATHS: dict[str, list[str]] = {
    "plain": ["data.isolate_documents=false", "data.packing=null"],  # windows of text
    "packed": ["data.isolate_documents=true", "data.packing=best_fit_decreasing"],
    "padded": ["data.isolate_documents=true", "data.packing=off"],
    "unpadded": [],  # answers one after the other, as pairs and single answers always are
    "unshared": ["data.share_prompts=false"],  # the same, but each answer of a pair has its own copy of the prompt
}
COMPILE = ("eager", "compiled")
SPLITS = ("whole", "split")  # a step is one micro-batch per rank, or several
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


# The quick suite covers each of these values, the slow one every pair of them, and the nightly one all values.
# Compiling a cell takes seconds, so the quick suite has few compiled ones (COMPILED).
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
    """Returns whether the objective can have the cell's kind of reference and its layout of rows."""
    return (cell.reference != "-") == (cell.objective in HAS_REFERENCE) and cell.path in PATHS_OF[cell.objective]


def refusal(cell: Cell) -> str | None:
    """Returns words of the message that refuses the cell, in the order of lmtrain's checks, or None if it trains."""
    c = cell
    quantized = c.adapter.startswith("qlora")
    if c.objective == "kto" and c.reference in ("precomputed", "none"):
        return "objective.reference"
    if c.precision == "fp8" and (quantized or c.objective in HAS_REFERENCE):
        return "does not go with trainer.precision=fp8"
    if c.objective == "mdlm" and c.path != "plain":
        return "does not go with objective=mdlm: it attends in both directions over whole rows"
    if c.precision == "fp8":
        return "trainer.precision=fp8"
    if c.reference == "adapter_off" and c.adapter in ("none", "pissa", "continued"):
        return "objective.reference=adapter_off: "
    return None


# Cells that are known to be wrong, with the reason; to be removed once the fault is fixed.
FAULTS: list[tuple[Callable[[Cell], bool], str]] = []


# The compiled cells of the quick suite: a loss on labels, one on masked tokens and one on answers, each in a precision.
# (Lightning's bf16-true rounds floating-point inputs; precomputed log-probabilities of -148.51 must not become -149.)
COMPILED = [
    Cell("causal_lm", "-", "none", "32-true", "packed", "compiled", "split", 1),
    Cell("mdlm", "-", "continued", "bf16-mixed", "plain", "compiled", "split", 1),
    Cell("dpo", "precomputed", "none", "bf16-true", "unshared", "compiled", "whole", 1),
]


def cells() -> Iterator[Cell]:
    """Returns all meaningful cells."""
    return (cell for cell in map(Cell._make, itertools.product(*AXES)) if means_something(cell))


def each_value(candidates: list[Cell]) -> list[Cell]:
    """Returns a few candidates that together contain every value of any candidate; greedy and deterministic."""
    left = {pair for cell in candidates for pair in enumerate(cell)}
    chosen = []
    while left:
        chosen.append(max(candidates, key=lambda cell: len(left & set(enumerate(cell)))))
        left -= set(enumerate(chosen[-1]))
    return chosen


def pairwise(candidates: list[Cell]) -> list[Cell]:
    """Returns a few candidates that together contain every pair of values in any candidate; greedy, deterministic."""
    numbers: dict[object, int] = {}
    masks = []  # per candidate, one bit for each pair of values in it
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
    """Returns a fixed random sample of the candidates."""
    return random.Random(0).sample(candidates, count)
