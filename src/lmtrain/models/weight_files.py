"""Pretrained weights that stay in their safetensors files until each rank reads the rows of its shard."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lmtrain.files import absolute
from lmtrain.models.language_model import KNOWN_FAMILIES

LEFT = "left_in_files"  # attribute of a model whose parameters are on the meta device: {name: file}
_DTYPES = ("F32", "BF16", "F16")


def may_leave(config: PretrainedConfig, name_or_path: str) -> bool:
    """Returns whether the weights may be able to stay in their files, so that `leave` is worth trying.

    They can't where transformers is known to change the tensors it loads, nor in families outside KNOWN_FAMILIES,
    whose logits are compared once with those of transformers, which needs the weights.
    """
    here = Path(name_or_path).expanduser()
    changed = any(getattr(config, name, None) for name in ("quantization_config", "num_experts", "num_local_experts"))
    return config.model_type in KNOWN_FAMILIES and not changed and (not here.is_dir() or bool(_files(here)))


def leave(model: PreTrainedModel, name_or_path: str) -> bool:
    """Moves all parameters of a model that was just loaded to the meta device, in fp32, if its files can supply them.

    They can if every parameter is in a safetensors file, unchanged and under its own name: transformers may have
    renamed, stacked or transposed tensors while loading. Returns whether the parameters were moved.

    Args:
        model: in the dtype of its files, so that safetensors maps the tensors into memory without reading them.
        name_or_path: where the model was loaded from.
    """
    config = model.config
    if any(b.is_floating_point() and b.dtype != torch.float32 for b in model.buffers()):
        return False
    files = of_model(name_or_path, getattr(config, "_commit_hash", None))
    readers: dict[str, Any] = {file: safe_open(file, "pt") for file in set(files.values())}
    parameters = dict(model.named_parameters())
    if not all(name in files and _same(p, readers[files[name]].get_slice(name)) for name, p in parameters.items()):
        return False
    for p in parameters.values():
        shape = torch.empty_like(p, dtype=torch.float32, device="meta")
        torch.utils.swap_tensors(p, nn.Parameter(shape, p.requires_grad))
    config.dtype = torch.float32
    setattr(model, LEFT, {name: files[name] for name in parameters})
    return True


def of_model(name_or_path: str, commit: str | None) -> dict[str, str]:
    """Returns the safetensors file of each tensor of a model by name: of a folder, or of the hub's copy here."""
    return _files(_folder(name_or_path, commit))


def _folder(name_or_path: str, commit: str | None) -> Path:
    here = Path(name_or_path).expanduser()
    if here.is_dir():
        return here
    found = try_to_load_from_cache(name_or_path, "config.json", revision=commit)
    return Path(found).parent if isinstance(found, str) else here


def _files(folder: Path) -> dict[str, str]:
    """Returns the file of each tensor by name, or {} if the folder has no safetensors files."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.exists():
        with safe_open(str(one), "pt") as reader:
            return dict.fromkeys(reader.keys(), str(absolute(one.resolve())))
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: str(absolute((folder / file).resolve())) for name, file in names.items()}
    return {}


def _same(parameter: Tensor, there: Any) -> bool:
    """Returns whether a tensor in a file equals this parameter in its shape and in a sample of up to six rows."""
    if there.get_dtype() not in _DTYPES or list(parameter.shape) != there.get_shape() or parameter.ndim == 0:
        return False
    rows = len(parameter)
    some = {row for row in (0, 1, rows // 3, rows // 2, rows - 2, rows - 1) if 0 <= row < rows}
    return all(torch.equal(parameter[row], there[row : row + 1][0].to(parameter.dtype)) for row in some)


class WeightFiles:
    """The parameters of a model that were left in safetensors files, with readers for them; one object per rank.

    Args:
        left: {name: file}, as found by the first rank.
        model: this rank's model.
        part: (index, number of parts) of the rows that this rank reads; None: the first rank reads all.
    """

    def __init__(self, left: Mapping[str, str], model: nn.Module, part: tuple[int, int] | None) -> None:
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if name in left}
        self._files, self.part = left, part
        self._readers: dict[str, Any] = {}

    def rows(self, count: int) -> slice:
        """Returns this rank's slice of `count` rows, cut as torch.chunk and therefore FSDP2 does."""
        number, parts = self.part or (0, 1)
        each = -(-count // parts)
        return slice(min(number * each, count), min((number + 1) * each, count))

    def take(self, tensor: Tensor) -> str | None:
        """Returns the name of a parameter that is in a file, else None, and drops the reference that keeps it alive."""
        return self._names.pop(tensor, None)

    def read(self, name: str, into: Tensor, rows: slice) -> None:
        """Copies the rows `rows` of a parameter from its file into the same rows of `into`, which has its shape."""
        if rows.start == rows.stop:
            return
        file = self._files[name]
        if file not in self._readers:
            self._readers[file] = safe_open(file, "pt")
        into[rows].copy_(self._readers[file].get_slice(name)[rows])


def identities(left: Mapping[str, str]) -> dict[str, str | None]:
    """Returns a SHA-256 of each file's size and some of its bytes, or None for files that this rank can't find."""
    return {
        file: hashlib.sha256(some_of(Path(file))).hexdigest() if Path(file).is_file() else None
        for file in set(left.values())
    }


def some_of(file: Path, blocks: int = 16, size: int = 1 << 16) -> bytes:
    """Returns the size of a file, followed by `blocks` evenly spaced blocks of its bytes."""
    length = file.stat().st_size
    parts = [str(length).encode()]
    with file.open("rb") as handle:
        for i in range(blocks):
            handle.seek(max(0, length - size) * i // (blocks - 1))
            parts.append(handle.read(size))
    return b"".join(parts)
