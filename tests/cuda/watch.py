"""Records what a run does on its device: every wait of the host, every matrix product, every operation."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.attention.varlen  # registers its operator
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lmtrain

TORCH = str(Path(torch.__file__).parent)
PACKAGE = str(Path(lmtrain.__file__).parent)
aten = torch.ops.aten
PRODUCTS = {
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten._scaled_mm,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}  # fmt: skip


class Wait(NamedTuple):
    """One wait of the host for the device."""

    step: int  # the current optimizer step, counted from 1; 0 before the first batch
    what: str
    where: str  # the innermost function of lmtrain, such as "callbacks/metrics.py _log_step"


class Watch(TorchDispatchMode):
    """Notes each operation that would wait for the device and makes up its value. Entered after FakeTensorMode."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.waits: list[Wait] = []
        self.products: Counter[str] = Counter()  # matrix products by the dtype they are computed in
        self.operations: Counter[int] = Counter()  # by step, without views
        self.fp32_sums = 0  # half-precision products that one kernel adds to fp32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) or kind.__name__ == "Float8TrainingTensor" for kind in types):
            return NotImplemented  # their inner tensors are dispatched separately
        if func is aten._local_scalar_dense.default:
            return self._made_up(args[0])
        if func.overloadpacket in (aten._to_copy, aten.copy_):
            self._note_copy(func, args, kwargs)
        if func.overloadpacket in PRODUCTS:
            self.products[str(_operand(args).dtype).removeprefix("torch.")] += 1
        self.fp32_sums += func is aten.addmm.dtype_out
        if func is torch.ops.torch_attn._varlen_attn.default:
            self._check_varlen(args)
        if func.namespace != "prim" and not func.is_view:
            self.operations[self.step] += 1
        return func(*args, **kwargs)

    def _made_up(self, tensor: torch.Tensor) -> Any:
        """Returns a made-up value: 0 or True for a tensor on the device, 1 (a step count) or False on the host."""
        on_device = tensor.device.type == "cuda"
        if on_device:
            self._wait("item")
        if tensor.dtype == torch.bool:
            return on_device
        value = 0 if on_device else 1
        return float(value) if tensor.is_floating_point() else value

    def _note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func.overloadpacket is aten.copy_:
            target, source = args[0].device, args[1]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            source, target = args[0], kwargs.get("device") or args[0].device
            waits = not kwargs.get("non_blocking")
        # torch waits for a copy between host and device in either direction.
        if waits and isinstance(source, torch.Tensor) and source.device.type != torch.device(target).type:
            self._wait(f"copy {source.device.type} to {torch.device(target).type}")

    def _check_varlen(self, args: Any) -> None:
        query, key, value, cu_q, cu_k = args[:5]
        assert all(t.dtype in (torch.bfloat16, torch.float16) for t in (query, key, value)), query.dtype
        assert cu_q.dtype == torch.int32, cu_q.dtype
        assert cu_k is None or cu_k.dtype == torch.int32, cu_k.dtype
        self.products[str(query.dtype).removeprefix("torch.")] += 1

    def _wait(self, what: str) -> None:
        self.waits.append(Wait(self.step, what, where()))


def _operand(args: Any) -> torch.Tensor:
    """Returns the second tensor of a product, since addmm's first is the one that is added to."""
    return [a for a in args if isinstance(a, torch.Tensor)][1]


def where() -> str:
    """Returns the innermost running function of lmtrain, or else the innermost one outside of torch."""
    frame: Any = sys._getframe(2)
    innermost = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path[len(PACKAGE) + 1 :]} {frame.f_code.co_name}"
        if not innermost and not path.startswith((TORCH, __file__)):
            innermost = f"{path} {frame.f_code.co_name}"
        frame = frame.f_back
    return innermost
