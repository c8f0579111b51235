"""The experts of a mixture-of-experts model under autocast."""

import pytest
import torch

from helpers_models import packed, tiny, wrapped
from lmtrain.models.routers import EXPERTS


def test_experts_multiply_in_the_autocast_dtype(monkeypatch):
    seen = []
    grouped_mm = torch.nn.functional.grouped_mm

    def watch(x, w, **options):
        seen.append((x.dtype, w.dtype))
        return grouped_mm(x, w, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", watch)
    model = wrapped("qwen3_moe")
    assert model.model.config._experts_implementation == EXPERTS
    seen.clear()  # of the tiny copy that is tried first
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**packed()).loss_sum
    assert len(seen) == 4
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    seen.clear()
    model(**packed())
    assert set(seen) == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("autocast", [False, True])
def test_equals_transformers_loop_over_experts(autocast):
    results = {}
    for implementation in (EXPERTS, "eager"):
        model = tiny("qwen3_moe")
        model.set_experts_implementation(implementation)
        experts = model.model.layers[0].mlp.experts
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(50, 32, generator=generator).requires_grad_()
        index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(50)])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = experts(hidden, index, torch.rand(50, 2, generator=generator))
        out.square().sum().backward()
        results[implementation] = [out, hidden.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    for ours, theirs in zip(*results.values(), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < (0.02 if autocast else 1e-5)


def test_exported_config_does_not_name_our_experts(tmp_path):
    tiny("qwen3_moe").save_pretrained(tmp_path)
    assert EXPERTS not in (tmp_path / "config.json").read_text()
