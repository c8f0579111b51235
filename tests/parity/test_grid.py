"""Every combination in grid.py trains like a plain loop of plain.py, or is refused with the words given in grid.py.

The plain loops have no micro-batches, packing, ranks or compiled code, so many cells must equal the same loop.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import (
    ADAPTERS,
    COMPILED,
    CORE,
    FAULTS,
    HAS_REFERENCE,
    OBJECTIVES,
    PRECISIONS,
    REFERENCES,
    Cell,
    cells,
    each_value,
    pairwise,
    refusal,
    sample,
)
from grid_runs import How, Ran, expected, run_cell, run_on_ranks, write_data
from plain import Trained

from lmtrain.config import options
from lmtrain.config.schema import PRECISIONS as SCHEMA_PRECISIONS
from lmtrain.errors import UserError
from support import REPO


@dataclasses.dataclass(frozen=True)
class Tolerance:
    loss: float  # relative if the loss is above 1, else absolute
    norm: float  # relative
    weight: float


FULL = Tolerance(1e-6, 2e-6, 1e-6)
# Products are rounded to 8 significant bits at the same places, but the sums before are in another order, so some are
# rounded the other way. A gradient norm is accurate to a few 1e-3 then: the plain loop's own is as far from fp32's.
HALF = Tolerance(2e-4, 1e-2, 2e-3)
# An answer's log-probability is a sum over 15 tokens, each accurate to some 3e-3; a margin is multiplied by beta.
HALF_ANSWERS = Tolerance(5e-4, 1e-2, 2e-3)
# A memory's tokens choose chapters by score: between two close scores, the last bit decides.
HALF_ROUTED = Tolerance(5e-4, 4e-2, 1e-2)
# All weights are rounded to 8 significant bits after each step: rounding the other way changes one below 1 by up to
# 1/256, and one of 1 or more, as those of norms are, by 1/128. The gradient's norm is rounded too, in steps of up to
# 1/128.
HALF_WEIGHTS = Tolerance(5e-4, 2e-2, 8e-3)
# LLM.int8 also rounds activations to 8 bits, in steps proportional to the largest value of a token.
INT8 = Tolerance(5e-4, 2e-2, 2e-3)


def tolerance(cell: Cell) -> Tolerance:
    if cell.adapter == "qlora_8bit":
        return INT8
    if cell.precision in ("32-true", "64-true"):
        return FULL
    if "memory" in cell.adapter:
        return HALF_ROUTED
    if cell.precision.endswith("-true") and cell.adapter == "none":
        return HALF_WEIGHTS
    return HALF_ANSWERS if cell.objective in HAS_REFERENCE else HALF


def compare(cell: Cell, found: Ran, plain: Trained) -> list[str]:
    """Returns descriptions of all differences beyond the tolerance."""
    allowed, wrong = tolerance(cell), []
    for step, (ours, theirs) in enumerate(zip(found.losses, plain.losses, strict=True), 1):
        if not abs(ours - theirs) <= allowed.loss * max(1.0, abs(theirs)):
            wrong.append(f"step {step}: loss {ours:.8g} instead of {theirs:.8g}")
    for step, (ours, theirs) in enumerate(zip(found.norms, plain.norms, strict=True), 1):
        if not abs(ours - theirs) <= allowed.norm * theirs:
            wrong.append(f"step {step}: gradient norm {ours:.8g} instead of {theirs:.8g}")
    assert found.weights.keys() == plain.weights.keys(), "other parameters are trained"
    for name, theirs in plain.weights.items():
        off = (found.weights[name].double() - theirs.double()).abs().max().item()
        if not off <= allowed.weight:
            wrong.append(f"{name} differs by {off:.2e} at the end")
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    found = tmp_path_factory.mktemp("grid")
    write_data(found)
    return found


def walk(chosen: list[Cell], folder: Path, runs: Path, how: How) -> None:
    """Asserts that all cells equal their plain loops; cells of two ranks are run together."""
    references: dict[tuple[Any, ...], Trained] = {}
    wrong: dict[str, list[str]] = {}

    def check(cell: Cell, ran: Ran) -> None:
        found = differences(cell, ran)
        reason = next((why for matches, why in FAULTS if matches(cell)), None)
        if found and reason is None:
            wrong[cell.id] = found

    def differences(cell: Cell, ran: Ran) -> list[str]:
        # What a plain loop depends on; for masked diffusion, also the run's draws, so it is never reused.
        key = (*cell[:4], cell.path == "plain")
        if key not in references or cell.objective == "mdlm":
            references[key] = expected(cell, folder, ran)
        return compare(cell, ran, references[key])

    for number, cell in enumerate(cell for cell in chosen if cell.ranks == 1):
        torch._dynamo.reset()  # dynamo limits the variants of a block, and the cells before have used some
        try:
            ran = run_cell(cell, folder, runs / f"one_{number}", how)
        except Exception as error:  # the other cells are still to be run
            if not any(matches(cell) for matches, _ in FAULTS):
                wrong[cell.id] = [f"{type(error).__name__}: {error}"]
            continue
        check(cell, ran)
    two = [cell for cell in chosen if cell.ranks == 2]
    for cell, ran in zip(two, run_on_ranks(two, folder, runs, how) if two else [], strict=True):
        check(cell, ran)
    assert not wrong, "\n".join(f"{cell}:\n  " + "\n  ".join(found[:6]) for cell, found in wrong.items())


TRAINED = [cell for cell in cells() if refusal(cell) is None]
REFUSED = [cell for cell in cells() if refusal(cell) is not None]


IN_CORE = [c for c in TRAINED if all(v in core for v, core in zip(c, CORE, strict=True))]


def test_each_setting_trains_like_a_plain_loop(folder: Path, tmp_path: Path) -> None:
    """Covers each setting in CORE; blocks are compiled without inductor, which takes long."""
    walk([*each_value(IN_CORE), COMPILED[0]], folder, tmp_path, How("eager", steps=4))


@pytest.mark.slow
def test_any_two_settings_train_like_a_plain_loop(folder: Path, tmp_path: Path) -> None:
    walk([*pairwise(IN_CORE), *COMPILED], folder, tmp_path, How("eager", steps=4))


@pytest.mark.nightly
@pytest.mark.slow
def test_many_cells_train_like_a_plain_loop(folder: Path, tmp_path: Path) -> None:
    """Covers any two settings of uncompiled cells, a sample of these, and a few compiled ones, 15 times as slow."""
    eager, compiled = ([c for c in TRAINED if c.compile == kind] for kind in ("eager", "compiled"))
    chosen = dict.fromkeys([*pairwise(eager), *sample(eager, 20), *sample(compiled, 5)])
    walk(list(chosen), folder, tmp_path, How("aot_eager", steps=10))


def check_refused(chosen: list[Cell], folder: Path, runs: Path) -> None:
    for number, cell in enumerate(chosen):
        words = refusal(cell)
        assert words is not None
        with pytest.raises(UserError, match=re.escape(words)):
            run_cell(cell._replace(ranks=1), folder, runs / str(number), How("eager", 1))


def test_what_is_refused_says_why(folder: Path, tmp_path: Path) -> None:
    """Covers one cell per message."""
    check_refused(list({refusal(cell): cell for cell in reversed(REFUSED)}.values()), folder, tmp_path)


@pytest.mark.nightly
@pytest.mark.slow
def test_all_pairs_of_what_is_refused(folder: Path, tmp_path: Path) -> None:
    check_refused(pairwise(REFUSED), folder, tmp_path)


def test_the_grid_has_all_that_can_be_chosen() -> None:
    """A new objective, adapter, reference or precision needs an entry in grid.py, and a formula where it computes."""
    # These learn from samples or another model (test_grpo_trl.py, objectives/test_distill.py), or, as the loss of
    # reward models, have no log-probabilities (objectives/test_reward.py, test_reward_trl.py).
    elsewhere = {"custom", "grpo", "distill", "reward"}
    assert {file.stem for file in (REPO / "conf" / "objective").glob("*.yaml")} - elsewhere == set(OBJECTIVES)
    assert {file.stem for file in (REPO / "conf" / "peft").glob("*.yaml")} <= set(ADAPTERS)
    assert set(options.REFERENCES) == set(REFERENCES) - {"-"}
    assert set(SCHEMA_PRECISIONS) - {"auto"} == set(PRECISIONS)
    with_reference = {
        file.stem for file in (REPO / "conf" / "objective").glob("*.yaml") if "\nreference:" in file.read_text()
    }
    assert with_reference - elsewhere == set(HAS_REFERENCE)


def test_any_two_values_that_can_meet_do() -> None:
    met = {pair for cell in pairwise(TRAINED) for pair in pairs_of(cell)}
    assert met == {pair for cell in TRAINED for pair in pairs_of(cell)}


def pairs_of(cell: Cell) -> set[tuple[Any, Any]]:
    values = list(enumerate(cell))
    return {(a, b) for i, a in enumerate(values) for b in values[i + 1 :]}
