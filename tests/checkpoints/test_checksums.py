"""All ranks share the work of verifying a checkpoint, and every rank learns what is wrong with it."""

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import forked
from lmtrain.checkpoints import checksums, store
from lmtrain.errors import UserError


def write(folder: Path, step: int) -> Path:
    path = folder / store.name_of(step)
    store.publish({"state_dict": {"w": torch.full((100,), float(step))}, "global_step": step, "callbacks": {}}, path)
    return path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rank_of_two(rank: int, folder: Path, unread: str) -> None:
    """Writes what this rank found, the notes and errors it got, and which files it read."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    read, original = list[str](), checksums.sha256

    def watched(file: Path, offset: int, count: int) -> str:
        read.append(f"{file.parent.name}/{file.name}")
        if rank == 1 and unread in str(file):
            raise FileNotFoundError(2, "not on this node", str(file))
        return original(file, offset, count)

    checksums.sha256 = watched
    told, found = list[str](), None
    try:
        find = functools.partial(store.newest_complete, folder, told.append)
        found = str(checksums.helped_by_ranks(lambda compare: find(compare=compare)))
    except UserError as error:
        told.append(str(error))
    (folder / f"{rank}.json").write_text(json.dumps({"found": found, "told": told, "read": sorted(read)}))
    dist.destroy_process_group()


def on_two_ranks(folder: Path, unread: str = "nothing") -> list[dict]:
    forked.call_in_ranks(rank_of_two, folder, unread)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_share_the_reading_and_agree(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in (1, 2, 3)]
    flip(paths[2] / "trainer.pt")  # the second of the checkpoint's files, which rank 1 reads
    first, second = on_two_ranks(tmp_path)
    assert first["found"] == second["found"] == str(paths[1])
    assert "step_00000003 is damaged (trainer.pt does not match its checksum)" in " ".join(first["told"])
    assert first["read"] == ["step_00000002/model.pt", "step_00000003/model.pt"]  # each file is read once, by one rank
    assert second["read"] == ["step_00000002/trainer.pt", "step_00000003/trainer.pt"]


@pytest.mark.slow
def test_what_a_rank_can_not_read_the_first_one_does(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    first, second = on_two_ranks(tmp_path, unread="trainer.pt")
    assert first["found"] == second["found"] == str(path)
    assert first["read"] == ["step_00000001/model.pt", "step_00000001/trainer.pt"]


@pytest.mark.slow
def test_all_ranks_raise_where_nothing_is_whole(tmp_path: Path) -> None:
    flip(write(tmp_path, 1) / "trainer.pt")
    first, second = on_two_ranks(tmp_path)
    assert first["found"] is second["found"] is None
    assert "no checkpoint in" in first["told"][-1]
    assert first["told"][-1] == second["told"][-1]
