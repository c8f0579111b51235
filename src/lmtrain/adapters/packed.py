"""4-bit layers of bitsandbytes whose packed weights and scales are parameters: what FSDP shards and gathers by block.

bitsandbytes keeps the scales beside its parameter, where FSDP doesn't see them: each rank would hold all of them, up to
an eighth of the packed weights. The few tensors a layer needs besides (a rank holds all of them) are buffers.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # an extra: each function imports what it needs
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit


class Form(NamedTuple):
    """What a layer's tensors don't say about how they were packed."""

    shape: torch.Size  # [out, in]
    blocksize: int  # weights with one scale
    quant_type: str
    dtype: torch.dtype  # of the weights before, and of dequantised ones
    scale_blocksize: int = 0  # scales with one scale, where they are quantised as well (double quantisation)
    scale_dtype: torch.dtype = torch.float32


class Packed(nn.Module):
    """What makes a Linear4bit put its weight together from parts, at each use (see `_packed_linear`).

    All are bytes, also those of numbers in fp32: FSDP's mixed precision and bf16-true would cast these.

    packed: uint8 [out * in / 2, 1], two weights a byte.
    scales: uint8 [bytes], a number a block: fp32, with double quantisation 8 bits.
    tables: uint8 [bytes], of fp32 [16], what the 4 bits stand for; with double quantisation also [256], what the 8 bits
        stand for, [blocks / 256], the scales' own scales, and [1], what was taken from the scales.
    """

    form: Form
    packed: nn.Parameter
    scales: nn.Parameter
    tables: Tensor

    @property
    def weight(self) -> Any:
        """A view of the parts, so of what is gathered, as every other Linear4bit has it."""
        from bitsandbytes.nn import Params4bit

        form = self.form
        return Params4bit(
            self.packed,
            quant_state=self._state(),
            blocksize=form.blocksize,
            compress_statistics=bool(form.scale_blocksize),
            quant_type=form.quant_type,
            bnb_quantized=True,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":  # which peft's DoRA reads, moves to the device it is on and puts back
            super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # the parts as they are, and no weight

    def _state(self) -> "QuantState":
        from bitsandbytes.functional import QuantState

        form, tables = self.form, self.tables.view(torch.float32)
        known = {"shape": form.shape, "code": tables[:16], "blocksize": form.blocksize, "quant_type": form.quant_type,
                 "dtype": form.dtype}  # fmt: skip
        if not form.scale_blocksize:
            return QuantState(self.scales.view(torch.float32), **known)
        code, scales, offset = tables[16:272], tables[272:-1], tables[-1]
        outer = QuantState(scales, blocksize=form.scale_blocksize, code=code, dtype=form.scale_dtype)
        return QuantState(self.scales, offset=offset, state2=outer, **known)


@functools.cache
def _packed_linear() -> type[nn.Module]:
    from bitsandbytes.nn import Linear4bit

    return type("PackedLinear4bit", (Packed, Linear4bit), {})


@contextlib.contextmanager
def quantised_on(device: torch.device) -> Iterator[None]:
    """Within it weights in host memory go to `device` to be quantised, one at a time, and come back."""
    from bitsandbytes.nn import Params4bit

    quantise = Params4bit._quantize

    def there_and_back(self: Any, _: Any) -> Any:
        quantise(self, device)
        self.data = self.data.cpu()
        self.quant_state.to(torch.device("cpu"))
        return self

    Params4bit._quantize = there_and_back
    try:
        yield
    finally:
        Params4bit._quantize = quantise


class BaseFormat(NamedTuple):
    """What a rank that has no weights can't know: weights that are stored in 4 bits keep the files' dtypes."""

    forms: list[Form]  # of each Linear4bit, in the order of the model's modules
    dtypes: list[torch.dtype]  # of each parameter that isn't packed


def format_of(model: nn.Module) -> BaseFormat:
    forms = [_form_of(layer.weight.quant_state) for layer in _layers(model)]
    return BaseFormat(forms, [p.dtype for p in model.parameters() if p.is_floating_point()])


def take_apart(model: nn.Module, base: BaseFormat) -> None:
    """Makes each Linear4bit a `Packed`, in place, on its device (also on the meta device).

    Args:
        base: of the first rank, whose tensors all will have.
    """
    others = [p for p in model.parameters() if p.is_floating_point()]
    for parameter, dtype in zip(others, base.dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)
    for layer, form in zip(_layers(model), base.forms, strict=True):
        _take_apart(layer, form)


def _layers(model: nn.Module) -> list[Any]:
    from bitsandbytes.nn import Linear4bit

    return [module for module in model.modules() if type(module) is Linear4bit]


def _form_of(state: "QuantState") -> Form:
    form = Form(state.shape, state.blocksize, state.quant_type, state.dtype)
    outer = state.state2
    return form if outer is None else form._replace(scale_blocksize=outer.blocksize, scale_dtype=outer.dtype)


def _take_apart(layer: Any, form: Form) -> None:
    weight, state = layer.weight, layer.weight.quant_state
    tables = [state.code]
    if state.state2 is not None:
        tables += [state.state2.code, state.state2.absmax, state.offset.view(1).to(state.code.device)]
    del layer.weight
    layer.quant_state = None
    layer.__class__ = _packed_linear()
    layer.form = form
    packed = weight.detach().as_subclass(Tensor).view(torch.uint8).view(-1, 1)
    layer.packed = nn.Parameter(packed, requires_grad=False)
    layer.scales = nn.Parameter(state.absmax.view(torch.uint8), requires_grad=False)
    layer.register_buffer("tables", torch.cat(tables).view(torch.uint8), persistent=False)


def pack_shapes(model: nn.Module) -> None:
    """Gives bitsandbytes' layers of a model on the meta device the tensors that quantised ones have."""
    from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt

    layer: Any
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            layer.weight = _packed_shape(layer)
        elif isinstance(layer, Linear8bitLt):
            whole = _meta(layer.out_features, layer.in_features, dtype=torch.int8)
            layer.weight = Int8Params(whole, requires_grad=False)


def _packed_shape(layer: Any) -> "Params4bit":
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    numbers, old = layer.out_features * layer.in_features, layer.weight
    blocks = math.ceil(numbers / old.blocksize)
    outer = offset = None
    if old.compress_statistics:
        offset = torch.zeros((), device="cpu")  # a state dict asks for its value
        outer = QuantState(_meta(math.ceil(blocks / 256)), code=_meta(256), blocksize=256, dtype=torch.float32)
    state = QuantState(
        _meta(blocks, dtype=torch.float32 if outer is None else torch.uint8),
        shape=torch.Size((layer.out_features, layer.in_features)),
        code=_meta(16),
        blocksize=old.blocksize,
        quant_type=old.quant_type,
        dtype=torch.float32,  # as weights are loaded
        offset=offset,
        state2=outer,
    )
    packed = _meta(math.ceil(numbers / 2), 1, dtype=torch.uint8)
    return Params4bit(
        packed,
        quant_state=state,
        blocksize=old.blocksize,
        compress_statistics=old.compress_statistics,
        quant_type=old.quant_type,
        module=layer,
        bnb_quantized=True,
    )


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
