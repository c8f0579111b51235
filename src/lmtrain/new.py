"""The skeleton of a class of your own, with a test of it: `python -m lmtrain.new objective my_thing`."""

import argparse
import re
import sys
from pathlib import Path
from string import Template

from lmtrain import cli, errors
from lmtrain.errors import UserError

# A test trains two steps of a tiny model on the standard library's text.
TINY = '''SMALL = [
    "data=python_stdlib", "data.num_samples=20", "data.seq_len=32", "data.global_batch_size=4",
    "data.micro_batch_size=2", "tokenizer=bytes", "model.num_hidden_layers=1", "model.num_attention_heads=2",
    "model.hidden_size=32", "model.max_position_embeddings=32", "trainer.max_steps=2", "trainer.precision=32-true",
    "trainer.log_every_n_steps=1", "logger=none", "run.allow_target=[$name]",
]


def losses(run_dir, *overrides):
    """Trains; the loss of each step."""
    assert train.main([*SMALL, f"run.dir={run_dir}", f"data.cache_dir={run_dir}_cache", *overrides]) == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row["train/loss"] for row in map(json.loads, lines) if "train/loss" in row]'''

HEAD = """import json

import pytest

from lmtrain import train

"""

OBJECTIVE = '''"""What $cls learns. Train with it:

python -m lmtrain.train objective=custom objective._target_=$name.$cls run.allow_target=[$name] +objective.scale=2.0
"""

from dataclasses import dataclass
from typing import Annotated

from lmtrain.config import schema
from lmtrain.config.constraints import TRAJECTORY, above_zero
from lmtrain.data.text.windows import IGNORE
from lmtrain.objectives.base import LossParts, Objective


@dataclass(kw_only=True)
class ${cls}Options(schema.Objective):
    """The keys under objective: each says its type, what it shapes (TRAJECTORY: what is learned), its constraint."""

    scale: Annotated[float, TRAJECTORY, above_zero] = 1.0


class $cls(Objective):
    """Next-token prediction, its loss times objective.scale."""

    Options = ${cls}Options

    def prepare(self, config, corpus):
        self.scale = config.objective.scale

    def count_tokens(self, batch):
        """int64 []: what the sums below are divided by."""
        return (batch["labels"] != IGNORE).sum()

    def micro_batch_loss(self, batch):
        """batch: input_ids and labels, int64 [B, T], labels shifted. Sums over its tokens, never means."""
        out = self.call_model(**batch)
        return LossParts(self.scale * out.loss_sum, out.n_tokens, {"loss": self.scale * out.nll_sum})
'''
OBJECTIVE_TEST = (
    HEAD
    + TINY
    + """


def test_its_loss_is_the_scale_times_the_plain_one(tmp_path):
    mine = ["objective=custom", "objective._target_=$name.$cls", "optimizer.lr=0"]
    plain = losses(tmp_path / "plain", *mine)
    assert losses(tmp_path / "twice", *mine, "+objective.scale=2.0") == pytest.approx([2 * x for x in plain])
"""
)

OPTIMIZER = '''"""How $cls steps. Train with it:

python -m lmtrain.train optimizer=custom optimizer._target_=$name.$cls run.allow_target=[$name] +optimizer.momentum=0.8
"""

import torch


class $cls(torch.optim.Optimizer):
    """Gradient descent with momentum and decoupled weight decay."""

    def __init__(self, params, lr=1e-3, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]  # saved in checkpoints: tensors and plain values only
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["momentum"])
'''
OPTIMIZER_TEST = (
    HEAD.replace("import pytest\n\n", "")
    + TINY
    + """


def test_it_lowers_the_loss_and_resumes(tmp_path):
    mine = ["optimizer=custom", "optimizer._target_=$name.$cls", "optimizer.lr=0.1", "schedule=constant",
            "schedule.warmup_steps=0", "+optimizer.momentum=0.5"]
    straight = losses(tmp_path / "straight", *mine, "trainer.max_steps=6")
    assert straight[-1] < straight[0]
    for steps in (3, 6):
        resumed = losses(tmp_path / "resumed", *mine, "run.resume=auto", f"trainer.max_steps={steps}")
    assert resumed == straight
"""
)

CALLBACK = '''"""What $cls does while a model trains. Train with it:

python -m lmtrain.train 'callbacks.extra=[{_target_: $name.$cls, every: 10}]' run.allow_target=[$name]
"""

import lightning.pytorch as pl


class $cls(pl.Callback):
    """Notes the gradient's norm every so many steps."""

    seen = []

    def __init__(self, every=1):
        self.every = every

    def on_train_batch_end(self, trainer, objective, outputs, batch, batch_idx):
        step = objective.last_step  # of lmtrain.objectives.base.StepResult
        if step.step % self.every == 0:
            self.seen.append((step.step, step.grad_norm.item()))
'''
CALLBACK_TEST = (
    HEAD.replace("import pytest\n\n", "")
    + "from $name import $cls\n\n"
    + TINY
    + """


def test_it_sees_every_step(tmp_path):
    losses(tmp_path / "run", "callbacks.extra=[{_target_: $name.$cls, every: 1}]")
    assert [step for step, _ in $cls.seen] == [1, 2]
    assert all(norm > 0 for _, norm in $cls.seen)
"""
)

METRIC = '''"""How $cls scores answers. Train with it:

python -m lmtrain.train objective=sft ... 'callbacks.samples.metrics=[{_target_: $name.$cls}]' \\\\
    callbacks.samples.every_n_validations=1 run.allow_target=[$name]
"""

import torch
from torchmetrics import Metric


class $cls(Metric):
    """The share of answers that begin with the reference's first word."""

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds, target):
        """Two lists of texts: the model's answers and the references."""
        self.right += sum(p.split()[:1] == t.split()[:1] for p, t in zip(preds, target, strict=True))
        self.seen += len(target)

    def compute(self):
        return self.right / self.seen
'''
METRIC_TEST = """import pytest

from lmtrain.outputs.text_metrics import TextMetrics


def test_it_scores_as_lmtrain_calls_it():
    metrics = TextMetrics([{"_target_": "$name.$cls"}], ["$name"])
    scores = metrics.score(["yes it is", "no"], ["yes", "maybe not"])
    assert scores == pytest.approx({"$cls": 0.5})
"""

KINDS = {
    "objective": (OBJECTIVE, OBJECTIVE_TEST),
    "optimizer": (OPTIMIZER, OPTIMIZER_TEST),
    "callback": (CALLBACK, CALLBACK_TEST),
    "metric": (METRIC, METRIC_TEST),
}


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Writes <name>.py and test_<name>.py.

    Raises:
        UserError: an unknown kind, a name that no module can have, a file that is there already.
    """
    if kind not in KINDS:
        raise UserError(f"there is no skeleton of {kind!r}: {', '.join(KINDS)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{name!r} can't name a module: use small letters, digits and _, such as my_thing")
    cls = "".join(part.capitalize() for part in name.split("_"))
    files = [folder / f"{name}.py", folder / f"test_{name}.py"]
    for file, text in zip(files, KINDS[kind], strict=True):
        if file.exists():
            raise UserError(f"{file} is there already: choose another name, or move it away")
        file.write_text(Template(text).substitute(name=name, cls=cls), encoding="utf-8")
    return files


def _write_and_say(kind: str, name: str) -> int:
    files = write(kind, name, Path())
    print(f"{files[0]}  (its first lines say how to train with it; python -m pytest {files[1]} tests it)")
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.new", description=cli.OTHERS["new"])
    parser.add_argument("kind", help=", ".join(KINDS))
    parser.add_argument("name", help="of the module, such as my_thing; its class is MyThing")
    args = parser.parse_args(argv)
    return cli.plain(lambda: _write_and_say(args.kind, args.name))


if __name__ == "__main__":
    sys.exit(main())
