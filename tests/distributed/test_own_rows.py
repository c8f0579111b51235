"""Each rank reads its own rows of pretrained weights from the files, and no rank sends any."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import forked
from lmtrain.config.compose import check, compose
from lmtrain.run.build import build_language_model
from lmtrain.strategies import sharding
from tiny_pretrained import save_pretrained


class Tokens(SimpleNamespace):
    eos_token_id = 0

    def __len__(self) -> int:
        return 20

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return []


def rank_of_two(rank: int, model: str, folder: str, how: str) -> None:
    """Writes the whole weights, assembled from both ranks' shards, and how many numbers were broadcast."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    words = ["model=pretrained", f"model.name_or_path={model}", "data=text", "data.seq_len=32"]
    config = check(compose([*words, f"trainer.strategy={'ddp' if how == 'sent' else 'fsdp'}"]))
    sent, original = list[int](), dist.broadcast

    def counting(tensor: torch.Tensor, src: int) -> None:
        sent.append(tensor.numel())
        original(tensor, src=src)

    if how == "not found" and rank == 1:
        sharding.identities = dict.fromkeys
    in_files = sharding.reads_files(config)
    built = sharding.build(config, lambda: build_language_model(config, Tokens(), in_files))
    here = {p.device.type for p in built.parameters()}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("nodes", "devices")) if how == "node" else None
    dist.broadcast = counting
    sharding.shard(built, mesh or init_device_mesh("cpu", (2,)), torch.device("cpu"), "32-true", config.trainer.fsdp)
    dist.broadcast = original
    whole = {name: p.full_tensor().detach() for name, p in built.model.named_parameters()}  # type: ignore[operator]
    torch.save(whole, f"{folder}/{rank}.pt")
    Path(f"{folder}/{rank}.json").write_text(json.dumps({"devices": sorted(here), "sent": sum(sent)}))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["rows", "node", "not found", "sent"])
def test_ranks_read_their_rows(how: str, tmp_path: Path) -> None:
    model = save_pretrained(tmp_path / "model", intermediate_size=49, tie_word_embeddings=how == "node")
    forked.call_in_ranks(rank_of_two, str(model), str(tmp_path), how)
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    bytes_of_weights = sum(4 * p.numel() for p in expected.parameters())
    for rank in (0, 1):
        whole = torch.load(tmp_path / f"{rank}.pt")
        parameters = dict(expected.named_parameters())
        assert whole.keys() == parameters.keys()
        assert all(torch.equal(whole[name], p) for name, p in parameters.items())
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["devices"] == ["cpu" if (how, rank) == ("sent", 0) else "meta"]
        if how in ("rows", "node"):
            assert found["sent"] < 200  # only the rotary embedding's frequencies
        else:
            assert found["sent"] > bytes_of_weights
