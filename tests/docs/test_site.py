"""The documentation site: every page and every API page builds, with warnings treated as errors."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import browser
import screen
import screenshots
from lmtrain.config.compose import compose
from lmtrain.config.override_text import leaves_of
from support import REPO


def defaults() -> set[str]:
    """Returns the keys that hold a value, of runs with many kinds of options."""
    words = [["objective=grpo", "data=prompts_jsonl", "reward=code"], ["objective=dpo", "data=preference_jsonl"],
             ["optimizer=muon", "peft=lora", "model=pretrained"], ["model=memory_nano", "schedule=wsd"]]  # fmt: skip
    trees = [OmegaConf.to_container(compose(some), resolve=False) for some in words]
    keys = {key for tree in trees for key, _ in leaves_of(tree) if "." in key}
    sections = {key.rpartition(".")[0] for key in keys}
    return {key for key in keys - sections if key.rpartition(".")[2] not in ("name", "_target_", "defaults")}


@pytest.mark.slow
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
    python = (tmp_path / "api" / "python" / "index.html").read_text()
    assert all(f'id="lmtrain.run.python.{name}"' in python for name in ("compose", "build", "PythonRun.fit"))
    for notebook in (REPO / "notebooks").glob("*.ipynb"):
        assert "parameter group" in (tmp_path / "notebooks" / notebook.stem / "index.html").read_text()
    keys = (tmp_path / "keys" / "index.html").read_text()
    assert [key for key in defaults() if f"<code>{key}</code>" not in keys] == []
    assert not list(tmp_path.rglob("*.py"))


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.MISSING)
def test_no_page_cuts_a_line_of_code_or_is_wider_than_its_window(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason='needs mkdocs: pip install "lmtrain[docs]"')
    with browser.open_browser() as window:
        assert screenshots.look_at_site(window, tmp_path) == []
    assert (tmp_path / "docs_pretraining_400.png").stat().st_size > 50_000


def test_the_picture_of_the_readme_is_a_real_run_and_fits() -> None:
    text = (REPO / "docs" / "screen.svg").read_text(encoding="utf-8")
    found = re.search(r'<svg [^>]*width="(\d+)" height="(\d+)"', text)
    assert found is not None
    assert int(found[2]) <= 500
    shown = html.unescape(text).replace("\xa0", " ")
    assert all(word in shown for word in ("val/bits_per_byte", "next:", "outputs/first"))


def test_a_terminals_last_screen() -> None:
    """A progress bar that is redrawn repeatedly becomes one line, as on a terminal."""
    text = "plan\r\n\x1b[2Kbar 1\r\x1b[2Kbar 2\r\n\x1b[1A\x1b[2Kbar \x1b[31m3\x1b[0m\r\nend\r\n"
    assert screen.screen(text) == ["plan", "bar \x1b[31m3\x1b[0m", "end"]
