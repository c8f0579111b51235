"""LoRA on a base of 4 or 8 bits learns before and after a validation, and merges into a model with equal outputs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.adapters import lora as adapters
from lmtrain.adapters import quantized
from lmtrain.adapters.lora_merge import merged
from lmtrain.config import compose as rules
from lmtrain.config.schema import PeftConfig
from lmtrain.errors import UserError
from lmtrain.models import flops
from lmtrain.models.language_model import LanguageModel
from tiny_pretrained import load_pretrained, save_pretrained

Params4bit = pytest.importorskip("bitsandbytes").nn.Params4bit
from lmtrain.adapters import packed  # noqa: E402

SOMEWHERE = ["model=pretrained", "model.name_or_path=somewhere", "data.seq_len=64", "optimizer=adamw"]
BATCH = {"input_ids": torch.arange(60).reshape(3, 20) + 7, "labels": torch.arange(60).reshape(3, 20) + 11}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Widths divisible by 64 use every path of bitsandbytes, including the repacked one of CPUs with AVX512-BF16.
    return save_pretrained(tmp_path_factory.mktemp("base") / "q", hidden_size=64, intermediate_size=128)


def quantised(base: Path, quantization: str, **changes: Any) -> Any:
    peft = settings(quantization, **changes)
    model = load_pretrained(base, 257, **quantized.loading_options(peft, "32-true", "cpu"))
    quantized.make_trainable_on_cpu(model)
    adapters.attach(model, peft, str(base), None, [], seed=0)
    return model


def settings(quantization: str, **changes: Any) -> PeftConfig:
    return PeftConfig(
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
    wrapped = LanguageModel(model)
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
    allowed = 0.1 if quantization == "int8" else 1e-5  # the live int8 model also rounds the inputs of its layers
    assert (found - live).abs().max() < allowed * live.abs().max()


def test_counts_of_a_quantised_model(base: Path) -> None:
    """Parameters are counted as if they were not packed; the memory estimate counts the bytes they take."""
    total, trained, _ = flops.parameter_counts(quantised(base, "nf4"))
    whole, _, _ = flops.parameter_counts(build_whole(base))
    assert total - trained == whole
    blocks = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)  # q, k and v, o, and the three matrices of the MLP
    others = 4 * (whole - blocks) + 4 * trained
    scales = blocks // 64  # one fp32 scale per 64 weights; double quantisation: 8 bits and an fp32 scale per up to 256
    assert flops._weights_bytes(quantised(base, "nf4"), 4) == others + blocks // 2 + 4 * scales
    double = flops._weights_bytes(quantised(base, "nf4", double_quant=True), 4)
    assert double == others + blocks // 2 + scales + 4 * 2 * 7


@pytest.mark.parametrize(("quantization", "double_quant"), [("nf4", True), ("fp4", False)])
def test_layers_taken_apart_are_the_same_functions(quantization: str, double_quant: bool, base: Path) -> None:
    """Taken-apart layers are bit-identical in both directions, and a model built without weights has the same parts."""
    whole = quantised(base, quantization, double_quant=double_quant)
    apart = quantised(base, quantization, double_quant=double_quant)
    stored = packed.format_of(apart)
    packed.take_apart(apart, stored)
    assert len(stored.forms) == 14
    gradients = []
    for model in (whole, apart):
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        LanguageModel(model)(**BATCH).loss_sum.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(gradient.equal(gradients[1][name]) for name, gradient in gradients[0].items())

    peft = settings(quantization, double_quant=double_quant)
    options = quantized.loading_options(peft, "32-true", "cpu")
    with torch.device("meta"):
        shapes = load_pretrained(base, 257, **options)
        quantized.quantise_shapes(shapes, options)
        adapters.attach(shapes, peft, str(base), None, [], seed=0)
    assert flops._weights_bytes(shapes, 4) == flops._weights_bytes(whole, 4)
    assert flops.parameter_counts(shapes) == flops.parameter_counts(whole)
    assert packed.format_of(shapes) == stored
    packed.take_apart(shapes, stored)
    assert facts(shapes) == facts(apart)
    assert all(p.is_meta for p in shapes.parameters())


def facts(model: Any) -> dict[str, Any]:
    return {
        name: (tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }


def test_weights_quantised_elsewhere_come_back(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising on a GPU for host memory gives the same weights as on the CPU, which stands in for the GPU here."""
    peft = settings("nf4", double_quant=True)
    asked = []
    monkeypatch.setattr(quantized, "_device", lambda accelerator: asked.append(accelerator) or "cpu:0")
    with quantized.quantising(peft, "cuda", to_host=True):
        found = load_pretrained(base, 257, **quantized.loading_options(peft, "32-true", "cuda", to_host=True))
    assert asked
    assert "there_and_back" not in Params4bit._quantize.__name__
    expected = load_pretrained(base, 257, **quantized.loading_options(peft, "32-true", "cpu"))
    for name, parameter in expected.named_parameters():
        assert parameter.equal(found.get_parameter(name))
    found_layer, layer = (model.model.layers[1].mlp.down_proj for model in (found, expected))
    assert quantized.dequantized(found_layer).equal(quantized.dequantized(layer))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["peft=qlora_8bit", "trainer.strategy=fsdp"], r"those of 4 bits.* Set trainer\.strategy=fsdp with peft=qlora"),
        (["peft=qlora", "trainer.strategy=fsdp_tp"], r"Set trainer\.strategy=fsdp, which shares a base of 4 bits"),
        (["peft=qlora", "trainer.strategy=deepspeed"], r"Set trainer\.strategy=fsdp, which shares a base of 4 bits"),
        (["peft=qlora_8bit", "trainer.strategy=deepspeed"], r"Set trainer\.strategy=fsdp with peft=qlora"),
    ],
)
def test_other_ways_to_share_a_base_out_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(UserError, match=r"^peft\.quantization=\w+ does not go with trainer\.strategy=\w+.*" + said):
        rules.check(rules.compose([*SOMEWHERE, *settings]))


def test_stored_in_8_bits_can_not_be_shared_out(base: Path) -> None:
    model = load_pretrained(base, 257)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    quantized.check_shared_out(model, "ddp")
    with pytest.raises(UserError, match=r"stored quantised \(bitsandbytes\).*strategy=fsdp: set trainer.strategy=ddp"):
        quantized.check_shared_out(model, "fsdp")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized.check_shared_out(model, "fsdp")
    with pytest.raises(UserError, match=r"strategy=deepspeed: set trainer\.strategy=fsdp or ddp"):
        quantized.check_shared_out(model, "deepspeed")


def build_whole(base: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base)
