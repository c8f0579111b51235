"""What can be refused before torch is imported, which takes seconds: missing files, misspelt metrics, an absent GPU.

Whatever passes is checked again where it is used. Imports no torch.
"""

import ctypes
import difflib
import importlib.metadata
import sys
from pathlib import Path

from lmtrain.config.schema import Config
from lmtrain.data.sources import files
from lmtrain.data.sources.addresses import is_address
from lmtrain.errors import UserError

_ON_DEVICES = ("train", "tune", "verify", "evaluate")
_READ_DATA = (*_ON_DEVICES, "inspect", "prepare")


def refuse(verb: str, config: Config) -> None:
    """Raises UserError for what is wrong with the files, the metrics or the device that the command would use."""
    if verb in _READ_DATA and config.data.source == "files":
        _refuse_missing(config.data.path, "data.path")
        _refuse_missing(config.data.val_path, "data.val_path")
    if verb in _ON_DEVICES and config.trainer.accelerator in ("gpu", "cuda"):
        _refuse_absent_gpu(f"trainer.accelerator={config.trainer.accelerator}")
    if verb == "train" and not config.callbacks.extra and config.objective._target_.startswith("lmtrain."):
        _refuse_misspelt(config, "checkpoint.monitor", config.checkpoint.monitor)
        if config.callbacks.early_stopping.enabled:
            _refuse_misspelt(config, "callbacks.early_stopping.monitor", config.callbacks.early_stopping.monitor)


def _refuse_misspelt(config: Config, key: str, name: str) -> None:
    """Raises UserError for a metric that no validation reports; which ones this run's do report shows with its data."""
    known = [f"val/{metric}" for metric in dict.fromkeys((*config.objective.headline, "loss"))]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
    is_of_a_set = name.startswith(tuple(f"val/{set_}/" for set_ in config.data.val_sets))
    if name not in known and not is_of_a_set and (near or not name.startswith("val/")):
        raise UserError(f"{key}={name}: no validation reports that; set {key}={' or '.join(near or known)}")


def _refuse_missing(path: str | list[str] | None, key: str) -> None:
    for part in [path] if isinstance(path, str) else path or []:
        if not is_address(part) and not Path(part).expanduser().exists():
            files.matching(part, key)


def _refuse_absent_gpu(asked: str) -> None:
    """Raises UserError if the torch that is installed is built for CPUs, or if there is no driver for its CUDA."""
    version = next((found.version for found in importlib.metadata.distributions(name="torch")), "")
    build = version.partition("+")[2]
    if "torch" in sys.modules or build.startswith("rocm"):
        return  # torch itself is asked
    found = f"{asked}, torch {version} sees no CUDA: set trainer.accelerator=cpu, or install"
    if build == "cpu":
        raise UserError(f"{found} a CUDA build of torch")
    try:
        ctypes.CDLL("libcuda.so.1" if sys.platform == "linux" else None)  # the driver, by the name that torch loads
    except OSError:
        raise UserError(f"{found} an NVIDIA driver (there is no libcuda.so.1)") from None
