"""The wrapped model's loss and gradients against transformers' own."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config

from helpers_models import FAMILIES, VOCAB, packed, tiny, wrapped
from lmtrain.config.compose import check, compose
from lmtrain.errors import UserError
from lmtrain.losses import cross_entropy
from lmtrain.models.attention import generation_mode
from lmtrain.models.blocks import compile_model, decoder_blocks, enable_activation_checkpointing
from lmtrain.models.language_model import LanguageModel
from lmtrain.run.build import build_language_model


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def transformers_loss(model, ids: torch.Tensor) -> torch.Tensor:
    """Returns transformers' own loss with its own eager attention, summed over tokens."""
    model.set_attn_implementation("eager")
    return model(ids, labels=ids, use_cache=False).loss * (ids.numel() - ids.shape[0])


def shifted(ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)


def test_loss_and_gradients_equal_transformers(family):
    model = wrapped(family)
    ids = packed()["input_ids"]
    out = model(ids, shifted(ids))
    ours = gradients(model.model, out.loss_sum)
    loss = transformers_loss(model.model, ids)
    theirs = gradients(model.model, loss)
    torch.testing.assert_close(out.loss_sum, loss, rtol=1e-6, atol=0)
    assert out.n_tokens == ids.numel() - ids.shape[0]
    assert ours.keys() == theirs.keys() == {n for n, _ in model.model.named_parameters()}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-4, msg=name)


def test_angles_of_positions_are_exact_in_half_precision():
    """However it is converted, the model sees the positions that transformers' own bf16 model sees."""
    ours, exact, x = wrapped("llama"), wrapped("llama").model.model.rotary_emb, torch.zeros(1, 1, 8)
    HalfPrecision("bf16-true").convert_module(nn.ModuleList([ours]))
    assert ours.model.lm_head.weight.dtype == torch.bfloat16
    theirs = AutoModelForCausalLM.from_config(ours.model.config, dtype=torch.bfloat16).model.rotary_emb
    places = torch.tensor([[2047]])
    for one, other, true in zip(
        ours.model.model.rotary_emb(x, places), theirs(x, places), exact(x, places), strict=True
    ):
        assert torch.equal(one, other)
        assert torch.equal(one, true)


def test_buffers_that_a_family_keeps_in_fp32_stay_so():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 8,
             "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(vocab_size=VOCAB, **sizes))
    LanguageModel(model).to(torch.bfloat16)
    router = model.model.layers[0].mlp.gate
    assert (router.weight.dtype, router.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)


def test_packed_documents_equal_documents_on_their_own(family):
    """Loss and gradients of packed rows are the sums over their documents, each run alone."""
    model, batch = wrapped(family), packed()
    out = model(**batch)
    together = gradients(model, out.loss_sum)
    borders = batch["cu_seqlens"].tolist()
    ids, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    alone = sum(model(ids[a:b][None], labels[a:b][None]).loss_sum for a, b in pairwise(borders))
    torch.testing.assert_close(out.loss_sum, alone, rtol=1e-6, atol=0)
    for name, gradient in gradients(model, alone).items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("kept", [True, "selective", "offload"])
@pytest.mark.parametrize("mixed", [False, True])
def test_activation_checkpointing_changes_nothing(family, kept, mixed):
    batch = packed()
    plain, recomputed = wrapped(family), wrapped(family)
    enable_activation_checkpointing(recomputed.model, kept)
    calls = count_calls(recomputed)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        a, b = plain(**batch), recomputed(**batch)
    torch.testing.assert_close(a.loss_sum, b.loss_sum, rtol=0, atol=0)
    expected, found = gradients(plain, a.loss_sum), gradients(recomputed, b.loss_sum)
    assert calls["forwards"] == 2 * len(decoder_blocks(recomputed.model))  # once in the forward, once in the backward
    for name in expected:
        torch.testing.assert_close(expected[name], found[name], msg=name)


def count_calls(model: LanguageModel) -> dict[str, int]:
    """Counts the forwards of attention modules, which checkpointing runs again in the backward."""
    calls = {"forwards": 0}

    def count(*_):
        calls["forwards"] += 1

    for name, module in model.named_modules():
        if name.endswith((".attn", ".self_attn")):
            module.register_forward_hook(count)
    return calls


def test_compiled_blocks_keep_names_and_values():
    """Blocks share one compiled code: neither further layers nor further steps cause another compilation."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    expected, model = wrapped("llama", num_hidden_layers=4), wrapped("llama", num_hidden_layers=4)
    names = list(model.state_dict())
    for block in decoder_blocks(model.model):
        block.compile(backend=counter)
    assert list(model.state_dict()) == names
    for seed in range(3):
        ids = packed(seed=seed)["input_ids"]
        torch.testing.assert_close(model(ids, shifted(ids)).loss_sum, expected(ids, shifted(ids)).loss_sum)
    assert counter.frame_count == 1
    assert len(decoder_blocks(model.model)) == 4
    torch._dynamo.reset()


def test_compile_model_compiles_blocks_and_loss():
    model = wrapped("gpt2")
    assert not model._compiled()
    compile_model(model.model)
    assert all(block._compiled_call_impl is not None for block in decoder_blocks(model.model))
    assert model._compiled()


@pytest.mark.parametrize("ours", [True, False])
def test_blocks_stay_whole_inside_ddp(ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        counter, model = CompileCounter(), wrapped("llama", num_hidden_layers=2)
        compile_model(model.model, backend=counter)
        if not ours:  # torch's default, which compile_model has changed
            torch._dynamo.config.optimize_ddp = True
        ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        ids = packed()["input_ids"]
        ddp(ids, shifted(ids))
        assert (counter.frame_count == 1) is ours
    finally:
        dist.destroy_process_group()
        torch._dynamo.config.optimize_ddp = False
        torch._dynamo.reset()


@pytest.mark.parametrize("chunk", [1, 7, 10])
def test_chunk_size_changes_nothing(chunk, monkeypatch):
    hf, batch = tiny("gpt2"), packed()
    expected = LanguageModel(hf)(**batch)
    monkeypatch.setattr(LanguageModel, "_chunk", lambda *_: chunk)
    monkeypatch.setattr(cross_entropy, "CPU_BLOCK_BYTES", 0)  # below which there is one chunk
    found = LanguageModel(hf)(**batch)
    assert type(found.loss_sum.grad_fn) is not type(expected.loss_sum.grad_fn)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)


def test_router_loss_of_one_layer_equals_transformers():
    model = wrapped("qwen3_moe", num_hidden_layers=1, router_aux_loss_coef=0.5)
    ids = packed()["input_ids"]
    out = model(ids, shifted(ids))
    ours = gradients(model.model, out.loss_sum)
    hf = model.model
    hf.set_attn_implementation("eager")
    theirs = hf(ids, labels=ids, output_router_logits=True, use_cache=False)
    torch.testing.assert_close(out.loss_sum / out.n_tokens, theirs.loss)
    torch.testing.assert_close(out.aux["router/load_balance"], theirs.aux_loss.detach() / 2)
    assert not out.aux["router/load_balance"].requires_grad
    expected = gradients(hf, theirs.loss * out.n_tokens)
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-4, msg=name)


class Words(list):
    """The part of a tokenizer's interface that is used here."""

    eos_token_id = 0

    def convert_tokens_to_ids(self, tokens):
        return tokens


MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_loaded_mixtures_coefficient_means_what_its_authors_meant(family, layers, tmp_path):
    """With model=pretrained, the loss, including the router loss, and its gradients equal transformers' own."""
    other_family(family, **MIXTURES[family], num_hidden_layers=layers, initializer_range=0.3,
                 router_aux_loss_coef=0.5).save_pretrained(tmp_path)  # fmt: skip
    config = check(compose(["model=pretrained", f"model.name_or_path={tmp_path}", "data.seq_len=16"]))
    model = build_language_model(config, Words(range(VOCAB)))
    ids = packed()["input_ids"]
    out = model(ids, shifted(ids))
    ours = gradients(model.model, out.loss_sum)
    hf = model.model
    hf.set_attn_implementation("eager")
    theirs = hf(ids, labels=ids, output_router_logits=True, use_cache=False)
    torch.testing.assert_close(out.aux["router/load_balance"], theirs.aux_loss.detach() / 2, rtol=1e-6, atol=0)
    torch.testing.assert_close(out.loss_sum / out.n_tokens, theirs.loss, rtol=1e-6, atol=0)
    expected = gradients(hf, theirs.loss * out.n_tokens)
    for name in expected:
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=1e-5 * largest + 1e-6, msg=name)


def test_router_loss_survives_checkpointing_and_compilation():
    batch = packed()
    expected_model, model = (wrapped("qwen3_moe", router_aux_loss_coef=0.5) for _ in range(2))
    enable_activation_checkpointing(model.model)
    for block in decoder_blocks(model.model):
        block.compile(backend="eager")
    expected, found = expected_model(**batch), model(**batch)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    torch.testing.assert_close(found.aux, expected.aux)
    wanted, got = gradients(expected_model, expected.loss_sum), gradients(model, found.loss_sum)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-4, atol=1e-5, msg=name)


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def other_family(name: str, **fields):
    from transformers import CONFIG_MAPPING

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**{**SHAPE, **fields}))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.0625}),
        ("gemma2", {"final_logit_softcapping": 0.5, "sliding_window": 16}),
    ],
)
def test_logit_transforms_of_other_families_are_honoured(name, fields):
    hf = other_family(name, **fields)
    ids = packed()["input_ids"]
    out = LanguageModel(hf)(ids, shifted(ids))
    expected = transformers_loss(hf, ids)
    torch.testing.assert_close(out.loss_sum, expected, rtol=1e-5, atol=0)
    untransformed = torch.nn.functional.cross_entropy(
        hf.get_output_embeddings()(hf.model(ids, use_cache=False).last_hidden_state)[:, :-1].flatten(0, 1),
        ids[:, 1:].flatten(),
        reduction="sum",
    )
    assert not torch.isclose(untransformed, expected, rtol=1e-4)


def test_an_unknown_way_to_logits_is_refused():
    hf = other_family("granite", logits_scaling=8.0)
    hf.register_forward_hook(lambda module, args, out: out.__class__(logits=out.logits * 2))
    with pytest.raises(UserError, match="can't be trained"):
        LanguageModel(hf)


def test_generation_inside_training_uses_transformers_attention_with_masks(family):
    """A padded batch generates what each prompt generates alone, and training is unaffected afterwards."""
    model, batch = wrapped(family), packed()
    before = model(**batch).loss_sum
    hf = model.model.eval()
    prompts = [[5, 9, 3], [7, 1, 2, 8, 4]]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    with generation_mode(model), torch.no_grad():
        alone = [hf.generate(torch.tensor([p]), **options)[0, len(p) :] for p in prompts]
        padded = torch.tensor([[0, 0, *prompts[0]], prompts[1]])
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        both = hf.generate(padded, attention_mask=mask, **options)[:, 5:]
    torch.testing.assert_close(torch.stack(alone), both)
    with pytest.raises(RuntimeError, match="generation_mode"):
        hf.generate(torch.tensor([prompts[0]]), **options)
    hf.train()
    torch.testing.assert_close(model(**batch).loss_sum, before, rtol=0, atol=0)


def test_new_documents_cause_no_new_compilation():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    expected, model = (wrapped("llama", attention="dense_mask") for _ in range(2))
    for block in decoder_blocks(model.model):
        block.compile(backend=counter)
    for lengths in ([[5, 9, 6]], [[20]], [[1] * 20]):
        batch = packed(lengths * 3)
        torch.testing.assert_close(model(**batch).loss_sum, expected(**batch).loss_sum)
    assert counter.frame_count == 1
    torch._dynamo.reset()
