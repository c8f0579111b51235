"""The separate environment of litgpt, which needs an older huggingface_hub than lmtrain."""

import os
import subprocess
import sys
import venv
from pathlib import Path

from legs import Skipped

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
NOT_LITGPTS = ("huggingface_hub==",)  # pins that conflict with litgpt 0.5


def litgpt_python(given: Path | None) -> Path:
    """Returns the user's interpreter, or that of an environment that is created once in the cache folder."""
    if given is not None:
        if not _has_litgpt(given):
            raise Skipped(f"--litgpt-python {given} can't import litgpt")
        return given
    cache = Path(os.environ.get("LMTRAIN_CACHE", "~/.cache/lmtrain")).expanduser()
    folder = cache / "benchmarks" / "litgpt"
    python = folder / "bin" / "python"
    if not (python.exists() and _has_litgpt(python)):
        _install(folder, python)
    return python


def _has_litgpt(python: Path) -> bool:
    try:
        return subprocess.run([python, "-c", "import litgpt"], capture_output=True).returncode == 0
    except OSError:
        return False


def _install(folder: Path, python: Path) -> None:
    """Installs litgpt with lmtrain's pins, above all the same torch, so that the benchmark compares like with like."""
    print(f"installing litgpt into {folder} (once; --litgpt-python PATH takes one that is there)", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pins = [p for p in CONSTRAINTS.read_text().splitlines() if not p.startswith(NOT_LITGPTS)]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins) + "\n")
    packages = ("litgpt", "requests")  # litgpt's command line imports requests
    command = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints), *packages]
    done = subprocess.run(command, stdout=sys.stdout, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Skipped(f"pip could not install litgpt ({last}); --litgpt-python PATH names one that is there")
