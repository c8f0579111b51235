"""The parts of an estimate, of tuning and of a budget, each against numbers worked out by hand."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmtrain.config import compose as rules
from lmtrain.config.schema import Config
from lmtrain.errors import RunError, UserError
from lmtrain.models import dial
from lmtrain.optim.schedules import Suggestion
from lmtrain.planning import budget, estimation, trial, tuning
from lmtrain.planning.estimation import Change, Device
from support import TINY


def config(*words: str) -> Config:
    return rules.check(rules.compose([*TINY, *words]))


# Estimates


@pytest.mark.parametrize(("asked", "size", "peak"), [
    ("H 100", 80 * 2**30, 989e12), ("A100-40GB", 40 * 2**30, 312e12), ("a100-40gb", 40 * 2**30, 312e12),
    ("24", 24 * 2**30, None), ("0.5", 2**29, None),
])  # fmt: skip
def test_a_device_is_named_or_has_a_size(asked: str, size: float, peak: float | None) -> None:
    found = estimation.device_of(config(f"estimate.device='{asked}'"))
    assert (found.bytes, found.peak) == (size, peak)
    assert found.words == (asked if peak else f"{float(asked):g} GiB")


def test_what_is_auto_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = [f"trainer.{key}=auto" for key in ("accelerator", "devices", "precision", "strategy",
                                              "activation_checkpointing")]  # fmt: skip

    def resolved(*words: str) -> list[Any]:
        asked = config(*auto, *words)
        estimation.resolve(asked)
        t = asked.trainer
        return [t.accelerator, t.devices, t.precision, t.strategy, t.activation_checkpointing]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert resolved("estimate.device=h100") == ["cuda", 1, "bf16-mixed", "ddp", False]
    assert resolved()[:2] == ["cpu", 1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolved() == ["cuda", 5, "bf16-mixed", "ddp", False]
    assert resolved("trainer.accelerator=cpu", "estimate.device=h100")[:2] == ["cpu", 1]


def test_the_size_of_a_vocabulary_is_the_tokenizers_or_the_configs() -> None:
    def size(*words: str) -> int:
        return len(estimation.vocabulary(config(*words)))

    assert size("tokenizer=bpe", "tokenizer.vocab_size=300") == 300
    assert size("tokenizer=bpe", "tokenizer.vocab_size=300", "tokenizer.add_tokens=[a,b]") == 302
    assert size("tokenizer=char", "model.vocab_size=77") == 77
    assert size("tokenizer=hub", "tokenizer.name_or_path=nobody/gpt2") == 50257
    assert size("tokenizer=hub", "tokenizer.name_or_path=nobody/x", "model.vocab_size=90") == 90
    with pytest.raises(UserError, match=r"set model\.vocab_size"):
        size("tokenizer=char")
    with pytest.raises(UserError):
        size("tokenizer=hub", "tokenizer.name_or_path=nobody/x")
    words = estimation.Vocabulary(10, ["a", "b"])
    assert (len(words), words.convert_tokens_to_ids(["a", "b"]), words.eos_token_id) == (12, [10, 11], 0)


def test_the_time_of_a_run_is_its_tokens_by_the_speed() -> None:
    device = Device("it", 1.0, 2e12)
    typed = config("estimate.tokens_per_s=50")
    assert estimation.describe_time(typed, device, 500, 1e9, 4) == "10 s (estimate.tokens_per_s)"
    by_peak = config("estimate.mfu=0.25")  # 0.25 of 4 x 2e12 FLOP/s, 1e9 a token: 2,000 tokens a second
    assert estimation.describe_time(by_peak, device, 20_000, 1e9, 4) == "10 s (25% of the peak, 2,000 tokens/s)"
    assert estimation.describe_time(by_peak, device, None, 1e9, 4).startswith("set trainer.max_steps")
    assert estimation.describe_time(by_peak, Device("it", 1.0, None), 5, 1e9, 4).startswith("not known for this device")


def test_a_table_has_the_parts_of_all_strategies_and_says_what_fits() -> None:
    found = {"ddp": {"parameters": 2 * 2**20, "logits": 2**20}, "fsdp": {"parameters": 2**20, "offload": 3 * 2**19}}
    table = estimation.memory_table(found, 3 * 2**20)
    assert [str(column.header) for column in table.columns] == ["strategy", "weights", "logits", "offload", "all", ""]
    assert [list(column.cells) for column in table.columns] == [
        ["ddp", "fsdp"], ["2", "1"], ["1", "0"], ["0", "2"], ["3", "2"], ["fits", "fits"],
    ]  # fmt: skip
    assert table.title == "memory of a device, MiB"
    assert list(estimation.memory_table(found, 3 * 2**20 - 1).columns[-1].cells) == ["too large", "fits"]
    large = estimation.memory_table({"ddp": {"parameters": 2**32}}, 1)
    assert large.title == "memory of a device, GiB"
    assert next(large.columns[1].cells) == "4.0"
    assert estimation.memory_table({"ddp": {"parameters": 2**32 - 1}}, 1).title == "memory of a device, MiB"


def test_the_choices_are_halved_batches_strategies_recomputation_and_8_bits() -> None:
    asked = config("data.global_batch_size=12", "data.micro_batch_size=12", "trainer.strategy=ddp",
                   "trainer.activation_checkpointing=false", "optimizer=adamw", "trainer.devices=1")  # fmt: skip
    sizes, strategies, saved, optimizers = estimation._choices(asked)
    assert sizes == [Change((), 1.0), Change(("data.micro_batch_size=6",), 1.03),
                     Change(("data.micro_batch_size=3",), 1.03**2)]  # fmt: skip
    assert [way.slower for way in strategies] == [1.0, 3.0], "one device gains from offloading only"
    assert saved == [Change((), 1.0), Change(("trainer.activation_checkpointing=true",), 1.33)]
    assert optimizers == [Change((), 1.0), Change(("optimizer=adamw_8bit",), 1.02)]
    asked.trainer.devices, asked.trainer.activation_checkpointing, asked.optimizer.name = 2, True, "lion"
    _, strategies, saved, optimizers = estimation._choices(asked)
    assert [way.slower for way in strategies] == [1.0, 1.1, 3.0, 1.3, 1.05, 1.2]
    assert saved == optimizers == [Change((), 1.0)]
    asked.trainer.strategy = "fsdp"
    assert estimation._choices(asked)[1] == [Change((), 1.0)]


def test_ways_to_fit_are_the_fastest_that_fit_without_what_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [[Change((), 1.0), Change((f"data.micro_batch_size={n}",), s)] for n, s in ((4, 1.03),)]
    choices[0].append(Change(("data.micro_batch_size=2",), 1.06))
    choices += [
        [Change((), 1.0), Change((word,), slower)] for word, slower in (("a=1", 1.3), ("b=1", 1.2), ("c=1", 2.0))
    ]
    saves = {"data.micro_batch_size=4": 3, "data.micro_batch_size=2": 4, "a=1": 6, "b=1": 2, "c=1": 9}
    monkeypatch.setattr(estimation, "_choices", lambda config: choices)
    monkeypatch.setattr(estimation, "changed", lambda config, overrides: None if "c=1" in overrides else overrides)
    monkeypatch.setattr(
        estimation, "memory", lambda model, overrides, others: {"x": 10 - sum(saves[o] for o in overrides), "y": 5}
    )
    model: Any = None

    def ways(room: float) -> list[tuple[str, ...]]:
        return [way.overrides for way in estimation.ways_to_fit(model, config(), room)]

    assert ways(11) == [("data.micro_batch_size=2",), ("a=1",)], "b=1 alone saves too little"
    assert ways(12) == [("data.micro_batch_size=4",), ("a=1",)]
    assert ways(13) == [("data.micro_batch_size=4",), ("b=1",), ("a=1",)]
    assert ways(9.5) == [("data.micro_batch_size=2", "b=1"), ("a=1",)]
    assert ways(2) == []


def test_overrides_that_cannot_be_are_no_choice() -> None:
    asked = config("trainer.devices=2", "data.global_batch_size=8", "data.micro_batch_size=4")
    found = estimation.changed(asked, ("data.micro_batch_size=2", "optimizer=lion"))
    assert found is not None
    assert (found.data.micro_batch_size, found.optimizer.name, asked.data.micro_batch_size) == (2, "lion", 4)
    assert estimation.changed(asked, ("data.micro_batch_size=3",)) is None


def test_a_checkpoint_has_what_is_trained_its_state_and_the_average() -> None:
    words = ["optimizer=adamw", "trainer.precision=32-true", "trainer.accelerator=cpu"]
    for more, copies in (([], 3), (["callbacks.ema.enabled=true"], 4)):
        asked = config(*words, *more)
        estimation.resolve(asked)
        model = estimation.build(asked)
        assert estimation.checkpoint_bytes(model, asked) == copies * 4 * sum(p.numel() for p in model.parameters())


def test_the_facts_of_a_run() -> None:
    asked = config("trainer.max_steps=10", "data.global_batch_size=4", "data.micro_batch_size=2", "trainer.devices=2",
                   "data.seq_len=16", "checkpoint.keep_last=3", "checkpoint.keep_best=2", "trainer.accelerator=cpu",
                   "checkpoint.keep_every=null", "trainer.save_every_n_steps=null")  # fmt: skip
    estimation.resolve(asked)
    model = estimation.build(asked)
    facts = dict(estimation.rows(model, asked, Device("card", 2**33, None)))
    total = sum(p.numel() for p in model.parameters())
    assert f"{total:,} parameters" in facts["model"]
    assert facts["step"] == "4 rows x 16 = 64 tokens"
    assert facts["devices"].startswith("2 x card, 8.0")
    assert "up to 5 kept" in facts["checkpoint"]
    assert facts["bins"].startswith("2 bytes a token, 1.28 kB for 640 different tokens")
    for size, width in ((2**16, 2), (2**16 + 1, 4)):
        model.config.vocab_size = size
        assert dict(estimation.rows(model, asked, Device("card", 2**33, None)))["bins"].startswith(f"{width} bytes")
    asked.checkpoint.keep_every, asked.trainer.save_every_n_steps = 2, 3
    assert "up to 6 kept" in dict(estimation.rows(model, asked, Device("card", 2**33, None)))["checkpoint"]
    asked.trainer.max_steps = None
    assert "in all" not in dict(estimation.rows(model, asked, Device("card", 2**33, None)))["compute"]


# Tuning


def test_micro_batches_are_divisors_each_at_most_half_of_the_one_before() -> None:
    for rows, sizes in ((12, [12, 6, 3, 1]), (7, [7, 1]), (1, [1]), (30, [30, 15, 6, 3, 1]), (16, [16, 8, 4, 2, 1])):
        for devices in (1, 2):
            asked = config(f"data.global_batch_size={rows * devices}", f"data.micro_batch_size={rows}",
                           f"trainer.devices={devices}")  # fmt: skip
            assert tuning.micro_batch_sizes(asked) == sizes


def test_the_largest_micro_batch_that_fits_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(most: int, *words: str) -> tuple[tuning.Found, list[Any]]:
        asked, seen = config("data.global_batch_size=8", "trainer.devices=1", *words, "trainer.accelerator=cpu"), []

        def fits(one: Config, folder: Path) -> tuple[bool, str]:
            seen.append((one.data.micro_batch_size, folder.name))
            return one.data.micro_batch_size <= most, f"of {most}"

        monkeypatch.setattr(tuning, "_estimated", fits)
        result = tuning.Found()
        tuning.largest_micro_batch(asked, tmp_path, result)
        return result, seen

    result, seen = found(4, "data.micro_batch_size=8")
    assert (result.micro_batch_size, seen) == (4, [(8, "rows_8"), (4, "rows_4")])
    assert result.tried == ["data.micro_batch_size=8: of 4", "data.micro_batch_size=4: of 4"]
    assert found(4, "data.micro_batch_size=4")[0].micro_batch_size is None, "it is the config's"
    with pytest.raises(RunError, match=r"one row does not fit \(data.micro_batch_size=1: of 0\)"):
        found(0, "data.micro_batch_size=8")


def test_on_a_cpu_the_memory_is_estimated_for_each_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = [2**30]
    monkeypatch.setattr(tuning, "build_corpus", lambda config: SimpleNamespace(tokenizer="abc"))
    monkeypatch.setattr(estimation, "build", lambda config, tokens: ("model", tokens))
    monkeypatch.setattr(
        estimation, "memory", lambda model, config: {"a": needed[0], "b": len(model) - 2 + model[1] - 3}
    )
    card = int(2 * 2**30 / 0.9) + 1  # a tenth of which is left free
    monkeypatch.setattr(estimation, "device_of", lambda config: Device(str(config.estimate.device), card, None))
    asked = config("trainer.devices=2", "estimate.device=h100")
    assert tuning._estimated(asked, tmp_path) == (
        True, "1.00 GiB by the estimate, of 1.00 GiB that a process can use"
    )  # fmt: skip
    needed[0] += 1
    assert not tuning._estimated(asked, tmp_path)[0]


def test_on_a_gpu_steps_are_tried_on_the_longest_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    monkeypatch.setattr(trial, "config_of", lambda config, folder, steps: given.append(steps))
    monkeypatch.setattr(trial, "run", lambda config, folder, longest_rows: given.append(longest_rows))
    assert tuning._tried(config("trainer.devices=1"), tmp_path) == (True, "fits the longest rows")
    assert tuning._tried(config("trainer.devices=2"), tmp_path) == (True, "fits rows of the first steps")
    assert given == [2, True, 2, False]

    def full(*_: Any, **__: Any) -> None:
        raise trial.OutOfMemory

    monkeypatch.setattr(trial, "run", full)
    assert tuning._tried(config("trainer.devices=1"), tmp_path) == (False, "out of memory on the longest rows")


def test_what_was_found_is_typed_and_put_into_the_config() -> None:
    asked = config("optimizer.lr=0.5")
    nothing = tuning.Found()
    assert nothing.overrides() == []
    nothing.put_into(asked)
    before = asked.data.micro_batch_size
    assert (asked.optimizer.lr, asked.optimizer.groups) == (0.5, [])
    found = tuning.Found(0.00123, [{"pattern": "a", "lr": 1e-3}], 6)
    assert found.overrides()[0] == "optimizer.lr=0.0012"
    assert found.overrides()[1].startswith("optimizer.groups=")
    assert found.overrides()[2] == "data.micro_batch_size=6"
    found.put_into(asked)
    assert (asked.optimizer.lr, asked.optimizer.groups, asked.data.micro_batch_size) == (0.00123, found.groups, 6)
    assert before != 6


def test_rates_of_groups_are_scaled_with_the_base() -> None:
    groups: list[dict[str, Any]] = [{"pattern": "a", "lr": 0.3}, {"pattern": "b"}, {"pattern": "c", "lr": 0.0}]
    scaled = tuning.scaled(groups, 0.1, 0.02)
    assert scaled == [{"pattern": "a", "lr": 0.06}, {"pattern": "b"}, {"pattern": "c", "lr": 0.0}]
    assert tuning.scaled(groups[1:], 0.1, 0.02) is None
    assert tuning.scaled(groups, 0.0, 0.02) is None


def test_a_range_test_trains_from_the_lowest_to_the_highest_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}
    curve = [{"lr": 10 ** (i / 10 - 4), "loss": 4 - i / 10} for i in range(20)]

    def run(tried: Config, folder: Path) -> list[dict[str, Any]]:
        schedule: Any = tried.schedule
        seen.update(lr=tried.optimizer.lr, floor=schedule.min_lr_ratio, groups=tried.optimizer.groups)
        seen.update(ends=tried.callbacks.extra[-1])
        return curve

    monkeypatch.setattr(trial, "run", run)
    groups = "optimizer.groups=[{pattern: wpe, lr: 0.02}]"
    found = tuning.Found()
    tuning.range_test(config("optimizer.lr=0.01", groups, "tune.steps=20"), tmp_path, found)
    assert (seen["lr"], seen["floor"]) == (10.0, pytest.approx(1e-6))
    assert seen["groups"][0]["lr"] == 20.0
    assert (seen["ends"]["diverged"], seen["ends"]["smoothing"], seen["ends"]["steps"]) == (4, 0.8, 20)
    assert found.suggestion is not None
    assert found.lr == float(f"{found.suggestion.lr:.2g}")
    assert found.groups is not None
    assert found.groups[0]["lr"] == pytest.approx(2 * found.lr, rel=1e-2)
    assert "its end was at" in found.tried[0]
    for words, low, high in ((["tune.min_lr=0.001"], 0.001, 10.0), (["tune.max_lr=0.5"], 1e-5, 0.5)):
        tuning.range_test(config("optimizer.lr=0.01", "tune.steps=30", *words), tmp_path, found)
        assert (seen["lr"], seen["floor"] * seen["lr"]) == (high, pytest.approx(low))
    assert "where it diverged was at" in found.tried[-1]
    tuning.range_test(config("optimizer.lr=0", "tune.min_lr=0.001", "tune.max_lr=1", "tune.steps=20"), tmp_path, found)
    for words, said in ((["optimizer.lr=0"], "not the middle of a range"),
                        (["optimizer.lr=0", "tune.min_lr=1"], "not the middle of a range"),
                        (["tune.min_lr=1", "tune.max_lr=1"], "the second has to be the larger")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            tuning.range_test(config(*words), tmp_path, found)
    for row in curve:
        row["loss"] = 4 + row["lr"]
    with pytest.raises(UserError, match=r"did not fall between optimizer.lr=1e-05 and 10 \(20 steps, the last loss is"):
        tuning.range_test(config("optimizer.lr=0.01"), tmp_path, found)


def test_what_was_found_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuning.Found(0.5, curve=[{"lr": 0.1, "loss": 3.0}, {"lr": 1.0, "loss": 2.0}], tried=["x"])
    assert tuning.write(found, tmp_path / "a") == [tmp_path / "a" / "tune.json"]
    found.suggestion = Suggestion(0.5, 0.1, 1.0, [3.0, 2.0])
    drawn: list[Path] = []
    monkeypatch.setattr(tuning, "_draw", lambda found, path: drawn.append(path) or [path])
    assert tuning.write(found, tmp_path / "b") == [tmp_path / "b" / "tune.json", tmp_path / "b" / "lr.png"]
    tree = json.loads((tmp_path / "b" / "tune.json").read_text())
    assert (tree["lr"], tree["overrides"], tree["suggestion"]["lowest"]) == (0.5, ["optimizer.lr=0.5"], 1.0)
    assert tuning.results(config("tune.dir=here")) == Path.cwd() / "here"
    assert tuning.results(config("run.name=mine")).parts[-2:] == ("tune", "mine")


def test_a_trial_differs_in_what_is_shown_saved_and_validated(tmp_path: Path) -> None:
    asked = config("trainer.max_steps=500", "trainer.val_check_interval=7", "trainer.save_every_n_steps=5",
                   "trainer.max_bad_steps=4", "trainer.val_before_training=true",
                   "trainer.max_restarts=2", "checkpoint.async_save=true", "run.name=mine",
                   "run.time_limit=00:10:00")  # fmt: skip
    found = trial.config_of(asked, tmp_path, 9, smoothing=0.5)
    t, run = found.trainer, found.run
    assert (t.max_steps, t.max_epochs, t.val_check_interval, t.save_every_n_steps) == (10, None, None, None)
    assert (t.max_bad_steps, t.val_before_training, t.max_restarts) == (2**31 - 1, False, 0)
    assert t.fast_dev_run is False
    assert (run.name, run.dir, run.resume, run.time_limit) == (None, str(tmp_path / "run"), "none", None)
    assert (found.export.enabled, found.report.enabled, found.checkpoint.async_save) == (False, False, False)
    assert (found.callbacks.early_stopping.enabled, found.callbacks.samples.every_n_validations) == (False, 0)
    assert found.callbacks.progress.style == "none"
    assert found.logger == {}
    assert found.callbacks.extra[-1] == {
        "_target_": "lmtrain.callbacks.stopping.EndsEarly", "path": str(tmp_path / "curve.jsonl"), "steps": 9,
        "smoothing": 0.5,
    }  # fmt: skip
    assert asked.trainer.max_steps == 500
    assert found.data == asked.data


# Budgets


def test_the_next_depth_to_measure() -> None:
    """Alone, half the depth if it looks best, else the best one, at most three times as deep."""
    for best, measured, then in (
        (8, [8], 4), (1, [1], None), (12, [8], 12), (30, [8], 24), (3, [8], 3), (10, [8, 4], None),
        (12, [8, 4], None), (13, [8, 4], 13), (40, [4, 8], 24), (2, [8, 4], None),
    ):  # fmt: skip
        assert budget._next_to_measure(best, measured) == then, (best, measured)


def test_rows_of_the_dial_are_spread_over_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_FORWARD_TOKENS", 4 * 2048)
    rows = ["data.global_batch_size=10", "data.micro_batch_size=2"]

    def split(*words: str, length: int = 2048, typed: tuple[str, ...] = ()) -> tuple[int, int]:
        words = ("model=dial", "data=text", "data.path=a", "tokenizer=bytes", *rows, f"data.seq_len={length}", *words)
        asked = rules.check(rules.compose(list(words)))
        budget._split(asked, dict.fromkeys(typed, ""))
        return asked.data.global_batch_size, asked.data.micro_batch_size

    assert split("trainer.devices=1") == (10, 5), "the divisor of 10 that is nearest to 4"
    assert split("trainer.devices=4") == (12, 3)
    assert split("trainer.devices=2", "trainer.num_nodes=2") == (12, 3)
    assert split("trainer.devices=5") == (10, 2)
    assert split("trainer.devices=5", typed=("data.micro_batch_size",)) == (10, 2)
    assert split("trainer.devices=1", length=1024) == (10, 10)
    assert split("trainer.devices=4", typed=("data.micro_batch_size",)) == (12, 2)
    assert split("trainer.devices=4", typed=("data.global_batch_size",)) == (10, 2)
    other = config("data.global_batch_size=10", "data.micro_batch_size=2", "trainer.devices=4")
    budget._split(other, {})
    assert (other.data.global_batch_size, other.data.micro_batch_size) == (10, 2)


def test_values_by_a_rule_follow_the_depth_and_others_stay() -> None:
    asked = rules.check(rules.compose(["model=dial", "data=text", "data.path=a", "tokenizer=bytes", "model.depth=4",
                                       "optimizer.lr=0.123"]))  # fmt: skip
    other, rule = budget._at_depth(asked, 8), dial.recipe(8)
    assert asked.model.num_hidden_layers == 4  # type: ignore[attr-defined]
    assert (other.model.num_hidden_layers, other.optimizer.lr) == (8, 0.123)  # type: ignore[attr-defined]
    assert other.model.hidden_size == rule["model.hidden_size"] != asked.model.hidden_size  # type: ignore[attr-defined]


def test_a_step_within_the_time_left_pays_for_its_share_of_a_validation() -> None:
    took = budget.Measured(starting=10.0, step=2.0, validation=8.0)
    every = config("budget.minutes=5", "trainer.val_check_interval=4")
    left = 300 - 10 - 8 - budget.ENDING_S
    assert budget.steps_within(300.0, took, every) == int(left / 4.0)
    assert budget.steps_within(300.0, took, config("budget.minutes=5", "trainer.val_check_interval=null")) == int(
        left / 2
    )
    just = 10 + 8 + budget.ENDING_S + 10 * 4.0
    assert budget.steps_within(just, took, every) == 10
    with pytest.raises(UserError, match=r"only 9 steps of 2\.00 s"):
        budget.steps_within(just - 1, took, every)
    with pytest.raises(UserError, match="only 0 steps"):
        budget.steps_within(5.0, took, every)
    slow = budget.Measured(starting=10.0, step=20.0, validation=8.0)  # for ten steps of 300 s, 219 s less are left
    with pytest.raises(UserError, match=r"preparing \(59 s\).* only 9 steps of 20.00 s: give it 4\.7 minutes"):
        budget.steps_within(219 + 10 + 8 + budget.ENDING_S, slow, every)


def test_a_measured_step_is_the_median_of_the_later_half(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0, 9.0, 12.0, 13.0, 15.0, 18.0]  # steps of 9, 3, 1, 2 and 3 seconds
    monkeypatch.setattr(budget, "_alone", lambda config, corpus: (7.0, times))
    monkeypatch.setattr(budget, "_on_ranks", lambda config: (70.0, times))
    monkeypatch.setattr(budget, "_validation", lambda config, corpus, step: 10 * step)
    monkeypatch.setattr(budget.ranks, "find", lambda: None)
    corpus: Any = None
    plain = config("trainer.devices=1", "trainer.compile=false", "trainer.accelerator=cpu")
    assert budget.measure(plain, corpus) == budget.Measured(7.0, 2.0, 20.0)
    compiled = config("trainer.devices=1", "trainer.compile=true", "trainer.accelerator=cpu")
    assert budget.measure(compiled, corpus) == budget.Measured(27.0, pytest.approx(1.36), pytest.approx(13.6))
    assert budget.measure(config("trainer.devices=2", "trainer.compile=false"), corpus).starting == 70.0
    monkeypatch.setattr(budget.ranks, "find", lambda: "a layout")
    assert budget.measure(plain, corpus).starting == 70.0


def test_a_run_goes_on_with_the_steps_that_were_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget.run_dir, "locate", lambda config: tmp_path)
    mode = ["auto"]
    monkeypatch.setattr(budget.run_dir, "resume_mode", lambda config: mode[0])
    asked = config()
    assert budget._chosen_before(asked) is None
    for steps, kept in ((7, True), (1, True), (0, False), ("null", False), ("x", False)):
        (tmp_path / "config.yaml").write_text(f"trainer: {{max_steps: {steps}}}\n")
        assert (budget._chosen_before(asked) is not None) == kept, steps
    (tmp_path / "config.yaml").write_text("[1]")
    assert budget._chosen_before(asked) is None
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 7}\n")
    mode[0] = "none"
    assert budget._chosen_before(asked) is None


def test_ranks_of_one_node_are_tried_on_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(tried: Config, folder: Path) -> list[dict[str, Any]]:
        seen.append(
            (tried.data.global_batch_size, tried.trainer.num_nodes, tried.budget.minutes, tried.trainer.max_steps)
        )
        return [{"time": 105.0}, {"time": 107.0}]

    monkeypatch.setattr(trial, "run", run)
    monkeypatch.setattr(budget.time, "time", lambda: 100.0)
    asked = config("data.global_batch_size=8", "data.micro_batch_size=2", "trainer.num_nodes=2", "budget.minutes=5",
                   f"run.root={tmp_path}", "trainer.devices=2")  # fmt: skip
    assert budget._on_ranks(asked) == (5.0, [105.0, 107.0])
    assert seen == [(4, 1, None, 21)]
    assert (asked.data.global_batch_size, asked.trainer.num_nodes) == (8, 2)
    monkeypatch.setattr(budget.time, "time", lambda: 106.0)
    assert budget._on_ranks(asked)[0] == 0.0
    assert math.isfinite(asked.budget.minutes or math.nan)


def test_the_picture_shows_the_smoothed_losses_with_a_fifth_of_their_fall_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    found = tuning.Found(0.5, curve=[{"lr": 10.0**-k, "loss": 9.0} for k in (3, 2, 1)], tried=[])
    found.suggestion = Suggestion(0.5, 0.1, 1.0, [4.0, 3.0])
    axes: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: axes.extend(self.axes))
    assert tuning._draw(found, tmp_path / "lr.png") == [tmp_path / "lr.png"]
    (axis,) = axes
    assert axis.get_ylim() == pytest.approx((2.8, 4.2))
    assert [line.get_xdata()[-1] for line in axis.lines[:2]] == [0.1, 0.01]


# A continued run


def test_a_continued_run_keeps_what_its_budget_had_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {
        "trainer": {"max_steps": 321, "val_check_interval": 40},
        "optimizer": {"weight_decay": 0.25},
        "model": {"dropout": 0.125},
    }
    monkeypatch.setattr(budget, "_chosen_before", lambda config: before)
    for measured, typed in ((True, {}), (False, {}), (True, {"model.dropout": 0, "trainer.val_check_interval": 7})):
        monkeypatch.setattr(budget.dial, "is_measured", lambda config, measured=measured: measured)
        asked = config("budget.minutes=5", "trainer.val_check_interval=7")
        asked.trainer.max_epochs, kept = None, asked.optimizer.weight_decay
        budget._settle_minutes(asked, 0.0, typed, None)
        assert asked.trainer.max_steps == 321
        assert asked.trainer.val_check_interval == (7 if typed else 40)
        assert asked.optimizer.weight_decay == (0.25 if measured else kept)
        assert asked.model.dropout == (0.125 if measured and not typed else 0.0)
        assert asked.trainer.max_epochs == budget.EPOCHS["text"]


@pytest.mark.parametrize(("reference", "method", "copies"), [
    ("auto", "none", 1), ("frozen_copy", "none", 1), ("none", "none", 0), ("precomputed", "none", 0),
    ("auto", "lora", 0), ("frozen_copy", "lora", 0),
])  # fmt: skip
def test_a_frozen_copy_takes_the_memory_of_the_weights(
    reference: str, method: str, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimation.flops, "memory_estimate", lambda *_: {"weights": 1, "gradients": 30})
    asked: Any = SimpleNamespace(
        estimate=SimpleNamespace(device=None),
        objective=SimpleNamespace(reference_in_use=lambda: reference, other_models=lambda config: []),
        peft=SimpleNamespace(method=method),
    )
    model: Any = None
    assert sum(estimation.memory(model, asked).values()) == 31 + 30 * copies
