"""What `lmtrain doctor` looks at: packages, devices, compilers, disk, memory, the hub."""

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from lmtrain import errors, terminal

OPTIONAL = {  # distribution: (extra, what it is for)
    "bitsandbytes": ("bitsandbytes", "peft=qlora, optimizer=adamw_8bit"),
    "torchao": ("fp8", "trainer.precision=fp8"),
    "deepspeed": ("deepspeed", "trainer.strategy=deepspeed"),
    "optuna": ("optuna", "sweep=optuna"),
    "hydra-submitit-launcher": ("submitit", "sweeps on SLURM"),
    "hydra-ray-launcher": ("ray", "sweeps on Ray"),
    "matplotlib": ("plots", "the picture of tune"),
    "lm-eval": ("lm-eval", "evaluate.tasks"),
    "nvidia-ml-py": ("nvml", "utilisation and power of a GPU in the records"),
    "starlette": ("web", "the page of lmtrain chat --web"),
}


class Finding(NamedTuple):
    name: str
    good: bool
    words: str
    needed: bool = False  # whether training can't run without it


def diagnose(folder: Path) -> int:
    """Prints what was found, a line each, as it is found; says what is missing and how to get it."""
    console, missing = terminal.console(), 0
    for finding in findings(folder):
        missing += finding.needed and not finding.good
        sign, style = ("ok", "green") if finding.good else ("missing", "red") if finding.needed else ("-", "dim")
        line = Table.grid(padding=(0, 1))
        line.add_column(width=7, style=style)
        line.add_column(width=23, style="bold")
        line.add_column(overflow="fold")
        line.add_row(sign, Text(finding.name), Text(finding.words))  # as they are: [ray] is not markup
        console.print(line)
    if missing:
        errors.print_error(f"training can't run here: parts it needs and lacks, named above: {missing}")
        return errors.FAILED
    return errors.FINISHED


def findings(folder: Path) -> Iterator[Finding]:
    """Everything found, quickest first; `folder` is where runs would be written."""
    yield Finding("python", True, f"{platform.python_version()} on {platform.platform(terse=True).strip()}")
    needed = list(_packages())
    yield from needed
    for name, (extra, purpose) in OPTIONAL.items():
        yield _package(name, f" ({purpose})", f'for {purpose}: pip install "lmtrain[{extra}]"')
    yield _writable(folder)
    yield _memory()
    yield _compiler()
    if all(f.good for f in needed):
        yield from _devices()
    yield _hub()


def _packages() -> Iterator[Finding]:
    """The packages that lmtrain requires, by its own metadata."""
    requirements = importlib.metadata.requires("lmtrain") or []
    for requirement in (r for r in requirements if "extra ==" not in r):
        name = re.split(r"[<>=!~;\[ ]", requirement)[0]
        yield _package(name, "", f'pip install "{requirement}"', needed=True)


def _package(name: str, purpose: str, missing: str, needed: bool = False) -> Finding:
    try:
        return Finding(name, True, f"{importlib.metadata.version(name)}{purpose}", needed)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, missing, needed)


def _writable(folder: Path) -> Finding:
    there = next(p for p in (folder, *folder.parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return Finding("runs", False, f"{there} can't be written ({error.strerror}): set run.root", needed=True)
    return Finding("runs", True, f"{folder}, {free / 2**30:,.0f} GiB free", needed=True)


def _memory() -> Finding:
    try:
        pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return Finding("memory", True, "not known on this system")
    return Finding("memory", True, f"{pages * size / 2**30:.1f} GiB free")


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return Finding("C compiler", found is not None, found or "trainer.compile=true needs one: install gcc or clang")


def _devices() -> Iterator[Finding]:
    import torch

    from lmtrain.distributed.devices import best_precision

    precision = best_precision("cuda" if torch.cuda.is_available() else "cpu")
    yield Finding("CPU", True, f"{os.cpu_count()} cores, trainer.precision=auto is {best_precision('cpu')}")
    if not torch.cuda.is_available():
        yield Finding("CUDA", False, f"torch {torch.__version__} sees no GPU")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        words = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
        yield Finding(f"GPU {index}", True, f"{words}, trainer.precision=auto is {precision}")
    yield _package("triton", " (trainer.compile)", "trainer.compile=auto stays off without it: pip install triton")


def _hub() -> Finding:
    from lmtrain.data import hub
    from lmtrain.errors import UserError

    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return Finding("hub", False, "HF_HUB_OFFLINE is set: only what is cached can be loaded")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")  # seconds
    try:
        hub.commit_of("model", "openai-community/gpt2", None)
    except hub.Unreachable as error:
        return Finding("hub", False, f"{hub.endpoint()} doesn't answer ({error}): local files and cached copies only")
    except UserError as error:
        return Finding("hub", True, f"{hub.endpoint()} answers ({error})")
    return Finding("hub", True, f"{hub.endpoint()} answers")
