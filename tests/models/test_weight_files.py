"""Which pretrained weights may stay in their files, and that rows read from files equal what transformers reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from helpers_models import tiny
from lmtrain.models import weight_files


def saved(folder: Path, family: str) -> Path:
    tiny(family).save_pretrained(folder)
    return folder


def read(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_of_files_are_the_weights(family: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    whole = tiny(family, tie_word_embeddings=tied).to(dtype)
    whole.save_pretrained(folder, max_shard_size="20KB")  # several files
    assert len(list(folder.glob("*.safetensors"))) > 1
    model = read(folder)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert weight_files.leave(model, str(folder))
    parameters = dict(model.named_parameters())
    assert {(p.device.type, p.dtype) for p in parameters.values()} == {("meta", torch.float32)}
    assert model.config.dtype == torch.float32
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    embeddings, head = (m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    assert (embeddings is head) is tied

    files = weight_files.WeightFiles(getattr(model, weight_files.LEFT), model, None)
    for name, expected in whole.named_parameters():
        assert files.take(parameters[name]) == name
        assert files.take(parameters[name]) is None  # it has dropped its reference, so that the tensor can be freed
        for count in (1, 3):  # number of ranks
            parts = []
            for number in range(count):
                into = torch.full_like(expected, torch.nan, dtype=torch.float32)
                files.part = (number, count)
                rows = files.rows(len(into))
                files.read(name, into, rows)
                assert into[rows].isfinite().all()
                assert into.isnan().sum() == into.numel() - into[rows].numel()
                parts.append(into[rows])
            chunks = expected.detach().float().chunk(count)
            assert [len(part) for part in parts][: len(chunks)] == [len(chunk) for chunk in chunks]
            assert torch.equal(torch.cat(parts), expected.float())


def _renamed(folder: Path) -> None:
    tensors = {name.removeprefix("model."): t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_other_names_are_read_as_before(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    _renamed(folder)
    model = read(folder)
    assert weight_files.may_leave(model.config, str(folder))
    assert not weight_files.leave(model, str(folder))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma"])
def test_other_files_stacked_experts_and_families_that_are_compared(family: str, tmp_path: Path) -> None:
    """Weights can't stay in pickled files, nor with experts, which are stacked, nor outside KNOWN_FAMILIES."""
    folder = saved(tmp_path / "model", family)
    config = AutoConfig.from_pretrained(folder)
    assert weight_files.may_leave(config, str(folder)) is (family == "llama")
    _pickled(folder)
    assert not weight_files.may_leave(config, str(folder))


def test_a_file_of_another_content_is_another_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(40_000)}, file)
    left = {"w": str(file), "gone": str(tmp_path / "nowhere")}
    first = weight_files.identities(left)
    assert first[str(tmp_path / "nowhere")] is None
    assert first == weight_files.identities(left)
    save_file({"w": torch.ones(40_000)}, file)  # of the same size
    assert first != weight_files.identities(left)


@pytest.mark.parametrize("change", [lambda t: t.flip(0), lambda t: t.t().contiguous()])
def test_weights_that_transformers_has_turned_are_seen(change, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    model = read(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert not weight_files.leave(model, str(folder))
