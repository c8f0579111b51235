"""Runs jobs in turn on ranks that import torch once: `torch.distributed.run ... ranks.py JOBS.json`."""

import json
import os
import sys
import traceback
from pathlib import Path

from lmtrain.config.compose import check, compose
from lmtrain.distributed import devices
from lmtrain.distributed.ranks import leave
from lmtrain.run.session import Session
from lmtrain.run_folder import folder as run_dir


def main(jobs: list[list[str]], results: Path) -> None:
    codes: list[str] = []
    for overrides in jobs:
        config = check(compose(overrides))
        devices.resolve_auto(config)
        folder = run_dir.RunDir(Path(str(config.run.dir)))
        try:
            if os.environ["RANK"] == "0":  # as the launching process of a run does
                folder = run_dir.open_run(config)
            codes.append(str(Session(config, folder).run()))
        except Exception:
            codes.append(traceback.format_exc())
            print(codes[-1], file=sys.stderr, flush=True)
    (results / f"{os.environ['RANK']}.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
    leave(0)
