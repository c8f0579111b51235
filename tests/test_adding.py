"""Tests how many files of lmtrain change when a feature is added, in a copy of the tree that is run as users run it.

Extensions that change no file, since the config names a user's class, are tested by tests/docs/test_extending.py
(model, schedule, data source) and tests/config/test_doors.py; features across packages by tests/run/test_features.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO

PAGE = (REPO / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))

VERB = '''"""Says hello."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def hello(config: Config) -> int:
    print(f"hello, seed {config.seed}")
    return 0


main = cli.main_of("hello", hello)


if __name__ == "__main__":
    sys.exit(main())
'''


class Tree:
    """A copy of lmtrain and conf/ that a test may change."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for part in ("src/lmtrain", "conf"):
            shutil.copytree(REPO / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))

    def insert(self, file: str, before: str, line: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert text.count(before) == 1, f"{file} has {text.count(before)} of {before!r}"
        path.write_text(text.replace(before, line + before))

    def changed(self) -> list[str]:
        """Returns the files of the copy that differ from lmtrain's own, without new files."""
        own = {p.relative_to(REPO) for part in ("src/lmtrain", "conf") for p in (REPO / part).rglob("*.*")}
        return sorted(
            str(p)
            for p in own
            if p.suffix in (".py", ".yaml", ".txt") and (REPO / p).read_bytes() != (self.root / p).read_bytes()
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(self.root / "src")}
        return subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False, cwd=self.root, env=environ
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_a_verb_changes_one_file(tree: Tree) -> None:
    (tree.root / "src" / "lmtrain" / "hello.py").write_text(VERB)
    tree.insert("src/lmtrain/cli.py", '    "verify": ', '    "hello": "says hello",\n')
    assert tree.changed() == ["src/lmtrain/cli.py"]
    assert tree.run("lmtrain.hello", "seed=7").stdout == "hello, seed 7\n"
    assert "says hello" in tree.run("lmtrain").stdout
    wrong = tree.run("lmtrain.hello", "seeed=7")
    assert (wrong.returncode, "seed" in wrong.stderr) == (2, True)


def test_a_key_changes_two_files(tree: Tree) -> None:
    tree.insert("conf/run/default.yaml", "quiet: false", "greeting: null # what a run says first, a word\n")
    tree.insert("src/lmtrain/config/schema.py", "    quiet: ", "    greeting: Annotated[str | None, SHOWN]\n")
    assert tree.changed() == ["conf/run/default.yaml", "src/lmtrain/config/schema.py"]
    assert "greeting: hi" in tree.run("lmtrain.train", "run.greeting=hi", "--cfg").stdout
    assert "what a run says first, a word" in tree.run("lmtrain.explain", "run.greeting").stdout
    wrong = tree.run("lmtrain.train", "run.greting=hi", "--cfg")
    assert (wrong.returncode, "run.greeting" in wrong.stderr) == (2, True)


LOSS = """def squared(r: Ratios, o: LossOptions) -> Tensor:
    return (o.beta * (r.chosen - r.rejected) - o.target).square()


"""
ROWS = FILES["questions.py"]  # of docs/extending.md
SIGNS = """def _signs(groups: Groups, cfg: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=cfg.momentum)


"""
SIGNS_KEYS = """@dataclass(kw_only=True)
class SignsConfig(OptimizerConfig):
    momentum: Annotated[float, TRAJECTORY, share]

    def state_bytes(self, name: str, shape: Sequence[int], itemsize: int) -> float:
        return itemsize


"""
OPTIONS = "src/lmtrain/config/options.py"
SMALL = ["model=tiny", "tokenizer=bytes", "data.seq_len=64", "trainer.accelerator=cpu", "trainer.precision=32-true",
         "logger=none", "trainer.max_steps=1", "report.enabled=false", "export.enabled=false", "data.val_fraction=0.4",
         "data.global_batch_size=4", "data.micro_batch_size=2", "callbacks.samples.max_new_tokens=2"]  # fmt: skip


@pytest.mark.slow
def test_five_kinds_of_parts_change_three_files_at_most(tree: Tree) -> None:
    """A preference loss with a key, a row format, an optimizer, a text metric and a preset, added one after another."""
    touched: set[str] = set()

    def files() -> int:
        """Returns how many files were changed or added since the last call."""
        before = set(touched)
        new = {str(p.relative_to(tree.root)) for part in ("src/lmtrain", "conf") for p in (tree.root / part).rglob("*")
               if p.suffix in (".py", ".yaml") and not (REPO / p.relative_to(tree.root)).exists()}  # fmt: skip
        touched.update(now := {*tree.changed(), *new})
        contents = {name: (tree.root / name).read_bytes() for name in now}
        count = sum(contents[name] != seen.get(name) for name in now)
        seen.update(contents)
        assert before <= touched
        return count

    seen: dict[str, bytes] = {}
    losses = "src/lmtrain/losses/preferences.py"
    tree.insert(losses, "class Loss(NamedTuple):", LOSS)
    tree.insert(
        losses, '    "simpo": Loss(', '    "squared": Loss(squared, lambda o: o.target**2, options=("target",)),\n'
    )
    tree.insert(losses, "    gamma: float = 0.5", "    target: float = 1.0  # the margin aimed at: squared\n")
    tree.insert(OPTIONS, '"apo_down", "simpo"', '"squared", ')
    key = '    target: Annotated[float, TRAJECTORY, above_zero, _of_loss("squared")]\n'
    tree.insert(OPTIONS, '    gamma: Annotated[float, TRAJECTORY, not_negative, _of_loss("simpo")]', key)
    tree.insert("conf/objective/dpo.yaml", "gamma: 0.5", "target: 2.0 # squared only: the margin aimed at\n")
    assert files() == 3

    (tree.root / "src/lmtrain/data/examples/question_rows.py").write_text(ROWS)
    rows = "defaults: [chat_jsonl, _self_]\nrows: lmtrain.data.examples.question_rows.QuestionRows\n"
    (tree.root / "conf/data/questions_jsonl.yaml").write_text(rows)
    assert files() == 2

    optimizers = "src/lmtrain/optim/optimizers.py"
    tree.insert(optimizers, "_BUILDERS: dict[", SIGNS)
    tree.insert(optimizers, '    "lion": _lion,', '    "signs": _signs,\n')
    tree.insert(OPTIONS, "def arguments_of(", SIGNS_KEYS)
    tree.insert(OPTIONS, '    "lion": LionConfig,', '    "signs": SignsConfig,\n')
    (tree.root / "conf/optimizer/signs.yaml").write_text(
        "defaults: [base, _self_]\nname: signs\nlr: 0.01\nweight_decay: 0.0\nmomentum: 0.9 # of the gradient\n"
    )
    assert files() == 3

    metrics = "src/lmtrain/generation/text_metrics.py"
    tree.insert(metrics, '    "exact_match": {', '    "chrf": {"_target_": "torchmetrics.text.CHRFScore"},\n')
    tree.insert("src/lmtrain/config/checks.py", '"exact_match")', '"chrf", ')
    assert files() == 2

    (tree.root / "conf/model/tiny.yaml").write_text(
        "defaults: [llama_nano, _self_]\nname: tiny\nhidden_size: 32\nnum_hidden_layers: 1\n"
    )
    assert files() == 1

    found = [{"question": f"{n}?", "answer": str(n)} for n in range(8)]
    (tree.root / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    done = tree.run("lmtrain.train", "objective=sft", "data=questions_jsonl", "data.path=questions.jsonl",
                    "optimizer=signs", "run.dir=sft", *SMALL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = (tree.root / "sft/plan.txt").read_text()
    assert all(word in plan for word in ("tiny: ", "signs")), plan
    pairs = [{"prompt": f"{n}?", "chosen": str(n), "rejected": str(n + 1)} for n in range(8)]
    (tree.root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    done = tree.run("lmtrain.train", "objective=dpo", "objective.loss=squared", "data=preference_jsonl",
                    "data.path=pairs.jsonl", "data.chat_template=zephyr", "callbacks.samples.metrics=[chrf]",
                    "callbacks.samples.every_n_validations=1", "run.dir=dpo", *SMALL)  # fmt: skip
    assert done.returncode == 0, done.stderr
    first = json.loads((tree.root / "dpo/metrics.jsonl").read_text().splitlines()[0])
    assert first["train/loss"] == pytest.approx(4.0)
    assert "val/chrf" in (tree.root / "dpo/metrics.jsonl").read_text()
