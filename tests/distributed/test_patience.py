"""How long ranks wait for each other, where NCCL writes traces of a hang, and how ranks share a reference's work."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import forked
from lmtrain.config.compose import check, compose
from lmtrain.data.store.cache import PART, compute_share
from lmtrain.distributed import process_group as world
from lmtrain.objectives.reference import Precomputed
from lmtrain.run import launch


def rank_of_two(rank: int, folder: str) -> None:
    """Writes the timeouts in seconds of the first group and of those of a mesh, before and after `equal_patience`."""
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0", world.MEETING: folder}
    os.environ.update(ranks)
    world.connect("cpu", 7777)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("nodes", "devices"))
    groups = [dist.group.WORLD, mesh.get_group("devices"), mesh.get_group("nodes")]

    def seconds() -> list[float]:
        found = [group._get_backend(torch.device("cpu")).options._timeout for group in groups if group is not None]
        return [timeout.total_seconds() for timeout in found]

    before = seconds()
    world.equal_patience()
    Path(f"{folder}/{rank}.json").write_text(json.dumps([before, seconds()]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_group_waits_as_long_as_the_first(tmp_path: Path) -> None:
    forked.call_in_ranks(rank_of_two, str(tmp_path))
    for rank in (0, 1):
        before, after = json.loads((tmp_path / f"{rank}.json").read_text())
        assert before[1] == 1800  # torch's default for a new group, which is why all groups are set
        assert after == [7777] * 3


@pytest.mark.slow
def test_the_flight_recorder_of_ranks_writes_into_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_that_looks.py").write_text(
        "import json, os, pathlib\n"
        "from lmtrain.distributed import process_group as world\n"
        "world.connect('cpu', 60)\n"
        "found = {name: value for name, value in os.environ.items() if name.startswith(('TORCH_FR', 'TORCH_NCCL'))}\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK'] + '.json').write_text(json.dumps(found))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    folder = tmp_path / "run" / "ranks"
    folder.mkdir(parents=True)
    assert launch.launch_ranks("rank_that_looks", check(compose([])), folder, processes=2) == 0
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["TORCH_FR_DUMP_TEMP_FILE"] == f"{folder}/nccl_trace_rank_"
        assert (found["TORCH_NCCL_DUMP_ON_TIMEOUT"], found["TORCH_FR_BUFFER_SIZE"]) == ("1", "2000")


def test_a_folder_that_is_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder set by the launcher or the user is kept; under torchrun none is set, so the run's folder is used."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/scratch/trace_")
    world.write_traces_to(Path("runs/one"))
    assert world.traces() == "/scratch/trace_*"
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    world.write_traces_to(Path("runs/one"))
    assert world.traces() == "runs/one/nccl_trace_rank_*"


def test_each_rank_computes_its_parts_and_no_others(tmp_path: Path) -> None:
    """Ranks divide the parts like this when the reference of DPO and KTO is computed before training."""
    asked: list[list[int]] = [[], []]
    for rank in (0, 1):

        def numbers(rows: np.ndarray, rank: int = rank) -> np.ndarray:
            asked[rank].extend(rows.tolist())
            return rows.astype(np.float64)

        compute_share(tmp_path, np.arange(3 * PART + 1), numbers, rank, 2)
    assert asked[0] == [*range(PART), *range(2 * PART, 3 * PART)]
    assert asked[1] == [*range(PART, 2 * PART), 3 * PART]


def test_the_ranks_of_a_run_share_the_reference_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With separate caches, each rank asks for exactly its own rows of each split, whatever others have written."""
    asked: dict[int, dict[str, list[int]]] = {}
    splits = {"train": range(3 * PART + 1), "val": range(PART + 7)}
    monkeypatch.setattr(world, "size", lambda: 2)
    monkeypatch.setattr(world, "together", lambda make: make())
    for rank in (0, 1):
        monkeypatch.setattr(world, "rank", lambda rank=rank: rank)
        asked[rank] = {name: [] for name in splits}

        def numbers(split: range, rows: np.ndarray, rank: int = rank) -> np.ndarray:
            asked[rank]["train" if len(split) == len(splits["train"]) else "val"].extend(rows.tolist())
            return rows.astype(np.float64)

        Precomputed._compute_shares(object.__new__(Precomputed), splits, numbers, tmp_path / str(rank))
    for name, rows in splits.items():
        first, second = asked[0][name], asked[1][name]
        assert first
        assert second
        assert sorted(first + second) == list(rows)
