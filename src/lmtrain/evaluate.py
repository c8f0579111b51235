"""Evaluation of a model: `python -m lmtrain.evaluate run_dir=outputs/my_run data=text data.val_path=a.txt`."""

import sys
from typing import TYPE_CHECKING

from lmtrain import cli, terminal

if TYPE_CHECKING:
    from lmtrain.config.schema import Config


def evaluate(config: "Config") -> int:
    """Prints a table of scores, beside those of a second model if given, and writes evaluations/<name>.json."""
    terminal.status.say("loading torch and transformers")
    from lmtrain.evaluation.session import start

    return start(config)


def main(argv: list[str] | None = None) -> int:
    # The model comes from run_dir, so the size limits of the model that would be trained don't apply.
    unbounded = "model.max_position_embeddings=1000000"
    return cli.run("evaluate", evaluate, [unbounded, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    cli.program(["evaluate", *sys.argv[1:]])
