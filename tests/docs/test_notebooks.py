"""Every notebook runs from its first cell to its last, with fewer steps, and is stored with its outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(notebook: Path, tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(c["source"]) for c in code_cells(notebook)))
    environment = {**os.environ, "STEPS": "2", "RUN": str(tmp_path / "run"), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_shows_what_it_did(notebook: Path) -> None:
    """A stored notebook uses the Python API, was run in order, and has a picture but no errors or machine's paths."""
    cells = code_cells(notebook)
    assert any("lmtrain.build(" in "".join(c["source"]) for c in cells)
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [output for c in cells for output in c["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        shown = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image")}
        assert not re.search(r"/(tmp|work|home|root|Users)/", json.dumps({**output, "data": shown}))


def test_there_are_notebooks() -> None:
    assert {n.stem for n in NOTEBOOKS} == {"pretraining", "sft", "dpo"}
