"""A checkpoint, an export and a data cache that lmtrain wrote at commit 69cd62e (22 November 2026) can still be read.

In `earlier/`, the code of that commit ran three steps of the command in run/summary.json; losses.json holds what the
same code logged when it continued to six. Only the paths were made relative, and the two files of the checkpoint are
stored as JSON and safetensors, from which they are rebuilt: git can show changes, and nothing here is a pickle.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from inprocess import run, snapshot
from lmtrain.config import fingerprint
from lmtrain.config.compose import check, compose, dump
from lmtrain.errors import UserError
from support import rows

EARLIER = Path(__file__).parent / "earlier"


def restored(content: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Rebuilds the object of a checkpoint file: dicts are stored as pairs, tensors by name."""
    if isinstance(content, list):
        return [restored(inner, tensors) for inner in content]
    if not isinstance(content, dict):
        return content
    if "tensor" in content:
        return tensors[content["tensor"]]
    if "tuple" in content:
        return tuple(restored(content["tuple"], tensors))
    return {restored(key, tensors): restored(value, tensors) for key, value in content["pairs"]}


def make_checkpoint(folder: Path) -> None:
    """Rebuilds model.pt and trainer.pt, and writes their sizes and checksums into the manifest."""
    tensors = load_file(folder / "tensors.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for name in ("model", "trainer"):
        file = folder / f"{name}.pt"
        torch.save(restored(json.loads((folder / f"{name}.json").read_text()), tensors), file)
        content = file.read_bytes()
        manifest["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / f"{name}.json").unlink()
    (folder / "tensors.safetensors").unlink()
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "earlier"
    shutil.copytree(EARLIER, folder)
    make_checkpoint(folder / "run" / "checkpoints" / "step_00000003")
    monkeypatch.chdir(folder)
    return folder


def test_a_run_goes_on_as_it_would_have_gone_on_then(here: Path) -> None:
    cache, expected = snapshot(here / "cache"), json.loads((here / "losses.json").read_text())
    command = json.loads((here / "run" / "summary.json").read_text())["command"].split()[3:]
    ended = run("train", *command, "trainer.max_steps=6", "run.resume=auto")
    assert ended.code == 0, ended.err
    logged = rows(here / "run" / "metrics.jsonl")
    for which in ("train", "val"):
        losses = [row[f"{which}/loss"] for row in logged if f"{which}/loss" in row]
        assert losses == pytest.approx(expected[which], abs=1e-5)
    new = {name for name in snapshot(here / "cache") if not name.startswith(".locks")}
    assert new == set(cache), "the data were prepared again"


def test_an_export_is_read(here: Path) -> None:
    where = ["data=text", "data.val_path=data", "data.path=null", "data.seq_len=32", "trainer.precision=32-true"]
    ended = run("evaluate", "run_dir=export", *where, "trainer.accelerator=cpu", "evaluate.name=now")
    assert ended.code == 0, ended.err
    found = json.loads((here / "outputs" / "evaluations" / "now.json").read_text())["scores"]
    assert found["loss"] == pytest.approx(5.707926836325016, abs=1e-5)  # what that commit's `lmtrain.evaluate` gave


def test_removed_keys_of_a_config_are_left_out() -> None:
    """A config.yaml of commit 516ce9d may have these keys, whatever class `_target_` names for its data."""
    words = ["objective=sft", "data=chat_jsonl", "data.path=x.jsonl", "data.seq_len=32"]
    tree = yaml.safe_load(dump(check(compose(words))))
    assert tree["data"]["_target_"]
    tree["data"]["ranking"], tree["debug"] = "best", {"name": "replay"}
    tree["data"]["curriculum"]["score"] = tree["optimizer"]["fused"] = None
    tree["objective"]["label_smoothing"], tree["callbacks"]["progress"]["plain_every_seconds"] = 0.0, 5.0
    assert check(tree).data.rows == "conversations"


def test_a_removed_key_that_shaped_the_run_is_not_dropped_in_silence() -> None:
    config = check(compose(["optimizer=muon"]))
    now = fingerprint.fingerprint(config, {})
    for value, said in ((0.0, []), (1e-4, ["objective.z_loss (then 0.0001, now removed)"])):
        then = {"keys": {**now["keys"], "objective.z_loss": value, "optimizer.ns_steps": 5}, "contents": {}}
        assert [str(change) for change in fingerprint.changes(then, now, {}, config)] == said
    fingerprint.check_names(["objective.z_loss"], now, config)
    for typed in ("+objective.z_loss=1e-4", "+data.batch_warmup.lr_scaling=sqrt", "+optimizer.ns_steps=3"):
        with pytest.raises(UserError, match="there is no key"):
            check(compose(["optimizer=muon", typed]))
