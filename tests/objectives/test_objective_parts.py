"""The parts that objectives share, by hand: sums and means, the choice of a reference,
and checks of the first steps."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lmtrain.errors import RunError
from lmtrain.objectives import reference, start_check
from lmtrain.objectives.parts import LossParts, add_sums, means_over, of_rows, with_routers
from lmtrain.objectives.start_check import FirstSteps


def test_sums_of_rows_count_nothing_of_an_empty_micro_batch() -> None:
    losses = torch.tensor([1.0, 2.5], requires_grad=True)
    for n, factor in ((2, 1.0), (0, 0.0)):
        found = of_rows(losses, {"right": torch.tensor([1.0, 1.0])}, torch.tensor(n))
        assert found.loss_sum.item() == 3.5 * factor
        assert {name: value.item() for name, value in found.sums.items()} == {
            "loss": 3.5 * factor,
            "right": 2.0 * factor,
        }
        assert found.n_tokens == n
        assert not found.sums["loss"].requires_grad
        assert found.loss_sum.requires_grad


def test_sums_add_up_and_are_divided_by_their_counts() -> None:
    total = {"a": torch.tensor(1.0)}
    add_sums(total, {"a": torch.tensor(2.0), "b": torch.tensor(5.0)})
    assert {name: value.item() for name, value in total.items()} == {"a": 3.0, "b": 5.0}
    sums = {"loss": 6.0, "reward": 4.0, "kl": 1.0}
    assert means_over(sums, 3) == {"loss": 2.0, "reward": 4 / 3, "kl": 1 / 3}
    assert means_over(sums, 0)["loss"] == 6.0
    assert means_over(sums, 3, {"reward": 2, "kl": 0, "other": 7}) == {"loss": 2.0, "reward": 2.0}
    tensors = means_over({"loss": torch.tensor(6.0), "kl": torch.tensor(0.0)}, torch.tensor(0), {"kl": torch.tensor(0)})
    assert tensors["loss"] == 6.0
    assert math.isnan(tensors["kl"])


def test_router_losses_weigh_as_the_other_numbers() -> None:
    parts = LossParts(torch.tensor(6.0), torch.tensor(3), {"loss": torch.tensor(6.0)})
    forward: Any = SimpleNamespace(aux={"z_loss": torch.tensor(0.5)}, router_loss=torch.tensor(0.1))
    found = with_routers(parts, forward)
    assert found.loss_sum.item() == pytest.approx(6.3)
    assert found.sums["z_loss"].item() == 1.5
    assert found.sums["loss"].item() == 6.0
    forward.router_loss = None
    assert with_routers(parts, forward).loss_sum.item() == 6.0


# References


class Net(nn.Module):
    """A base of two matrices, and an adapter's B beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.layer = nn.ModuleDict({"lora_B": nn.ModuleDict({"default": nn.Linear(2, 3)})})


def test_which_reference_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapter = Net(), SimpleNamespace(start={}, config=SimpleNamespace(bias="none"))
    b: Any = model.get_submodule("layer.lora_B.default")
    monkeypatch.setattr(reference, "adapter_of", lambda m: adapter)
    monkeypatch.setattr(reference, "has_been_trained", lambda m: False)
    monkeypatch.setattr(reference, "memory_of", lambda m: None)
    monkeypatch.setattr(reference, "base_parameters", lambda m: iter(m.base.parameters()))
    model.base.requires_grad_(False)
    nn.init.zeros_(b.weight)
    nn.init.zeros_(b.bias)

    def chosen(wanted: str = "auto", why: str = "") -> str:
        return reference.choose(wanted, model, why).kind

    assert (chosen(), chosen("frozen_copy"), chosen("adapter_off"), chosen("none")) == (
        "adapter_off", "frozen_copy", "adapter_off", "none",
    )  # fmt: skip
    for name, value, said in (
        ("start", {"a": 1}, "initial values were taken out"),
        ("config", SimpleNamespace(bias="all"), "bias=all"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(adapter, name, value)
            assert chosen() == "frozen_copy"
            with pytest.raises(reference.UserError, match=said):
                chosen("adapter_off")
    with torch.no_grad():
        b.weight[0, 0] = 1
    assert chosen() == "frozen_copy"
    with pytest.raises(reference.UserError, match="has been trained before"):
        chosen("adapter_off")
    model.base.weight.requires_grad_(True)
    with pytest.raises(reference.UserError, match="the base is trained too"):
        chosen("adapter_off")
    monkeypatch.setattr(reference, "adapter_of", lambda m: None)
    with pytest.raises(reference.UserError, match="no adapter is trained"):
        chosen("adapter_off")
    model.requires_grad_(True)
    assert (chosen(), chosen(why="it doesn't pay")) == ("precomputed", "frozen_copy")
    model.base.requires_grad_(False)
    monkeypatch.setattr(reference, "memory_of", lambda m: object())
    assert chosen() == "adapter_off", "a memory beside a frozen base"
    monkeypatch.setattr(reference, "has_been_trained", lambda m: True)
    assert chosen() == "frozen_copy"


def test_hashes_of_weights_see_names_shapes_and_values() -> None:
    def net(seed: int = 0) -> Net:
        torch.manual_seed(seed)
        return Net()

    for of in (reference.first_values_hash, reference.weights_hash):
        assert of(net()) == of(net()) != of(net(1))
    frozen = net()
    frozen.base.requires_grad_(False)
    assert reference.first_values_hash(frozen) != reference.first_values_hash(net()), "of trained ones only"
    assert reference.weights_hash(frozen) == reference.weights_hash(net())
    zeros = {
        reference.weights_hash(nn.ParameterDict({name: nn.Parameter(torch.zeros(shape, dtype=dtype))}))
        for name in ("a", "b")
        for shape in ((2, 3), (3, 2))
        for dtype in (torch.float16, torch.bfloat16)
    }
    assert len(zeros) == 8, "the same bytes under other names, in another shape or dtype are another model"
    assert len(reference.first_values_hash(net())) == 16
    large = nn.Linear(64, 8, bias=False)
    before = reference.first_values_hash(large)
    with torch.no_grad():
        large.weight.view(-1)[8] += 1
    assert reference.first_values_hash(large) != before, "every eighth of 512 values is looked at"


def test_a_frozen_copy_is_swapped_in_and_out() -> None:
    model = nn.Linear(2, 2)
    copy = reference.FrozenCopy(model)
    first = model.weight.detach().clone()
    assert copy.changed() == []
    with torch.no_grad():
        model.weight += 1
    assert copy.changed() == ["weight"]
    with copy.in_place():
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, first + 1)
    copy.replace({"weight": torch.zeros(2, 2)})
    with copy.in_place():
        assert not model.weight.any()


# First steps


def first(**options: Any) -> tuple[FirstSteps, list[int]]:
    asked: list[int] = []
    wrong: list[Any] = [options.pop("wrong", None)]
    return FirstSteps(0.1, lambda: asked.append(1) or wrong[0], **options), asked


def test_a_check_waits_until_a_change_must_be_visible() -> None:
    one = torch.tensor(5.0)  # norms count as 1 at most
    check, asked = first(since=2)
    assert not check.over(1, [0.04], one, may_wait=True)
    assert not check.over(2, [0.04], one, may_wait=True), "the rates add up to 0.08"
    assert not check.over(3, [0.04], one, may_wait=False)
    assert not asked
    assert check.over(4, [0.04], one, may_wait=True)
    assert asked
    early, asked = first(since=3)
    assert not early.over(2, [1.0], one, may_wait=True), "before the step from which it is due"
    assert early.over(3, [1.0], one, may_wait=True)


def test_gradients_of_nearly_nothing_end_the_check_at_last() -> None:
    check, asked = first()
    assert not check.over(1, [0.2], torch.tensor(0.1), may_wait=True), "0.02 of rate times norm"
    assert not check.over(2, [0.2], torch.tensor(math.nan), may_wait=True)
    assert not check.over(3, [99.0], torch.tensor(0.0), may_wait=True)
    assert check.over(4, [1.0], torch.tensor(0.0), may_wait=True), "rates of more than a thousand times it"
    assert not asked
    check, asked = first()
    assert not check.over(1, [0.2], torch.tensor(0.4), may_wait=True)
    assert check.over(2, [0.1], torch.tensor(0.3), may_wait=True), "0.08 and 0.03"
    assert asked


def test_the_slowest_group_counts_or_the_fastest() -> None:
    one = torch.tensor(1.0)
    fast, _ = first()
    assert fast.over(1, [0.01, 0.2], one, may_wait=True)
    slow, _ = first(slowest=True)
    assert not slow.over(1, [0.01, 0.2], one, may_wait=True)
    still, asked = first(slowest=True)
    assert still.over(1, [0.0, 0.2], one, may_wait=True), "which group a norm is of isn't known"
    assert not asked
    nothing, _ = first(slowest=True)
    assert not nothing.over(1, [0.0, 0.0], one, may_wait=True)
    wrong, _ = first(wrong=("nothing has moved", "look there"))
    with pytest.raises(RunError, match=r"after 1 optimizer step nothing has moved.*\(grad_norm 1\): look there"):
        wrong.over(1, [1.0], one, may_wait=True)
    later, _ = first(wrong=("x", "y"))
    with pytest.raises(RunError, match="after 7 optimizer steps x"):
        later.over(7, [1.0], one, may_wait=True)


@pytest.mark.parametrize(("precision", "off", "fits"), [
    ("32-true", 1.19e-4, True), ("32-true", 1.21e-4, False), ("64-true", 1.21e-4, False),
    ("bf16-mixed", 0.089, True),
    ("bf16-mixed", 0.091, False),
])  # fmt: skip
def test_policy_and_reference_agree_within_rounding(
    precision: str, off: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.tensor([[-10.0, -20.0]], dtype=torch.float64)
    policy = before + torch.tensor([[0.0, off]], dtype=torch.float64)
    model = nn.Linear(1, 1)
    objective: Any = SimpleNamespace(
        model=model, trainer=SimpleNamespace(precision=precision), answer_log_probs=lambda batch: (policy, None),
        reference_log_probs=lambda batch: before,
    )  # fmt: skip
    monkeypatch.setattr(start_check, "_what_differs", lambda *_: "they differ")
    names = ("chosen", "rejected")
    if fits:
        assert start_check.check_agreement(objective, {}, names)[:2] == (policy, before)
    else:
        with pytest.raises(RunError, match="they differ"):
            start_check.check_agreement(objective, {}, names)


def test_a_checksum_sees_every_bit_and_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.arange(7, dtype=dtype).view(7, 1)
        whole = start_check._checksum(tensor)
        bits = tensor.flatten().view(start_check.INTEGERS[tensor.element_size()]).tolist()
        expected = sum(b * (b + 1) for b in bits) % 2**64
        assert whole.item() % 2**64 == expected
        with monkeypatch.context() as patched:
            patched.setattr(start_check, "CHUNK", 3)
            assert start_check._checksum(tensor) == whole


def test_weights_without_a_gradient_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(start_check, "note", told.append)
    engine = SimpleNamespace(steps_itself=False)
    monkeypatch.setattr(start_check, "placement_of", lambda trainer: engine)
    net = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abcde"})
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=None), is_global_zero=True)
    objective: Any = SimpleNamespace(model=SimpleNamespace(model=net), trainer=trainer)
    net["e"].requires_grad_(False)
    start_check.name_unreached(objective)
    assert told.pop().startswith("no gradient reaches a.weight, b.weight, c.weight (4 in all): ")
    net["a"].weight.grad = torch.ones(1, 1)
    start_check.name_unreached(objective)
    assert told.pop().startswith("no gradient reaches b.weight, c.weight, d.weight: ")
    trainer.is_global_zero = False
    start_check.name_unreached(objective)
    trainer.is_global_zero, engine.steps_itself = True, True
    start_check.name_unreached(objective)
    assert told == []
    with pytest.raises(RunError, match="doesn't call its closure"):
        start_check.check_judged(torch.optim.SGD(net.parameters()), 3, 2)
    start_check.check_judged(torch.optim.SGD(net.parameters()), 3, 3)


def test_numbers_of_rows_are_computed_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[Any] = []
    monkeypatch.setattr(reference.world, "rank", lambda: 1)
    monkeypatch.setattr(reference.world, "size", lambda: 3)
    monkeypatch.setattr(reference.world, "together", lambda work: work())
    monkeypatch.setattr(
        reference, "compute_share", lambda parts, rows, of, rank, size: shares.append((parts, len(rows), rank, size))
    )
    numbers: Any = lambda rows, chosen: np.zeros(0)  # noqa: E731
    made = reference.Precomputed("x", {})
    made._compute_shares({"train": range(5), "val": range(2)}, numbers, reference.Path("p"))  # type: ignore[dict-item]
    assert shares == [(reference.Path("p/train"), 5, 1, 3), (reference.Path("p/val"), 2, 2, 3)], "rotated by split"
    keys = {reference.Precomputed("x", identity).key(nn.Linear(1, 1)) for identity in ({}, {"a": 1})}
    assert len(keys) == 2
