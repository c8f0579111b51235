"""Two ranks draw the bits that a bf16 checkpoint lacks as one process does, whole or sharded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategy_runs import CAUSAL, Runs
from transformers import AutoModelForCausalLM

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
