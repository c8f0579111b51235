"""Tokens shared out between layers that are split: the numbers equal one process's, and what each rank holds."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from strategy_runs import CAUSAL, SFT, Runs
from test_tensor_parallel import SHARED_HEADS, TP
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import forked
from chats import write_chats
from inprocess import message, run
from lmtrain.errors import UserError
from lmtrain.models import split
from lmtrain.models.split import TokenShares
from support import TINY
from tiny_pretrained import save_pretrained

SHARED = [*TP, "trainer.fsdp.sequence_parallel=true"]
LLAMA = ["model=llama_nano", "tokenizer=bytes", "model.num_attention_heads=4", "model.num_key_value_heads=2",
         "model.intermediate_size=48"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    r = Runs(tmp_path_factory.mktemp("sequence_parallel"))
    text = [*CAUSAL, f"data.path={corpus}", "callbacks.samples.every_n_validations=0"]
    chats = f"data.path={write_chats(r.folder / 'chats.jsonl', 40)}"
    tasks = {
        "gpt2": text,  # also generates text: one token for two ranks
        "llama": [*text, *LLAMA, "data.isolate_documents=true", "data.seq_len=31"],  # not divisible by the ranks
        "qwen": [*text, *SHARED_HEADS],
        "sft": [*SFT, chats],
    }
    for task, settings in tasks.items():
        r.one(task, *settings)
        r.two(f"{task}-shared", *settings, *SHARED)
    r.launch()
    r.two("qwen-again", *tasks["qwen"], *SHARED, f"run.resume={r.checkpoint('qwen', 10)}",
          "trainer.activation_checkpointing=true")  # fmt: skip
    r.two("llama-selective", *tasks["llama"], *SHARED, "trainer.activation_checkpointing=selective")
    r.launch()
    r.two("qwen-2x2", *tasks["qwen"], *SHARED)
    r.launch(ranks=4)
    r.one("qwen-to-one", *tasks["qwen"], f"run.resume={r.checkpoint('qwen-2x2', 10)}")
    return r


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gpt2", "llama", "qwen", "sft"])
def test_numbers_are_those_of_one_process(runs: Runs, task: str) -> None:
    runs.compare(f"{task}-shared", task)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task"),
    [("qwen-again", "qwen"), ("llama-selective", "llama"), ("qwen-2x2", "qwen"), ("qwen-to-one", "qwen")],
)
def test_groups_checkpoints_and_checkpointing(runs: Runs, name: str, task: str) -> None:
    runs.compare(name, task)


def rank_of_two(rank: int, folder: str) -> None:
    """Writes the shapes of the blocks' inputs, and the logits, for 7 tokens on two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base")
    blocks, tokens, layers, shapes = model.model.layers, TokenShares(mesh), split.check(model, 2), list[list[int]]()
    tokens.enter(blocks[0])
    tokens.leave(blocks[-1])
    for block in blocks:
        split.split(block, layers, mesh, tokens)
        block.register_forward_hook(lambda _block, args, _output: shapes.append(list(args[0].shape)))
    logits = model(torch.arange(14).view(2, 7), use_cache=False).logits
    torch.save({"shapes": shapes, "logits": logits.detach()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_between_layers_each_rank_holds_half_of_the_tokens(tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base")
    forked.call_in_ranks(rank_of_two, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(base)
    whole = model(torch.arange(14).view(2, 7), use_cache=False).logits.detach()
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["shapes"] == [[2, 4, model.config.hidden_size]] * model.config.num_hidden_layers
        torch.testing.assert_close(found["logits"], whole, rtol=1e-5, atol=1e-5)


def test_what_can_not_be_shared_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_pretrained(tmp_path / "base"))
    split.check_tokens(model)
    model.model.layers[0].add_module("dropout", torch.nn.Dropout(0.1))
    with pytest.raises(UserError, match=r"Set model\.dropout=0"):
        split.check_tokens(model)
    model.model.layers[0].dropout.p = 0.0
    get_peft_model(model, LoraConfig(target_modules="all-linear"))
    with pytest.raises(UserError, match="does not go with LoRA"):
        split.check_tokens(model)


def test_it_is_read_under_fsdp_tp_alone() -> None:
    ended = run("train", *TINY, "trainer.strategy=fsdp", "trainer.fsdp.sequence_parallel=true")
    assert ended.code == 2
    assert "set trainer.strategy=fsdp_tp" in message(ended.err)
