"""Flipped bits and cuts in every small file that a run, a sweep, a pipeline or prepared data leaves.

Either the file is read or a message names it; no other exception occurs. A manifest has a checksum, so changes of its
content are always detected; in the others, which people may edit, another value of the same type is accepted.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.checkpoints import manifest, retention, store
from lmtrain.data.store import bins
from lmtrain.errors import RunError, UserError
from lmtrain.files import read_jsonl
from lmtrain.reports import listing
from lmtrain.reports import report as report_of
from lmtrain.run_folder.cut_back import cut_back
from lmtrain.run_folder.folder import RunDir
from lmtrain.stages.state import Row, State
from lmtrain.sweeps.trials import Trial, Trials

REFUSED = object()
SLOW = ("cut", "report of metrics", "report of summary", "report of starts", "report of samples", "report of config")


def make_run(folder: Path) -> RunDir:
    """Writes the small files of a run, as a run of two steps leaves them."""
    run = RunDir(folder)
    path = run.checkpoints / store.name_of(2)
    weights = {"state_dict": {"w": torch.ones(4)}, "global_step": 2, "metrics": {"val/loss": 1.5}, "scored_on": "ab"}
    store.publish({**weights, "fingerprint": {"keys": {}}, "tokenizer": {"tokenizer.json": "0f"}}, path)
    run.config.write_text("checkpoint: {monitor: val/loss, mode: min}\ntrainer: {max_steps: 2}\nseed: 1\n")
    run.write_summary({"status": "finished", "step": 2, "tokens": 384, "asked": {"max_steps": 2, "max_epochs": None},
                       "best": "checkpoints/step_00000002", "best_metric": {"val/loss": 1.5}, "tokens_per_s": 10.5,
                       "validation": {"step": 2, "val/loss": 1.5}, "wall_seconds": 1.0})  # fmt: skip
    run.metrics.write_text("".join(
        json.dumps({"step": s, "rows": "0a1b2c3d", "tokens_seen": 192 * s, "train/loss": 5.5, "lr": 1e-3}) + "\n"
        + json.dumps({"step": s, "val/loss": 1.5, "val/perplexity": 4.4}) + "\n" for s in (1, 2)))  # fmt: skip
    run.samples.write_text('{"step": 2, "prompt": "a", "text": "b"}\n')
    run.starts.write_text('{"time": 1764000000.5, "step": 0}\n{"time": 1764000100.5, "step": 1}\n')
    return run


def meta() -> bins.Meta:
    shard: Any = {"file": "train.bin", "tokens": 8, "documents": 1, "sha256": "00"}
    split: Any = {"tokens": 8, "documents": 1, "bytes": 8, "shards": [shard]}
    return {"format_version": bins.FORMAT_VERSION, "dtype": "uint16", "vocab_size": 257, "tokenizer_hash": "00",
            "eos_id": 256, "splits": {"train": split}, "key": {"a": 1}}  # fmt: skip


def bins_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.bin").write_bytes(bytes(16))
    (folder / "train.docs").write_bytes((8).to_bytes(8, "little"))
    bins.save_meta(meta(), folder)
    return folder / bins.META


def sweep(folder: Path) -> Path:
    folder.mkdir()
    trials = Trials(folder)
    trials.rows = [Trial(0, ["seed=1"], ["a=b"], "finished", 0, 1.5, 2.0), Trial(1, ["seed=2"], ["a=b"], "failed", 1)]
    trials.write()
    return trials.path


def pipeline(folder: Path) -> Path:
    folder.mkdir()
    state = State(folder)
    state.rows = {"pretrain": Row("0f3a", "91bc", 312.0), "sft": Row("0f3b")}
    state.write()
    return state.path


def places(folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Returns each reader with the file that is changed."""
    run = make_run(folder / "run")
    checkpoint = run.checkpoints / store.name_of(2)
    of_sweep, of_pipeline, of_bins = sweep(folder / "s"), pipeline(folder / "p"), bins_folder(folder / "b")
    copy = folder / "metrics.jsonl"

    def cut() -> None:
        copy.write_bytes(run.metrics.read_bytes())
        cut_back(copy, 1, True, lambda _: None)
        assert all(row["step"] <= 1 for row in read_jsonl(copy))

    told = lambda: report_of.reported_run(run)  # noqa: E731
    return {
        "manifest": (checkpoint / manifest.NAME, lambda: manifest.read(checkpoint)),
        "scores": (checkpoint / manifest.NAME, lambda: retention.scores(run.checkpoints, "val/loss")),
        "summary": (run.summary, run.read_summary),
        "metrics": (run.metrics, lambda: list(read_jsonl(run.metrics))),
        "cut": (run.metrics, cut),
        "report of metrics": (run.metrics, told),
        "report of summary": (run.summary, told),
        "report of starts": (run.starts, told),
        "report of samples": (run.samples, told),
        "report of config": (run.config, told),
        "listing": (run.summary, lambda: listing.read(run)),
        "sweep": (of_sweep, lambda: Trials(of_sweep.parent).find(["seed=1"], ["a=b"])),
        "pipeline": (of_pipeline, lambda: State(of_pipeline.parent)),
        "bins": (of_bins, lambda: bins.open_bins(of_bins.parent, "train")),
    }


def changed(data: bytes, chance: random.Random) -> bytes:
    """Flips one to three bits, cuts the end off, or removes a part."""
    kind = chance.randrange(4)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    if kind == 1:
        start = chance.randrange(len(data))
        return data[:start] + data[start + chance.randrange(1, 40) :]
    text = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        bit = chance.randrange(8 * len(text))
        text[bit // 8] ^= 1 << bit % 8
    return bytes(text)


def result(read: Callable[[], Any], file: Path) -> Any:
    """Returns what is read, or REFUSED if a message names the file or its folder; other exceptions propagate."""
    try:
        return read()
    except (UserError, RunError) as error:
        return REFUSED if file.name in str(error) or str(file.parent) in str(error) else f"unnamed: {error}"


def fuzz(folder: Path, each: int) -> None:
    chance = random.Random(7)
    for name, (file, read) in places(folder).items():
        data, whole = file.read_bytes(), read()
        for number in range(each // 3 if name in SLOW else each):
            file.write_bytes(changed(data, chance))
            try:
                found = result(read, file)
            except Exception as error:
                raise AssertionError(f"{name}, change {number}: {file.read_bytes()!r}") from error
            assert not str(found).startswith("unnamed"), (name, number, found)
            allowed = {"manifest": (REFUSED, whole), "scores": ([], whole)}.get(name)
            assert allowed is None or found in allowed, (name, number, found)
        file.write_bytes(data)


def test_a_thousand_changes(tmp_path: Path) -> None:
    fuzz(tmp_path, 100)


@pytest.mark.nightly
@pytest.mark.slow
def test_twenty_thousand_changes(tmp_path: Path) -> None:
    fuzz(tmp_path, 2000)
