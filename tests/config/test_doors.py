"""Classes that the config names by `_target_`: their options, and the messages about classes that don't fit."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel

from chats import write_rows
from inprocess import Ended, run, train_tiny
from lmtrain.config import compose as rules
from lmtrain.config import schema
from lmtrain.config.constraints import RATE, TRAJECTORY, above_zero
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.examples.unpaired_rows import UnpairedRowEncoder
from lmtrain.data.text.windows import IGNORE
from lmtrain.errors import UserError
from lmtrain.objectives.base import Objective
from lmtrain.objectives.kto import KTOOptions
from lmtrain.objectives.parts import LossParts
from lmtrain.optim.schedules import LRSchedule
from support import EXPORT, rows

HERE = "run.allow_target=[test_doors]"


@dataclass(kw_only=True)
class WeightedOptions(schema.ObjectiveConfig):
    weight: Annotated[float, TRAJECTORY, above_zero] = 2.0


class Weighted(Objective):
    """Next-token prediction with the loss multiplied by a weight."""

    Options = WeightedOptions

    def prepare(self, config: schema.Config, corpus: Corpus) -> None:
        assert isinstance(config.objective, WeightedOptions)
        self.weight = config.objective.weight

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        out = self.call_model(**batch)
        return LossParts(self.weight * out.loss_sum, out.n_tokens, {"loss": self.weight * out.nll_sum})


class Raises(Weighted):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ArithmeticError("no\nsuch number")


class NoOptions:
    pass


class NoLoss(Objective):
    Options = WeightedOptions

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()


@dataclass(kw_only=True)
class Unmarked(schema.ObjectiveConfig):
    plain: int = 0


class WithUnmarked(Weighted):
    Options = Unmarked  # type: ignore[assignment]


def custom(corpus: Path, name: str, *argv: str) -> Ended:
    return train_tiny(corpus, "objective=custom", f"objective._target_=test_doors.{name}", HERE, *argv)


def test_an_objective_of_ones_own_trains_with_its_options(corpus: Path, tmp_path: Path) -> None:
    losses = {}
    for weight in ("2.0", "6.0"):
        run_dir = tmp_path / weight
        ended = custom(corpus, "Weighted", f"+objective.weight={weight}", f"run.dir={run_dir}", "optimizer.lr=0")
        assert ended.code == 0, ended.err
        losses[weight] = [r["train/loss"] for r in rows(run_dir / "metrics.jsonl") if "train/loss" in r]
    assert losses["6.0"] == pytest.approx([3 * loss for loss in losses["2.0"]], rel=1e-5)
    refused = custom(corpus, "Weighted", "+objective.weight=3.0", f"run.dir={tmp_path}/2.0", "run.resume=auto",
                     "trainer.max_steps=3")  # fmt: skip
    assert refused.code == 2
    assert "objective.weight (then 2.0, now 3.0)" in refused.err


REFUSED = {
    "no objective": (["NoOptions"], r"objective: _target_=test_doors.NoOptions is not an objective: it has no Options"),
    "without its loss": (["NoLoss"], r"objective: _target_=test_doors.NoLoss lacks micro_batch_loss"),
    "no such class": (["Wieghted"], r"objective: _target_=test_doors.Wieghted can't be imported"),
    "no such option": (["Weighted", "+objective.weihgt=1"], r"'objective.weihgt'; did you mean objective.weight"),
    "out of its range": (["Weighted", "+objective.weight=0"], r"objective.weight=0.0: a number above 0 is needed"),
    "an option that shapes nothing": (["WithUnmarked"], r"Options of test_doors.WithUnmarked: objective.plain: say in"),
    "raises": (["Raises"], r"objective: test_doors.Raises raised ArithmeticError: no such number"),
    "not allowed": (["Weighted", "run.allow_target=[]"], r"run\.allow_target=\[test_doors\]"),
    "another kind of rows": (["Weighted", "data=chat_jsonl"], r"objective=custom needs text, and this data holds conv"),
    "no class": (["Weighted", "objective._target_=null"], r"set objective\._target_=<package\.module\.Class>"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_message(case: str, corpus: Path, tmp_path: Path) -> None:
    (name, *argv), said = REFUSED[case]
    ended = custom(corpus, name, f"run.dir={tmp_path}/run", *argv)
    assert ended.code == 2, ended.err
    assert re.search(said, ended.err), ended.err
    assert ended.err.strip().splitlines()[-1].startswith("error: ")


class BrokenRows(UnpairedRowEncoder):
    def __init__(self, tokenizer: Any, cfg: schema.DataConfig) -> None:
        raise ArithmeticError("no such row")


NO_ROWS = {
    "a name": ("chats", r"data\.rows=chats is not known: text, conversations, pairs, or the path of a class"),
    "not allowed": ("shutil.rmtree", r"data\.rows: _target_=shutil\.rmtree is outside the known packages"),
    "no class": ("test_doors.Nothing", r"data\.rows: _target_=test_doors\.Nothing can't be imported"),
    "methods missing": (
        "test_doors.NoOptions",
        r"data\.rows=test_doors\.NoOptions is not a row format: it lacks group",
    ),
    "raises": ("test_doors.BrokenRows", r"data\.rows: test_doors\.BrokenRows raised ArithmeticError: no such row"),
}


@pytest.mark.parametrize("case", NO_ROWS)
def test_a_row_format_that_does_not_fit_is_refused_in_one_message(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, said = NO_ROWS[case]
    path = write_rows(tmp_path / "rows.jsonl", "unpaired_jsonl")
    composed = rules.compose(["objective=kto", "data=unpaired_jsonl", f"data.path={path}", "tokenizer=bytes",
                              "data.chat_template=vicuna", "data.seq_len=64", f"data.rows={named}", HERE])  # fmt: skip
    monkeypatch.setattr(KTOOptions, "rows", named)  # as a user's objective would set it
    with pytest.raises(UserError, match=said):
        build_corpus(rules.check(composed))


class SignDescent(torch.optim.Optimizer):
    """Moves every parameter by lr times `share` times the sign of its gradient."""

    def __init__(self, params: Any, lr: float = 1e-3, share: float = 1.0) -> None:
        if share <= 0:
            raise ValueError("share must be above 0")
        super().__init__(params, {"lr": lr, "share": share})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    p.sub_(group["lr"] * group["share"] * p.grad.sign())


def optimizer(corpus: Path, run_dir: Path, target: str, *argv: str) -> Ended:
    return train_tiny(corpus, EXPORT, "optimizer=custom", f"optimizer._target_={target}", f"run.dir={run_dir}", *argv)


def weights(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def test_an_optimizer_of_ones_own_moves_the_weights_as_it_says(corpus: Path, tmp_path: Path) -> None:
    argv = [HERE, "optimizer.lr=0.01", "schedule=constant", "schedule.warmup_steps=0", "data.val_fraction=0"]
    argv += ["trainer.max_steps=1", "export.dtype=float32"]
    still = optimizer(corpus, tmp_path / "still", "test_doors.SignDescent", *argv, "optimizer.lr=0")
    moved = optimizer(corpus, tmp_path / "moved", "test_doors.SignDescent", *argv, "+optimizer.share=0.5")
    assert still.code == moved.code == 0, still.err + moved.err
    before, after = weights(tmp_path / "still"), weights(tmp_path / "moved")
    steps = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    moving = steps[steps > 1e-4]
    assert len(moving) > 0.5 * len(steps)
    torch.testing.assert_close(moving, torch.full_like(moving, 0.005), rtol=1e-3, atol=1e-6)


def test_torchs_own_by_its_class_is_what_its_name_is_and_resumes(corpus: Path, tmp_path: Path) -> None:
    named = train_tiny(corpus, EXPORT, "optimizer=adamw", f"run.dir={tmp_path}/named")
    assert named.code == 0, named.err
    argv = ["torch.optim.AdamW", "+optimizer.betas=[0.9,0.95]", "+optimizer.eps=1e-8", "run.resume=auto"]
    assert optimizer(corpus, tmp_path / "run", *argv).code == 0
    again = optimizer(corpus, tmp_path / "run", *argv, "trainer.max_steps=4", "run.schedule_on_resume=keep")
    assert again.code == 0, again.err
    ours, theirs = (
        [r["train/loss"] for r in rows(tmp_path / name / "metrics.jsonl") if "train/loss" in r]
        for name in ("run", "named")
    )
    assert ours[:2] == pytest.approx(theirs, rel=1e-6)
    assert len(ours) == 4
    changed = optimizer(corpus, tmp_path / "run", "torch.optim.AdamW", "+optimizer.betas=[0.9,0.99]",
                        "+optimizer.eps=1e-8", "run.resume=auto", "trainer.max_steps=5")  # fmt: skip
    assert "optimizer.betas (then [0.9, 0.95], now [0.9, 0.99])" in changed.err


WRONG = {
    "no optimizer": (["torch.nn.Linear"], r"optimizer: _target_=torch\.nn\.Linear is not an Optimizer: derive it from"),
    "no such argument": (["torch.optim.RAdam", "+optimizer.beta=1"], r"argument 'beta'; did you mean betas\?"),
    "raises": (["test_doors.SignDescent", "+optimizer.share=0"], r"SignDescent raised ValueError: share must be above"),
    "no parameter groups": (["torch.optim.LBFGS"], r"optimizer: torch\.optim\.LBFGS raised ValueError: LBFGS"),
    "no class": (["torch.optim.RAdamm"], r"optimizer: _target_=torch\.optim\.RAdamm can't be imported"),
    "not allowed": (["shutil.rmtree"], r"optimizer: _target_=shutil\.rmtree is outside the known packages"),
    "without a plus": (["torch.optim.RAdam", "optimizer.betas=[0,0]"], r"write \+optimizer\.betas=\.\.\."),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_optimizer_that_does_not_fit_is_refused_in_one_message(case: str, corpus: Path, tmp_path: Path) -> None:
    argv, said = WRONG[case]
    ended = optimizer(corpus, tmp_path / "run", *argv, HERE)
    assert ended.code == 2, ended.err
    assert re.search(said, ended.err), ended.err


class DecoderConfig(PretrainedConfig):
    model_type = "test_doors"
    vocab_size: int = 8
    hidden_size: int = 16
    num_hidden_layers: int = 1
    num_attention_heads: int = 1


class Decoder(PreTrainedModel, GenerationMixin):
    """A class with everything that is required of it, but not a real model."""

    config_class = DecoderConfig
    _no_split_modules = ("Linear",)  # type: ignore[assignment]

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


class NoForward(PreTrainedModel, GenerationMixin):
    config_class = DecoderConfig


class NoGeneration(PreTrainedModel):
    config_class = DecoderConfig
    forward = Decoder.forward


class NoBlocks(Decoder):
    _no_split_modules = None


class NoConfig(PreTrainedModel, GenerationMixin):
    _no_split_modules = ("Linear",)  # type: ignore[assignment]
    forward = Decoder.forward


class NarrowConfig(PretrainedConfig):
    vocab_size: int = 8
    width: int = 16


class OtherNames(Decoder):
    config_class = NarrowConfig


class RaisesToo(Decoder):
    def __init__(self, config: PretrainedConfig) -> None:
        raise ArithmeticError("no such width")


NO_MODEL = {
    "no class": ([], r"set model\._target_=<package\.module\.Class>"),
    "not allowed": (["shutil.rmtree"], r"model: _target_=shutil\.rmtree is outside the known packages"),
    "no model": (["torch.nn.Linear"], r"model: _target_=torch\.nn\.Linear is not a PreTrainedModel: derive it from"),
    "without forward": (["test_doors.NoForward"], r"NoForward lacks forward\(input_ids"),
    "without generate": (["test_doors.NoGeneration"], r"NoGeneration lacks generate.* GenerationMixin"),
    "without blocks": (["test_doors.NoBlocks"], r"NoBlocks lacks _no_split_modules"),
    "without a config": (["test_doors.NoConfig"], r"NoConfig lacks config_class"),
    "other names": (["test_doors.OtherNames"], r"lacks hidden_size, num_hidden_layers, num_attention_heads in its con"),
    "no such field": (["test_doors.Decoder", "+model.hiden_size=8"],
                      r"model\.hiden_size: DecoderConfig of test_doors\.Decoder has no such field; did you mean "
                      r"model\.hidden_size\? it has hidden_size, num_hidden_layers, num_attention_heads"),
    "a wrong type": (["test_doors.Decoder", "+model.hidden_size=wide"],
                     r"model\.hidden_size=wide: a whole number is needed"),
    "no dropout": (["test_doors.Decoder", "model.dropout=0.1"], r"model\.dropout=0\.1: DecoderConfig has no field"),
    "no positions": (["test_doors.Decoder", "model.max_position_embeddings=64"],
                     r"model\.max_position_embeddings=64: DecoderConfig has no such field; make it null"),
    "raises": (["test_doors.RaisesToo"], r"model: test_doors\.RaisesToo raised ArithmeticError: no such width"),
    "without a body": (["test_doors.Decoder"], r"model: test_doors\.Decoder needs a body.* and lm_head"),
    "pretrained": (["test_doors.Decoder", "model.init=pretrained", "+model.name_or_path=x"],
                   r"starts from scratch; to train its export on: model=pretrained"),
}  # fmt: skip
QUICK = ["tokenizer=bytes", "data=text", "data.seq_len=16", "trainer.max_steps=1", "logger=none"]


@pytest.mark.parametrize("case", NO_MODEL)
def test_a_model_that_does_not_fit_is_refused_in_one_message(case: str, corpus: Path, tmp_path: Path) -> None:
    argv, said = NO_MODEL[case]
    named = [f"model._target_={argv[0]}", *argv[1:]] if argv else []
    ended = run("train", *QUICK, f"data.path={corpus}", "model=custom", *named, HERE, f"run.dir={tmp_path}/run")
    assert ended.code == 2, ended.err
    assert re.search(said, ended.err), ended.err
    assert ended.err.strip().splitlines()[-1].startswith("error: ")


@dataclass(kw_only=True)
class LevelOptions(schema.ScheduleConfig):
    level: Annotated[float, RATE, above_zero] = 0.5


class Level(LRSchedule):
    Options = LevelOptions

    def factor(self, step: int, total_steps: int) -> float:
        assert isinstance(self.options, LevelOptions)
        return self.options.level


class NoFactor(LRSchedule):
    pass


class Counts(LRSchedule):
    """A schedule that counts its calls, which no resumed run could know."""

    calls = 0

    def factor(self, step: int, total_steps: int) -> float:
        self.calls += 1
        return 1 / self.calls


class Nan(LRSchedule):
    def factor(self, step: int, total_steps: int) -> float:
        return float("nan")


class Divides(LRSchedule):
    def factor(self, step: int, total_steps: int) -> float:
        return 1 / (step - step)


NO_SCHEDULE = {
    "no class": (["null"], r"set schedule\._target_=<package\.module\.Class>"),
    "not allowed": (["shutil.rmtree"], r"schedule: _target_=shutil\.rmtree is outside the known packages"),
    "no schedule": (["torch.optim.lr_scheduler.StepLR"], r"StepLR is not a schedule: it has no Options, a dataclass"),
    "another kind": (["test_doors.Weighted"], r"schedule: _target_=test_doors\.Weighted is not a schedule"),
    "without factor": (["test_doors.NoFactor"], r"schedule: _target_=test_doors\.NoFactor lacks factor"),
    "no such option": (["test_doors.Level", "+schedule.levle=1"], r"'schedule.levle'; did you mean schedule\.level"),
    "out of its range": (["test_doors.Level", "+schedule.level=0"], r"schedule\.level=0\.0: a number above 0"),
    "remembers": (["test_doors.Counts"], r"Counts gives .* when asked again: its factor must depend on its arguments"),
    "no number": (["test_doors.Nan"], r"schedule: test_doors\.Nan gives nan for step 1: a number from 0 up is needed"),
    "raises": (["test_doors.Divides"], r"schedule: test_doors\.Divides raised ZeroDivisionError"),
}


@pytest.mark.parametrize("case", NO_SCHEDULE)
def test_a_schedule_that_does_not_fit_is_refused_in_one_message(case: str, corpus: Path, tmp_path: Path) -> None:
    (name, *argv), said = NO_SCHEDULE[case]
    ended = train_tiny(corpus, "schedule=custom", f"schedule._target_={name}", *argv, HERE, f"run.dir={tmp_path}/run")
    assert ended.code == 2, ended.err
    assert re.search(said, ended.err), ended.err
