"""Prints a number of a run by step: python benchmarks/curve.py RUN NAME, for the names in RUN/metrics.jsonl."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    run, name = sys.argv[1:]
    rows = map(json.loads, Path(run, "metrics.jsonl").read_text().splitlines())
    print(*(f"{row['step']}: {row[name]:.3f}" for row in rows if name in row))
