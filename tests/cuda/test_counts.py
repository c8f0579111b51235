"""What ranks tell each other each step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.objectives import base


def test_counts_are_made_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number made into a tensor is copied to the device (lift_fresh), for which torch waits."""
    seen: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.distributed, "all_reduce", lambda counts: None)
    monkeypatch.setattr(base, "data_parallel", lambda trainer: SimpleNamespace(copies=1))
    stop = SimpleNamespace(asked=lambda: True, agreed=False)
    objective: Any = SimpleNamespace(stop=stop, trainer=None)
    n_tokens, tokens = torch.tensor(7), torch.tensor(9)
    with Watch():
        agreed = base.Objective._agree(objective, n_tokens, tokens)
    assert [int(t) for t in agreed] == [7, 9]
    assert stop.agreed is True
    assert "aten.lift_fresh.default" not in seen
    assert "aten.new_full.default" in seen
