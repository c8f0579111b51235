"""Runs evaluations in turn on ranks that import torch once: `torch.distributed.run ... evaluations.py JOBS.json`."""

import json
import sys
from pathlib import Path

from lmtrain import evaluate
from lmtrain.distributed.ranks import leave


def main(jobs: list[list[str]]) -> int:
    return max(evaluate.main(overrides) for overrides in jobs)


if __name__ == "__main__":
    leave(main(json.loads(Path(sys.argv[1]).read_text())))
