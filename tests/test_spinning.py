"""The OpenMP spin limit is set before torch is loaded, in every process of a run."""

import json
from pathlib import Path

import pytest

from lmtrain.distributed import ranks
from support import TINY, Run

# Loaded by every Python process through PYTHONPATH; records the environment when torch is about to be imported.
NOTES = """
import json, os, sys

class Notes:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            kept = {k: os.environ.get(k) for k in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "RANK")}
            with open(os.environ["NOTES"], "a") as file:
                file.write(json.dumps(kept) + "\\n")

sys.meta_path.insert(0, Notes())
"""


@pytest.fixture
def notes(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTES)
    return {"PYTHONPATH": str(tmp_path / "site"), "NOTES": str(tmp_path / "notes.jsonl")}


def noted(notes: dict[str, str]) -> list[dict[str, str | None]]:
    return [json.loads(line) for line in Path(notes["NOTES"]).read_text().splitlines()]


@pytest.mark.slow
def test_it_is_set_before_torch_is_loaded_and_on_ranks(
    lmtrain: Run, notes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    # The ranks fail because the file is missing, which is late enough for torch to have been loaded.
    done = lmtrain("train", *TINY, "data=text", "data.path=missing.txt", "trainer.devices=2", "trainer.accelerator=cpu",
                   "data.global_batch_size=4", env=notes)  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = noted(notes)
    assert {entry["RANK"] for entry in found} >= {None, "0", "1"}
    assert {entry["GOMP_SPINCOUNT"] for entry in found} == {ranks.SPIN_ROUNDS}


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_has_set_is_kept(name: str, value: str) -> None:
    environ = {name: value}
    ranks.limit_spinning(environ)
    assert environ == {name: value}
