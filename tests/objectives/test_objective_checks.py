"""What objectives refuse of their settings and rows, and what their steps give a caller, without a run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmtrain.data.text.windows import IGNORE
from lmtrain.errors import RunError, UserError
from lmtrain.losses.preferences import Pairs
from lmtrain.objectives.base import Objective
from lmtrain.objectives.distill import DistillOptions
from lmtrain.objectives.grpo import GRPO
from lmtrain.objectives.grpo_options import GRPOOptions
from lmtrain.objectives.kto import KTO, KTOOptions, check_labels, kto_losses
from lmtrain.objectives.mdlm import MDLM
from lmtrain.objectives.parts import options_of
from lmtrain.objectives.reward import RewardModel
from lmtrain.objectives.with_reference import ReferenceObjective


def given(**values: Any) -> Any:
    return SimpleNamespace(**values)


def made(options: type, **values: Any) -> Any:
    """Returns options of which only these are set."""
    found = object.__new__(options)
    found.__dict__.update(values)
    return found


def test_a_distillation_needs_a_teacher_and_a_divergence() -> None:
    def check(**values: Any) -> None:
        made(DistillOptions, **{"teacher": "a", "beta": 0.0} | values).check(given())

    check()
    with pytest.raises(UserError, match=r"objective=distill needs a teacher: set objective\.teacher"):
        check(teacher=None)
    with pytest.raises(UserError, match=r"objective\.beta=-0\.1: a number from 0"):
        check(beta=-0.1)


def test_the_overlong_part_is_of_the_completion() -> None:
    for buffer in (None, 8):
        made(GRPOOptions, overlong_buffer=buffer, max_new_tokens=8).check(given())
    with pytest.raises(UserError, match=r"objective\.overlong_buffer=9 is more than objective\.max_new_tokens=8"):
        made(GRPOOptions, overlong_buffer=9, max_new_tokens=8).check(given())
    plain, played = (made(GRPOOptions, max_new_tokens=8, max_turns=3, environment=e) for e in ({}, {"_target_": "x"}))
    assert (plain.max_sampled, played.max_sampled) == (8, 24)
    assert made(GRPOOptions, reference="frozen_copy", kl_coef=0.0).reference_in_use() == "none"
    assert made(GRPOOptions, reference="frozen_copy", kl_coef=0.1).reference_in_use() == "frozen_copy"


def test_the_options_must_be_those_that_the_objective_reads() -> None:
    own = made(KTOOptions)
    assert options_of(given(objective=own), KTOOptions) is own
    with pytest.raises(
        UserError, match=r"objective\._target_=my\.Loss: its Options must derive from .*kto\.KTOOptions"
    ):
        options_of(given(objective=given(_target_="my.Loss")), KTOOptions)


def test_rows_without_prompts_or_with_one_answer_are_refused() -> None:
    config = given(objective=made(GRPOOptions, name="grpo"), data=given(rows="text", path="a.jsonl"))
    with pytest.raises(UserError, match=r"objective=grpo samples prompts: data\.rows=text has none"):
        GRPO.prepare(given(), config, given(train=[1]))
    config.objective = made(KTOOptions)
    with pytest.raises(UserError, match=r"data\.path=a\.jsonl has one answer to train on: at least 2"):
        KTO.prepare(given(), config, given(train=[1]))


@pytest.mark.parametrize(("labels", "weights", "refused"), [
    ([1, 0], (1, 1), None), ([1, 1], (1, 1), "all 2 answers are desirable.*label: false, or train on them as answers"),
    ([0, 0, 0], (1, 1), "all 3 answers are undesirable.*label: true, or pair them"), ([1, 1], (1, 0), None),
    ([0, 0], (0, 1), None), ([0, 0], (1, 0), "undesirable"), ([], (1, 1), None),
])  # fmt: skip
def test_answers_of_one_label_teach_nothing(
    labels: list[int], weights: tuple[float, float], refused: str | None
) -> None:
    options = given(desirable_weight=weights[0], undesirable_weight=weights[1])
    rows = given(examples=given(labels=torch.tensor(labels)))
    if refused is None:
        check_labels(rows, options)
        check_labels(given(), options)
        return
    with pytest.raises(UserError, match=refused):
        check_labels(rows, options)


def test_ktos_losses_are_equation_8() -> None:
    options = given(beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    found = kto_losses(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), torch.tensor(0.4), options)
    s = torch.sigmoid(torch.tensor([0.5 * (1.0 - 0.4), 0.5 * (0.4 - 1.0)]))
    torch.testing.assert_close(found, torch.tensor([2.0, 3.0]) * (1 - s))


def test_the_places_of_rows_from_a_callers_loader_count_on() -> None:
    module = given(trainer=given(testing=True, test_dataloaders=[given(dataset=[]), given(dataset=[])]))
    assert MDLM._places(module, 3, 1, 4) == [12, 13, 14, 15]
    module.trainer = given(testing=False, val_dataloaders=given(dataset=[]))
    assert MDLM._places(module, 0, 0, 2) == [0, 1]


def test_outputs_for_a_caller_are_those_of_the_objective() -> None:
    """`trainer.predict`: rewards, log-probabilities, or the means that a validation reports."""
    tensor = torch.tensor([[1.0, 2.0]])
    assert RewardModel.predict_step(given(rewards=lambda batch: (tensor, batch)), {}, 0) == {"rewards": tensor}
    pairs = given(answer_log_probs=lambda batch: (tensor, batch))
    assert ReferenceObjective.predict_step(pairs, {}, 0) == {"log_probs": tensor}
    seen: list[Any] = []
    plain = given(
        look_ahead=lambda batches, tokens: seen.append((batches, tokens)),
        count_tokens=lambda batch: torch.tensor(4),
        micro_batch_loss=lambda batch: given(sums={"loss": torch.tensor(6.0)}, n_tokens=torch.tensor(4)),
        means_of=lambda sums, n: {name: value / n for name, value in sums.items()},
    )
    assert Objective.predict_step(plain, {"a": 1}, 0) == {"loss": torch.tensor(1.5), "n_tokens": torch.tensor(4)}
    assert seen == [([{"a": 1}], torch.tensor(4))]


def test_a_batch_that_is_no_step_or_not_the_next_one_is_refused() -> None:
    module = given(trainer=given(global_step=3))
    with pytest.raises(UserError, match="trains whole steps, and this loader gives micro-batches"):
        Objective.training_step(module, {"input_ids": torch.full((1, 2), IGNORE)}, 0)
    with pytest.raises(RunError, match="the loader gave step 4 where 3 is due"):
        Objective.training_step(module, {"micro_batches": [], "step": 4}, 0)
    with pytest.raises(NotImplementedError):
        Objective.pair_losses(given(), Pairs(*[torch.zeros(1)] * 6))
    with pytest.raises(UserError, match=r"load_from_checkpoint: a checkpoint holds weights, not"):
        Objective.load_from_checkpoint("a.ckpt")
