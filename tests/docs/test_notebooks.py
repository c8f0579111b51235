"""Every notebook runs from its first cell to its last, with fewer steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(notebook: Path, tmp_path: Path) -> None:
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join("".join(c["source"]) for c in cells))
    environment = {**os.environ, "STEPS": "2", "RUN": str(tmp_path / "run"), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_notebooks_and_their_outputs_are_not_committed() -> None:
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
        assert all(not c["outputs"] and c["execution_count"] is None for c in cells), notebook.name
