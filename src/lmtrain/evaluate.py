"""Evaluation of a model: `python -m lmtrain.evaluate run_dir=outputs/my_run data=text data.val_path=a.txt`."""

import sys

from lmtrain import cli

_evaluate = cli.door("evaluate", "lmtrain.evaluation.session:start")


def main(argv: list[str] | None = None) -> int:
    # The model comes from run_dir, so the size limits of the model that would be trained don't apply.
    unbounded = "model.max_position_embeddings=1000000"
    return _evaluate([unbounded, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    cli.program(["evaluate", *sys.argv[1:]])
