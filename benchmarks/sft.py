"""Measures supervised fine-tuning: packed and padded rows of lmtrain and of TRL, interleaved.

python benchmarks/sft.py            what is measured, and how, is in benchmarks/README.md
"""

import json
import sys
from pathlib import Path
from typing import Any

import finetune
from finetune import Contender, Task, lmtrain_leg, trl_leg
from legs import Leg
from transformers import AutoTokenizer
from workload import MARKED_CHATML, made_conversations


def rows_of_a_step(task: Task, packed: bool) -> tuple[int, int]:
    """Returns (rows per step, rows per forward pass); packed rows are fewer, with about as many tokens in total."""
    rows = task.options.rows
    micro = task.options.micro_batch_size or rows
    if not packed:
        return rows, micro
    packed_rows = max(1, round(rows * task.options.mean_length / task.options.seq_len))
    forwards = min(packed_rows, max(1, rows // micro))
    micro = -(-packed_rows // forwards)
    return micro * forwards, micro


def lmtrain(packing: str) -> Contender:
    def leg(task: Task, folder: Path) -> Leg:
        rows, micro = rows_of_a_step(task, packing != "off")
        settings = {
            "objective": "sft",
            "data": "chat_jsonl",
            "data.packing": packing,
            "data.global_batch_size": rows,
            "data.micro_batch_size": micro,
        }
        return lmtrain_leg(task, folder, settings, lambda row: row["tokens_seen"])

    return leg


def trl(packing: bool, **settings: Any) -> Contender:
    def leg(task: Task, folder: Path) -> Leg:
        rows, micro = rows_of_a_step(task, packing)
        micro = min(micro, task.options.trl_micro_batch_size or micro)
        batch = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro}
        return trl_leg(task, folder, "sft", {"packing": packing, **batch, **settings}, lambda row: row["tokens"])

    return leg


CONTENDERS: dict[str, Contender] = {
    "lmtrain": lmtrain("best_fit_decreasing"),
    "lmtrain_padded": lmtrain("off"),
    "trl_padded": trl(False),
    "trl_by_length": trl(False, train_sampling_strategy="group_by_length"),
    "trl_packed": trl(True, packing_strategy="bfd"),
}


def task_of(folder: Path, options: Any) -> Task:
    task = finetune.prepare(folder, options, made_conversations, ["messages"])
    options.mean_length = mean_length(task)
    print(f"{options.mean_length:.0f} tokens a conversation, {options.rows} conversations a step", flush=True)
    return task


def mean_length(task: Task) -> float:
    """Returns the mean tokens per conversation, truncated at seq_len."""
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    rows = [json.loads(line)["messages"] for line in task.data.read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(row, chat_template=MARKED_CHATML, tokenize=False) for row in rows]
    lengths = [min(len(ids), task.options.seq_len) for ids in tokenizer(texts)["input_ids"]]
    return sum(lengths) / len(lengths)


def main(argv: list[str] | None = None) -> int:
    parser = finetune.parser(__doc__, CONTENDERS, steps=40)
    parser.add_argument("--rows", type=int, default=8, help="conversations per optimizer step (%(default)s)")
    options = finetune.parse(parser, CONTENDERS, argv)
    return finetune.main(task_of, CONTENDERS, options, "tokens")


if __name__ == "__main__":
    sys.exit(main())
