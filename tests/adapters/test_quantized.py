"""LoRA on a base of 4 or 8 bits: it learns before and after a validation, and merges to what it was."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_models import objective
from lmtrain.adapters import lora as adapters
from lmtrain.adapters import quantized
from lmtrain.adapters.merge import merged
from lmtrain.config.schema import PeftConfig
from lmtrain.errors import UserError
from lmtrain.models import flops
from lmtrain.models.language_model import LanguageModel
from tiny_pretrained import load_pretrained, save_pretrained

pytest.importorskip("bitsandbytes")
BATCH = {"input_ids": torch.arange(60).reshape(3, 20) + 7, "labels": torch.arange(60).reshape(3, 20) + 11}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Widths that divide by 64 take every path of bitsandbytes, the repacked one of CPUs with AVX512-BF16 included.
    return save_pretrained(tmp_path_factory.mktemp("base") / "q", hidden_size=64, intermediate_size=128)


def quantised(base: Path, quantization: str, **changes: Any) -> Any:
    peft = PeftConfig(
        method="lora",
        r=4,
        alpha=8,
        dropout=0.0,
        target_modules="all-linear",
        modules_to_save=[],
        bias="none",
        use_rslora=False,
        use_dora=changes.get("use_dora", False),
        init_weights="default",
        quantization=quantization,
        double_quant=changes.get("double_quant", False),
    )
    model = load_pretrained(base, 257, **quantized.loading_options(peft, "32-true", "cpu"))
    quantized.make_trainable_on_cpu(model)
    adapters.attach(model, peft, str(base), None, [], seed=0)
    return model


CASES = [
    ("nf4", {}),
    ("nf4", {"double_quant": True}),
    ("fp4", {}),
    ("int8", {}),
    ("nf4", {"use_dora": True}),
]


@pytest.mark.parametrize(("quantization", "changes"), CASES)
def test_learns_after_a_validation_and_merges(quantization: str, changes: dict[str, Any], base: Path) -> None:
    if quantization == "int8" and not quantized.multiplies_int8():
        with pytest.raises(UserError, match=r"products of 8-bit numbers overflow.*peft\.quantization=nf4"):
            quantised(base, quantization, **changes)
        return
    model = quantised(base, quantization, **changes)
    wrapped = LanguageModel(model, objective())
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 and "lora_" in name for name, p in trainable.items())
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    gradients = []
    for _ in range(2):
        for _ in range(2):
            loss = wrapped(**BATCH).loss_sum
            optimizer.zero_grad()
            loss.backward()
            gradients.append({name: p.grad.clone() for name, p in trainable.items()})
            optimizer.step()
        wrapped.eval()
        with torch.no_grad():
            wrapped(**BATCH)
        wrapped.train()
    assert all(g.abs().max() > 0 for name, g in gradients[-1].items() if "lora_B" in name), "in every layer"
    assert all(g.abs().max() > 0 for name, g in gradients[-1].items() if "lora_A" in name), "B is not zero any more"

    model.set_attn_implementation("sdpa")
    model.eval()
    with torch.no_grad():
        live = model(BATCH["input_ids"]).logits
        plain = merged(model)
        found = plain(BATCH["input_ids"]).logits
    assert getattr(plain.config, "quantization_config", None) is None
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    allowed = 0.1 if quantization == "int8" else 1e-5  # the live int8 model also rounds what goes into a layer
    assert (found - live).abs().max() < allowed * live.abs().max()


def test_counts_of_a_quantised_model(base: Path) -> None:
    """Parameters as if they were not packed; the memory estimate counts the bytes they take."""
    total, trained, _ = flops.parameter_counts(quantised(base, "nf4"))
    whole, _, _ = flops.parameter_counts(build_whole(base))
    assert total - trained == whole
    blocks = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)  # q, k and v, o, and the three of the MLP
    stored = flops._weights_bytes(quantised(base, "nf4"), 4)
    assert stored == 4 * (whole - blocks) + blocks // 2 + 4 * trained


def build_whole(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base)
