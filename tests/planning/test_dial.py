"""experiment=dial: its rules, the scaling law that chooses a depth for a time budget, and a text file with a budget."""

import csv
import io
import itertools
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from lmtrain.callbacks.length import Length
from lmtrain.callbacks.time_budget import ENDING_S, Forecast, TimeBudget, build_forecast
from lmtrain.config import compose as rules
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.models import dial
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.planning import budget
from support import REPO, Run


@pytest.mark.parametrize(
    ("depth", "width", "rows", "rate", "steps"),
    [(2, 64, 8, 8.485e-3, 960), (4, 128, 16, 6e-3, 3840), (6, 192, 24, 4.899e-3, 8640)],
)
@pytest.mark.parametrize("key", [dial.KEY, dial.LAYERS])
def test_the_rules_set_all_else(key: str, depth: int, width: int, rows: int, rate: float, steps: int) -> None:
    config = rules.check(rules.compose(["experiment=dial", f"{key}={depth}"]))
    model = config.model
    assert (model.hidden_size, model.num_attention_heads) == (width, depth)  # type: ignore[attr-defined]
    assert (config.data.global_batch_size, config.optimizer.lr, config.trainer.max_steps) == (rows, rate, steps)
    tokens_a_weight = steps * rows * config.data.seq_len / dial.weights(depth)
    assert tokens_a_weight == pytest.approx(20)


def test_what_is_typed_wins_over_its_rule() -> None:
    words = ["experiment=dial", "model.depth=6", "model.hidden_size=96", "optimizer.lr=0.001"]
    config = rules.check(rules.compose(words))
    assert (config.model.hidden_size, config.optimizer.lr) == (96, 0.001)  # type: ignore[attr-defined]
    assert config.data.global_batch_size == 24


def test_a_rule_that_has_no_value_is_refused() -> None:
    with pytest.raises(UserError, match="power_law: 0 and 3 have to be above 0"):
        rules.check(rules.compose(["experiment=dial", "model.depth=0"]))


def test_the_dial_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.depth has no meaning .* it belongs to model=dial"):
        rules.check(rules.compose(["model=gpt_nano", "model.depth=6"]))


def test_tokens_that_are_seen_again_are_worth_less() -> None:
    assert dial.worth(1e6, 1e6) == dial.worth(1e6, 2e6) == 1e6
    assert dial.worth(1.01e6, 1e6) == pytest.approx(1.01e6, rel=1e-3)  # the first repeats are worth as much as new ones
    worth = [dial.worth(epochs * 1e6, 1e6) for epochs in (1, 2, 4, 8, 16, 1e6)]
    assert worth == sorted(worth)
    assert worth[-1] == pytest.approx((1 + dial.WORN) * 1e6)


def test_the_law_by_hand() -> None:
    """3 layers, 331,776 weights, 2 M tokens of a text of 1 M."""
    tokens = 1e6 * (1 + 1.3 * (1 - math.exp(-1 / 1.3)))
    loss = 0.5 + ((1.284e5 / 331776) ** (0.2 / 0.2104) + 2.53e6 / tokens) ** 0.2104
    half = 2.95e6 * (1e6 / 331776) ** 0.6
    copied = 1 / (1 + math.exp(-math.log(2e6 / half) / 0.56))
    assert dial.expected(3, 2e6, 1e6) == pytest.approx(loss * (1 - 0.136 * copied))


RUNS = list(csv.DictReader((REPO / "benchmarks" / "dial_runs.csv").open()))


@pytest.mark.parametrize(("used", "most"), [("fitted", 0.02), ("left out", 0.03), ("vocabulary", 0.03)])
def test_the_law_foretells_runs_that_were_made(used: str, most: float) -> None:
    """On the standard library; those left out are longer than five minutes, and no constant was fitted to them.

    Nor to those with another vocabulary.
    """
    runs = [run for run in RUNS if run["text"] == "standard library" and run["used"] == used]
    assert len(runs) >= 5
    for run in runs:
        depth = int(run["layers"])
        tokens = int(run["steps"]) * 1024 * depth * dial.longer(int(run["vocabulary"]))
        found = dial.expected(depth, tokens, float(run["unique_tokens"]))
        assert found == pytest.approx(float(run["bits_per_byte"]), rel=most), run


def test_a_larger_vocabulary_has_longer_tokens() -> None:
    """Tokens of the standard library, 3,813,778 with a vocabulary of 1,024; of bytes it has 10.4 million."""
    counted = {
        1536: 3449678,
        2048: 3239628,
        2816: 3050223,
        4096: 2869332,
        8192: 2633340,
        16384: 2492738,
        32768: 2413297,
    }
    for vocabulary, tokens in counted.items():
        assert dial.longer(vocabulary) == pytest.approx(3813778 / tokens, rel=0.01)
    assert dial.longer(1024) == 1
    assert dial.longer(65) == pytest.approx(3.81 / 10.4, rel=0.02)


def test_the_best_shape_for_a_number_of_flops_is_that_of_larger_runs() -> None:
    """nanochat's sweep at 1e18 FLOPs: 80 M weights in the layers (dev/LOG.md); the curve is flat there."""
    loss = {depth: dial.expected(depth, 1e18 / 6 / dial.weights(depth)) for depth in dial.DEPTHS}
    best = min(loss, key=lambda depth: loss[depth])
    assert loss[18] <= 1.01 * loss[best]  # 70 M
    assert 0.5 <= dial.weights(best) / 80e6 <= 2


def test_more_text_asks_for_depth() -> None:
    speed = dial.Speed(0.0, 1e-11)
    much, little = (dial.best_depth(3600, speed, shape, unique) for unique in (1e9, 1e5))
    assert little < much


def test_a_speed_takes_what_was_measured() -> None:
    for depths in ((4, 2), (4, 9), (4, 12, 20)):
        measured = [(shape(depth), 0.01 * depth + 1e-12 * shape(depth).flops) for depth in depths]
        for at, seconds in measured:
            assert dial.Speed.of(measured).step(at) == pytest.approx(seconds)
    assert dial.Speed.of(measured[:1]).layer == 0
    # A deeper shape that takes no longer, or that takes more than its FLOPs explain: neither part is negative.
    for seconds in (0.001, 1e9):
        speed = dial.Speed.of([(shape(4), 0.04), (shape(8), seconds)])
        assert min(speed) >= 0
        assert speed.step(shape(8)) == pytest.approx(seconds)


def shape(depth: int) -> dial.Shape:
    there = dial.recipe(depth)
    return dial.Shape(depth, there["tokenizer.vocab_size"], there["data.seq_len"] * there["data.global_batch_size"])


def test_no_rule_jumps_up_to_32_layers() -> None:
    """By a factor of two at most between neighbours; the length follows the weights, 2.25 times from 2 to 3 layers."""
    found = [rules.check(rules.compose(["experiment=dial", f"model.depth={depth}"])) for depth in (3, 16, 32)]
    assert [dial.recipe(c.model.num_hidden_layers)["data.seq_len"] for c in found] == [c.data.seq_len for c in found]  # type: ignore[attr-defined]
    values = {d: dial.recipe(d) for d in dial.DEPTHS}
    keys = ["tokenizer.vocab_size", "data.seq_len", "data.global_batch_size", "model.learning_rate"]
    for depth, next_depth in itertools.pairwise(dial.DEPTHS):
        now, deeper = values[depth], values[next_depth]
        assert all(0.5 <= deeper[key] / now[key] <= 2 for key in keys), depth
        heads = [v["model.hidden_size"] / v["model.num_attention_heads"] for v in (now, deeper)]
        assert heads[0] <= heads[1] <= 2 * heads[0]
        assert heads[1] % 8 == 0
        if depth > 2:
            assert deeper["trainer.max_steps"] <= 2 * now["trainer.max_steps"]
        tokens = now["trainer.max_steps"] * now["data.seq_len"] * now["data.global_batch_size"]
        assert tokens / dial.weights(depth) == pytest.approx(20, rel=0.12)  # sizes are multiples of 4 and 128


class Machine(NamedTuple):
    """A simulated machine: seconds of launches per layer of a step, FLOP/s of wide layers, the width that has half."""

    launches: float
    flops: float
    half: int
    link: float = math.inf  # bytes/s between devices

    def step(self, at: dial.Shape) -> float:
        width = 32 * at.depth
        moved = 8 * dial.weights(at.depth) / self.link
        return self.launches * at.depth + at.flops / (self.flops * width / (width + self.half)) + moved


MACHINES = {
    "laptop": Machine(2e-3, 1e11, 32),
    "an H100": Machine(1.2e-3, 6e14, 512),
    "eight H100s": Machine(1.4e-3, 8 * 6e14, 512, 1.5e11),
}


def chosen(machine: Machine, minutes: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, float, list[float]]:
    """Returns the config at the depth that budget.minutes chooses, the seconds left for training, and a fake clock."""
    now = [0.0]

    def measure(config: Config, _: Any) -> budget.Measured:
        tokens = config.data.seq_len * config.data.global_batch_size
        step = machine.step(dial.Shape(config.model.num_hidden_layers, 1024, tokens))  # type: ignore[attr-defined]
        now[0] += 5 + max(1.2, 4 * step)
        return budget.Measured(5.0, step, 0.0)

    corpus = SimpleNamespace(tokenizer=range(1024), epoch_tokens=10**13, stream=None)
    for clock in ("time", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    monkeypatch.setattr(budget, "measure", measure)
    monkeypatch.setattr(budget, "build_corpus", lambda _: corpus)
    monkeypatch.setattr(budget, "_validation", lambda *_: 0.0)
    config = rules.check(rules.compose(["experiment=dial", f"budget.minutes={minutes}"]))
    config.trainer.devices = 1
    found = budget._choose_depth(config, 0.0, {})
    assert found.took.step == pytest.approx(machine.step(shape(found.depth)), rel=0.5)
    now[0] += found.took.starting
    return budget._at_depth(config, found.depth), 60 * minutes - now[0] - ENDING_S, now


@pytest.mark.parametrize("name", MACHINES)
def test_a_simulated_machine_gets_nearly_the_best_depth(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, depths = MACHINES[name], []
    for minutes in (1, 2, 5, 15, 60, 240, 1440):
        config, left, _ = chosen(machine, minutes, monkeypatch)

        def loss(depth: int, seconds: float = left) -> float:
            at = shape(depth)
            return dial.expected(depth, seconds / machine.step(at) * at.tokens * dial.longer(at.vocabulary))

        depths.append(config.model.num_hidden_layers)  # type: ignore[attr-defined]
        assert loss(depths[-1]) <= 1.02 * min(map(loss, dial.DEPTHS)), minutes
        assert config.tokenizer.vocab_size == dial.recipe(depths[-1])["tokenizer.vocab_size"]
        assert config.data.global_batch_size * config.data.seq_len == shape(depths[-1]).tokens
    assert depths == sorted(depths)
    assert depths[-1] > depths[0]


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("slower", [1.0, 1.7])
def test_a_simulated_run_ends_in_time(name: str, slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the machine becomes slower in the middle; as fast as measured, the run keeps what the law promised."""
    config, left, now = chosen(MACHINES[name], 5, monkeypatch)
    at = shape(config.model.num_hidden_layers)  # type: ignore[attr-defined]
    step = MACHINES[name].step(at)
    config.trainer.val_check_interval = None
    planned = budget.steps_within(300 - now[0], budget.Measured(0.0, step, 0.0), config)
    clock = TimeBudget(config, Length(planned, 10**9, 0), Console(quiet=True), [])
    monkeypatch.setattr(clock, "set_length", lambda _, module, steps: setattr(module, "total_steps", steps))
    clock.began, module, trainer = 0.0, object.__new__(CausalLM), SimpleNamespace(global_step=0, world_size=1)
    module.total_steps = planned
    clock.on_train_start(trainer, module)  # type: ignore[arg-type]
    while trainer.global_step < module.total_steps:
        now[0] += step * (slower if now[0] > 150 else 1.0)
        trainer.global_step += 1
        clock.on_train_batch_end(trainer, module)  # type: ignore[arg-type]
    assert abs(now[0] + ENDING_S - 300) < max(2.0, 2 * slower * step)
    promised, made = (dial.expected(at.depth, steps * at.tokens) for steps in (left / step, trainer.global_step))
    assert made == pytest.approx(promised, rel=0.005) or slower > 1


def test_a_forecast_is_lower_where_the_curve_is_steep() -> None:
    flat, steep = [(475, 2.0), (665, 2.0)], [(475, 2.4), (665, 2.0)]
    assert dial.forecast(steep, 1000, decayed=False) < dial.forecast(flat, 1000, decayed=False)
    assert (dial.fall(flat, 1000), dial.fall(steep, 1000)) == (0.0, pytest.approx(1 / 6))
    # log(end / v2) = -0.0201 - 0.732 log(2.4 / 2.0), and -0.0124 with weight decay, by hand
    assert dial.forecast(steep, 1000, decayed=False) == pytest.approx(2.0 * math.exp(-0.0201 - 0.1335), rel=1e-3)
    assert dial.forecast(steep, 1000, decayed=True) == pytest.approx(2.0 * math.exp(-0.0325 - 0.1335), rel=1e-3)


@pytest.mark.parametrize(
    ("scores", "steps", "decayed", "end"),
    [  # from benchmarks/RESULTS.md: ten minutes by the clock, none of them in the fit
        ([(896, 1.3792), (1120, 1.3157), (1344, 1.2633)], 1920, False, 1.1972),
        ([(936, 1.3684), (1170, 1.3039), (1404, 1.2618), (1638, 1.2369)], 2166, False, 1.1902),
        ([(1000, 1.353), (1250, 1.287), (1500, 1.254), (1750, 1.226)], 2308, False, 1.179),
        ([(912, 2.02), (1140, 1.9602), (1368, 1.8923), (1596, 1.8308)], 2157, True, 1.7189),
        ([(960, 1.4262), (1200, 1.3505), (1440, 1.3077)], 2098, True, 1.191),
    ],
)
def test_a_forecast_of_runs_that_were_made(
    scores: list[tuple[int, float]], steps: int, decayed: bool, end: float
) -> None:
    assert dial.forecast(scores, steps, decayed=decayed) == pytest.approx(end, rel=0.03)


@pytest.mark.parametrize(
    ("depth", "epoch_steps", "scores"),
    [  # benchmarks/RESULTS.md: the final bits per byte by weight decay
        (2, 202, {0: 2.1722, 0.3: 2.1646, 0.6: 2.1521, 1: 2.1798}),
        (2, 138, {0.3: 2.2431, 0.6: 2.2221, 1: 2.2270}),
        (3, 254, {0: 1.9656, 0.25: 1.9573, 0.5: 1.9637, 1: 1.9932}),
        (3, 125, {0: 2.368, 0.1: 2.301, 0.3: 2.220, 1: 2.137, 3: 2.160}),
        (4, 412, {0: 1.7745, 0.3: 1.7189, 1: 1.7345}),
    ],
)
def test_the_weight_decay_is_near_the_best_of_those_measured(
    depth: int, epoch_steps: float, scores: dict[float, float]
) -> None:
    lr = rules.compose(["experiment=dial", f"model.depth={depth}"]).optimizer.lr
    chosen = dial.weight_decay(lr, epoch_steps)
    nearest = min(scores, key=lambda decay: abs(math.log(max(decay, 0.03) / chosen)))
    assert scores[nearest] <= 1.004 * min(scores.values())  # two seeds differ by 0.6 %


def test_a_long_epoch_needs_little_weight_decay_and_a_short_one_at_most_one() -> None:
    assert dial.weight_decay(0.006, 100_000) == 0.0014  # 1 / (0.006 x 1.2 x 100,000)
    assert dial.weight_decay(0.006, 5) == 1.0


def test_dropout_where_it_was_measured_to_help() -> None:  # benchmarks/RESULTS.md
    assert [dial.dropout(epochs) for epochs in (0.5, 5.9, 8, 13.3, 20)] == [0.0, 0.0, 0.0, 0.1, 0.1]


def test_a_forecast_does_not_depend_on_where_the_validations_stand() -> None:
    def curve(*steps: int) -> list[tuple[int, float]]:
        return [(step, 4.0 * step**-0.1) for step in steps]

    expected = dial.forecast(curve(142, 171, 200), 300, decayed=False)
    for steps in ((40, 80, 120, 160, 200), (10, 150, 210), (100, 180, 240)):
        assert dial.forecast(curve(*steps), 300, decayed=False) == pytest.approx(expected, rel=2e-3)
    # interpolated and extrapolated between validations, to 47.5 and 66.5 of 100 steps, by hand
    found = dial.forecast([(20, 2.4), (40, 2.2), (60, 2.0)], 100, decayed=False)
    assert found == pytest.approx(1.8057, rel=1e-3)


@pytest.mark.parametrize(
    ("typed", "forecasts"),
    [
        ((), True),
        (("model.dropout=0",), False),
        (("optimizer.weight_decay=1.2",), False),
        (("model.depth=4",), False),  # more weights than a text that is repeated is enough for
        (("trainer.max_epochs=1", "optimizer.weight_decay=0", "model.dropout=0", "model.depth=4"), True),
    ],
)
def test_a_run_is_forecast_if_the_fit_has_runs_like_it(typed: tuple[str, ...], forecasts: bool) -> None:
    usual = dial.regularization(6.9e-3, 1500, 15)
    words = ["experiment=dial", "model.depth=3", "budget.minutes=10", "trainer.max_epochs=15"]
    words += [f"{key}={value}" for key, value in usual.items()]
    config = rules.check(rules.compose([*words, *typed]))
    metrics: Any = SimpleNamespace(last_val={})
    made = build_forecast(config, metrics, Length(1500, 1500, 100), Console(file=io.StringIO()))
    assert (made is not None) == forecasts


def forecaster(out: io.StringIO) -> Forecast:
    schedule = rules.check(rules.compose(["experiment=dial"])).schedule
    assert isinstance(schedule, WarmupStableDecayConfig)
    metrics: Any = SimpleNamespace(last_val={})
    return Forecast(metrics, schedule, 10.0, Console(file=out, width=120), decayed=False)


def validate(forecast: Forecast, step: int, bits: float, steps: int) -> None:
    """Ends a validation at a step of a run that is planned to have `steps` steps."""
    objective = object.__new__(CausalLM)
    objective.total_steps = steps
    forecast.metrics.last_val = {"val/bits_per_byte": bits}
    trainer: Any = SimpleNamespace(global_step=step)
    forecast.on_validation_end(trainer, objective)


def test_a_run_is_forecast_once_at_two_thirds() -> None:
    out = io.StringIO()
    forecast = forecaster(out)
    scores = [(4, 3.0), *((38 * n, 2.5 * n**-0.15) for n in range(1, 11))]  # the first is within the warmup
    for step, bits in scores:
        validate(forecast, step, bits, 400)
        resumed = forecaster(out)
        resumed.load_state_dict(forecast.state_dict())
        forecast = resumed
    bits = dial.forecast(scores[1:8], 400, decayed=False)
    low, high = pytest.approx(bits * 0.96), pytest.approx(bits * 1.04)
    assert forecast.made == {"val/bits_per_byte": bits, "low": low, "high": high, "step": 38 * 7}
    assert out.getvalue().count("at the end") == 1
    assert f"will be about {bits:.3f} at the end" in out.getvalue()


def test_a_text_unlike_those_of_the_fit_gets_no_forecast() -> None:
    out = io.StringIO()
    forecast = forecaster(out)
    for step in range(38, 400, 38):
        validate(forecast, step, 3.0 * (step / 38) ** -0.6, 400)  # falls by 18 % from 47.5 to 66.5 % of the steps
        resumed = forecaster(out)
        resumed.load_state_dict(forecast.state_dict())
        forecast = resumed
    assert not forecast.made
    assert out.getvalue().count("no forecast") == 1
    assert "fell by 18" in out.getvalue()


def test_a_run_that_the_clock_makes_longer_waits_with_its_forecast() -> None:
    out = io.StringIO()
    forecast = forecaster(out)
    scores = [(38 * n, 3.0 * n**-0.1) for n in range(1, 15)]  # spread over 400 steps, which the clock extends to 600
    for step, bits in scores:
        validate(forecast, step, bits, 400 if step < 200 else 600)
    assert forecast.made is not None
    assert forecast.made["step"] == 38 * 11  # the first validation at or after 66.5 % of 600 steps
    assert forecast.made["val/bits_per_byte"] == dial.forecast(scores[:11], 600, decayed=False)


def test_a_validation_that_comes_too_late_makes_no_forecast() -> None:
    out = io.StringIO()
    forecast = forecaster(out)
    for step, bits in [(100, 2.6), (200, 2.4), (250, 2.3), (370, 2.2)]:  # of a run that the clock shortens to 400 steps
        validate(forecast, step, bits, 1000 if step < 300 else 400)
    assert forecast.made is None
    assert out.getvalue() == ""


@pytest.mark.slow
def test_a_file_and_minutes_are_enough(tmp_path: Path, lmtrain: Run) -> None:
    words = ("It was a dark and stormy night; the rain fell in torrents. ", "The quick brown fox jumps. ")
    (tmp_path / "book.txt").write_text(
        "\n\n".join(words[i % 2] * (1 + i % 7) + f"Page {i}, {i * i % 97}." for i in range(500))
    )
    common = ["book.txt", "budget.minutes=0.8", "run.name=book", "trainer.accelerator=cpu", "logger=none"]
    ended = lmtrain("train", *common)
    assert ended.returncode == 0, ended.stderr
    assert "book.txt is plain text: experiment=dial data=text" in ended.stderr
    chosen = re.search(r"budget.minutes=0.8 chose model.depth=(\d+)", ended.stderr)
    assert chosen is not None
    saved = rules.read(tmp_path / "outputs" / "book" / "config.yaml")
    assert saved["model"]["num_hidden_layers"] == int(chosen[1])
    assert saved["model"]["hidden_size"] == 32 * int(chosen[1])
    assert saved["optimizer"]["weight_decay"] == dial.MOST_DECAY  # an epoch of this text takes few steps
    assert saved["model"]["dropout"] == dial.DROPOUT
    # The same command again finds the run finished, with the depth chosen then.
    again = lmtrain("train", *common)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
