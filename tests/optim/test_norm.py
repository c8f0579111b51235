"""The gradient norm used for clipping is accurate for large and small tensors."""

import pytest
import torch

from lmtrain.distributed.dtensor import clip, total_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_large_and_small_tensors(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2000, 2003), (70_001,), (33, 7), (), (0, 4)]
    tensors = [(torch.randn(shape) * torch.rand(shape) ** 8 * 10**i).to(dtype) for i, shape in enumerate(shapes)]
    exact = torch.cat([t.flatten().double() for t in tensors]).norm()
    found = total_norm(tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)


@pytest.mark.parametrize(
    ("norm", "scale"),
    [(0.5, 1.0), (0.999, 1.0), (1.0, 1.0), (2.0, 0.5), (float("inf"), 0.0), (float("nan"), float("nan"))],
)
def test_clipping_leaves_small_gradients_alone(norm: float, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they used to be multiplied by 1, one more pass over all of them."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    calls, real = [], torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *args: calls.append(args) or real(*args))
    clip(torch.optim.SGD([parameter]), 1.0, torch.tensor(norm))
    torch.testing.assert_close(parameter.grad, torch.full((3,), scale), equal_nan=True)
    assert bool(calls) == (not norm < 1.0)
