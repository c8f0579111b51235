"""Seventy further inputs of a stranger, each judged in the process that composes it: nothing runs, is sent or is written.

An input is an experiment of a --config-dir, and the user types only what makes an ordinary run.
`tests/hostile/test_corpus.py` has inputs that reach training.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml
from guard import WORD, Watch, watching

from lmtrain.config import compose as rules
from lmtrain.config import environment
from lmtrain.errors import UserError

USER = ["data=text", "data.path=x"]
HTTP = "http://127.0.0.1:9/PWNED"


def defaults(**options: str) -> list[Any]:
    return [*({f"override /{group}": option} for group, option in options.items()), "_self_"]


GRPO = {"objective": "grpo", "data": "prompts_jsonl", "reward": "code"}
CODE = "lmtrain.rewards.code.CodeTests"

# What a stranger's experiment says, by what it tries.
EXPERIMENTS: dict[str, dict[str, Any]] = {
    # running the text of rows and answers
    "reward=code": {"defaults": defaults(**GRPO)},
    "reward=code with network": {"defaults": defaults(**GRPO), "reward": {"network": True}},
    "code by its class": {"reward": {"_target_": CODE, "network": True}},
    "code as a part of a sum": {"reward": {"parts": {"a": {"_target_": CODE, "weight": 1.0}}}},
    "code among harmless parts": {
        "reward": {"parts": {"a": {"_target_": "lmtrain.rewards.text.Equal"}, "b": {"_target_": CODE}}}
    },
    "code by an interpolation": {"reward": {"_target_": "${spare}"}, "spare": CODE},
    "code by an interpolated section": {"reward": "${spare}", "spare": {"_target_": CODE}},
    "code in pieces": {"reward": {"_target_": "lmtrain.rewards.${spare}.CodeTests"}, "spare": "code"},
    "code through another module": {"reward": {"_target_": "lmtrain.rewards.scoring.CodeTests"}},
    "a reward that parses formulas": {"defaults": defaults(objective="grpo", data="prompts_jsonl", reward="math_verify")},
    "tasks of the harness": {"evaluate": {"tasks": ["humaneval"]}},
    "a folder of tasks": {"evaluate": {"task_folder": "tasks"}},
    "tools of one's own": {
        "defaults": defaults(objective="grpo", data="prompts_jsonl", reward="regex"),
        "objective": {"environment": {"_target_": "pwned_module.Thing"}},
    },
    "a command in an environment": {
        "defaults": defaults(objective="grpo", data="prompts_jsonl", reward="regex"),
        "objective": {"environment": {"_target_": "lmtrain.rewards.games.Calculator", "command": "touch PWNED"}},
    },
    # classes
    "a package allowed by itself": {"run": {"allow_target": ["pwned_module"]}, "reward": {"_target_": "pwned_module.Thing"}},
    "a package allowed by an interpolation": {"run": {"allow_target": "${spare}"}, "spare": ["pwned_module"]},
    "a callback": {"callbacks": {"extra": [{"_target_": "pwned_module.Thing"}]}},
    "a callback of Lightning with a folder": {
        "callbacks": {"extra": [{"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "/PWNED"}]}
    },
    "a callback of Lightning with a file name": {
        "callbacks": {"extra": [{"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "filename": "../PWNED"}]}
    },
    "a list of callbacks by an interpolation": {
        "callbacks": {"extra": "${spare}"}, "spare": [{"_target_": "lightning.pytorch.callbacks.LearningRateFinder"}]
    },
    "an objective": {"objective": {"name": "x", "_target_": "pwned_module.Thing"}},
    "a model": {"model": {"_target_": "pwned_module.Thing", "init": "scratch"}},
    "a model of transformers": {"model": {"_target_": "transformers.models.gpt2.GPT2LMHeadModel", "init": "scratch"}},
    "an optimizer": {"optimizer": {"name": "custom", "_target_": "pwned_module.Thing", "lr": 0.1}},
    "text for an optimizer of torch": {"optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "x": HTTP}},
    "a schedule": {"schedule": {"name": "custom", "_target_": "pwned_module.Thing"}},
    "a data module": {"data": {"_target_": "pwned_module.Thing"}},
    "a source": {"data": {"source": "pwned_module.Thing", "source_options": {"args": "touch PWNED"}}},
    "arguments of a source": {"data": {"source": "lmtrain.data.sources.sums.Sums", "source_options": {"x": HTTP}}},
    "rows": {"data": {"rows": "pwned_module.Thing"}},
    # servers, accounts and publications
    "a server of W&B": {"defaults": defaults(logger="wandb"), "logger": {"wandb": {"settings": {"base_url": HTTP}}}},
    "an account of W&B": {"defaults": defaults(logger="wandb"), "logger": {"wandb": {"entity": "stranger"}}},
    "a key of W&B": {"defaults": defaults(logger="wandb"), "logger": {"wandb": {"settings": {"api_key": "a" * 40}}}},
    "code that W&B uploads": {"defaults": defaults(logger="wandb"), "logger": {"wandb": {"save_code": True}}},
    "a folder of W&B": {"defaults": defaults(logger="wandb"), "logger": {"wandb": {"dir": "/PWNED"}}},
    "models that W&B uploads": {"defaults": defaults(logger="wandb"), "logger": {"wandb": {"log_model": "all"}}},
    "W&B by a whole section": {"logger": "${spare}", "spare": {"wandb": {"settings": {"base_url": HTTP}}}},
    "a server of MLflow": {"defaults": defaults(logger="mlflow"), "logger": {"mlflow": {"tracking_uri": HTTP}}},
    "a database of MLflow": {
        "defaults": defaults(logger="mlflow"), "logger": {"mlflow": {"tracking_uri": "sqlite:////tmp/PWNED.db"}}
    },
    "files of MLflow": {"defaults": defaults(logger="mlflow"), "logger": {"mlflow": {"tracking_uri": "file:///PWNED"}}},
    "artifacts of MLflow": {"defaults": defaults(logger="mlflow"), "logger": {"mlflow": {"artifact_location": "s3://x"}}},
    "a registry of MLflow": {"defaults": defaults(logger="mlflow"), "logger": {"mlflow": {"save_dir": "/PWNED"}}},
    "a folder of TensorBoard": {"defaults": defaults(logger="tensorboard"), "logger": {"tensorboard": {"log_dir": "/PWNED"}}},
    "a publication": {"export": {"push_to": "stranger/stolen"}},
    "a public one of the user's": {"export": {"push_private": False}},
    "a public one by an interpolation": {"export": {"push_private": "${export.merge}", "merge": False}},
    "a baseline that a metric fetches": {
        "callbacks": {"samples": {"metrics": [{"_target_": "torchmetrics.text.BERTScore", "baseline_url": HTTP}]}}
    },
    "the same in an evaluation": {
        "evaluate": {"metrics": [{"_target_": "torchmetrics.text.BERTScore", "baseline_url": HTTP}]}
    },
    "a metric's encoder at an address": {"callbacks": {"samples": {"metrics": [f"bertscore:{HTTP}"]}}},
    # addresses
    "a model at an address": {"model": {"init": "pretrained", "name_or_path": HTTP}},
    "a tokenizer at an address": {"tokenizer": {"kind": "hub", "name_or_path": "file://127.0.0.1/PWNED"}},
    "an adapter at an address": {"peft": {"method": "lora", "adapter": "s3://bucket/PWNED"}},
    "a reward model at an address": {
        "defaults": defaults(objective="grpo", data="prompts_jsonl", reward="model"), "reward": {"name_or_path": HTTP}
    },
    "a chat template at an address": {"data": {"chat_template": HTTP}},
    "a checkpoint at an address": {"run": {"resume": HTTP}},
    "a nested address": {"data": {"val_sets": {"a": {"path": ["b", ["simplecache::" + HTTP]]}}}},
    "an address in pieces": {"data": {"val_path": "${spare}://127.0.0.1/"}, "spare": "http"},
    # places
    "a folder of the run": {"run": {"dir": "~/PWNED"}},
    "a folder of the run, one level up": {"run": {"root": "outputs/../../PWNED"}},
    "a folder with a NUL": {"run": {"root": "a\0b"}},
    "a folder of somebody": {"run": {"dir": "~nobody_of_this_name/x"}},
    "a cache": {"data": {"cache_dir": "/PWNED"}},
    "a page": {"inspect": {"html": "PWNED.html"}},
    "answers": {"generate": {"out": "PWNED.jsonl"}},
    "a configuration of DeepSpeed": {"trainer": {"deepspeed": {"config": "PWNED.json"}}},
    "a disk of DeepSpeed": {"trainer": {"deepspeed": {"nvme_path": "/PWNED"}}},
    "another run that is continued": {"run": {"name": "mine", "allow_change": ["optimizer.lr"]}},
    "a page for others": {"chat": {"web": True, "port": 8000}},
    "a whole section of the model": {"model": {"extra": {"attn_implementation": "stranger/kernel"}}},
    "code of a model in a field": {"model": {"extra": {"auto_map": {"AutoModelForCausalLM": "stranger/x--y.Z"}}}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_trusted", set())


def stranger(folder: Path, tree: dict[str, Any]) -> Path:
    (folder / "experiment").mkdir(parents=True)
    (folder / "pwned_module.py").write_text(f"open({str(folder / WORD)!r}, 'w')\nclass Thing: pass\n")
    file = folder / "experiment" / "theirs.yaml"
    file.write_text(f"# @package _global_\n{yaml.safe_dump(tree, sort_keys=False)}")
    return file


# A third of them in every run of the tests, as each composes a config.
_PARAMS = [pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.slow) for i, name in enumerate(EXPERIMENTS)]


@pytest.mark.parametrize("name", _PARAMS)
def test_what_an_experiment_tries(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "theirs")
    stranger(tmp_path / "theirs", EXPERIMENTS[name])
    before = {*tmp_path.rglob("*")}
    with watching(Watch([], [tmp_path / "theirs"])) as watch, pytest.raises(UserError) as refusal:
        rules.check(rules.compose([*USER, "experiment=theirs"], str(tmp_path / "theirs")))
    assert "counts only where you type it" in str(refusal.value)
    assert watch.seen == []
    assert {*tmp_path.rglob("*")} == before
