"""Training from a bin far larger than the memory limit: the process does not grow with the pages it reads."""

import json
import sys
from pathlib import Path

import pytest

from support import TINY, Run

GIB = 2**30


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and needs sparse files")
def test_an_8_gib_bin_trains_in_300_mib(lmtrain: Run, tmp_path: Path) -> None:
    folder = tmp_path / "bins"
    folder.mkdir()
    for name, size in (("train.bin", 8 * GIB), ("val.bin", 2**20)):
        with (folder / name).open("wb") as file:
            file.truncate(size)  # sparse: the zeros take no disk space
    probe = tmp_path / "memory.json"
    done = lmtrain(
        "train",
        *TINY,
        "data=bins",
        f"data.path={folder}",
        "data.dtype=uint16",
        "data.append_eos=false",
        "data.global_batch_size=64",
        "data.micro_batch_size=64",
        "trainer.max_steps=300",
        "trainer.val_check_interval=100",
        "trainer.limit_val_batches=2",
        "export.enabled=false",
        "run.dir=run",
        f"callbacks.extra=[{{_target_: memory_probe.MemoryProbe, path: {probe}}}]",
        "run.allow_target=[memory_probe]",
        env={"PYTHONPATH": str(Path(__file__).parent)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    memory = json.loads(probe.read_text())
    # 19,200 rows at random places: if the file were memory-mapped, each would have left pages in memory.
    assert memory["grown"] < 300 * 2**20, memory
