"""Measures learning from preferences: lmtrain and TRL's DPOTrainer, KTOTrainer or RewardTrainer, interleaved.

python benchmarks/dpo.py [--objective kto]            what is measured, and how, is in benchmarks/README.md
"""

import sys
from pathlib import Path
from typing import Any

import finetune
from finetune import Contender, Task, lmtrain_leg, trl_leg
from legs import Leg
from workload import Row, made_pairs


def lmtrain(precomputed: bool) -> Contender:
    def leg(task: Task, folder: Path) -> Leg:
        objective = task.options.objective
        online = "adapter_off" if task.options.peft else "frozen_copy"
        reference = {"objective.reference": "precomputed" if precomputed else online}
        settings = {
            "objective": objective,
            **({} if objective == "reward" else reference),
            "data": "unpaired_jsonl" if objective == "kto" else "preference_jsonl",
            "data.train_on": "completion",  # as in TRL: everything that the template writes after the prompt
            "data.on_too_long": "drop",
            "data.global_batch_size": task.options.pairs,
            "data.micro_batch_size": task.options.micro_batch_size or task.options.pairs,
        }
        return lmtrain_leg(task, folder, settings, lambda row: row["step"] * task.options.pairs)

    return leg


def trl(**settings: Any) -> Contender:
    def leg(task: Task, folder: Path) -> Leg:
        pairs = task.options.pairs
        micro = task.options.trl_micro_batch_size or task.options.micro_batch_size or pairs
        batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": pairs // micro}
        return trl_leg(task, folder, task.options.objective, {**batch, **settings}, lambda row: row["step"] * pairs)

    return leg


CONTENDERS: dict[str, Contender] = {
    "lmtrain": lmtrain(precomputed=False),
    "lmtrain_precomputed": lmtrain(precomputed=True),
    "trl": trl(),
    "trl_precomputed": trl(precompute_ref_log_probs=True),
}


def task_of(folder: Path, options: Any) -> Task:
    if options.objective == "kto":
        return finetune.prepare(folder, options, made_answers, ["prompt", "completion", "label"])
    return finetune.prepare(folder, options, made_pairs, ["prompt", "chosen", "rejected"])


def made_answers(count: int) -> list[Row]:
    """Returns the pairs' answers in turn: the chosen one of the first pair, the rejected one of the second."""
    return [
        {"prompt": pair["prompt"], "completion": pair["rejected" if i % 2 else "chosen"], "label": i % 2 == 0}
        for i, pair in enumerate(made_pairs(count))
    ]


def main(argv: list[str] | None = None) -> int:
    parser = finetune.parser(__doc__, CONTENDERS, steps=40)
    parser.add_argument("--objective", choices=("dpo", "kto", "reward"), default="dpo", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=8, help="or answers, of kto, per optimizer step (%(default)s)")
    options = finetune.parse(parser, CONTENDERS, argv)
    unit = "answers" if options.objective == "kto" else "pairs"
    return finetune.main(task_of, CONTENDERS, options, unit)


if __name__ == "__main__":
    sys.exit(main())
