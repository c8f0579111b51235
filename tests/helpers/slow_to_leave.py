"""Ranks that raise the same error, rank 1 first; its interpreter then takes a minute to exit."""

import os
import sys
import time

from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.run.launch import as_rank


def job(config: Config) -> int:
    time.sleep(0 if os.environ["RANK"] == "1" else 1)
    raise UserError("no such file")


if __name__ == "__main__":
    code = as_rank(sys.argv[1:], job)
    if os.environ["RANK"] == "1":
        time.sleep(60)
    sys.exit(code)
