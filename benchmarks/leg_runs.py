"""Short runs of the main job in this process, one after the other, and numbers from their records.

Run by gpu_queue.py: python leg_runs.py CASES.json FOLDER; CASES: {name: overrides}. Prints {name: numbers} at the end.
"""

import contextlib
import io
import json
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lmtrain import train

WARMUP = 3  # records not counted, because of compilation and first allocations


def numbers(run: Path) -> dict[str, Any]:
    """Returns speed, memory and loss of a run, and the extra time of the step after a save."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_ms" in row]
    counted = rows[WARMUP:]
    found: dict[str, Any] = {"loss": rows[-1]["train/loss"]}
    for name in ("tokens_per_s", "step_ms", "mfu", "memory_gib"):
        values = [row[name] for row in counted if row.get(name) is not None]
        if values:
            found[name] = median(values)
    between = {a["step"]: 1000 * (b["time"] - a["time"]) / (b["step"] - a["step"]) for a, b in pairwise(rows)}
    saved = {int(path.name.split("_")[1]) for path in (run / "checkpoints").glob("step_*")}
    after, others = (
        [ms for step, ms in between.items() if step > WARMUP and (step in saved) is of] for of in (True, False)
    )
    if after and others:
        found["save_stall_ms"] = round(median(after) - median(others), 1)
    return found


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results: dict[str, Any] = {}
    for name, overrides in cases.items():
        waits = folder / f"{name}.waits.json"
        extra = [f"callbacks.extra=[{{_target_: waits.Waits, path: '{waits}'}}]", "run.allow_target=[waits]"]
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = train.main([*overrides, *extra, f"run.dir={folder / name}"])
            if code:
                raise RuntimeError(f"exit code {code}")
            results[name] = numbers(folder / name) | json.loads(waits.read_text())
        except Exception:
            results[name] = {"error": (said.getvalue() + traceback.format_exc())[-2000:]}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
