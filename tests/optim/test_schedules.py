"""Schedules against closed forms, and against torch's and transformers' own schedulers."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from lmtrain.config import compose as rules
from lmtrain.config.options import SCHEDULES, RangeTestConfig
from lmtrain.config.schema import ScheduleConfig
from lmtrain.errors import UserError
from lmtrain.optim.groups import set_lr
from lmtrain.optim.schedules import LRSchedule, Smoothed, build_schedule, lr_factor, suggest, warmup_steps

CONF = Path(__file__).resolve().parents[2] / "conf" / "schedule"
T = 40
EXTRA: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"min_lr_ratio": 0.1},
    "cosine": {"min_lr_ratio": 0.1},
    "cosine_restarts": {"min_lr_ratio": 0.1, "num_cycles": 3},
    "polynomial": {"min_lr_ratio": 0.1, "power": 2.0},
    "inverse_sqrt": {"timescale": 10},
    "wsd": {"min_lr_ratio": 0.1, "decay_ratio": 0.25, "decay_shape": "sqrt"},
}
DECAYING = [name for name in EXTRA if name not in ("constant", "inverse_sqrt")]


def schedule(name: str, **changes: Any) -> ScheduleConfig:
    return SCHEDULES[name](**{"name": name, "warmup_steps": None, "warmup_ratio": None, **EXTRA[name], **changes})


def curve(s: ScheduleConfig, total: int = T, steps: int = T + 5) -> list[float]:
    return [lr_factor(s, step, total) for step in range(steps)]


def from_lambda_lr(scheduler_of: Any, steps: int = T) -> list[float]:
    """Returns the learning-rate factors that a torch scheduler sets, step by step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = scheduler_of(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def test_every_schedule_is_covered() -> None:
    assert {*EXTRA, "range_test"} == set(SCHEDULES)


def test_the_range_test_multiplies_the_rate() -> None:
    rising = RangeTestConfig(name="range_test", warmup_steps=None, warmup_ratio=None, min_lr_ratio=1e-4)
    assert curve(rising, total=5, steps=7) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1, 1, 1])


def test_closed_forms() -> None:
    w = 4
    n = T - w  # steps of decay
    expected = {
        "constant": lambda s: 1.0,
        "linear": lambda s: 1 - 0.9 * (s - w) / n,
        "cosine": lambda s: 0.55 + 0.45 * math.cos(math.pi * (s - w) / n),
        # 36 steps in 3 cycles of 12
        "cosine_restarts": lambda s: 0.55 + 0.45 * math.cos(math.pi * ((s - w) % 12) / 12),
        "polynomial": lambda s: 0.1 + 0.9 * ((T - s) / n) ** 2,
        "inverse_sqrt": lambda s: math.sqrt(10 / (10 + s - w)),
        # the last quarter of 40 steps: 30 ... 39
        "wsd": lambda s: 1.0 if s < 30 else 0.1 + 0.9 * (1 - math.sqrt((s - 30) / 10)),
    }
    for name, form in expected.items():
        got = curve(schedule(name, warmup_steps=w), steps=T)
        assert got[:w] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5]), name
        assert got[w:] == pytest.approx([form(s) for s in range(w, T)], abs=1e-12), name


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_wsd_shapes(shape: str) -> None:
    got = curve(schedule("wsd", decay_shape=shape, min_lr_ratio=0.0), steps=T)
    left = (
        [1 - i / 10 for i in range(10)] if shape == "linear" else [math.cos(math.pi * i / 20) ** 2 for i in range(10)]
    )
    assert got == pytest.approx([1.0] * 30 + left, abs=1e-12)


@pytest.mark.parametrize("name", EXTRA)
def test_bounds(name: str) -> None:
    """The first rate is positive, step w has the full rate, all rates are in (0, 1], and the end stays at the floor."""
    got = curve(schedule(name, warmup_steps=4))
    assert got[0] > 0
    assert got[4] == 1.0
    assert got[:5] == sorted(got[:5])
    assert all(0 < f <= 1 for f in got)
    if name in DECAYING:
        assert got[T:] == [0.1] * 5
        assert got[T - 1] > 0.1  # the floor is reached right after the last step
    if name != "cosine_restarts":
        assert got[4:] == sorted(got[4:], reverse=True)


def test_no_step_is_taken_at_zero() -> None:
    for name in DECAYING:
        assert min(curve(schedule(name, min_lr_ratio=0.0), steps=T)) > 0


def test_against_torch() -> None:
    lr_scheduler = torch.optim.lr_scheduler
    assert curve(schedule("cosine"), steps=T) == pytest.approx(
        from_lambda_lr(lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=T, eta_min=0.1))
    )
    assert curve(schedule("linear")) == pytest.approx(
        from_lambda_lr(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=T), steps=T + 5)
    )
    assert curve(schedule("polynomial", min_lr_ratio=0.0)) == pytest.approx(
        from_lambda_lr(lambda o: lr_scheduler.PolynomialLR(o, total_iters=T, power=2.0), steps=T + 5)
    )
    # T_0 = 10: four cycles in 40 steps
    assert curve(schedule("cosine_restarts", num_cycles=4), steps=T) == pytest.approx(
        from_lambda_lr(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=10, eta_min=0.1))
    )


def test_against_transformers() -> None:
    """Rates are equal after the warmup; transformers' own warmup, step / w, spends its first step at a rate of 0."""
    w = 4
    hf = transformers.optimization
    pairs = {
        "constant": (hf.get_constant_schedule_with_warmup, {}, {}),
        "linear": (hf.get_linear_schedule_with_warmup, {"num_training_steps": T}, {"min_lr_ratio": 0.0}),
        "cosine": (
            hf.get_cosine_with_min_lr_schedule_with_warmup,
            {"num_training_steps": T, "min_lr_rate": 0.1},
            {},
        ),
        "cosine_restarts": (
            hf.get_cosine_with_hard_restarts_schedule_with_warmup,
            {"num_training_steps": T, "num_cycles": 3},
            {"min_lr_ratio": 0.0},
        ),
        "polynomial": (
            hf.get_polynomial_decay_schedule_with_warmup,
            {"num_training_steps": T, "power": 2.0, "lr_end": 0.1},
            {},
        ),
        "inverse_sqrt": (hf.get_inverse_sqrt_schedule, {"timescale": 10}, {}),
        "wsd": (
            hf.get_wsd_schedule,
            {"num_training_steps": T, "num_decay_steps": 10, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
            {},
        ),
    }
    assert set(pairs) == set(EXTRA)
    for name, (factory, arguments, changes) in pairs.items():
        theirs = from_lambda_lr(lambda o, f=factory, a=arguments: f(o, num_warmup_steps=w, **a))
        ours = curve(schedule(name, warmup_steps=w, **changes), steps=T)
        assert ours[w:] == pytest.approx(theirs[w:], abs=1e-12), name
        assert theirs[0] < ours[0]


def test_warmup_ratio_is_rounded_up() -> None:
    assert warmup_steps(schedule("cosine", warmup_ratio=0.1), 40) == 4
    assert warmup_steps(schedule("cosine", warmup_ratio=0.1), 41) == 5
    assert warmup_steps(schedule("cosine", warmup_ratio=0.1), 30) == 3
    assert warmup_steps(schedule("cosine", warmup_ratio=0.07), 100) == 7  # 0.07 * 100 is 7.000000000000001
    assert warmup_steps(schedule("cosine", warmup_ratio=0.55), 20) == 11  # 0.55 * 20 is 11.000000000000002
    assert warmup_steps(schedule("cosine", warmup_ratio=0.0), 30) == 0
    assert warmup_steps(schedule("cosine"), 30) == 0
    assert curve(schedule("cosine", warmup_ratio=0.1)) == curve(schedule("cosine", warmup_steps=4))


def test_runs_shorter_than_their_warmup() -> None:
    assert curve(schedule("cosine", warmup_steps=100), total=3, steps=3) == pytest.approx([1 / 101, 2 / 101, 3 / 101])
    # a decay that would begin within the warmup begins after it
    assert curve(schedule("wsd", warmup_steps=6, decay_ratio=0.9, decay_shape="linear"), total=10, steps=10)[6:] == (
        pytest.approx([1 - 0.9 * i / 4 for i in range(4)])
    )
    assert all(0 < f <= 1 for name in EXTRA for f in curve(schedule(name, warmup_ratio=0.5), total=1, steps=1))


@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_schedules_that_do_not_depend_on_the_length(name: str) -> None:
    s = schedule(name, warmup_steps=4)
    assert curve(s, total=10 * T) == curve(s, total=T)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.warmup_steps=4 schedule.warmup_ratio=0.1", "Set one of them to null"),
        ("schedule.warmup_steps=0 schedule.warmup_ratio=0.1", "Set one of them to null"),
        ("schedule.warmup_steps=-1", "schedule.warmup_steps=-1"),
        ("schedule.warmup_ratio=1.5", "schedule.warmup_ratio=1.5"),
        ("schedule.min_lr_ratio=null", "schedule.min_lr_ratio has no value"),
        ("schedule.min_lr_ratio=2.0", "schedule.min_lr_ratio=2.0"),
        ("schedule=cosine_restarts schedule.num_cycles=0", "schedule.num_cycles=0"),
        ("schedule=polynomial schedule.power=0.0", "schedule.power=0.0"),
        ("schedule=inverse_sqrt schedule.timescale=0", "schedule.timescale=0"),
        ("schedule=wsd schedule.decay_ratio=0.0", "schedule.decay_ratio=0.0"),
        ("schedule=wsd schedule.decay_shape=square", "options: linear, cosine, sqrt"),
        ("schedule.name=cosin", r"schedule\.name=cosin is not known; did you mean cosine.*constant, linear, cosine"),
        ("schedule.name=wsd", r"needs schedule\.decay_ratio: choose schedule=wsd"),
        (
            "schedule.name=constant",
            r"schedule\.min_lr_ratio has no meaning with the schedule chosen here",
        ),
        (
            "+schedule.power=2",
            r"power has no meaning with the schedule chosen here; it belongs to schedule=polynomial",
        ),
    ],
)
def test_wrong_values_are_explained(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        rules.check(rules.compose(override.split()))


def test_set_lr_scales_every_group_from_its_base() -> None:
    parameters = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "base_lr": lr} for lr in (0.5, 0.2)]
    optimizer = torch.optim.SGD(parameters)
    set_lr(optimizer, 0.5)
    set_lr(optimizer, 0.1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.02])


@pytest.mark.parametrize("path", sorted(set(CONF.glob("*.yaml")) - {CONF / "custom.yaml"}), ids=lambda p: p.stem)
def test_yamls_hold_what_their_schedule_reads(path: Path) -> None:
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(values, dict)
    s = SCHEDULES[str(values["name"])](**values)  # type: ignore[arg-type]
    assert set(values) == {f.name for f in dataclasses.fields(s)} - {"_target_"}
    got = curve(s, total=2000, steps=2000)
    assert max(got) == 1.0
    assert min(got) > 0


def test_there_is_a_yaml_for_every_schedule() -> None:
    assert {p.stem for p in CONF.glob("*.yaml")} == {*SCHEDULES, "constant_with_warmup", "custom"} - {"range_test"}


class Halves(LRSchedule):
    """Half as fast at each step; `wrong` says what is the matter with it."""

    wrong: Any = None
    asked = 0

    def factor(self, step: int, total_steps: int) -> float:
        Halves.asked += 1
        return {"bool": True, "text": "x", "negative": -0.5, "endless": math.inf, "forgets": Halves.asked / 100.0}.get(
            self.wrong, 0.5**step * total_steps
        )


def test_a_schedule_of_ones_own_begins_after_the_warmup() -> None:
    cfg = ScheduleConfig(name="custom", warmup_steps=3, warmup_ratio=None, _target_="test_schedules.Halves")
    built = build_schedule(cfg, 10, ["test_schedules"])
    assert [built(step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 7.0, 3.5, 1.75]
    assert build_schedule(schedule("linear"), 10)(9, 10) == lr_factor(schedule("linear"), 9, 10)


@pytest.mark.parametrize("wrong", ["bool", "text", "negative", "endless", "forgets"])
def test_a_schedule_that_gives_no_valid_factor_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Halves, "wrong", wrong)
    cfg = ScheduleConfig(name="custom", warmup_steps=3, warmup_ratio=None, _target_="test_schedules.Halves")
    words = "when asked again" if wrong == "forgets" else "for step 9: a number from 0 up is needed"
    with pytest.raises(UserError, match=words):
        build_schedule(cfg, 10, ["test_schedules"])


def test_a_smoothed_series_is_adams_first_moment() -> None:
    found, average, series = [], Smoothed(0.75), [2.0, 4.0, 8.0]
    found = [average.add(value) for value in series]
    weights = [[0.75 ** (t - i) for i in range(t + 1)] for t in range(3)]
    expected = [sum(w * v for w, v in zip(ws, series, strict=False)) / sum(ws) for ws in weights]
    assert found == pytest.approx(expected)
    assert [Smoothed(0.0).add(3.0), found[0]] == [3.0, 2.0]


def test_a_range_test_suggests_the_middle_of_steepest_and_lowest() -> None:
    """A loss that falls by 0.1, then by 0.5 around the sixth rate, then rises from the tenth on."""
    rates = [10.0 ** (n / 4) for n in range(14)]
    losses = [5.0, 4.9, 4.8, 4.7, 4.6, 4.1, 3.6, 3.1, 3.0, 2.9, 3.4, 5.0, 9.0, math.inf]
    found = suggest(rates, losses, smoothing=0.0)
    assert found is not None
    assert found.smoothed == pytest.approx(losses[:-1])
    assert (found.steepest, found.lowest) == (rates[5], rates[9])
    assert found.lr == pytest.approx(rates[7])
    assert suggest(rates, [*losses[:9], math.nan, *losses[10:]], smoothing=0.0) is None, "nine are too few"
    assert suggest(rates, [*losses[:10], math.nan, *losses[11:]], smoothing=0.0) == found._replace(smoothed=losses[:10])
    assert suggest(rates, [1.0 + n for n in range(14)], smoothing=0.0) is None, "it never fell"
    assert suggest(rates, [1.0] * 14, smoothing=0.0) is None
    assert suggest(rates, [2.0, 1.9, 1.8, *(3.0 + n for n in range(11))], smoothing=0.0) is None, (
        "no slope over five steps"
    )
    smoothed = suggest(rates, losses, smoothing=0.5)
    assert smoothed is not None
    assert smoothed.steepest > found.steepest
