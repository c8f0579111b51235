"""Compiles and loads the library with a CUDA device that does nothing; it is loaded before torch."""

import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("one_device.cpp")


def compiled(folder: Path) -> Path | str:
    """Returns the library in `folder`, compiled if missing for this source and torch, or the reason why it can't be."""
    import torch
    from torch.utils import cpp_extension

    if torch.version.cuda is not None:
        return "this torch is a CUDA build: its own device guard is in it"
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return f"no C++ compiler here ({compiler} is not found)"
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"one_device-{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{id(folder)}.part")  # two test processes may compile at once
        headers = [f"-I{path}" for path in cpp_extension.include_paths()]
        command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", *headers, str(SOURCE), "-o", str(part)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        part.replace(library)
    return library


def load(library: str) -> None:
    """Loads the library. torch must not be imported yet: it asks for the device's hooks only once."""
    assert "torch" not in sys.modules
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
