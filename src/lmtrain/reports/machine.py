"""The checks of `lmtrain doctor`: packages, devices, compiler, disk, memory and the hub."""

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
from lmtrain.config import safe_yaml

OPTIONAL = safe_yaml.table(__file__, "optional.yaml")


class Finding(NamedTuple):
    name: str
    good: bool
    words: str
    needed: bool = False  # whether training requires it


def diagnose(folder: Path) -> int:
    """Prints each finding as it is made, with advice on how to install missing parts; returns the exit code."""
    console, missing = terminal.console(), 0
    for finding in findings(folder.absolute()):
        missing += finding.needed and not finding.good
        sign, style = ("ok", "green") if finding.good else ("missing", "red") if finding.needed else ("-", "dim")
        line = Table.grid(padding=(0, 1))
        line.add_column(width=7, style=style)
        line.add_column(width=23, style="bold")
        line.add_column(overflow="fold")
        line.add_row(sign, Text(finding.name), Text(finding.words))  # Text: [ray] is not markup
        console.print(line)
    if missing:
        errors.print_error(f"training can't run here: required parts are missing, named above: {missing}")
        return errors.FAILED
    return errors.FINISHED


def findings(folder: Path) -> Iterator[Finding]:
    """Yields all findings, roughly the quickest checks first; `folder` is where runs would be written."""
    yield Finding("python", True, f"{platform.python_version()} on {platform.platform(terse=True).strip()}")
    needed = list(_packages())
    yield from needed
    for name, (extra, purpose) in OPTIONAL.items():
        yield _installed(name, f" ({purpose})", f'for {purpose}: pip install "lmtrain[{extra}]"')
    yield _writable(folder)
    yield _memory()
    yield _compiler()
    if all(f.good for f in needed):
        yield from _devices()
    yield _hub()


def _packages() -> Iterator[Finding]:
    """Checks the packages that lmtrain's own metadata requires."""
    try:
        requirements = importlib.metadata.requires("lmtrain") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("lmtrain", True, "not installed but run from its source, so its packages are not checked", True)
        return
    for requirement in (r for r in requirements if "extra ==" not in r):
        name = re.split(r"[<>=!~;\[ ]", requirement)[0]
        yield _installed(name, "", f'pip install "{requirement}"', needed=True)


def _installed(name: str, about: str, advice: str, needed: bool = False) -> Finding:
    """Finds the version of a package, followed by `about`; `advice` says how to install a missing one."""
    try:
        return Finding(name, True, f"{importlib.metadata.version(name)}{about}", needed)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, advice, needed)


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

    auto = ", ".join(f"{best_precision('cpu', width)} for {width} channels" for width in (64, 256, 768))
    yield Finding("CPU", True, f"{os.cpu_count()} cores, trainer.precision=auto is {auto}")
    if not torch.cuda.is_available():
        yield Finding("CUDA", False, f"torch {torch.__version__} sees no GPU")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        words = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}"
        yield Finding(f"GPU {index}", True, f"{words}, trainer.precision=auto is {best_precision('cuda')}")
    yield _installed("triton", " (trainer.compile)", "trainer.compile=auto stays off without it: pip install triton")


def _hub() -> Finding:
    from lmtrain.data import hub
    from lmtrain.errors import UserError

    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return Finding("hub", False, "HF_HUB_OFFLINE is set: only what is cached can be loaded")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")  # seconds
    try:
        _, why = hub.commit_of("model", "openai-community/gpt2", None)
    except UserError as error:
        return Finding("hub", True, f"{hub.endpoint()} answers ({error})")
    if why:
        return Finding("hub", False, f"{hub.endpoint()} doesn't answer ({why}): local files and cached copies only")
    return Finding("hub", True, f"{hub.endpoint()} answers")
