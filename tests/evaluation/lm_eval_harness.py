"""Run by test_harness.py in an environment that has lm-evaluation-harness; compares its numbers with our own.

    python lm_eval_harness.py FOLDER_OF_TASKS EVALUATIONS MODEL...

Prints JSON: for each model the log-likelihoods of all answers by the harness and by lmtrain, the exit code of an
evaluation, and the exit code and message of one with an unknown task.
"""

import contextlib
import io
import json
import sys
from typing import Any

import numpy as np

from lmtrain import evaluate
from lmtrain.config.compose import check, compose
from lmtrain.evaluation import harness, subject
from lmtrain.evaluation.scoring import Window, negative_log_likelihoods

ASKED = ["evaluate.tasks=[cities]", "evaluate.batch_size=3"]


def both(name: str, settings: list[str]) -> dict[str, Any]:
    """Returns the log-likelihoods of the answers by the harness and by lmtrain."""
    config = check(compose([f"run_dir={name}", *settings]))
    who = subject.load(name, "best", config)
    samples = harness.run(who, config, harness.find(config))["samples"]["cities"]
    theirs, windows = [], []
    for sample in samples:
        for (context, answer), (likelihood, _) in zip(sample["arguments"], sample["filtered_resps"], strict=True):
            asked = who.tokenizer(context, add_special_tokens=False)["input_ids"]
            ids = who.tokenizer(context + answer, add_special_tokens=False)["input_ids"]
            scored = np.arange(len(ids)) >= len(asked)
            windows.append(Window(np.array(ids), scored, len(theirs)))
            theirs.append(float(likelihood))
    ours = [0.0] * len(theirs)
    for row, nll, _ in negative_log_likelihoods(who.model, windows, 4):
        ours[row] -= nll
    return {"harness": theirs, "ours": ours}


def main(tasks: str, evaluations: str, *models: str) -> None:
    settings = [*ASKED, f"evaluate.task_folder={tasks}", "trainer.accelerator=cpu"]
    found = {name: both(name, settings) for name in models}
    with contextlib.redirect_stdout(sys.stderr):
        words = [f"evaluate.against={models[1]}", f"evaluate.dir={evaluations}", "evaluate.name=cities"]
        code = evaluate.main([f"run_dir={models[0]}", *settings, *words])
        with contextlib.redirect_stderr(io.StringIO()) as said:
            unknown = evaluate.main([f"run_dir={models[0]}", *settings, "evaluate.tasks=[hellaswagg]"])
    print(json.dumps({"models": found, "code": code, "unknown": [unknown, said.getvalue()]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
