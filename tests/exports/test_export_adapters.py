"""Runs that train an adapter: what they save, export, merge and refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from inprocess import message, run, snapshot
from lmtrain.checkpoints import store
from lmtrain.exports.hf_folder import logits
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import rows, thinned
from tiny_pretrained import SHORT, save_pretrained

IDS = torch.arange(3, 35)[None]
KINDS: dict[str, list[str]] = {
    "lora": ["peft=lora", "peft.dropout=0.1"],
    "pissa": ["peft=lora", "peft.init_weights=pissa", "peft.use_rslora=true"],
    "added tokens": ["peft=lora", 'tokenizer.add_tokens=["<|a|>","<|b|>"]'],
    "in full": ["peft=lora", "peft.modules_to_save=[embed_tokens]", "peft.bias=all"],
    "bf16": ["peft=lora", "trainer.precision=bf16-true"],
    "qlora": ["peft=qlora"],
}


def train(corpus: Path, base: Path, run_dir: Path, *extra: str) -> Any:
    return run("train", *SHORT, f"data.path={corpus}", f"model.name_or_path={base}", f"run.dir={run_dir}", *extra)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("base") / "tied", tie_word_embeddings=True, initializer_range=0.08)


@pytest.mark.parametrize("kind", thinned(KINDS, 5))
def test_adapter_and_merged_export_equal_the_live_model(kind: str, corpus: Path, tied: Path, tmp_path: Path) -> None:
    if kind == "qlora":
        pytest.importorskip("bitsandbytes")
    done = train(corpus, tied, tmp_path / "run", *KINDS[kind])
    assert done.code == 0, done.err
    folder = RunDir(tmp_path / "run")
    live, tokenizer, _ = trained.from_run(folder, "last", {})
    expected = logits(live, IDS)
    largest = expected.abs().max().item()

    weights = store.load_weights(folder.checkpoints / "last")
    parts = ("lora_", "modules_to_save", "trainable_tokens")
    assert all(any(part in name for part in parts) for name in weights), "no base in it"
    assert {t.dtype for n, t in weights.items() if "lora_" in n} == {torch.float32}
    config = json.loads((folder.export / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tied)
    assert not (folder.export / "model.safetensors").exists()
    if kind != "qlora":  # AutoPeft would load the base without quantising it
        theirs = AutoPeftModelForCausalLM.from_pretrained(folder.export)
        assert (logits(theirs, IDS) - expected).abs().max() < 1e-5 * largest
        base = AutoModelForCausalLM.from_pretrained(tied)
        base.resize_token_embeddings(len(tokenizer))
        assert (logits(PeftModel.from_pretrained(base, folder.export), IDS) - expected).abs().max() < 1e-5 * largest

    adapter = snapshot(folder.export)
    done = run("export", f"run_dir={folder.path}", "export.merge=true")
    assert done.code == 0, done.err
    assert f"{folder.export_merged}  (from" in done.out
    assert snapshot(folder.export) == adapter, "it stays as it was"
    model = AutoModelForCausalLM.from_pretrained(folder.export_merged)
    assert (logits(model, IDS) - expected).abs().max() < 1e-5 * largest
    rows_ = model.get_input_embeddings().weight.shape[0]
    assert model.config.vocab_size == rows_ == len(AutoTokenizer.from_pretrained(folder.export_merged))
    assert model.config.pad_token_id is None
    assert model.config.tie_word_embeddings, "it was tied and is"

    done = run("export", f"run_dir={folder.path}", "export.merge=true", "export.dtype=bfloat16")
    assert done.code == 0, done.err
    model = AutoModelForCausalLM.from_pretrained(folder.export_merged, dtype=torch.float32)
    assert (logits(model, IDS) - expected).abs().max() < 2e-2 * largest


def test_merged_at_the_end_of_training(corpus: Path, tied: Path, tmp_path: Path) -> None:
    done = train(corpus, tied, tmp_path / "run", "peft=lora", "export.merge=true", "export.dtype=bfloat16")
    assert done.code == 0, done.err
    live, _, _ = trained.from_run(RunDir(tmp_path / "run"), "last", {})
    expected = logits(live, IDS)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export_merged", dtype=torch.float32)
    adapter = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run" / "export", dtype=torch.float32)
    for model in (merged, adapter):
        assert (logits(model, IDS) - expected).abs().max() < 2e-2 * expected.abs().max()
    assert "".join(done.out.split()).count("from_pretrainedreadsit") == 2


def test_without_an_adapter_there_is_nothing_to_merge(corpus: Path, tied: Path, tmp_path: Path) -> None:
    done = train(corpus, tied, tmp_path / "run", "export.merge=true")
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "export" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "export_merged").exists()


def test_rows_of_added_tokens_reach_the_exported_adapter(corpus: Path, tied: Path, tmp_path: Path) -> None:
    """By default peft writes no row of a token that was only added, which would then silently load as noise."""
    done = train(corpus, tied, tmp_path / "run", *KINDS["added tokens"])
    assert done.code == 0, done.err
    weights = load_file(tmp_path / "run" / "export" / "adapter_model.safetensors")
    row_names = [name for name in weights if "trainable_tokens_delta" in name]
    assert [weights[name].shape for name in row_names] == [(2, 32)]
    done = train(corpus, tied, tmp_path / "on", "peft=lora", f"peft.adapter={tmp_path / 'run' / 'export'}",
                 f"tokenizer.name_or_path={tmp_path / 'run' / 'export'}")  # fmt: skip
    assert done.code == 0, done.err
    assert "(trainable)" in done.out, "the plan says that it goes on"
    assert "259 tokens" in done.out


def test_generate_from_a_run_and_from_its_adapter(corpus: Path, tied: Path, tmp_path: Path) -> None:
    assert train(corpus, tied, tmp_path / "run", "peft=lora", "export.merge=true").code == 0
    texts = []
    for where in ("run", "run/export", "run/export_merged"):
        done = run("generate", f"run_dir={tmp_path / where}", "generate.prompt=line", "generate.max_new_tokens=8",
                   "generate.checkpoint=last")  # fmt: skip
        assert done.code == 0, done.err
        texts.append(done.out)
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].startswith("line")


@pytest.mark.parametrize("peft", thinned(["lora", "qlora"], 2))
def test_validations_change_nothing(peft: str, corpus: Path, tied: Path, tmp_path: Path) -> None:
    """Training with a validation after each step equals training without validations, bit for bit."""
    if peft == "qlora":
        pytest.importorskip("bitsandbytes")
    states = []
    for name, every in (("often", 1), ("never", 100)):
        done = train(corpus, tied, tmp_path / name, f"peft={peft}", "peft.dropout=0.1", "export.enabled=false",
                     f"trainer.val_check_interval={every}")  # fmt: skip
        assert done.code == 0, done.err
        states.append(store.load_weights(tmp_path / name / "checkpoints" / "last"))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())
    assert all(t.abs().max() > 0 for name, t in states[0].items() if "lora_B" in name)


def test_what_a_resumed_run_must_share(corpus: Path, tied: Path, tmp_path: Path) -> None:
    where = tmp_path / "run"
    assert train(corpus, tied, where, "peft=lora", "export.enabled=false").code == 0
    longer = ["trainer.max_steps=6", "run.resume=auto", "export.enabled=false"]
    other = save_pretrained(tmp_path / "other", tie_word_embeddings=True, initializer_range=0.1)
    done = train(corpus, other, where, "peft=lora", *longer, f"tokenizer.name_or_path={tied}")
    assert done.code == 2
    assert "model.name_or_path (then" in message(done.err)
    done = train(corpus, tied, where, "peft=lora", "peft.r=8", *longer)
    assert done.code == 2
    assert "peft.r (then 16, now 8)" in message(done.err)
    done = train(corpus, tied, where, "peft=none", *longer)
    assert done.code == 2
    assert "peft.method (then lora, now none)" in message(done.err)
    moved = tied.rename(tied.with_name("moved"))  # the same weights in another folder are the same base
    done = train(corpus, moved, where, "peft=lora", *longer)
    moved.rename(tied)
    assert done.code == 0, done.err
    assert [row["step"] for row in rows(where / "metrics.jsonl") if "train/loss" in row] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["peft=lora", "model=llama_nano", "tokenizer=bytes"], "adapts a pretrained model. Set model=pretrained"),
        (["peft=lora", "peft.r=0"], "peft.r=0"),
        (["peft=lora", "peft.dropout=1.0"], "peft.dropout=1.0"),
        (["peft=lora", "peft.init_weights=pisa"], "did you mean pissa"),
        (["peft=qlora", "peft.init_weights=pissa"], "does not go with peft.quantization=nf4"),
        (["peft=lora", "peft.target_modules=[q_prj]"], "'q_prj' matches no module of the model (there are q_proj"),
    ],
)
def test_settings_that_are_refused(
    settings: list[str], expected: str, corpus: Path, tied: Path, tmp_path: Path
) -> None:
    given = [s for s in SHORT if not s.startswith("model=")] if "model=llama_nano" in settings else SHORT
    name = [] if "model=llama_nano" in settings else [f"model.name_or_path={tied}"]
    done = run("train", *given, f"data.path={corpus}", *name, f"run.dir={tmp_path / 'run'}", *settings)
    assert done.code == 2
    assert expected in message(done.err)
