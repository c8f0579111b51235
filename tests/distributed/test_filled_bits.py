"""Two ranks draw the bits that a bf16 checkpoint lacks as one process does, whole or sharded."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from strategy_runs import CAUSAL, Runs
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

import forked
from lmtrain.optim.half import fill_in
from tiny_pretrained import save_pretrained


@pytest.mark.slow
def test_ranks_fill_in_equal_bits(corpus: Path, tmp_path: Path) -> None:
    """With a learning rate that moves nothing, the weights after a step are those of the checkpoint and the bits."""
    base = save_pretrained(tmp_path / "base", intermediate_size=65)  # rows that two ranks don't share evenly
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    settings = [*CAUSAL, "model=pretrained", f"model.name_or_path={base}", f"data.path={corpus}", "trainer.max_steps=1",
                "schedule=constant", "optimizer.lr=1e-30", "trainer.precision=bf16-mixed"]  # fmt: skip
    r = Runs(tmp_path)
    r.one("one", *settings)
    for strategy in ("ddp", "fsdp"):
        r.two(strategy, *settings, f"trainer.strategy={strategy}")
    r.launch()
    one, *others = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("one", "ddp", "fsdp"))
    loaded = model.state_dict()
    products = [name for name, weight in one.items() if weight.ndim > 1 and "embed" not in name]
    assert all((one[name] != loaded[name]).float().mean() > 0.9 for name in products)
    for other in others:
        assert all(torch.equal(other[name], weight) for name, weight in one.items())


def loaded_weights() -> list[Tensor]:
    """Returns a bf16 checkpoint's matrix, one whose last rows were added in fp32, and one whose last columns were."""
    torch.manual_seed(0)
    weights = [torch.randn(5, 6).bfloat16().float() for _ in range(3)]
    weights[1][3:] += 1e-4
    weights[2][:, 3:] += 1e-4
    return weights


def rank_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh, filled = init_device_mesh("cpu", (2,)), []
    for dim in (0, 1):
        for place, weight in enumerate(loaded_weights()):
            sharded = distribute_tensor(weight, mesh, [Shard(dim)])
            fill_in(sharded, place, torch.bfloat16)
            filled.append(sharded.full_tensor())
    torch.save(filled, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_whether_to_fill_in_is_decided_for_the_whole_weight(tmp_path: Path) -> None:
    forked.call_in_ranks(rank_of_two, str(tmp_path))
    loaded, alone = loaded_weights(), loaded_weights()
    for place, weight in enumerate(alone):
        fill_in(weight, place, torch.bfloat16)
    assert [torch.equal(*pair) for pair in zip(loaded, alone, strict=True)] == [False, True, True]
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert all(torch.equal(*pair) for pair in zip(found, alone * 2, strict=True))
