"""The parts of optimizers, each against a closed form: bad steps, rests at the edge, buckets, and kernels' order."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lmtrain.config.schema import OptimizerConfig
from lmtrain.errors import UserError
from lmtrain.optim import half, muon, schedules, skipping
from lmtrain.optim.adafactor import Adafactor
from lmtrain.optim.groups import parameter_groups
from lmtrain.optim.muon import Muon
from lmtrain.optim.optimizers import Lion


def stored(dtype: torch.dtype, exact: list[float]) -> tuple[Tensor, Tensor]:
    """Returns the weights and rests that exact float32 weights are stored as."""
    weight = nn.Parameter(torch.zeros(len(exact), dtype=dtype))
    state: dict[str, Any] = {"rest": torch.zeros(len(exact), dtype=torch.int16)}
    weight.grad = torch.zeros_like(weight)
    with torch.no_grad():
        wide = half._Wide([weight], [state])
        wide.weights[0].copy_(torch.tensor(exact))
        wide.put_back([{}], 1)
    return weight.detach(), state["rest"]


def test_a_weight_midway_between_two_numbers_is_kept_as_near_as_an_int16_can() -> None:
    """Rounding to even puts it 2^15 float32 numbers away, to either side, and int16 ends at 2^15 - 1."""
    exact = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1 + 2**-9, 1.0]
    weight, rest = stored(torch.bfloat16, exact)
    assert weight.tolist() == [1.0, 1 + 2**-6, -1.0, 1.0, 1.0]
    assert rest.tolist() == [2**15 - 1, -(2**15), 2**15 - 1, 2**14, 0]
    back = half.join(weight.float(), rest.int())
    torch.testing.assert_close(back, torch.tensor(exact), rtol=2**-23, atol=0)


def test_float16_weights_near_zero_have_the_farthest_rest() -> None:
    least = 2.0**-24  # float16's smallest number
    weight, rest = stored(torch.float16, [0.3 * least, 0.6 * least, 1.0 + 2**-12])
    assert weight.tolist() == [0.0, least, 1.0]
    assert rest.tolist() == [2**15 - 1, -(2**15), 2**11]


def test_a_rest_of_zero_is_never_below_it() -> None:
    near = half.join(torch.zeros(2), torch.tensor([-5, 5], dtype=torch.int32))
    assert near[0] == 0
    assert near[1] == torch.tensor(5, dtype=torch.int32).view(torch.float32)


def test_weights_lie_on_a_dtype_if_all_are_its_numbers() -> None:
    weights = torch.tensor([1.0, 1.5, 2.0])
    assert half.lies_on(weights, torch.bfloat16)
    weights[1] += 2**-20
    assert not half.lies_on(weights, torch.bfloat16)


def test_buckets_hold_the_full_weights_first_and_then_at_most_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "BUCKET", 10)
    full, others = torch.zeros(99), [torch.zeros(n, dtype=torch.bfloat16) for n in (4, 6, 1, 30, 5, 5)]
    sizes = [[p.numel() for p in bucket] for bucket in half._buckets([others[0], full, *others[1:]])]
    assert sizes == [[99], [4, 6], [1], [30], [5, 5]]
    assert [[p.numel() for p in bucket] for bucket in half._buckets(others[:1])] == [[4]]
    assert [[p.numel() for p in bucket] for bucket in half._buckets([full])] == [[99]]


@torch.no_grad()
def test_only_the_moments_of_a_matrix_are_rounded() -> None:
    weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    weight.grad = torch.zeros_like(weight)
    own: dict[str, Any] = {"rest": torch.zeros(2, 2, dtype=torch.int16)}
    wide = half._Wide([weight], [own])
    given = {"step": torch.tensor(3.0), "mean": torch.full((2, 2), 0.5), "row": torch.ones(2), "kind": "x",
             "count": torch.ones(2, 2, dtype=torch.int32)}  # fmt: skip
    wide.put_back([given], 1)
    assert {key: getattr(value, "dtype", None) for key, value in own.items()} == {
        "rest": torch.int16, "step": torch.float32, "mean": torch.bfloat16, "row": torch.float32, "kind": None,
        "count": torch.int32,
    }  # fmt: skip
    kept = own["mean"]
    assert kept.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    again = half._Wide([weight], [own])
    assert again.states[0]["mean"].dtype == torch.float32
    again.states[0]["mean"].fill_(0.25)
    again.put_back(again.states, 2)
    assert own["mean"] is kept, "in the same memory"
    assert kept.tolist() == [[0.25, 0.25], [0.25, 0.25]]
    single = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
    single.grad = torch.zeros_like(single)
    assert half._Wide([single], [{"rest": torch.zeros((), dtype=torch.int16)}])._moments([{"m": torch.zeros(())}]) == []


@pytest.mark.parametrize("make", [lambda p: Lion(p, lr=0.1), lambda p: Muon(p, lr=0.1), lambda p: Adafactor(p, lr=0.1)])
def test_a_bad_step_changes_nothing_and_a_good_one_what_it_would(make: Any) -> None:
    def stepped(found: list[float | None], gradients: list[float]) -> Tensor:
        weight = nn.Parameter(torch.full((2, 3), 0.5))
        optimizer = make([weight])
        for bad, gradient in zip(found, gradients, strict=True):
            weight.grad = torch.full((2, 3), gradient) * torch.tensor([[1.0, 2.0, -1.0], [3.0, 1.0, 1.0]])
            if bad is not None:
                optimizer.found_inf = torch.tensor(bad)
            optimizer.step()
        return weight.detach()

    plain = stepped([None, None], [1.0, -2.0])
    assert torch.equal(stepped([0.0, 0.0], [1.0, -2.0]), plain)
    assert torch.equal(stepped([0.0, 1.0, 0.0], [1.0, math.nan, -2.0]), plain)
    assert torch.equal(stepped([1.0], [math.inf]), torch.full((2, 3), 0.5))


def test_a_change_decays_first_and_then_moves_by_rate_and_scale() -> None:
    for lr in (0.1, torch.tensor(0.1)):
        weights, directions = [torch.tensor([1.0, -2.0])], [torch.tensor([3.0, 4.0])]
        skipping.change(weights, directions, lr, 0.5, 2.0)
        torch.testing.assert_close(weights[0], torch.tensor([0.95 - 0.6, -1.9 - 0.8]))
    weights = [torch.tensor([1.0])]
    skipping.change(weights, [torch.tensor([1.0])], 0.25, 0.0)
    assert weights[0].item() == 0.75


def test_found_inf_is_the_factor_and_the_choice() -> None:
    optimizer: Any = Lion([nn.Parameter(torch.zeros(1))])
    one, other = [torch.tensor([1.0])], [torch.tensor([2.0])]
    assert skipping.factor(optimizer) == 1.0
    assert skipping.or_else(optimizer, one, other) is one
    for bad in (0.0, 1.0):
        optimizer.found_inf = torch.tensor(bad)
        assert float(skipping.factor(optimizer)) == 1.0 - bad
        assert skipping.or_else(optimizer, one, other)[0].item() == (2.0 if bad else 1.0)


def test_which_optimizers_can_leave_a_step_out() -> None:
    parameter = [nn.Parameter(torch.zeros(1))]
    assert skipping.can_skip(Lion(parameter))
    assert skipping.can_skip(torch.optim.AdamW(parameter, fused=True))
    assert not skipping.can_skip(torch.optim.AdamW(parameter, fused=False))
    assert not skipping.can_skip(torch.optim.SGD(parameter))


def test_muons_matrices_of_a_shape_go_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "BATCH_ELEMENTS", 12)
    shapes = [(2, 3), (3, 2), (2, 3), (2, 3), (5, 5), (5, 5)]
    some = [torch.zeros(shape) for shape in shapes]
    assert [[tuple(p.shape) for p in batch] for batch in muon._equal_shapes(some)] == [
        [(2, 3), (2, 3)], [(2, 3)], [(3, 2)], [(5, 5)], [(5, 5)],
    ]  # fmt: skip
    monkeypatch.setattr(muon.world, "size", lambda: 3)
    assert [len(batch) for batch in muon._equal_shapes(some)] == [3, 1, 2]


def test_a_step_of_muon_is_the_nearest_orthogonal_matrix_by_its_scale() -> None:
    """Of a diagonal momentum, the matrix of signs, up to the iteration's error; AdamW's size, 0.2 sqrt(columns)."""
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.tensor([[4.0, 0, 0], [0, -4.0, 0]])
    Muon([weight], lr=0.5, weight_decay=0.1).step()
    moved = (torch.ones(2, 3) * 0.95 - weight.detach()) / (0.5 * 0.2 * math.sqrt(3))
    torch.testing.assert_close(moved, torch.tensor([[1.0, 0, 0], [0, -1.0, 0]]), rtol=0, atol=0.35)


def test_nesterov_adds_the_gradient_once_more() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer, momentum = Muon([weight], momentum=0.75), torch.zeros(2, 2)
    for gradient in (torch.eye(2), torch.tensor([[0.0, 2.0], [1.0, 0.0]])):
        weight.grad = gradient
        (direction,) = optimizer._directions([weight], optimizer.param_groups[0])
        momentum = 0.75 * momentum + 0.25 * gradient
        torch.testing.assert_close(direction, 0.25 * gradient + 0.75 * momentum)


def test_adafactors_first_step_is_clipped_and_scaled_by_the_weights() -> None:
    """By algorithm 4 by hand: at the first step beta2 is 0, so of rank-one squares the update is the sign."""
    for ndim in (1, 2):
        start = torch.tensor([3.0, -4.0]) if ndim == 1 else torch.tensor([[3.0, -4.0]])
        weight = nn.Parameter(start.clone())
        optimizer = Adafactor([weight], lr=0.1, weight_decay=0.5)
        weight.grad = torch.tensor([2.0, -7.0]).view_as(weight)
        optimizer.step()
        rms = math.sqrt(12.5)
        moved = start * 0.95 - 0.1 * rms * torch.tensor([1.0, -1.0]).view_as(weight)
        torch.testing.assert_close(weight.detach(), moved)
        assert optimizer.state[weight]["step"] == 1
        weight.grad = torch.tensor([2.0, 1.0]).view_as(weight)
        optimizer.step()
        new = 2**-0.8
        if ndim == 1:
            square = (1 - new) * torch.tensor([4.0, 49.0]) + new * torch.tensor([4.0, 1.0])
            torch.testing.assert_close(optimizer.state[weight]["square"], square)
        else:
            row = (1 - new) * 26.5 + new * 2.5
            torch.testing.assert_close(optimizer.state[weight]["row"], torch.tensor([row]))
    small = nn.Parameter(torch.zeros(4))
    small.grad = torch.full((4,), 5.0)
    Adafactor([small], lr=0.1, min_parameter_rms=0.5).step()
    torch.testing.assert_close(small.detach(), torch.full((4,), -0.05))


def test_the_share_of_new_squares_is_one_at_the_first_step() -> None:
    from lmtrain.optim.adafactor import _share_of_new

    assert [_share_of_new(torch.tensor(float(n))) for n in (0, 1, 2)] == [1.0, 1.0, 2**-0.8]


def test_what_a_pattern_might_have_meant_is_shown_from_all_over_the_model() -> None:
    names = [f"layer{i}.weight" for i in range(20)]
    named = [(name, nn.Parameter(torch.zeros(2, 2))) for name in names]
    config: Any = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.0, groups=[{"pattern": "none such"}])
    with pytest.raises(UserError, match=r"such as layer0.weight, layer3.weight, layer6.weight, .*, layer15.weight$"):
        parameter_groups(named, config)
    with pytest.raises(UserError, match=r"such as layer0.weight, layer1.weight$"):
        parameter_groups(named[:2], config)


def test_a_smoothed_curve_needs_ten_losses_and_slopes_over_four_steps() -> None:
    rates = [10.0 ** (i / 4) for i in range(12)]
    falling = [10.0, 9, 8, 7, 6, 4, 1, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert schedules.suggest(rates[:9], falling[:9], 0.0) is None
    found = schedules.suggest(rates[:10], falling[:10], 0.0)
    assert found is not None
    steepest = min(range(2, 8), key=lambda i: falling[i + 2] - falling[i - 2])
    assert (found.steepest, found.lowest) == (rates[steepest], rates[9])
    assert found.lr == pytest.approx(math.sqrt(rates[steepest] * rates[9]))
    early = [5.0, 4, 3, 2, 9, 9, 9, 9, 9, 9, 9, 9]
    assert schedules.suggest(rates, early, 0.0) is None, "it ends to fall before there is a slope"
    assert schedules.suggest(rates, [5.0, 4, 3, 2, 1.5, *[9.0] * 7], 0.0) is not None
    assert schedules.suggest(rates, [1.0] * 12, 0.0) is None
