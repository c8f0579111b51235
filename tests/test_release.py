"""What a release says of itself: its metadata, an editable install, and the workflows that make it."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import lmtrain
from support import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))


def metadata(**environ: str) -> dict[str, Any]:
    pytest.importorskip("hatchling", reason="reading the metadata needs hatchling")
    command = [sys.executable, "-m", "hatchling", "metadata"]
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    done = subprocess.run(command, cwd=REPO, env=hidden | environ, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_index_page_links_to_the_host_that_built_the_release() -> None:
    found = metadata(GITHUB_REPOSITORY="someone/lmtrain", GITHUB_REF_NAME="v1.2.3")
    assert found["urls"]["Source"] == "https://github.com/someone/lmtrain"
    text = found["readme"]["text"]
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    assert len(links) >= 15
    assert [link for link in links if not link.startswith("https://")] == []
    prefix = re.compile("https://github.com/someone/lmtrain/(?:blob|raw)/v1.2.3/(.*)")
    inside = [match[1] for link in links if (match := prefix.match(link))]
    assert len(inside) >= 15
    assert [name for name in inside if not (REPO / name).exists()] == []


def test_a_build_elsewhere_invents_no_address() -> None:
    found = metadata()
    assert "urls" not in found
    assert found["readme"]["text"] == (REPO / "README.md").read_text()


def test_an_editable_install_copies_no_configs(tmp_path: Path) -> None:
    """The copy of conf/ in site-packages would stay as it was while the checkout's changes."""
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    code = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if "conf/" in name] == []


def test_every_action_is_pinned_and_has_no_more_rights_than_it_needs() -> None:
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {"contents": "read"}, file.name
        used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
        assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == [], file.name
        assert all("timeout-minutes" in job or "environment" in job for job in workflow["jobs"].values()), file.name


def test_the_python_versions_named_are_those_that_are_tested() -> None:
    (ci,) = (yaml.safe_load(file.read_text()) for file in WORKFLOWS if file.stem == "ci")
    tested = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [line.rpartition(" ")[2] for line in metadata()["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert named == tested


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((REPO / "CITATION.cff").read_text())["version"] == lmtrain.__version__
    assert (Path(lmtrain.__file__).parent / "py.typed").exists()
