"""4-bit layers of bitsandbytes whose packed weights and scales are parameters, so that FSDP shards and gathers them.

bitsandbytes keeps the scales in an attribute of its parameter, where FSDP doesn't see them: each rank would hold all of
them, up to an eighth of the packed weights. The few other tensors of a layer are buffers, replicated on every rank.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:  # an optional dependency, which each function imports when needed
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit


class Form(NamedTuple):
    """The parameters of a layer's quantisation that its tensors don't contain."""

    shape: torch.Size  # [out, in]
    blocksize: int  # number of weights that share a scale
    quant_type: str
    dtype: torch.dtype  # of the weights before quantisation, and of dequantised ones
    scale_blocksize: int = 0  # number of scales that share a scale with double quantisation; 0 without
    scale_dtype: torch.dtype = torch.float32


class Packed(nn.Module):
    """A mixin for Linear4bit that assembles the weight from its parts at each use (see `_packed_linear`).

    All parts are stored as bytes, even fp32 numbers, which FSDP's mixed precision and bf16-true would cast otherwise.

    packed: uint8 [out * in / 2, 1], two weights per byte.
    scales: uint8 [bytes], one number per block: fp32, or 8 bits with double quantisation.
    tables: uint8 [bytes] of fp32 numbers: [16], the values of the 4-bit codes; with double quantisation also [256], the
        values of the 8-bit codes, [blocks / 256], the scales of the scales, and [1], the offset of the scales.
    """

    form: Form
    packed: nn.Parameter
    scales: nn.Parameter
    tables: Tensor

    @property
    def weight(self) -> Any:
        """A Params4bit view of the parts, gathered ones included, in place of Linear4bit's own parameter."""
        return _quantised(self.packed, self._state())

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":  # peft's DoRA reads the weight, moves it to its current device and assigns it again
            super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # saves the parts instead of the weight

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
    """Quantises weights that are in host memory on `device` within the context, one at a time, and moves them back."""
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
    """What ranks without weights need to know about the base, which keeps the files' dtypes if those are 4-bit."""

    forms: list[Form]  # of each Linear4bit, in the order of the model's modules
    dtypes: list[torch.dtype]  # of each parameter that isn't packed


def format_of(model: nn.Module) -> BaseFormat:
    forms = [_form_of(layer.weight.quant_state) for layer in _layers(model)]
    return BaseFormat(forms, [p.dtype for p in model.parameters() if p.is_floating_point()])


def take_apart(model: nn.Module, base: BaseFormat) -> None:
    """Converts each Linear4bit to a `Packed` layer, in place, on its device (also on the meta device).

    Args:
        base: the format of the first rank's model, to which all ranks' parameters are converted.
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
    """Replaces the weights of bitsandbytes layers on the meta device with ones shaped like quantised weights."""
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

    numbers, old = layer.out_features * layer.in_features, layer.weight
    blocks = math.ceil(numbers / old.blocksize)
    outer = offset = None
    if old.compress_statistics:
        offset = torch.zeros((), dtype=torch.float32, device="cpu")  # building a state dict reads its value
        outer = QuantState(_meta(math.ceil(blocks / 256)), code=_meta(256), blocksize=256, dtype=torch.float32)
    state = QuantState(
        _meta(blocks, dtype=torch.float32 if outer is None else torch.uint8),
        shape=torch.Size((layer.out_features, layer.in_features)),
        code=_meta(16),
        blocksize=old.blocksize,
        quant_type=old.quant_type,
        dtype=torch.float32,  # weights are loaded in fp32
        offset=offset,
        state2=outer,
    )
    return _quantised(_meta(math.ceil(numbers / 2), 1, dtype=torch.uint8), state, module=layer)


def _quantised(packed: Tensor, state: "QuantState", **options: Any) -> "Params4bit":
    """Returns weights that are quantised already as a parameter of bitsandbytes."""
    from bitsandbytes.nn import Params4bit

    return Params4bit(
        packed,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.state2 is not None,
        quant_type=state.quant_type,
        bnb_quantized=True,
        **options,
    )


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
