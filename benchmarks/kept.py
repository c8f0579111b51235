"""Single-threaded runs that each produce a number, and the file that keeps the numbers of a long series."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_BARE = [
    "trainer.val_check_interval=null", "trainer.save_every_n_steps=null", "trainer.accelerator=cpu",
    "trainer.num_threads=1", "logger=none", "export.enabled=false", "report.enabled=false",
    "callbacks.samples.every_n_validations=0", "callbacks.progress.style=none",
]  # fmt: skip


class Kept:
    """Numbers by kind and name in a JSON file, written after each measurement; existing ones are not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}

    def number(self, kind: str, name: str, measure: Callable[[], float]) -> float:
        kept = self.found.setdefault(kind, {})
        if name not in kept:
            kept[name] = measure()
            print(f"{kind}  {name}: {kept[name]:.4f}", flush=True)
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        return kept[name]


def train(words: Sequence[str]) -> list[dict]:
    """Trains a run that validates once, at its end; returns its records, or raises SystemExit with the output."""
    with tempfile.TemporaryDirectory(prefix="lmtrain_run_") as folder:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "lmtrain.train", *_BARE, *words, f"run.dir={folder}/run"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)}: {(done.stdout + done.stderr)[-2000:]}")
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
