"""The examples of docs/extending.md, and the skeletons that it names, work unchanged from outside the tree."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import lmtrain
from inprocess import Ended, run
from lmtrain import new
from support import REPO, rows

PAGE = (REPO / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# ([\w/]+\.(?:py|yaml))\n(.*?)```", PAGE, flags=re.DOTALL))
SKELETONS = re.findall(r"`python -m lmtrain.new (\w+) (\w+)`", PAGE)
TINY_MODEL = ["model=gpt_nano", "tokenizer=bytes", "model.num_hidden_layers=1", "model.hidden_size=32",
              "model.num_attention_heads=2", "model.max_position_embeddings=64", "trainer.accelerator=cpu",
              "trainer.precision=32-true", "logger=none", "data.seq_len=64", "trainer.max_steps=1",
              "export.enabled=false", "report.enabled=false"]  # fmt: skip
SMALL = ["tokenizer=bytes", "data=text", "data.seq_len=32", "data.global_batch_size=6", "data.micro_batch_size=2",
         "trainer.precision=32-true", "trainer.log_every_n_steps=1", "logger=none", "data.val_fraction=0.1",
         "trainer.limit_val_batches=1", "callbacks.samples.max_new_tokens=4", "export.dtype=float32"]  # fmt: skip
MODEL = ["model=custom", "model._target_=small_decoder.SmallDecoder", "run.allow_target=[small_decoder]",
         "+model.hidden_size=32", "model.max_position_embeddings=32"]  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the page's files to an empty folder, which becomes the working folder, and returns it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for kind, name in SKELETONS:
        new.write(kind, name)
    for file in tmp_path.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    return tmp_path


def train(corpus: Path, *argv: str) -> Ended:
    ended = run("train", *SMALL, f"data.path={corpus}", *argv)
    assert ended.code == 0, ended.err
    return ended


def column(run_dir: Path, name: str) -> list[float]:
    return [row[name] for row in rows(run_dir / "metrics.jsonl") if name in row]


def test_the_decoder_trains_resumes_and_is_exported_with_its_code(
    corpus: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (package / "small_decoder.py").read_text()
    constant = ["schedule=constant", "schedule.warmup_steps=0"]
    train(corpus, *MODEL, *constant, "run.dir=straight", "trainer.max_steps=4")
    for steps in (2, 4):
        train(corpus, *MODEL, *constant, "run.dir=resumed", "run.resume=auto", f"trainer.max_steps={steps}")
    losses = column(package / "straight", "train/loss")
    assert losses == column(package / "resumed", "train/loss")
    assert losses[-1] < losses[0]

    export = package / "straight" / "export"
    assert (export / "small_decoder.py").read_text() == source
    assert "trust_remote_code=True" in (export / "README.md").read_text()
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    live = sys.modules["small_decoder"].SmallDecoder.from_pretrained(export)(ids).logits
    # As on another machine: the only small_decoder is the file in the export's folder.
    monkeypatch.delitem(sys.modules, "small_decoder")
    (package / "small_decoder.py").unlink()
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(package / "modules"))
    refused = run("generate", f"run_dir={export}")
    assert refused.code == 2
    assert "brings its own code: if you trust it, set model.trust_remote_code=true" in refused.err
    told = run("generate", f"run_dir={export}", "model.trust_remote_code=true", "generate.max_new_tokens=4")
    assert told.code == 0, told.err
    loaded = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules")
    torch.testing.assert_close(loaded(ids).logits, live)


def test_the_stairs_are_climbed_down_and_a_resumed_run_goes_on_where_it_was(corpus: Path, package: Path) -> None:
    stairs = ["schedule=custom", "schedule._target_=stairs.Stairs", "run.allow_target=[stairs]", "+schedule.every=2",
              "schedule.warmup_steps=1", "optimizer.lr=1.0e-3", "model.num_hidden_layers=1", "model.hidden_size=32",
              "model.num_attention_heads=2", "model.max_position_embeddings=32", "export.enabled=false"]  # fmt: skip
    for steps in (3, 6):
        train(corpus, *stairs, "run.dir=run", "run.resume=auto", f"trainer.max_steps={steps}")
    assert column(package / "run", "lr") == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4])


def test_the_source_is_prepared(package: Path) -> None:
    done = run("prepare", *SMALL, "data.source=greetings.Greetings", "data.source_options={number: 30}",
               "run.allow_target=[greetings]", "data.cache_dir=cache")  # fmt: skip
    assert done.code == 0, done.err
    assert next((package / "cache").glob("greetings-*")).is_dir()


def test_rows_of_ones_own_train_sft_on_their_answers(package: Path) -> None:
    found = [{"question": f"{n} + 1? ", "answer": str(n + 1)} for n in range(8, 12)]
    (package / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    words = ["objective=sft", "data=chat_jsonl", "data.path=questions.jsonl", "data.rows=questions.QuestionRows",
             "run.allow_target=[questions]", "data.global_batch_size=4", "data.micro_batch_size=2",
             "data.val_fraction=0", "data.packing=off"]  # fmt: skip
    made = lmtrain.build(lmtrain.compose([*TINY_MODEL, *words, "run.dir=run"]))
    made.fit()
    answers = sum(len(row["answer"]) + 1 for row in found)  # their bytes, and the end of the text
    assert int(made.objective.last_step.n_tokens) == answers
    refused = run("train", *TINY_MODEL, *words, "run.dir=other", "objective=dpo")
    assert (refused.code, "objective=dpo needs pairs" in refused.err) == (2, True), refused.err


def test_a_preference_loss_of_ones_own_trains_and_is_evaluated(package: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": str(n), "rejected": str(n + 1)} for n in range(6)]
    (package / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    data = ["data=preference_jsonl", "data.path=pairs.jsonl", "data.chat_template=zephyr", "data.global_batch_size=4",
            "data.micro_batch_size=2", "data.val_fraction=0.4", "run.allow_target=[squared]"]  # fmt: skip
    words = ["objective=dpo", "objective.name=squared", "objective._target_=squared.Squared", "+objective.target=2"]
    done = run("train", *TINY_MODEL, *data, *words, "run.dir=run", "export.enabled=true")
    assert done.code == 0, done.err
    assert column(package / "run", "train/loss")[0] == pytest.approx(4.0)  # the target's square, while both agree
    scored = run("evaluate", "run_dir=run", "evaluate.reference=run", "run.allow_target=[squared]")
    assert scored.code == 0, scored.err
    assert re.search(r"loss\W+4\.0", scored.out), scored.out


def test_a_metric_and_a_preset_of_ones_own(package: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
             for n in range(6)]  # fmt: skip
    (package / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    small = [word for word in TINY_MODEL if not word.startswith("model")]
    done = run("train", "chats.jsonl", *small, "--config-dir", "mine", "model=tiny", "model.hidden_size=32",
               "data.chat_template=zephyr", "data.val_fraction=0.4", "callbacks.samples.max_new_tokens=2",
               "callbacks.samples.metrics=[{_target_: first_word.FirstWord}]", "run.allow_target=[first_word]",
               "callbacks.samples.every_n_validations=1", "run.dir=run")  # fmt: skip
    assert done.code == 0, done.err
    assert set(column(package / "run", "val/FirstWord")) == {0.0}
    assert "num_hidden_layers: 2" in (package / "run" / "config.yaml").read_text()
