"""Layers split over a group of ranks: numbers and exports equal one process's, and checkpoints are portable."""

import json
from pathlib import Path

import pytest
import torch
from strategy_runs import CAUSAL, DPO, DPO_LORA, LORA, SFT, Runs, names_of, same_weights
from transformers import AutoConfig, AutoModelForCausalLM

from chats import write_chats, write_rows
from inprocess import message, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from lmtrain.errors import UserError
from lmtrain.models.split import check
from ranks_again import TORCHRUN, run_ranks
from resume.runs import assert_equal
from support import TINY, rows
from tiny_pretrained import save_pretrained

ADAPTED = ["model=pretrained", "model.name_or_path=somewhere"]
TP = ["trainer.strategy=fsdp_tp", "trainer.fsdp.tensor_parallel_size=2"]
# These families differ in biases, per-head norms, and whether queries, keys and values share one matrix.
FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "smollm3", "gemma", "gpt_neox")
SHARED_HEADS = ["model=qwen3_small", "tokenizer=bytes", "model.num_attention_heads=4", "model.num_key_value_heads=2",
                "model.head_dim=8", "model.intermediate_size=48"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    r = Runs(tmp_path_factory.mktemp("tensor_parallel"))
    # Only dropout on attention weights is not allowed: everything else is computed alike on the ranks of a group.
    text = [*CAUSAL, f"data.path={corpus}", "model.dropout=0.1", "+model.extra.attn_pdrop=0.0"]
    silent = "callbacks.samples.every_n_validations=0"  # only text, sft and lora generate samples
    qwen = [*CAUSAL, f"data.path={corpus}", *SHARED_HEADS, silent]
    chats = f"data.path={write_chats(r.folder / 'chats.jsonl', 40)}"
    pairs = f"data.path={write_rows(r.folder / 'pairs.jsonl', 'preference_jsonl', 40)}"
    llama = f"model.name_or_path={save_pretrained(r.folder / 'base_llama', max_position_embeddings=512)}"
    gpt2 = f"model.name_or_path={save_pretrained(r.folder / 'base_gpt2', 'gpt2', n_positions=512)}"
    tasks = {"text": text, "qwen": qwen, "sft": [*SFT, chats], "lora": [*LORA, chats, gpt2, "peft.dropout=0.1"],
             "dpo": [*DPO, pairs, llama, silent],
             "dpo_lora": [*DPO_LORA, pairs, llama, silent, "peft.dropout=0.1"],
             "muon": [*qwen, "optimizer=muon"]}  # fmt: skip
    for task, settings in tasks.items():
        r.one(task, *settings)
        r.two(f"{task}-tp", *settings, *TP)
    r.launch()
    for task in ("text", "lora"):
        saved = f"run.resume={r.checkpoint(f'{task}-tp', 10)}"
        r.one(f"{task}-tp-to-one", *tasks[task], saved)
        r.two(f"{task}-tp-to-tp", *tasks[task], *TP, saved, "trainer.fsdp.sharded_checkpoint=true")
        r.two(f"{task}-one-to-tp", *tasks[task], *TP, f"run.resume={r.checkpoint(task, 10)}")
    r.two("qwen-tp-to-fsdp", *qwen, "trainer.strategy=fsdp", f"run.resume={r.checkpoint('qwen-tp', 10)}")
    r.launch()
    # Two groups of two ranks; the second run's settings change how shards are gathered and gradients reduced.
    r.two("qwen-2x2", *qwen, *TP, "trainer.fsdp.sharded_checkpoint=true", "trainer.activation_checkpointing=selective")
    r.two("qwen-tp-to-2x2", *qwen, *TP, f"run.resume={r.checkpoint('qwen-tp', 10)}", "trainer.fsdp.cpu_offload=true",
          "trainer.fsdp.reduce_each_micro_batch=true", "trainer.activation_checkpointing=true")  # fmt: skip
    r.launch(ranks=4)
    r.one("qwen-2x2-to-one", *qwen, f"run.resume={r.checkpoint('qwen-2x2', 10)}")
    return r


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "qwen", "sft", "lora", "dpo", "dpo_lora"])
def test_numbers_are_those_of_one_process(runs: Runs, task: str) -> None:
    runs.compare(f"{task}-tp", task)


@pytest.mark.slow
def test_muon(runs: Runs) -> None:
    runs.compare("muon-tp", "muon", rel=5e-4)  # Newton-Schulz amplifies rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-2x2", "qwen-tp-to-2x2", "qwen-2x2-to-one"])
def test_two_groups_of_two(runs: Runs, name: str) -> None:
    runs.compare(name, "qwen")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "lora"])
def test_checkpoints_travel(runs: Runs, task: str) -> None:
    for ours in (f"{task}-tp-to-one", f"{task}-one-to-tp"):
        runs.compare(ours, task)
    whole = [without_times(r) for r in rows(runs.folder / f"{task}-tp" / "metrics.jsonl") if r["step"] > 10]
    assert whole == [without_times(r) for r in rows(runs.folder / f"{task}-tp-to-tp" / "metrics.jsonl")]
    runs.compare("qwen-tp-to-fsdp", "qwen")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "lora"])
def test_a_checkpoint_is_what_one_process_writes(runs: Runs, task: str) -> None:
    one, two, together = (
        store.load(Path(runs.checkpoint(name, 20))) for name in (task, f"{task}-tp", f"{task}-tp-to-tp")
    )
    a, b = one["state_dict"], two["state_dict"]
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=1e-3, atol=1e-4)
    for name in ("state_dict", "optimizer_states"):  # all ranks together write what rank 0 would
        assert_equal(two[name], together[name], name)
    s, t = (found["optimizer_states"][0] for found in (one, two))
    assert s["param_groups"] == t["param_groups"]
    for index, state in s["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(t["state"][index][key], value, rtol=1e-2, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "lora"])
def test_exports_are_equal(runs: Runs, task: str) -> None:
    name = "adapter_model.safetensors" if task == "lora" else "model.safetensors"
    one, two = (runs.folder / n / "export" / name for n in (task, f"{task}-tp"))
    same_weights(one, two)


@pytest.mark.slow
def test_families_give_the_logits_and_gradients_of_the_whole_model(tmp_path: Path) -> None:
    script = [str(Path(__file__).with_name("families.py")), str(tmp_path), ",".join(FAMILIES)]
    done = run_ranks([*TORCHRUN, *script])
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found) == set(FAMILIES)
        for family, words in found.items():
            assert words.endswith(" split"), f"{family} on rank {rank}: {words}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.devices=1"], "set trainer.devices=2"),
        (["trainer.devices=3"], "set trainer.fsdp.tensor_parallel_size=3 or trainer.strategy=fsdp"),
        (["trainer.fsdp.tensor_parallel_size=1"], "at least 2 is needed"),
        (["trainer.fsdp.tensor_parallel_size=4", "trainer.devices=4"], "does not divide model.num_attention_heads=2"),
        (["trainer.devices=4", "data.global_batch_size=6", "data.micro_batch_size=2"], "2 group(s) of 2 devices"),
        (["model=moe_small"], "experts and memories are not split"),
        ([*ADAPTED, "peft=lora", "peft.use_dora=true"], "peft.use_dora=true"),
        ([*ADAPTED, "peft=qlora"], "peft.quantization=nf4"),
        (["optimizer=adamw_8bit"], "Set optimizer=adamw"),
    ],
)
def test_what_cannot_work_is_refused(corpus: Path, tmp_path: Path, settings: list[str], said: str) -> None:
    all_settings = [*TINY, "data=text", f"data.path={corpus}", "trainer.strategy=fsdp_tp", *settings]
    done = run("train", *names_of(all_settings), f"run.dir={tmp_path / 'run'}")
    assert done.code == 2
    assert said in message(done.err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "changes", "size", "said"),
    [
        ("llama", {"num_key_value_heads": 1}, 2, "num_key_value_heads=1 is not a multiple"),
        ("llama", {"intermediate_size": 45}, 2, "does not divide the 45 outputs of model.layers.0.mlp.gate_proj"),
        ("gpt2", {"attn_pdrop": 0.1}, 2, "+model.extra.attn_pdrop=0"),
        ("gpt2", {"num_attention_heads": 3, "attn_pdrop": 0.0}, 2, "num_attention_heads=3 is not a multiple"),
        ("qwen3_moe", {}, 2, "mixture of experts"),
        ("bloom", {}, 2, "no plan to split the family bloom"),
    ],
)
def test_models_that_cannot_be_split_are_refused(family: str, changes: dict, size: int, said: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 4}  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **changes}))
    with pytest.raises(UserError) as refused:
        check(model, size)
    assert said in str(refused.value)
