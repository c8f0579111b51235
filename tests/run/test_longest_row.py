"""The plan's longest row: the memory available for activations, divided by the memory per token."""

from typing import Any

import pytest
import torch

from lmtrain.config.compose import check, compose
from lmtrain.config.schema import Config
from lmtrain.models import flops
from lmtrain.models.build import build_model
from lmtrain.run import plan_costs

GIB = 2**30
SHAPE = ["model=llama_small", "model.max_position_embeddings=65536"]


def config_of(size: int) -> Config:
    words = ["trainer.strategy=fsdp", "trainer.devices=4", f"trainer.fsdp.context_parallel_size={size}"]
    words += [
        "data.micro_batch_size=1",
        "data.global_batch_size=4",
        "data.seq_len=1024",
        "trainer.precision=bf16-mixed",
    ]
    config = check(compose([*SHAPE, *words]))
    config.trainer.accelerator = "cuda"
    config.trainer.activation_checkpointing = False
    return config


@pytest.fixture(scope="module")
def llama() -> Any:
    with torch.device("meta"):
        return build_model(config_of(1).model, 50_000, 0, seq_len=1024)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_longer_row_would_not_fit(size: int, llama: Any) -> None:
    """The memory left by everything else is divided by the cost of one more token in a device's slice of the row."""
    config, room, start = config_of(size), 80 * GIB, 2**14  # tokens from which on logits take their whole chunk
    held = []
    for config.data.seq_len in (start * size, 2 * start * size):
        held.append(sum(flops.memory_estimate(llama, config, room).values()))
    expected = size * ((room - held[0]) / ((held[1] - held[0]) / start) + start)
    found = plan_costs.longest_row(llama, config, room)
    assert found % (256 * size) == 0
    assert expected - 256 * size <= found <= expected
    assert config.data.seq_len == 2 * start * size  # restored
    assert plan_costs.longest_row(llama, config, GIB // 8) == 0  # not even the parameters fit


def test_it_is_said_where_devices_share_rows_and_their_memory_is_known(llama: Any, monkeypatch: Any) -> None:
    assert [name for name, _ in plan_costs.memory_rows(llama, config_of(2))] == ["memory"]  # no GPU here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = type("Card", (), {"total_memory": 80 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [name for name, _ in plan_costs.memory_rows(llama, config_of(1))] == ["memory"]
    (_, (name, words)) = plan_costs.memory_rows(llama, config_of(2))
    assert name == "longest row"
    both = [plan_costs.longest_row(llama, config_of(size), int(72 * GIB)) for size in (2, 1)]
    assert words == (
        f"about {both[0]:,} tokens with trainer.fsdp.context_parallel_size=2 and {both[1]:,} with 1, by the same "
        f"estimate, 10% of 80.00 GiB left free; the model has 65,536 positions"
    )
