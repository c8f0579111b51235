"""The gradient norm used for clipping is accurate for large and small tensors."""

import pytest
import torch

from lmtrain.distributed.dtensor import total_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_large_and_small_tensors(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2000, 2003), (70_001,), (33, 7), (), (0, 4)]
    tensors = [(torch.randn(shape) * torch.rand(shape) ** 8 * 10**i).to(dtype) for i, shape in enumerate(shapes)]
    exact = torch.cat([t.flatten().double() for t in tensors]).norm()
    found = total_norm(tensors)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
