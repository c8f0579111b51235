"""Models built from the config: shapes, initialization, presets, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, RwkvConfig, RwkvForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from family_variants import EXCLUDED
from helpers_models import FAMILIES, VOCAB, tiny
from lmtrain.config import compose as lmtrain_config
from lmtrain.config.options import MODELS, LoadedModelConfig
from lmtrain.config.schema import ModelConfig
from lmtrain.errors import UserError
from lmtrain.models import attention, folder
from lmtrain.models.build import build_model
from lmtrain.models.flops import parameter_counts
from lmtrain.models.probe import DROPOUTS
from tiny_pretrained import load_pretrained, save_pretrained

CONF = Path(__file__).parents[2] / "conf"
PRESETS = sorted(p.stem for p in (CONF / "model").glob("*.yaml") if p.stem not in ("base", "custom"))


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


def preset(name: str, *overrides: str) -> ModelConfig:
    tree = lmtrain_config.compose([f"model={name}", *overrides]).model
    model = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(MODELS[tree.init]), OmegaConf.to_container(tree, resolve=True))
    )
    assert isinstance(model, ModelConfig)
    return model


def count(cfg: ModelConfig, vocab_size: int = 50257) -> int:
    with torch.device("meta"):
        model = build_model(cfg, vocab_size, 0, seq_len=cfg.max_position_embeddings or 8)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert model.config.vocab_size == model.get_output_embeddings().weight.shape[0]
    return parameter_counts(model)[0]


@pytest.mark.parametrize(
    ("name", "vocab_size", "published"),
    [
        ("gpt_small", 50257, 124_439_808),
        ("gpt_medium", 50257, 354_823_168),
        ("gpt_large", 50257, 774_030_080),
        ("gpt_xl", 50257, 1_557_611_200),
        ("llama_1b", 128256, 1_235_814_400),
        ("llama_7b", 32000, 6_738_415_616),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, vocab_size, published):
    assert count(preset(name, "model.vocab_multiple_of=1"), vocab_size) == published


def test_qwen3_gives_the_published_number_for_its_published_shape():
    shape = ["hidden_size=1024", "num_hidden_layers=28", "num_attention_heads=16", "num_key_value_heads=8",
             "head_dim=128", "intermediate_size=3072", "vocab_multiple_of=1"]  # fmt: skip
    assert count(preset("qwen3_small", *(f"model.{s}" for s in shape)), 151936) == 596_049_920


@pytest.mark.parametrize("name", PRESETS)
def test_large_presets_bring_their_tokenizer(name):
    kind = {"nano": "bpe", "dial": "bpe"}.get(name.split("_")[-1], "hub")
    assert lmtrain_config.compose([f"model={name}"]).tokenizer.kind == kind


@pytest.mark.parametrize("name", ["gpt_nano", "llama_small", "pretrained"])
def test_a_tokenizer_of_the_command_line_wins(name):
    for overrides in ([f"model={name}", "tokenizer=bytes"], ["tokenizer=bytes", f"model={name}"]):
        assert lmtrain_config.compose(overrides).tokenizer.kind == "bytes"


def test_pretrained_uses_its_own_tokenizer():
    composed = lmtrain_config.compose(["model=pretrained", "model.name_or_path=some/model", "model.revision=v1"])
    assert composed.tokenizer.name_or_path == "some/model"
    assert composed.tokenizer.revision == "v1"


def test_gpt2_initialisation():
    """Weights are N(0, 0.02), residual projections divided by sqrt(2 L), biases 0, norms 1 (Radford et al. 2019)."""
    model = tiny("gpt2", hidden_size=128, num_hidden_layers=8, initializer_range=0.02)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p) if ".ln_" in name and "weight" in name else torch.zeros_like(p))
            continue
        expected = 0.02 / math.sqrt(2 * 8) if "c_proj" in name else 0.02
        assert p.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "nanochat", "lfm2"])
def test_llama_initialisation(name):
    model = tiny(name, hidden_size=128, num_hidden_layers=8, initializer_range=0.02, intermediate_size=256)
    scaled = 0
    for n, p in model.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p))
            continue
        residual = n.removesuffix(".weight").endswith(("o_proj", "down_proj", "fc2", "out_proj", "w2"))
        scaled += residual
        expected = 0.02 / math.sqrt(2 * 8) if residual else 0.02
        assert p.std().item() == pytest.approx(expected, rel=0.12 if "gate.weight" in n else 0.05), n
    assert scaled == 16


@pytest.mark.parametrize(("depth", "kinds"), [(2, "ca"), (5, "cacac")])
def test_a_pattern_of_layers_is_repeated_to_the_depth(depth, kinds):
    cfg = preset("lfm2_nano", f"model.num_hidden_layers={depth}")
    with torch.device("meta"):
        layers = build_model(cfg, 512, 0, seq_len=64).model.layers
    assert "".join("a" if layer.is_attention_layer else "c" for layer in layers) == kinds


def test_the_seed_decides_the_weights(family):
    a, b = tiny(family), tiny(family)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_built_for_training(family):
    model = tiny(family)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == attention.NAME
    assert model.config.pad_token_id is None
    assert (model.config.bos_token_id, model.config.eos_token_id) == (0, 0)


def test_dropout_reaches_every_dropout_of_the_family():
    config = tiny("gpt2", dropout=0.25).config
    assert (config.attn_pdrop, config.resid_pdrop, config.embd_pdrop) == (0.25, 0.25, 0.25)
    assert tiny("llama", dropout=0.25).config.attention_dropout == 0.25


def test_dropout_of_zero_leaves_none_of_a_familys() -> None:
    left: dict[str, list[str]] = {}
    for family in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - EXCLUDED.keys() - {"prophetnet"}:
        config = CONFIG_MAPPING[family]()
        config.update({name: 0.0 for name in DROPOUTS if hasattr(config, name)})
        kept = [name for name, value in config.to_dict().items() if "drop" in name and value]
        left[family] = [name for name in kept if not name.startswith(("classifier", "summary"))]  # of other heads
    assert {family: names for family, names in left.items() if names} == {}


def test_dropout_of_a_family_that_has_none():
    """LFM2 drops what its layers add to the residual stream, in training only."""
    plain, dropping = preset("lfm2_nano"), preset("lfm2_nano", "model.dropout=0.25")
    torch.manual_seed(0)
    expected = build_model(plain, VOCAB, 0, seq_len=64)
    torch.manual_seed(0)
    model = build_model(dropping, VOCAB, 0, seq_len=64)
    assert list(model.state_dict()) == list(expected.state_dict())
    seen = {}
    for name, module in model.named_modules():
        if name.split(".")[-1] in ("conv", "self_attn", "feed_forward"):
            module.register_forward_hook(lambda m, a, out, n=name: seen.update({n: out}))
    tokens = torch.randint(VOCAB, (8, 64))
    model(tokens)
    assert len(seen) == 2 * len(model.model.layers)
    for out in seen.values():
        out = out[0] if isinstance(out, tuple) else out
        assert (out == 0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)


def test_vocabulary_is_rounded_up():
    model = tiny("llama", vocab_multiple_of=64)
    assert model.config.vocab_size == model.lm_head.weight.shape[0] == 64
    assert tiny("gpt2", vocab_size=100, vocab_multiple_of=8).config.vocab_size == 104


def test_rope_theta_and_extra_reach_the_config():
    config = tiny("llama", rope_theta=1234.0, extra={"attention_bias": True}).config
    assert config.rope_parameters["rope_theta"] == 1234.0
    assert config.attention_bias
    assert tiny("qwen3_moe", head_dim=24).model.layers[0].self_attn.head_dim == 24


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"hidden_size": 30}, "model.num_attention_heads=3 or model.hidden_size=32"),
        ("llama", {"num_key_value_heads": 3}, "model.num_key_value_heads to a divisor of 4"),
        ("gpt2", {"num_experts": 4}, "model.num_experts=4: the family gpt2 has no such setting"),
        ("gpt2", {"rope_theta": 1e4}, "model.rope_theta=10000.0: the family gpt2"),
        ("llama", {"router_aux_loss_coef": 0.1}, "model.router_aux_loss_coef=0.1: the family llama"),
        ("llama", {"extra": {"atention_bias": True}}, "did you mean attention_bias"),
        ("qwen3_moe", {"num_experts_per_tok": 5}, "model.num_experts_per_tok=5 of model.num_experts=4"),
        ("lama", {}, "did you mean llama"),
        ("gpt2", {"num_attention_heads": 0}, "model.num_attention_heads=0: at least 1 is needed"),
        ("gpt2", {"vocab_size": 10}, "model.vocab_size=10 is less than the tokenizer's 61"),
        ("gpt2", {"max_position_embeddings": 16}, "data.seq_len=32 exceeds model.max_position_embeddings=16"),
        ("llama", {"hidden_act": "sillu"}, "did you mean silu"),
        ("gpt2", {"attention": "flash"}, "model.attention=flash is not one of auto"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(family, changes, message):
    with pytest.raises(UserError) as error:
        tiny(family, **changes)
    assert message in str(error.value)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Saves a bf16 Llama with a padding id, as checkpoints on the hub have one."""
    model = tiny("llama").to(torch.bfloat16)
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def pretrained(path: Path, **changes) -> LoadedModelConfig:
    values = {"name": "pretrained", "init": "pretrained", "name_or_path": str(path), "trust_remote_code": False,
              "attention": "auto", "learning_rate": 2e-5, "vocab_size": None, "vocab_multiple_of": 1,
              "dropout": 0.0}  # fmt: skip
    return LoadedModelConfig(**{**values, **changes})


def test_pretrained_weights_in_fp32_in_training_mode(checkpoint):
    model = build_model(pretrained(checkpoint, dropout=0.3), VOCAB, 0, seq_len=64)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.attention_dropout == 0.3
    assert model.config._attn_implementation == attention.NAME
    assert model.get_input_embeddings().padding_idx is None
    ids = torch.arange(12)[None]
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(ids).logits
    torch.testing.assert_close(model.eval()(ids, use_cache=False).logits, expected)


def test_a_vocabulary_in_the_config_of_an_earlier_run_leaves_a_pretrained_model_as_it_is(checkpoint):
    """Typed, it is refused; but runs that had it, without effect, can still be continued and exported."""
    model = build_model(pretrained(checkpoint, vocab_size=128), VOCAB, 0, seq_len=64)
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size < 128


def test_pretrained_on_meta_reads_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    with torch.device("meta"):
        model = build_model(pretrained(checkpoint), VOCAB, 0, seq_len=64)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("changes", "vocab_size", "seq_len", "message"),
    [
        ({}, VOCAB + 1, 8, "the tokenizer has 62 tokens"),
        ({}, VOCAB, 65, "data.seq_len=65 exceeds the 64 positions"),
        ({"max_position_embeddings": 64}, VOCAB, 8, "model.max_position_embeddings=64"),
        ({"name_or_path": None}, VOCAB, 8, "set model.name_or_path"),
        ({"extra": {"nonsense": 1}}, VOCAB, 8, "model.extra.nonsense"),
        ({"name_or_path": "./no/such/folder"}, VOCAB, 8, "model.name_or_path=./no/such/folder: no such folder"),
        ({"name_or_path": "no-such-user/no-such-model"}, VOCAB, 8, "HF_ENDPOINT"),
    ],
)
def test_a_pretrained_model_that_does_not_fit_is_refused(checkpoint, changes, vocab_size, seq_len, message):
    with pytest.raises(UserError) as error:
        build_model(pretrained(checkpoint, **changes), vocab_size, 0, seq_len)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


STORIES = Path(__file__).parents[3] / "shared/hub/models/karpathy/stories260K"


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/hub, which the project does not ship")
def test_a_real_pretrained_model_writes_english_and_predicts_it():
    from transformers import AutoTokenizer

    from lmtrain.models.attention import generation_mode
    from lmtrain.models.language_model import LanguageModel

    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    model = build_model(pretrained(STORIES), len(tokenizer), tokenizer.eos_token_id, seq_len=128).eval()
    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    with torch.no_grad(), generation_mode(model):
        story = model.generate(ids, max_new_tokens=60, do_sample=False)
    text = tokenizer.decode(story[0], skip_special_tokens=True)
    assert "there was a" in text
    wrapper = LanguageModel(model)
    out = wrapper(story[:, :-1], story[:, 1:])
    assert out.nll_sum / out.n_tokens < 1.2


def test_an_index_in_the_hubs_cache_names_no_files_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks its names up in the cache without a check: weights of another folder would load."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--some--body"
    copy = save_pretrained(repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    assert folder.from_pretrained("some/body", local_files_only=True).config.model_type == "llama"
    outside = (copy / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(outside), str(outside))}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="names weights outside its folder"):
        folder.from_pretrained("some/body", local_files_only=True)


def test_rwkv_keeps_its_weights_in_a_validation(tmp_path: Path) -> None:
    """In transformers it halves those of later blocks in eval mode, in place, and a checkpoint would hold them so."""
    config = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=4, rescale_every=2, context_length=32)
    RwkvForCausalLM(config).save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, 64).eval()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        model(torch.arange(8)[None])
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
