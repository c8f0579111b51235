"""`lmtrain.doctor`: one line a part, exit 1 where training can't run."""

from pathlib import Path

from lmtrain.run import machine
from support import Run


def test_everything_needed_is_found(lmtrain: Run, tmp_path: Path) -> None:
    done = lmtrain("doctor", str(tmp_path / "outputs"))
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("torch", "transformers", "matmul", "disk", "GFLOP/s", "C compiler"):
        assert part in done.stdout
    assert not (tmp_path / "outputs").exists()  # it only looks


def test_a_folder_that_cannot_be_written_is_exit_1(lmtrain: Run) -> None:
    done = lmtrain("doctor", "/proc/outputs")
    assert done.returncode == 1
    assert "set run.root" in done.stdout
    assert "can't run here" in done.stderr


def test_a_missing_package_names_its_requirement(monkeypatch) -> None:
    found = machine.importlib.metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    (peft,) = [f for f in machine._packages() if f.name == "peft"]
    assert (peft.good, peft.needed) == (False, True)
    assert "pip install" in peft.words
