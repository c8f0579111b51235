"""FLOP and memory estimates against what torch counts and keeps."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from family_variants import Variant, build, config_of
from helpers_models import tiny
from lmtrain.adapters.memory import MemorySettings, attach_memory, memory_blocks
from lmtrain.config import compose as lmtrain_config
from lmtrain.models import flops
from lmtrain.models.blocks import decoder_blocks

SHAPES = {
    "gpt2": {},
    "llama": {"num_key_value_heads": 2, "intermediate_size": 704},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 704, "head_dim": 64},
}


def model_of(family: str, **changes):
    shape = {"hidden_size": 256, "max_position_embeddings": 256, "initializer_range": 0.02, **SHAPES.get(family, {})}
    return tiny(family, **{**shape, **changes})


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_flops_per_token_equal_the_counted_ones(family, tied):
    model = model_of(family, tie_word_embeddings=tied, attention="transformers")
    model.set_attn_implementation("eager")  # eager attention computes all T keys of a token, as the formula assumes
    ids = torch.zeros(2, 128, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    assert flops.flops_per_token(model, 128) == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.02)


@pytest.mark.parametrize("family", SHAPES)
def test_frozen_matrices_cost_no_gradient_of_their_own(family):
    """All but the norms frozen: torch counts the forward and the gradients of the inputs, 4 per parameter."""
    model = model_of(family, attention="transformers")
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        parameter.requires_grad = parameter.ndim == 1
    ids = torch.zeros(2, 128, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    assert flops.flops_per_token(model, 128) == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.02)


@pytest.mark.parametrize("family", ["jetmoe", "deepseek_v3", "ernie4_5_moe", "granitemoe"])
def test_flops_of_mixtures_equal_the_counted_ones(family):
    """Whatever their experts are called, in attention or not; 2 of 4 are chosen. torch doesn't count norms."""
    model = build(config_of(Variant(family, {}))).train()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    ids = torch.arange(2 * 32).view(2, 32)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    assert flops.flops_per_token(model, 32) == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.02)


def test_idle_experts_cost_nothing():
    """A mixture that activates 2 of 8 experts costs as much as one with 2 of 2, except for its router."""
    shape = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts_per_tok": 2}
    few, many = (flops.flops_per_token(tiny("qwen3_moe", num_experts=n, **shape), 32) for n in (2, 8))
    layers, width = 2, 64
    assert many - few == 6 * layers * width * (8 - 2)


@pytest.mark.parametrize("share_bank", [True, False])
def test_chapters_that_are_not_read_cost_nothing(share_bank):
    """Reading 2 of 8 chapters costs what torch counts for reading all of 2, except for the router.

    With a shared bank, which exists once, each layer reads as much as from a bank of its own.
    """
    shape = {"attention": "transformers"}

    def with_memory(chapters):
        model = model_of("llama", **shape)
        attach_memory(model, MemorySettings(chapters, 48, 64, 2, 2, (0, 1), "top_k", 0.0, share_bank))
        for block in memory_blocks(model):
            torch.nn.init.ones_(block.gate)
        return model

    few, many, plain = with_memory(2), with_memory(8), model_of("llama", **shape)
    given = [flops.flops_per_token(model, 128) for model in (few, many, plain)]
    assert given[1] - given[0] == 6 * 2 * 256 * (8 - 2)
    counted = []
    for model in (few, plain):
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the fused kernel is not counted
            model(torch.zeros(16, 128, dtype=torch.long), use_cache=False).logits.sum().backward()
        counted.append(counter.get_total_flops() / (16 * 128))
    assert given[0] - given[2] == pytest.approx(counted[0] - counted[1], rel=0.02)  # a tile or two are half empty


def test_parameter_counts():
    model = tiny("gpt2")
    model.transformer.wpe.weight.requires_grad = False
    total, trained, embedding = flops.parameter_counts(model)
    assert total == sum(p.numel() for p in model.parameters()) == trained + 64 * 32
    assert embedding == (61 + 64) * 32


def test_peak_flops_of_known_devices(monkeypatch):
    assert flops.peak_flops(torch.device("cpu"), "bf16-mixed") is None
    name = ""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    for name, peak in [
        ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L4", 121e12), ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA A10G", 70e12), ("NVIDIA A10", 125e12), ("Tesla K80", None),
        ("NVIDIA GB200", 2500e12), ("NVIDIA GH200 480GB", 989e12), ("AMD Instinct MI250X / MI250", 383e12),
        # Workstation cards whose numbers begin like those of others.
        ("NVIDIA RTX A1000 Laptop GPU", None), ("NVIDIA RTX A4000", None), ("NVIDIA RTX A3000", None),
    ]:  # fmt: skip
        assert flops.peak_flops(torch.device("cuda"), "bf16-mixed") == peak, name
    assert flops.peak_flops(torch.device("cuda"), "32-true") is None


def run_config(*overrides: str):
    common = [
        *([] if any(word.startswith("optimizer=") for word in overrides) else ["optimizer=adamw"]),
        "data.micro_batch_size=2",
        "data.global_batch_size=2",
        "data.seq_len=256",
        "trainer.precision=32-true",
    ]
    config = lmtrain_config.check(lmtrain_config.compose([*common, *overrides]))
    config.trainer.activation_checkpointing = config.trainer.activation_checkpointing is True
    return config


def kept_for_backward(model, mixed: bool) -> int:
    """Returns the bytes of distinct tensors that the blocks' autograd graph keeps, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            kept[t.untyped_storage().data_ptr()] = t
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        hidden = model.base_model(torch.zeros(2, 256, dtype=torch.long), use_cache=False).last_hidden_state
    assert hidden.requires_grad
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_activations_are_those_autograd_keeps(family, precision):
    mixed = precision == "bf16-mixed"
    layers = {}
    for n in (2, 4):
        model = model_of(family, num_hidden_layers=n)
        estimate = flops.memory_estimate(model, run_config(f"trainer.precision={precision}"))
        weights = 2 * sum(p.numel() for b in decoder_blocks(model) for p in b.parameters()) if mixed else 0
        layers[n] = (estimate["activations"] + weights, kept_for_backward(model, mixed))
    estimated, kept = (layers[4][i] - layers[2][i] for i in (0, 1))
    assert estimated == pytest.approx(kept, rel=0.05)


def test_memory_by_part():
    model = model_of("gpt2")
    total = flops.parameter_counts(model)[0]
    memory = flops.memory_estimate(model, run_config())
    assert memory["parameters"] == memory["gradients"] == 4 * total
    assert memory["optimizer"] == 8 * total
    assert memory["logits"] == 2 * 256 * 61 * 4
    assert flops.memory_estimate(model, run_config("optimizer=lion"))["optimizer"] == 4 * total
    theirs = {"torch.optim.SGD": 0, "torch.optim.RAdam": 8, "torch.optim.RMSprop": 4}  # bytes a weight, by their papers
    for target, each in theirs.items():
        own = run_config("optimizer=custom", f"optimizer._target_={target}")
        assert flops.memory_estimate(model, own)["optimizer"] == each * total
    saved = flops.memory_estimate(model, run_config("trainer.activation_checkpointing=true"))["activations"]
    assert saved < 0.6 * memory["activations"]


def test_untied_embeddings_and_output_layer_are_gathered_at_different_times() -> None:
    """FSDP gathers two blocks and the output layer, or the embeddings alone if these are larger."""
    two = ["trainer.devices=2", "data.micro_batch_size=1", "data.global_batch_size=2", "trainer.strategy=fsdp"]
    for tied in (False, True):
        model = model_of("llama", vocab_size=40_000, tie_word_embeddings=tied)
        total, block = (flops.parameter_counts(m)[0] for m in (model, decoder_blocks(model)[0]))
        table, norm = (m.weight.numel() for m in (model.get_input_embeddings(), model.model.norm))
        found = flops.memory_estimate(model, run_config(*two))["parameters"]
        assert found == 4 * total // 2 + 4 * (table + 2 * block + norm)
    on_gpu = run_config(*two)
    on_gpu.trainer.accelerator, on_gpu.trainer.precision = "cuda", "bf16-mixed"
    model = model_of("llama", vocab_size=40_000, tie_word_embeddings=False)
    total, block = (flops.parameter_counts(m)[0] for m in (model, decoder_blocks(model)[0]))
    table, norm = (m.weight.numel() for m in (model.get_input_embeddings(), model.model.norm))
    found = flops.memory_estimate(model, on_gpu)["parameters"]
    assert found == 4 * total // 2 + 4 * norm + max(4 * table, 2 * table + 4 * block)


def test_what_a_device_of_a_tensor_parallel_group_holds():
    """With two tensor-parallel groups of two devices, all four share the state; each gathers its half of two blocks."""
    model = model_of("llama", num_attention_heads=4)
    total = flops.parameter_counts(model)[0]
    four = ["trainer.devices=4", "data.global_batch_size=4", "data.micro_batch_size=2", "model.num_attention_heads=4"]
    fsdp, split = (
        flops.memory_estimate(model, run_config(*four, f"trainer.strategy={name}")) for name in ("fsdp", "fsdp_tp")
    )
    blocks = [sum(p.numel() for p in block.parameters()) for block in decoder_blocks(model)]
    assert split["gradients"] == total  # 4 bytes per parameter over 4 devices; two groups need no gradient accumulation
    assert split["optimizer"] == fsdp["optimizer"] == 2 * total
    beside = total - sum(blocks) - model.get_input_embeddings().weight.numel()  # these are gathered for the lookup only
    assert split["parameters"] == total + 4 * beside + 4 * blocks[0]
    assert 0.5 * fsdp["activations"] < split["activations"] < 0.75 * fsdp["activations"]


def test_what_a_device_holds_under_zero():
    """On four devices, each holds its shard of the state, and DeepSpeed's buckets, which fit a whole small model."""
    model = model_of("llama")
    total = flops.parameter_counts(model)[0]
    four = ["trainer.devices=4", "data.global_batch_size=4", "data.micro_batch_size=1", "trainer.strategy=deepspeed"]
    two, three = (
        flops.memory_estimate(model, run_config(*four, f"trainer.deepspeed.stage={stage}")) for stage in (2, 3)
    )
    assert two["optimizer"] == three["optimizer"] == 2 * total
    assert two["parameters"] == 4 * total + total
    assert two["gradients"] == total + 4 * total
    assert three["parameters"] == 2 * total + 4 * total
    assert three["gradients"] == total + 2 * 4 * total
    half = flops.memory_estimate(model, run_config(*four, "trainer.deepspeed.stage=2", "trainer.precision=bf16-true"))
    assert half["parameters"] == 2 * total + total  # in 2 bytes each, and this device's quarter of the copy in fp32
    model.requires_grad_(False)
    model.model.norm.requires_grad_(True)
    few = flops.memory_estimate(model, run_config(*four, "trainer.deepspeed.stage=2"))
    assert few["parameters"] == 4 * total + model.model.norm.weight.numel()  # only what is trained has a copy


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
@pytest.mark.parametrize("kind", ["tied", "untied", "experts", "frozen", "bf16-true"])
def test_the_state_of_an_optimizer_is_what_it_holds(kind, optimizer):
    from lmtrain.optim.optimizers import build_optimizer

    family = {"tied": "gpt2", "experts": "qwen3_moe"}.get(kind, "llama")
    model, config = model_of(family, tie_word_embeddings=kind == "tied"), run_config(f"optimizer={optimizer}")
    if kind == "frozen":
        model.requires_grad_(False)
        model.model.layers[0].requires_grad_(True)
    if kind == "bf16-true":
        model, config.trainer.precision = model.to(torch.bfloat16), kind
    optimizer = build_optimizer(model.named_parameters(), config.optimizer)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = sum(
        t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.ndim
    )
    assert flops.memory_estimate(model, config)["optimizer"] == held


def test_only_layers_that_compare_all_tokens_grow_with_the_row():
    """FLOPs per token grow with row length only for attention layers, not for Mamba's or LFM2's convolutions."""
    mamba = build(config_of(Variant("mamba", {})))
    assert flops.flops_per_token(mamba, 1024) == flops.flops_per_token(mamba, 64)
    lfm2 = build(config_of(Variant("lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 2})))
    config = lfm2.config
    grown = flops.flops_per_token(lfm2, 1024) - flops.flops_per_token(lfm2, 64)
    assert grown == 12 * 2 * config.hidden_size * (1024 - 64)
