"""A pipeline that is killed repeatedly ends with the same bytes as one that never was."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import tiny, write

from support import REPO

TESTS = REPO / "tests"


def killed_at(place: str, step: int, marker: Path) -> str:
    return f"callbacks.extra=[{{_target_: killer.KillAt, place: {place}, step: {step}, marker: {marker}}}]"


def start(file: Path, folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS / "resume"), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "lmtrain.pipeline",
            "--trust",
            str(file),  # its callbacks write outside the run's folder
            f"pipeline={file}",
            f"run.dir={folder}",
            "run.allow_target=[killer]",
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def when(happened: Callable[[], bool], process: subprocess.Popen[str], by: signal.Signals) -> None:
    """Sends the pipeline a signal as soon as something has happened, or nothing if it ends before."""
    while process.poll() is None:
        if happened():
            process.send_signal(by)
            return
        time.sleep(0.01)


def weights(folder: Path) -> dict[str, str]:
    found = {name: folder / name / "export" / "model.safetensors" for name in ("pretrain", "sft", "dpo")}
    scores = {p.stem: p for p in (folder / "evaluations").glob("*.rows.jsonl")}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in (found | scores).items()}


@pytest.mark.slow
def test_killed_anywhere_it_ends_with_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    tree = tiny(corpus, tmp_path)
    tree["evaluations"]["answers"]["of"] = ["sft"]
    places = {"pretrain": ("mid_step", 2), "sft": ("mid_save", 3), "dpo": ("before_publish", 2)}
    markers = {stage: tmp_path / f"{stage}.killed" for stage in places}
    for stage, (place, step) in places.items():
        tree["stages"][stage]["overrides"] += [killed_at(place, step, markers[stage])]
    file, killed, whole = write(tree, tmp_path), tmp_path / "killed", tmp_path / "whole"

    # Each stage's process dies once, the pipeline's twice, and it gets one request to stop; then it runs to the end.
    events: list[tuple[Callable[[], bool], signal.Signals]] = [
        (lambda: False, signal.SIGKILL),  # pretrain dies
        (lambda: (killed / "pretrain" / "summary.json").exists(), signal.SIGKILL),
        (lambda: (killed / "sft" / "starts.jsonl").exists(), signal.SIGKILL),
        (lambda: (killed / "evaluations.log").exists(), signal.SIGTERM),
    ]
    codes = []
    for happened, by in [*events, *[(lambda: False, signal.SIGKILL)] * 5]:
        process = start(file, killed)
        when(happened, process, by)
        out = process.communicate(timeout=600)[0]
        codes.append(process.returncode)
        if process.returncode == 0:
            break
    assert codes[-1] == 0, out
    assert codes[0] == 1, codes
    assert len(codes) >= 5
    assert all(marker.exists() for marker in markers.values())

    undisturbed = start(file, whole)
    out = undisturbed.communicate(timeout=600)[0]
    assert undisturbed.returncode == 0, out
    assert weights(killed) == weights(whole)
    assert len(weights(whole)) == 4
