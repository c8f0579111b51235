"""experiment=dial: its rules, the scaling law that chooses a depth for a time budget, and a text file with a budget."""

import io
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lmtrain.callbacks.time_budget import Forecast, Length
from lmtrain.config import compose as rules
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.errors import UserError
from lmtrain.models import dial
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.run import build_callbacks
from support import Run


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
    with pytest.raises(UserError, match="power_law: 0 and 4 have to be above 0"):
        rules.check(rules.compose(["experiment=dial", "model.depth=0"]))


def test_the_dial_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.depth has no meaning .* it belongs to model=dial"):
        rules.check(rules.compose(["model=gpt_nano", "model.depth=6"]))


def test_tokens_that_are_seen_again_are_worth_less() -> None:
    assert dial.worth(1e6, 1e6) == dial.worth(1e6, 2e6) == 1e6
    # Muennighoff et al. 2023: up to four epochs are nearly as good as new text, and sixteen are worth about ten.
    assert dial.worth(4e6, 1e6) == pytest.approx(3.73e6, rel=0.01)
    assert 9e6 < dial.worth(16e6, 1e6) < 11e6
    assert dial.worth(1e12, 1e6) == pytest.approx(16.4e6)


def test_more_time_and_more_text_ask_for_depth() -> None:
    depths = [dial.best_depth(seconds, 4, 1e-4, 1e9) for seconds in (10, 60, 300, 1800, 36000)]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    much, little = (dial.best_depth(3600, 4, 1e-4, unique) for unique in (1e9, 1e5))
    assert little < much


def test_a_faster_machine_is_more_time() -> None:
    assert dial.best_depth(100, 4, 1e-5, 1e9) == dial.best_depth(1000, 4, 1e-4, 1e9)


def test_where_it_was_measured_does_not_matter() -> None:
    """A token at another depth takes the time that `cost` predicts, so the measured depth doesn't change the choice."""
    for depth, seconds in itertools.product((2, 6), (30, 600)):
        there = 1e-4 * dial.cost(depth) / dial.cost(4)
        assert dial.best_depth(seconds, depth, there, 1e9) == dial.best_depth(seconds, 4, 1e-4, 1e9)


def test_a_forecast_is_lower_where_the_curve_is_steep() -> None:
    flat, steep = [(475, 2.0), (665, 2.0)], [(475, 2.4), (665, 2.0)]
    assert dial.forecast(steep, 1000, decayed=False) < dial.forecast(flat, 1000, decayed=False)
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
    made = build_callbacks._forecast(config, metrics, Length(1500, 1500, 100), Console(file=io.StringIO()))
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
