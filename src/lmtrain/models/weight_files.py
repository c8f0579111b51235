"""Pretrained weights that stay in their safetensors files until each rank reads its own rows of them."""

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

from lmtrain.models.language_model import KNOWN_FAMILIES

LEFT = "left_in_files"  # attribute of a model whose parameters are on the meta device: {name: file}
_DTYPES = ("F32", "BF16", "F16")


def may_leave(config: PretrainedConfig, name_or_path: str) -> bool:
    """Whether it is worth a look at the files: not where transformers is known to change what it reads.

    And only of families whose logits need no comparison with weights.
    """
    here = Path(name_or_path).expanduser()
    changed = any(getattr(config, name, None) for name in ("quantization_config", "num_experts", "num_local_experts"))
    return config.model_type in KNOWN_FAMILIES and not changed and (not here.is_dir() or bool(_files(here)))


def leave(model: PreTrainedModel, name_or_path: str) -> bool:
    """Puts all parameters of a model that was just read onto the meta device, in fp32, if its files can give them.

    They can where each stands in a safetensors file under its own name, as it is: transformers may have renamed,
    stacked or turned others.

    Args:
        model: in the dtype of its files, whose tensors safetensors then maps: nothing is read yet.
        name_or_path: what it was read from.
    """
    config = model.config
    if any(b.is_floating_point() and b.dtype != torch.float32 for b in model.buffers()):
        return False
    files = _files(_folder(name_or_path, getattr(config, "_commit_hash", None)))
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


def _folder(name_or_path: str, commit: str | None) -> Path:
    here = Path(name_or_path).expanduser()
    if here.is_dir():
        return here
    found = try_to_load_from_cache(name_or_path, "config.json", revision=commit)
    return Path(found).parent if isinstance(found, str) else here


def _files(folder: Path) -> dict[str, str]:
    """The file of each tensor; {} where they are in none of safetensors."""
    one, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if one.exists():
        with safe_open(str(one), "pt") as reader:
            return dict.fromkeys(reader.keys(), str(one.resolve()))
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: str((folder / file).resolve()) for name, file in names.items()}
    return {}


def _same(parameter: Tensor, there: Any) -> bool:
    """Whether a tensor of a file is this parameter: by its shape, and some rows of it."""
    if there.get_dtype() not in _DTYPES or list(parameter.shape) != there.get_shape() or parameter.ndim == 0:
        return False
    rows = len(parameter)
    some = {row for row in (0, 1, rows // 3, rows // 2, rows - 2, rows - 1) if 0 <= row < rows}
    return all(torch.equal(parameter[row], there[row : row + 1][0].to(parameter.dtype)) for row in some)


class WeightFiles:
    """What is left in files, by the parameter, on every rank.

    Args:
        left: {name: file} of the first rank.
        model: on each rank.
    """

    def __init__(self, left: Mapping[str, str], model: nn.Module) -> None:
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if name in left}
        self._files = left
        self._readers: dict[str, Any] = {}

    def take(self, tensor: Tensor) -> str | None:
        """The name of a parameter that is in a file; asked once, as what is kept here would not be freed."""
        return self._names.pop(tensor, None)

    def read(self, name: str, into: Tensor, rows: slice) -> None:
        """Copies these rows of a parameter into theirs of `into`, which has its shape."""
        if rows.start == rows.stop:
            return
        file = self._files[name]
        if file not in self._readers:
            self._readers[file] = safe_open(file, "pt")
        into[rows].copy_(self._readers[file].get_slice(name)[rows])


def identities(left: Mapping[str, str]) -> dict[str, str | None]:
    """What each file is as this rank finds it, by its size and some of its bytes; None where it doesn't."""
    return {
        file: hashlib.sha256(some_of(Path(file))).hexdigest() if Path(file).is_file() else None
        for file in set(left.values())
    }


def some_of(file: Path, blocks: int = 16, size: int = 1 << 16) -> bytes:
    """The size of a file and some of its bytes, spread evenly."""
    length = file.stat().st_size
    parts = [str(length).encode()]
    with file.open("rb") as handle:
        for i in range(blocks):
            handle.seek(max(0, length - size) * i // (blocks - 1))
            parts.append(handle.read(size))
    return b"".join(parts)
