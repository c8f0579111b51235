"""The documentation site: every page and every API page builds, with warnings as errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason='needs mkdocs: pip install "lmtrain[docs]"')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPO, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {p.parent.name for p in tmp_path.rglob("index.html")}
    written = {p.stem for p in (REPO / "docs").rglob("*.md")} - {"index"}
    assert written <= pages
    assert "preference_losses" in (tmp_path / "api" / "losses" / "index.html").read_text()
