"""Measures learning from rewards: lmtrain and TRL's GRPOTrainer, interleaved.

python benchmarks/grpo.py            what is measured, and how, is in benchmarks/README.md
"""

import sys
from pathlib import Path
from typing import Any

import finetune
from finetune import Task, lmtrain_leg, trl_leg
from legs import Leg
from workload import Row, made_pairs


def lmtrain(task: Task, folder: Path) -> Leg:
    options = task.options
    settings = {
        "objective": "grpo",
        "objective.group_size": options.group,
        "objective.max_new_tokens": options.new_tokens,
        "objective.rollout_batch_size": options.prompts * options.group,
        "reward": "regex",
        "reward.pattern": "e",
        "reward.whole": "false",
        "data": "prompts_jsonl",
        "data.global_batch_size": options.prompts,
        "data.micro_batch_size": options.prompts,
    }
    return lmtrain_leg(task, folder, settings, lambda row: row["step"] * options.prompts * options.group)


def trl(task: Task, folder: Path) -> Leg:
    options = task.options
    settings = {
        "per_device_train_batch_size": options.prompts * options.group,
        "num_generations": options.group,
        "max_completion_length": options.new_tokens,
    }
    return trl_leg(task, folder, "grpo", settings, lambda row: row["step"] * options.prompts * options.group)


CONTENDERS = {"lmtrain": lmtrain, "trl": trl}


def made_prompts(count: int) -> list[Row]:
    return [{"prompt": pair["prompt"]} for pair in made_pairs(count)]


def task_of(folder: Path, options: Any) -> Task:
    return finetune.prepare(folder, options, made_prompts, ["prompt"])


def main(argv: list[str] | None = None) -> int:
    parser = finetune.parser(__doc__, CONTENDERS, steps=40)
    parser.add_argument("--prompts", type=int, default=4, help="per optimizer step (%(default)s)")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest completion (%(default)s)")
    options = finetune.parse(parser, CONTENDERS, argv)
    return finetune.main(task_of, CONTENDERS, options, "completions")


if __name__ == "__main__":
    sys.exit(main())
