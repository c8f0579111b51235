"""Resuming a run with changed settings, on real runs: refused key by key, reported, or from an earlier version."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from chats import write_rows
from inprocess import Ended, message, run, train_tiny
from lmtrain.callbacks.early_stopping import EarlyStopping, early_stopping
from lmtrain.checkpoints import manifest, retention, store
from lmtrain.config.compose import check, compose
from support import TINY, rows, thinned

PAIRS = ["objective=dpo", "data=preference_jsonl", "data.chat_template=vicuna", "data.val_fraction=0.2",
         "data.seq_len=512", "model.max_position_embeddings=512", "callbacks.samples.every_n_validations=0",
         "export.enabled=false", "trainer.max_steps=1", "trainer.val_check_interval=null",
         "trainer.limit_val_batches=1"]  # fmt: skip


@pytest.fixture(scope="module")
def text_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("text") / "run"
    ended = train_tiny(corpus, f"run.dir={run_dir}", "export.enabled=false")
    assert ended.code == 0, ended.err
    return run_dir


def again(corpus: Path, begun: Path, tmp_path: Path, *overrides: str) -> Ended:
    """Continues a copy of the run for one more step."""
    copy = tmp_path / "run"
    if not copy.exists():
        shutil.copytree(begun, copy, symlinks=True)
    longer = [f"run.dir={copy}", "run.resume=auto", "trainer.max_steps=3", "export.enabled=false"]
    return train_tiny(corpus, *longer, *overrides)


REFUSED = {
    "optimizer.betas=[0.8,0.9]": "optimizer.betas (then [0.9, 0.95], now [0.8, 0.9])",
    "trainer.gradient_clip_val=2.0": "trainer.gradient_clip_val (then 1.0, now 2.0)",
    "trainer.precision=64-true": "trainer.precision (then 32-true, now 64-true)",
    "model.dropout=0.1": "model.dropout (then 0.0, now 0.1)",
    "model.hidden_size=16": "model.hidden_size (then 32, now 16)",
    "data.isolate_documents=true": "data.isolate_documents (then False, now True)",
}


def test_changes_of_what_is_learned(text_run: Path, corpus: Path, tmp_path: Path) -> None:
    ended = again(corpus, text_run, tmp_path, *REFUSED)
    assert ended.code == 2, ended.out
    assert "trained with other settings: " in message(ended.err)
    for words in REFUSED.values():
        assert words in message(ended.err)
    # Each key is named once: no hash repeats a change that a key already shows.
    assert message(ended.err).count("(then") == len(REFUSED)
    names = {key.split("=")[0] for key in REFUSED}
    assert set(message(ended.err).rpartition("run.allow_change=[")[2].rstrip("]").split(",")) == names


@pytest.mark.parametrize(
    "override", ["trainer.gradient_clip_val=2.0", "trainer.precision=64-true", "model.dropout=0.1"]
)
def test_it_is_allowed_by_its_name(override: str, text_run: Path, corpus: Path, tmp_path: Path) -> None:
    ended = again(corpus, text_run, tmp_path, override, f"run.allow_change=[{override.split('=')[0]}]")
    assert ended.code == 0, ended.err


def test_a_change_that_is_the_users_right_is_said(text_run: Path, corpus: Path, tmp_path: Path) -> None:
    changed = [
        "optimizer.lr=1e-4",
        "optimizer.weight_decay=0.3",
        "schedule.min_lr_ratio=0.2",
        "data.micro_batch_size=3",
    ]
    ended = again(corpus, text_run, tmp_path, *changed)
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.replace("│", " ").split())
    assert "changed since this run's last start: data.micro_batch_size 2 -> 3," in said
    for words in ("optimizer.weight_decay 0.1 -> 0.3", "schedule.min_lr_ratio 0.1 -> 0.2", "trainer.max_steps 2 -> 3"):
        assert words in said
    assert "-> 0.0001" in said


def pairs_run(path: Path, run_dir: Path, *overrides: str) -> Ended:
    return run("train", *TINY, *PAIRS, f"data.path={path}", f"run.dir={run_dir}", "run.resume=auto", *overrides)


def test_options_of_the_preference_loss(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "pairs.jsonl", "preference_jsonl", 20)
    assert pairs_run(path, tmp_path / "run").code == 0
    changes = {
        "objective.beta=0.2": "objective.beta (then 0.1, now 0.2)",
        "objective.loss=hinge": "objective.loss (then sigmoid, now hinge)",
        "objective.sft_weight=0.5": "objective.sft_weight (then 0.0, now 0.5)",
    }
    of_this_loss = {
        "objective.label_smoothing=0.1": "objective.label_smoothing (then 0.0, now 0.1)",
        "objective.length_normalize=true": "objective.length_normalize (then False, now True)",
    }
    for changed in (changes, of_this_loss):
        ended = pairs_run(path, tmp_path / "run", "trainer.max_steps=2", *changed)
        assert ended.code == 2
        for words in changed.values():
            assert words in message(ended.err)
    # Writing out the value that auto stands for is no change.
    ended = pairs_run(path, tmp_path / "run", "trainer.max_steps=2", "objective.length_normalize=false")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("value", thinned(["auto", False], 2))
def test_a_run_whose_config_has_the_key_fused(value: Any, text_run: Path, corpus: Path, tmp_path: Path) -> None:
    """Earlier versions wrote this key, which no longer exists."""
    begun = tmp_path / "begun"
    shutil.copytree(text_run, begun, symlinks=True)
    tree = yaml.safe_load((begun / "config.yaml").read_text())
    tree["optimizer"]["fused"] = value
    (begun / "config.yaml").write_text(yaml.safe_dump(tree))

    for verb, words in (("evaluate", ["evaluate.limit=1"]), ("export", ["export.dtype=float32"])):
        ended = run(verb, f"run_dir={begun}", *words)
        assert ended.code == 0, ended.err
    new = ["--config-dir", str(begun), f"run.dir={tmp_path / 'new'}", "trainer.max_steps=1"]
    ended = run("train", *new)
    assert ended.code == 0, ended.err
    assert "fused" not in (tmp_path / "new/config.yaml").read_text()
    assert "no key 'optimizer.fused': AdamW is always" in message(run("train", *new, "optimizer.fused=true").err)
    ended = again(corpus, begun, tmp_path)
    assert ended.code == 0, ended.err
    assert "step_00000002" in ended.out.partition("start ")[2].splitlines()[0]


def scores_of(run_dir: Path) -> dict[int, float]:
    return {step: score for step, score in retention.scores(run_dir / "checkpoints", "val/loss") if score is not None}


def test_scores_of_other_validation_rows_are_not_compared(text_run: Path, corpus: Path, tmp_path: Path) -> None:
    """Scores on other rows aren't comparable: the run says so, and picks the best among scores on the same rows."""
    ended = again(corpus, text_run, tmp_path, "trainer.limit_val_batches=5", "optimizer.lr=0.0")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.split())
    assert "trainer.limit_val_batches 1 -> 5" in said
    assert "val/loss is measured on other rows than up to step 2: scores are not compared with those before" in said
    found = scores_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best"] == "checkpoints/step_00000003"
    assert summary["best_metric"] == {"val/loss": found[3]}
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step_00000003"
    assert len(found) > 1, "the best of the rows before stays too"


def test_scores_of_the_same_validation_rows_are_compared(text_run: Path, corpus: Path, tmp_path: Path) -> None:
    ended = again(corpus, text_run, tmp_path, "optimizer.lr=0.0")
    assert ended.code == 0, ended.err
    assert "not compared" not in ended.out
    found = scores_of(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["best_metric"] == {"val/loss": min(found.values())}


def test_early_stopping_on_other_rows_begins_again() -> None:
    before = EarlyStopping("val/loss", scored_on="a")
    before.best_score, before.wait_count = torch.tensor(0.1), 2
    same, other, older = (EarlyStopping("val/loss", scored_on=rows) for rows in ("a", "b", "b"))
    same.load_state_dict(before.state_dict())
    other.load_state_dict(before.state_dict())
    older.load_state_dict({k: v for k, v in before.state_dict().items() if k != "scored_on"})
    assert (same.wait_count, other.wait_count, older.wait_count) == (2, 0, 2)
    assert float(other.best_score) == float("inf")


@pytest.mark.parametrize(("mode", "stop_at", "worse"), [("max", 1.0, 0.999), ("min", 0.1, 0.101), ("max", 0.0, -0.001)])
def test_a_score_has_only_to_be_reached(mode: str, stop_at: float, worse: float) -> None:
    callbacks = ["monitor=val/loss", f"mode={mode}", f"stop_at={stop_at}"]
    config = check(compose([f"callbacks.early_stopping.{word}" for word in callbacks]))
    stopping = early_stopping(config.callbacks.early_stopping, lambda _: None)
    assert stopping._evaluate_stopping_criteria(torch.tensor(stop_at))[0]
    assert not stopping._evaluate_stopping_criteria(torch.tensor(worse))[0]


def test_a_stopped_run_goes_on_with_more_patience(corpus: Path, tmp_path: Path) -> None:
    settings = ["callbacks.early_stopping.threshold=100", "trainer.max_steps=6", "export.enabled=false"]
    again = [*settings, "run.resume=auto", f"run.dir={tmp_path / 'run'}"]
    ended = train_tiny(corpus, *again, "callbacks.early_stopping.patience=1")
    assert ended.code == 0, ended.err
    assert (json.loads((tmp_path / "run" / "summary.json").read_text())["step"]) == 2
    ended = train_tiny(corpus, *again, "callbacks.early_stopping.patience=3", "trainer.max_steps=7")
    assert ended.code == 0, ended.err
    assert (json.loads((tmp_path / "run" / "summary.json").read_text())["step"]) == 4


def swap_two_ids(file: Path) -> None:
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
def test_two_ids_swapped_in_a_runs_tokenizer(verb: str, text_run: Path, tmp_path: Path) -> None:
    shutil.copytree(text_run, tmp_path / "run", symlinks=True)
    swap_two_ids(tmp_path / "run" / "tokenizer" / "tokenizer.json")
    ended = run(verb, f"run_dir={tmp_path}/run")
    assert ended.code == 2, ended.out
    assert f"{tmp_path}/run/tokenizer is not the tokenizer that the model was trained with" in message(ended.err)
    assert "tokenizer.json" in message(ended.err)
    assert not (tmp_path / "run" / "export").exists()


def test_a_tokenizer_of_a_run_of_an_earlier_version_is_known_by_its_ids(text_run: Path, tmp_path: Path) -> None:
    shutil.copytree(text_run, tmp_path / "run", symlinks=True)
    for path in store.scan(tmp_path / "run" / "checkpoints"):
        content = manifest.read(path)
        manifest.write(path, {k: content[k] for k in ("step", "metrics", "interim", "files")} | {"version": 1})
    assert run("export", f"run_dir={tmp_path}/run").code == 0
    swap_two_ids(tmp_path / "run" / "tokenizer" / "tokenizer.json")
    assert "(its ids changed)" in message(run("export", f"run_dir={tmp_path}/run").err)


def test_a_resumed_run_writes_a_changed_tokenizer_again(text_run: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(text_run, tmp_path / "run", symlinks=True)
    file = tmp_path / "run" / "tokenizer" / "tokenizer_config.json"
    before = file.read_bytes()
    file.write_text("{}")
    ended = again(corpus, text_run, tmp_path)
    assert ended.code == 0, ended.err
    assert "was changed since step_00000002: rewritten" in " ".join(ended.out.split())
    assert file.read_bytes() == before
    assert run("export", f"run_dir={tmp_path}/run", "export.checkpoint=step_00000002").code == 0


COOLED = ["schedule.warmup_steps=2", "trainer.val_check_interval=null", "export.enabled=false",
          "trainer.save_every_n_steps=6", "callbacks.samples.every_n_validations=0"]  # fmt: skip


@pytest.mark.parametrize("schedule", ["wsd", "constant_with_warmup"])
def test_a_cooldown_is_a_run_of_that_length(schedule: str, corpus: Path, tmp_path: Path) -> None:
    """It equals one bit for bit, from a longer run's checkpoint at the full rate; the same command again resumes it."""
    long, alone, branch = (tmp_path / name for name in ("long", "alone", "branch"))
    words = [*COOLED, f"schedule={schedule}", "trainer.max_steps=16", "checkpoint.keep_every=6"]
    assert train_tiny(corpus, *words, f"run.dir={long}").code == 0
    short = [*COOLED, "schedule=wsd", "trainer.max_steps=8"]
    assert train_tiny(corpus, *short, f"run.dir={alone}", "schedule.decay_from=6").code == 0
    cooled = [*short, f"run.dir={branch}", f"run.cooldown_from={long / 'checkpoints' / 'step_00000006'}"]
    ended = train_tiny(corpus, *cooled)
    assert ended.code == 0, ended.err
    assert "was changed since" not in ended.out  # said of the new folder's tokenizer
    ours, theirs = (torch.load(run / "checkpoints" / "last" / "model.pt", weights_only=True) for run in (branch, alone))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ours.keys() == theirs.keys()
    rates = [row["lr"] for row in rows(branch / "metrics.jsonl") if "lr" in row]
    assert rates[-1] < rates[0]
    assert "nothing to do" in train_tiny(corpus, *cooled).out
    # Killed while it wrote its first checkpoint, it begins at the longer run's again, not at random weights.
    (branch / "summary.json").unlink()
    (branch / "checkpoints" / "step_00000008").rename(branch / "checkpoints" / "step_00000008.tmp99")
    again = train_tiny(corpus, *cooled)
    assert "continues after step 6" in again.out, again.err
    ours = torch.load(branch / "checkpoints" / "last" / "model.pt", weights_only=True)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["schedule=wsd", "run.cooldown_from=outputs/long/checkpoints/last"], "name a checkpoint by its step"),
        (["schedule=cosine", "run.cooldown_from=a/step_00000006"], "Set schedule=wsd"),
        (["schedule=wsd", "run.cooldown_from=a/step_00000016"], "trainer.max_steps=8 is not beyond that step"),
        (["schedule=wsd", "run.cooldown_from=a/step_00000006", "run.resume=b"], "both say where to begin"),
        (["schedule=wsd", "run.cooldown_from=a/step_00000006"], "no such checkpoint folder"),
    ],
)
def test_a_cooldown_from_nowhere_is_refused(words: list[str], said: str, corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, *COOLED, *words, "trainer.max_steps=8", f"run.dir={tmp_path}/run")
    assert ended.code == 2
    assert said in ended.err


def test_a_cooldown_begins_at_the_full_rate(corpus: Path, tmp_path: Path) -> None:
    assert train_tiny(corpus, *COOLED, "schedule=cosine", "trainer.max_steps=8", f"run.dir={tmp_path}/long").code == 0
    words = ["schedule=wsd", "trainer.max_steps=12", f"run.dir={tmp_path}/short"]
    ended = train_tiny(corpus, *COOLED, *words, f"run.cooldown_from={tmp_path}/long/checkpoints/step_00000006")
    assert ended.code == 2
    assert "at step 6 the learning rate was 0.55 of its peak" in ended.err  # halfway down to the floor of 0.1
