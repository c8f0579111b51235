"""The parts around an adapter, by hand: what a checkpoint holds of it, names, identities,
and how a base is quantised."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lmtrain.adapters import lora_checks, lora_files, memory, memory_adapter, memory_export, quantized, trainable
from lmtrain.adapters.memory import MemorySettings
from lmtrain.config.schema import MemoryConfig
from lmtrain.errors import UserError


def net() -> Any:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)})
    model["a"].requires_grad_(False)
    return model


def test_a_checkpoint_holds_the_trained_parameters_if_some_are_frozen() -> None:
    model = net()
    assert trainable.trainable_names(model) == {"b.weight", "b.bias"}
    assert trainable.without_frozen(model, model.state_dict()).keys() == {"b.weight", "b.bias"}
    saved = trainable.without_frozen(model, model.state_dict())
    trainable.check_weights(model, saved)
    for wrong, words in (
        ({"b.bias": saved["b.bias"]}, r"it lacks b\.weight \(1 in all\)"),
        ({**saved, "a.bias": torch.ones(3), "c": torch.ones(1)}, r"it holds a\.bias \(2 in all\)"),
        ({}, r"it lacks b\.bias \(2 in all\)"), ({"c": 1}, r"it lacks b\.bias \(2 in all\) and holds c \(1 in all\)"),
        ({**saved, "b.weight": torch.ones(3, 1)}, r"b\.weight is \[3, 1\] where this run's model has \[1, 3\]"),
        ({**saved, "b.weight": 5}, r"b\.weight is int where this run's model has \[1, 3\]"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            trainable.check_weights(model, wrong)
    model.requires_grad_(True)
    assert trainable.trainable_names(model) is None
    assert trainable.without_frozen(model, model.state_dict()).keys() == model.state_dict().keys()
    trainable.check_weights(model, {**model.state_dict(), "buffer": 1})
    with pytest.raises(UserError, match="lacks"):
        trainable.check_weights(model, saved)


def test_a_base_is_known_by_its_files_or_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(_commit_hash="abc"))
    assert trainable.base_identity(model, "a/b", None) == "abc"
    model.config._commit_hash = None
    assert trainable.base_identity(model, "a/b", None) == "a/b"
    monkeypatch.setattr(trainable, "some_of", lambda path: path.name.encode())
    for name in ("b.bin", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(name.encode())
    some = hashlib.sha256(b"a.safetensors" + b"b.bin").hexdigest()[:16]
    assert trainable.base_identity(model, str(tmp_path), None) == some
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tmp_path.glob("*.[bs]*"))}
    facts: Any = SimpleNamespace(digests=lambda files: {file: digests[file] for file in files})
    whole = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in sorted(digests.items()))).hexdigest()[:16]
    assert trainable.base_identity(model, str(tmp_path), facts) == whole
    assert trainable.adapter_identity("a/b") == "a/b"
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    assert trainable.adapter_identity(str(tmp_path)) == hashlib.sha256(b"x").hexdigest()[:16]


def test_an_adapter_is_described_in_a_line() -> None:
    config = SimpleNamespace(use_rslora=False, use_dora=False, r=8, lora_alpha=16.0, lora_dropout=0.05)
    tuner = SimpleNamespace(
        targeted_module_names=["m.0.q", "m.1.q", "m.0.v"], targeted_parameter_names=["m.0.mlp.experts"]
    )
    peft = SimpleNamespace(peft_config={"default": config}, base_model=tuner)
    adapter = trainable.Adapter(peft, {})  # type: ignore[arg-type]
    cfg: Any = SimpleNamespace(quantization=None, double_quant=True, adapter=None)
    assert trainable.describe_adapter(adapter, cfg) == "LoRA r=8, alpha=16, dropout=0.05, on mlp.experts, q, v"
    config.use_rslora = config.use_dora = True
    cfg.quantization, cfg.adapter = "nf4", "here"
    words = trainable.describe_adapter(adapter, cfg)
    assert words.startswith("rsLoRA + DoRA r=8")
    assert words.endswith(", base in nf4 (double), continues here (trainable)")
    cfg.double_quant = False
    assert "base in nf4, continues" in trainable.describe_adapter(adapter, cfg)


def test_a_start_that_differs_moves_the_base_by_the_difference() -> None:
    for transposed in (False, True):
        layer: Any = nn.Module()
        layer.scaling, layer.fan_in_fan_out = {"default": 0.5}, transposed
        base = nn.Linear(2, 3, bias=False)
        if transposed:
            base.weight = nn.Parameter(base.weight.detach().T.contiguous())
        layer.get_base_layer = lambda base=base: base
        model: Any = nn.ModuleDict({"q": layer})
        own = {"q.lora_A.default.weight": torch.ones(1, 2), "q.lora_B.default.weight": torch.ones(3, 1)}
        theirs = {name: 3 * tensor for name, tensor in own.items()}
        adapter = trainable.Adapter(None, dict(own))  # type: ignore[arg-type]
        model.__dict__[trainable.ATTRIBUTE] = adapter
        before = base.weight.detach().clone()
        trainable.restore_start(model, {})
        trainable.restore_start(model, own)
        assert torch.equal(base.weight, before)
        trainable.restore_start(model, theirs)
        torch.testing.assert_close(base.weight.detach(), before - 0.5 * 8)  # 1 - 9
        assert torch.equal(adapter.start["q.lora_A.default.weight"], theirs["q.lora_A.default.weight"])
        with pytest.raises(UserError, match="can't be recovered"), trainable.disabled(model):
            pass


# Names of modules


def test_names_match_a_whole_part_of_a_module_and_wrong_ones_are_explained() -> None:
    model: Any = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(1, 1)})]), "head": nn.Linear(1, 1)}
    )
    assert lora_checks.matches("a.q_proj", ["q_proj"])
    assert lora_checks.matches("q_proj", ["x", "q_proj"])
    assert not lora_checks.matches("a.q_proj", ["proj"])
    assert not lora_checks.matches("a.q_proj", [])
    for names in ("all-linear", ["q_proj", "head"], "layers.*", ["0.q_proj"], []):
        lora_checks.check_names_match(model, "key", names)
    for names, words in ((["q_prj"], r"key: 'q_prj' matches no module of the model \(there are q_proj\)"),
                         (["head", "zz"], r"'zz' matches no module .*head, layers, q_proj"),
                         ("q_proj", "a pattern must match the whole name")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            lora_checks.check_names_match(model, "key", names)


def test_layers_whose_weight_two_use_get_no_adapter() -> None:
    one, two, alone = (nn.Linear(2, 2) for _ in range(3))
    two.weight = one.weight
    model: Any = nn.ModuleDict({"m": nn.ModuleDict({"one": one, "two": two, "alone": alone})})
    assert lora_checks.unfit_layers(model) == ["m.one", "m.two"]
    two.weight = nn.Parameter(torch.zeros(2, 2))
    assert lora_checks.unfit_layers(model) is None
    assert lora_checks._gives_tensor(one)


def test_tokens_of_an_adapter_are_read_from_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [{"a": [5, 3], "b": [3]}]
    stored = SimpleNamespace(from_pretrained=lambda name: SimpleNamespace(trainable_token_indices=rows[0]))
    monkeypatch.setattr(lora_files, "StoredConfig", stored)
    assert lora_files.adapter_token_ids("x") == [3, 5]
    rows[0] = [7, 1]
    assert lora_files.adapter_token_ids("x") == [1, 7]
    rows[0] = None
    assert lora_files.adapter_token_ids("x") == []
    stored.from_pretrained = lambda name: 1 / 0 if name == "y" else (_ for _ in ()).throw(OSError())
    assert lora_files.adapter_token_ids("x") == []


def test_tied_tables_are_told_and_adapters_on_them_refused() -> None:
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    text = SimpleNamespace(tie_word_embeddings=True)
    model: Any = SimpleNamespace(
        get_output_embeddings=lambda: head, get_input_embeddings=lambda: embedding,
        named_modules=lambda: [("", None), ("e", embedding),
        ("h", head)], config=SimpleNamespace(get_text_config=lambda: text),
    )  # fmt: skip
    assert lora_checks.embedding_names(model) == ["e", "h"]
    assert not lora_checks.is_tied(model)
    lora_checks.refuse_tied_lora(model)
    head.weight = embedding.weight
    assert lora_checks.is_tied(model)
    embedding.lora_A = nn.Linear(1, 1)
    with pytest.raises(UserError, match="share one matrix"):
        lora_checks.refuse_tied_lora(model)
    text.tie_word_embeddings = False
    lora_checks.refuse_tied_lora(model)
    head.lora_A, head.use_dora = nn.Linear(1, 1), {"default": False}  # type: ignore[assignment]
    lora_checks.refuse_tied_lora(model)
    head.use_dora = {"default": True}  # type: ignore[assignment]
    with pytest.raises(UserError, match="use_dora=true on the output layer"):
        lora_checks.refuse_tied_lora(model)


# Quantised bases


def test_how_a_base_is_quantised_while_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_require_bitsandbytes", lambda name: None)
    monkeypatch.setattr(quantized, "multiplies_int8", lambda: False)
    cfg: Any = SimpleNamespace(quantization=None, double_quant=True)
    assert quantized.loading_options(cfg, "bf16-mixed", "cpu") == {}
    cfg.quantization = "nf4"
    found = quantized.loading_options(cfg, "bf16-mixed", "cpu")
    config = found["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert found["device_map"] == {"": "cpu"}
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert quantized.loading_options(cfg, "32-true", "cuda")["device_map"] == {"": "cuda:3"}
    assert quantized.loading_options(cfg, "32-true", "cuda", to_host=True)["device_map"] == {"": "cpu"}
    cfg.quantization = "int8"
    assert quantized.loading_options(cfg, "32-true", "cuda")["quantization_config"].load_in_8bit
    with pytest.raises(UserError, match="products of 8-bit numbers overflow"):
        quantized.loading_options(cfg, "32-true", "cpu")
    dtypes = {
        "bf16-mixed": torch.bfloat16,
        "bf16-true": torch.bfloat16,
        "16-mixed": torch.float16,
        "32-true": torch.float32,
    }
    assert {precision: quantized.compute_dtype(precision) for precision in dtypes} == dtypes
    for accelerator, device in (("cpu", "cpu"), ("gpu", "cuda:3"), ("cuda", "cuda:3"), ("mps", "mps")):
        assert quantized._device(accelerator) == device


def test_a_base_stored_quantised_is_shared_out_in_4_bits_by_fsdp_only() -> None:
    class Method:
        value = "bitsandbytes"

    def model(config: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace(quantization_config=config, _name_or_path="it"))

    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    quantized.check_shared_out(model(None), "fsdp_tp")
    quantized.check_shared_out(model({"quant_method": "gptq"}), "ddp")
    quantized.check_shared_out(model(four), "fsdp")
    quantized.check_shared_out(model(SimpleNamespace(quant_method=Method(), load_in_4bit=True)), "fsdp")
    for config, strategy, words in ((four, "fsdp_tp", "set trainer.strategy=fsdp or ddp"),
                                    ({**four, "load_in_4bit": False}, "fsdp",
                                    r"quantised \(bitsandbytes\).*strategy=ddp"),
                                    ({"quant_method": "gptq", "load_in_4bit": True}, "fsdp", r"\(gptq\)")):  # fmt: skip
        with pytest.raises(UserError, match=words):
            quantized.check_shared_out(model(config), strategy)


# Memories


def memory_settings(**changed: Any) -> MemorySettings:
    values: dict[str, Any] = {"num_chapters": 5, "chapter_size": 4, "memory_dim": 8, "num_heads": 2, "top_k": 2,
                              "layers": (0,), "router": "top_k", "router_noise": 0.0, "share_bank": False}  # fmt: skip
    return MemorySettings(**values | changed)


def test_a_router_takes_the_likeliest_chapters_and_is_noisy_in_training_only() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 0.5], [3.0, 0.0, 0.0, 2.9, -5.0]])
    for noise, training in ((0.0, True), (0.7, False), (0.7, True)):
        block = memory.MemoryBlock(6, memory_settings(router_noise=noise), None).train(training)
        torch.manual_seed(3)
        chapters, weights = block.route(logits.bfloat16())
        torch.manual_seed(3)
        expected = (logits + 0.7 * torch.randn(2, 5)) if noise and training else logits
        assert chapters.tolist() == [sorted(range(5), key=lambda i: -row[i])[:2] for row in expected.tolist()]
        kept = torch.stack([row[of].exp() for row, of in zip(expected, chapters, strict=True)])
        torch.testing.assert_close(weights, kept / kept.sum(1, keepdim=True), atol=1e-2, rtol=1e-2)
        assert weights.dtype == torch.float32


def test_straight_through_weights_have_the_probabilities_gradient() -> None:
    block = memory.MemoryBlock(6, memory_settings(router="straight_through", top_k=1), None)
    logits = torch.tensor([[0.5, 1.5, 0.0, 0.0, 0.0]], requires_grad=True)
    _, weights = block.route(logits)
    assert weights.item() == pytest.approx(1.0)
    (found,) = torch.autograd.grad(weights.sum(), logits)
    (expected,) = torch.autograd.grad(logits.softmax(1)[0, 1], logits)
    torch.testing.assert_close(found, expected)


class Layers(nn.Module):
    """A model with two decoder layers, as far as a memory looks at one."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])
        text = SimpleNamespace(num_hidden_layers=depth, hidden_size=6)
        self.config: Any = SimpleNamespace(get_text_config=lambda: text)

    @property
    def base_model(self) -> nn.Module:
        return self


def test_a_memory_changes_what_its_layer_gives_and_nothing_beside_it() -> None:
    model = Layers()
    memory.attach_memory(model, memory_settings(layers=(1,)))
    assert not hasattr(model.blocks[0], "memory")
    layer = model.blocks[1]
    with torch.no_grad():
        layer.memory.gate.fill_(1.0)  # type: ignore[union-attr, operator]
    layer.eval()
    hidden, beside = torch.randn(1, 3, 6), object()
    alone = memory._read_memory(layer, (), hidden)
    found = memory._read_memory(layer, (), (hidden, beside, 5))
    assert not torch.equal(alone, hidden)
    assert (torch.equal(found[0], alone), found[1:]) == (True, (beside, 5))
    with pytest.raises(ValueError, match="Layers has no list of its 3 decoder layers"):
        memory.decoder_layers(Layers(3))


def test_a_soft_router_reads_all_chapters() -> None:
    def settings(router: str) -> MemorySettings:
        cfg: Any = SimpleNamespace(**dict.fromkeys(MemoryConfig.__dataclass_fields__))
        cfg.layers, cfg.router, cfg.router_noise, cfg.top_k, cfg.num_chapters = [0], router, 0, 2, 7
        return memory_adapter.settings_of(cfg, Layers())  # type: ignore[arg-type]

    assert [settings(router).top_k for router in ("soft", "top_k")] == [7, 2]
    with pytest.raises(UserError, match="memory: Layers has no list of its 3 decoder layers, so no memory can stand"):
        memory_adapter.settings_of(SimpleNamespace(layers=[0]), Layers(3))  # type: ignore[arg-type]


def test_an_export_without_a_part_of_its_memory_is_refused(tmp_path: Path) -> None:
    model: Any = Layers()
    memory.attach_memory(model, memory_settings(layers=(0,)))
    weights = {name: torch.full_like(p, 2.0) for name, p in model.named_parameters()}
    save_file({name: value for name, value in weights.items() if "gate" not in name}, tmp_path / "a.safetensors")
    with torch.no_grad(), pytest.raises(UserError, match=r"its weights lack blocks\.0\.memory\.gate of its memory"):
        memory_export.load_memory(model, tmp_path)
    save_file({name: value for name, value in weights.items() if "gate" in name}, tmp_path / "b.safetensors")
    with torch.no_grad():
        memory_export.load_memory(model, tmp_path)
    assert all((p == 2).all() for p in model.parameters())


def test_a_memory_of_a_class_of_ones_own_is_not_exported() -> None:
    own: Any = SimpleNamespace(config=SimpleNamespace(model_type="llama"))
    with pytest.raises(UserError, match="a memory of SimpleNamespace, no class of transformers' own"):
        memory_export.check_exportable(own)
    for name in ("LlamaForCausalLM", "FSDPLlamaForCausalLM"):
        memory_export.check_exportable(type(name, (), {"config": own.config})())
