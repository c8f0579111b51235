"""Runs with a memory: what they train, save, resume, export, generate and refuse."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers_models import tiny
from inprocess import run
from lmtrain.adapters.memory_adapter import attach, has_been_trained
from lmtrain.checkpoints import store
from lmtrain.config import compose as rules
from lmtrain.errors import UserError
from lmtrain.exports.hf_folder import logits
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import rows
from tiny_pretrained import SHORT, save_pretrained

IDS = torch.arange(3, 35)[None]
CHATS = ["objective=sft", "data=chat_jsonl", "data.chat_template=vicuna", "data.val_fraction=0.2"]
SHAPE = [
    "memory.layers=[0,1]", "memory.num_chapters=4", "memory.chapter_size=8", "memory.memory_dim=16", "memory.top_k=2",
]  # fmt: skip
KINDS = {
    "llama": ["peft=memory"],
    "gpt2": ["peft=memory", "memory.share_bank=false", "memory.router=straight_through"],
    "lora": ["peft=memory_lora", "peft.r=4"],
    "nf4": ["peft=memory", "peft.quantization=nf4"],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    tied = {"tie_word_embeddings": True, "initializer_range": 0.08, "max_position_embeddings": 256}
    return {
        "llama": save_pretrained(folder / "llama", **tied),
        "gpt2": save_pretrained(folder / "gpt2", "gpt2", n_positions=256),
        "nf4": save_pretrained(folder / "nf4", hidden_size=64, intermediate_size=128, **tied),
    }


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    turns = lambda i: [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i * i}"}]  # noqa: E731
    path.write_text("".join(json.dumps({"messages": turns(i)}) + "\n" for i in range(30)))
    return path


def train(chats: Path, base: Path, run_dir: Path, *extra: str) -> Any:
    settings = [o for o in SHORT if not o.startswith("data=")]
    named = [f"data.path={chats}", f"model.name_or_path={base}", f"run.dir={run_dir}", "data.seq_len=256"]
    return run("train", *CHATS, *settings, *named, *SHAPE, "callbacks.samples.every_n_validations=0", *extra)


def losses(run_dir: Path) -> dict[int, float]:
    return {r["step"]: r["train/loss"] for r in rows(run_dir / "metrics.jsonl") if "train/loss" in r}


@pytest.mark.parametrize("kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("gpt2", "lora", "nf4"))])
def test_trains_resumes_exports_and_generates(
    kind: str, bases: dict[str, Path], chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    base = bases.get(kind, bases["llama"])
    whole, folder = tmp_path / "whole", RunDir(tmp_path / "halved")
    for run_dir, steps in ((whole, 4), (folder.path, 2), (folder.path, 4)):
        ended = train(chats, base, run_dir, *KINDS[kind], f"trainer.max_steps={steps}", "run.resume=auto",
                      "schedule=constant", "optimizer.lr=0.02")  # fmt: skip
        assert ended.code == 0, ended.err
    assert losses(folder.path) == losses(whole)
    first, second = (store.load_weights(f / "checkpoints" / "last") for f in (whole, folder.path))
    assert first.keys() == second.keys()
    assert all(torch.equal(t, second[name]) for name, t in first.items()), "resumed bit for bit"
    parts = (".memory.", ".memory_bank.", "lora_")
    assert all(any(part in name for part in parts) for name in first), "no base in it"

    live, _, _ = trained.from_run(folder, "last", {})
    assert has_been_trained(live)
    expected = logits(live, IDS)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    theirs = AutoModelForCausalLM.from_pretrained(folder.export, trust_remote_code=True)
    assert not type(theirs).__module__.startswith("lmtrain")
    assert (logits(theirs, IDS) - expected).abs().max() < 1e-5 * max(1.0, expected.abs().max().item())
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base), IDS), expected, atol=1e-3)
    cached, plain = (theirs.generate(IDS, max_new_tokens=6, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)
    text = [
        run(
            "generate", f"run_dir={where}", "generate.prompt=3?", "generate.max_new_tokens=6", "generate.temperature=0"
        ).out
        for where in (folder.path, folder.export)
    ]
    assert text[0] == text[1] != ""


def test_the_modeling_file_needs_no_lmtrain(bases: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    ended = train(
        chats, bases["llama"], tmp_path / "run", "peft=memory", "trainer.max_steps=1", "export.dtype=bfloat16"
    )
    assert ended.code == 0, ended.err
    assert "trust_remote_code=True reads it" in " ".join(ended.out.split())
    path = tmp_path / "run" / "export" / "modeling_memory.py"
    text = path.read_text()
    assert "Apache License, Version 2.0" in text
    assert not [line for line in text.splitlines() if "import" in line and "lmtrain" in line]
    spec = importlib.util.spec_from_file_location("modeling_memory_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    merged = run("export", f"run_dir={tmp_path / 'run'}", "export.merge=true")
    assert merged.code == 2
    assert "a memory can't be merged into its base" in merged.err
    exported = tmp_path / "run" / "export"
    assert "trust_remote_code=True" in (exported / "README.md").read_text()
    damaged = json.loads((exported / "config.json").read_text()) | {"memory": {"slots": 3}}
    (exported / "config.json").write_text(json.dumps(damaged))
    ended = run("generate", f"run_dir={exported}", "generate.prompt=3?")
    assert ended.code == 2
    assert "memory is not what lmtrain writes" in ended.err


def test_dpo_takes_the_model_without_its_memory_for_reference(bases: dict[str, Path], tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    row = lambda i: {"prompt": f"{i}?", "chosen": f"{i}!", "rejected": f"{i} or not"}  # noqa: E731
    pairs.write_text("".join(json.dumps(row(i)) + "\n" for i in range(20)))
    dpo = ["objective=dpo", "data=preference_jsonl", "peft=memory", "trainer.max_steps=3", "optimizer.lr=0.05"]
    dpo += ["export.enabled=false", "router.load_balance=0", "router.z_loss=0"]
    ended = train(pairs, bases["llama"], tmp_path / "run", *dpo)
    assert ended.code == 0, ended.err
    assert "adapter_off" in ended.out
    found = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert found[0]["train/loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert found[-1]["train/rewards/margin"] != 0


WRONG = {
    "memory.top_k=9": "memory.top_k=9 of memory.num_chapters=4: a token can't read more",
    "memory.memory_dim=18": "memory.memory_dim=18 does not divide into memory.num_heads=4: set memory.num_heads=3 or",
    "memory.layers=[0,2]": "memory.layers=[0, 2]: no layer 2; the model has 2, 0 to 1",
    "memory.layers=every_4": "memory.layers=every_4: the model has 2 layers; set memory.layers=[1]",
    "memory.layers=all": "memory.layers=all: every_4 say, or a list of layers counted from 0",
    "memory.chapter_size=4000000000": "the memory needs 7,629.4 GiB to be trained",
    "router.z_loss=-1": "router.z_loss=-1.0: a number from 0 up is needed",
    "router.load_balance=-0.1": "router.load_balance=-0.1: a number from 0 up is needed",
    "memory.router=top": "memory.router=top is not known; did you mean top_k?",
    "peft=none peft.method=memory": "it trains a memory",
    "export.merge=true": "a memory can't be merged",
    "tokenizer.add_tokens=[x]": "Set peft=memory_lora",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_one_message_says_what_is_wrong(wrong: str) -> None:
    """A wrong setting is refused with one message by the config check or by `attach`, before anything is trained."""
    shape = SHAPE if "peft=none" not in wrong else []
    overrides = ["model=pretrained", "model.name_or_path=x", "data.seq_len=8", "peft=memory", *shape, *wrong.split()]
    with pytest.raises(UserError) as refused:
        attach(tiny("llama"), rules.check(rules.compose(overrides)))
    assert WRONG[wrong] in str(refused.value)


@pytest.mark.slow
def test_a_checkpoint_on_another_base_is_refused(bases: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    other = save_pretrained(
        tmp_path / "other", tie_word_embeddings=True, initializer_range=0.09, max_position_embeddings=256
    )
    for base, steps, code in ((bases["llama"], 1, 0), (other, 2, 2)):
        ended = train(chats, base, tmp_path / "run", "peft=memory", f"trainer.max_steps={steps}", "run.resume=auto",
                      "export.enabled=false")  # fmt: skip
        assert ended.code == code, ended.err
    assert "model.name_or_path" in ended.err


def test_an_exported_memory_is_trained_further(bases: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """A run on an exported memory starts from the export's function, whether the base is frozen or trained too."""
    steady = ["trainer.max_steps=2", "schedule=constant", "optimizer.lr=0.02"]
    ended = train(chats, bases["llama"], tmp_path / "first", "peft=memory", *steady)
    assert ended.code == 0, ended.err
    first = RunDir(tmp_path / "first")
    expected = logits(trained.from_run(first, "last", {})[0], IDS)
    for kind in (["peft=memory"], ["peft=none", "memory=bank"]):
        unmoved = RunDir(tmp_path / f"unmoved_{len(kind)}")
        ended = train(chats, first.export, unmoved.path, *kind, "trainer.max_steps=1", "optimizer.lr=0")
        assert ended.code == 0, ended.err
        assert (logits(trained.from_run(unmoved, "last", {})[0], IDS) - expected).abs().max() < 1e-5
        assert trained.load(str(unmoved.export), "last", {})[0].config.model_type == "memory_llama"
    ended = train(chats, first.export, tmp_path / "second", "peft=memory", *steady)
    assert ended.code == 0, ended.err
    assert losses(tmp_path / "second")[1] < losses(first.path)[1]

    ended = train(chats, first.export, tmp_path / "third", "peft=memory", "memory.top_k=1")
    assert ended.code == 2
    assert "memory.top_k of the memory in" in ended.err
    assert "set memory.top_k=2" in ended.err
    named = [f"model.name_or_path={first.export}", f"data.path={chats}", f"run.dir={tmp_path / 'fourth'}"]
    ended = run("train", *CHATS, *SHORT, *named, "data=chat_jsonl", "data.seq_len=256")
    assert ended.code == 2
    assert "has a memory: to go on training it set peft=memory" in ended.err


GROUPS = "[{name: memory, lr: 1.0e-2, weight_decay: 0}, {name: adapter, lr: 1.0e-3}, {name: base, lr: 1.0e-4}]"


def test_memory_adapter_and_base_have_rates_of_their_own(bases: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """The example of docs/memory.md: memory, adapter and base train at their own rates, and are saved and exported."""
    three = ["peft=memory_lora", "peft.r=4", f"optimizer.groups={GROUPS}", "schedule=constant", "optimizer=lion"]
    folder = RunDir(tmp_path / "run")
    for steps in (1, 2):
        ended = train(chats, bases["llama"], folder.path, *three, f"trainer.max_steps={steps}", "run.resume=auto",
                      "schedule.warmup_steps=0")  # fmt: skip
        assert ended.code == 0, ended.err
    assert all(word in ended.out for word in ("memory/decay", "adapter/decay", "base/decay", "base/no_decay"))
    model, _, _ = trained.from_run(folder, "last", {})
    fresh = AutoModelForCausalLM.from_pretrained(bases["llama"])
    moved = {n.replace(".base_layer", ""): p for n, p in model.named_parameters() if "lora_" not in n}
    norm = "model.norm.weight"  # Lion moves each coordinate by exactly its learning rate per step
    steps_moved = ((moved[norm] - fresh.get_parameter(norm)) / 1e-4).detach()
    torch.testing.assert_close(steps_moved.abs().round(), steps_moved.abs(), rtol=0, atol=1e-2)
    assert steps_moved.abs().max() == pytest.approx(2, abs=1e-2)
    assert all(not torch.equal(moved[name], p) for name, p in fresh.named_parameters())
    assert (folder.export / "modeling_memory.py").exists()  # it was compared with the live model before it was kept


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["peft=lora"], "the export would be the adapter alone"),
        (["peft=memory_lora", "peft.quantization=nf4"], "quantised weights can't be trained"),
        (["peft=memory"], "{name: adapter}: no adapter is trained"),
    ],
)
def test_a_base_that_can_not_be_trained_is_refused(
    extra: list[str], said: str, bases: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    memory = [o for o in SHAPE if "memory" in extra[0]]
    named = [f"data.path={chats}", f"model.name_or_path={bases['llama']}", f"run.dir={tmp_path / 'run'}"]
    settings = [o for o in SHORT if not o.startswith("data=")]
    ended = run("train", *CHATS, *settings, *named, "data.seq_len=256", *memory, *extra, f"optimizer.groups={GROUPS}")
    assert ended.code == 2
    assert said in ended.err
