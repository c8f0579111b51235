"""Steps of half-precision weights against those of float32 weights, and what they keep between steps."""

import copy
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_optimizers import Net, backward, build, train
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from family_variants import EXCLUDED, Variant, config_of
from family_variants import build as build_family
from inprocess import run
from lmtrain.models.routers import use_experts
from lmtrain.objectives.start_check import WeightsMove
from lmtrain.optim.half import fill_in, first_rest, join, round_randomly
from lmtrain.strategies import choose
from tiny_pretrained import SHORT, save_pretrained


def half_checkpoint(folder: Path, family: str = "llama", **changes: Any) -> PreTrainedModel:
    """Saves a tiny model whose files hold bfloat16 weights, and returns it."""
    model = AutoModelForCausalLM.from_pretrained(save_pretrained(folder, family, **changes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model


SMALL = {"adamw": 1e-4, "lion": 1e-4, "muon": 3e-4, "adafactor": 3e-4}  # less than half the distance of most weights


def loss_after(dtype: torch.dtype, name: str, steps: int = 60) -> float:
    model = Net().to(dtype)
    losses = train(model, build(model, name, lr=SMALL[name]), range(steps))
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_small_updates_train_as_in_float32(name: str, dtype: torch.dtype) -> None:
    full = loss_after(torch.float32, name)
    assert full < 0.97 * loss_after(torch.float32, name, 10)  # it learns
    assert loss_after(dtype, name) == pytest.approx(full, rel=0.01)


@pytest.mark.parametrize("name", SMALL)
def test_weight_and_rest_are_the_float32_weight(name: str) -> None:
    """With the gradients of bfloat16 weights, float32 weights become what weights and rests say, state apart."""
    model = Net().bfloat16()
    optimizer = build(model, name, lr=1e-4)
    train(model, optimizer, range(1))  # makes the rests
    exact = Net()
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        p.data = exact_weight(q, optimizer)
    reference = build(exact, name, lr=1e-4)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.manual_seed(1)
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        q.grad = torch.randn_like(q)
        p.grad = q.grad.float()
    optimizer.step()
    reference.step()
    for p, q in zip(exact.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(exact_weight(q, optimizer), p.detach(), rtol=3e-7, atol=1e-9)
        assert torch.equal(q, exact_weight(q, optimizer).bfloat16())


@pytest.mark.parametrize("name", [*SMALL, "adamw_8bit"])
def test_small_updates_pass_the_check_of_the_first_steps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At 2e-5 hardly any bfloat16 weight changes, but weights joined with their rests do."""
    model = Net().bfloat16()
    optimizer = build(model, name, lr=2e-5)
    trainer = SimpleNamespace(world_size=1, is_global_zero=True)
    check = WeightsMove(SimpleNamespace(model=model, trainer=trainer, _optimizer=optimizer, device=torch.device("cpu")))
    for step in range(20):
        backward(model, step)
        check.before_update()
        optimizer.step()
        optimizer.zero_grad()
        over = check.over(step + 1, [2e-5], torch.tensor(1.0), may_wait=True)
    assert over
    assert "have moved" not in capsys.readouterr().out


def exact_weight(p: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    return join(p.detach().float(), optimizer.state[p]["rest"].int())


@pytest.mark.parametrize("name", [*SMALL, "adamw_8bit"])
def test_a_saved_state_continues_bit_for_bit(name: str) -> None:
    model = Net().bfloat16()
    optimizer = build(model, name, lr=1e-4)
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    twin = Net().bfloat16()
    twin.load_state_dict(weights)
    resumed = build(twin, name, lr=1e-4)
    resumed.load_state_dict(state)
    assert train(twin, resumed, range(3, 6)) == train(model, optimizer, range(3, 6))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert not isinstance(value, Tensor) or torch.equal(value, resumed.state[q][key]), key


def test_states_of_other_precisions_load() -> None:
    """Those of bfloat16 weights of earlier versions, without rests, those of float32 weights, and the other way."""
    for saved, loading in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        one, other = Net().to(saved), Net().to(loading)
        optimizer, resumed = build(one, "adamw"), build(other, "adamw")
        train(one, optimizer, range(2))
        state = copy.deepcopy(optimizer.state_dict())
        if loading == saved:
            for kept in state["state"].values():
                kept.pop("rest")
        resumed.load_state_dict(state)
        train(other, resumed, range(2, 4))
        assert all(("rest" in kept) == (loading == torch.bfloat16) for kept in resumed.state.values())


def test_slow_averages_move() -> None:
    """With a beta of 0.999, a bfloat16 average that is rounded to nearest never falls."""
    weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))
    optimizer = torch_adamw(weight)
    for step in range(400):
        weight.grad = torch.full_like(weight, 1.0 if step == 0 else 0.0)
        optimizer.step()
    average = optimizer.state[weight]["exp_avg_sq"]
    assert average.dtype == torch.bfloat16
    assert average.float().mean().item() == pytest.approx(0.001 * 0.999**399, rel=0.03)


def torch_adamw(weight: nn.Parameter) -> torch.optim.Optimizer:
    return build(nn.ParameterDict({"weight": weight}), "adamw", betas=[0.9, 0.999])


def test_rounding_is_right_in_the_mean_and_keeps_what_is_exact() -> None:
    value = torch.tensor(1.0 + 0.3 * 2**-7)  # three tenths of the way between two bfloat16 numbers
    rounded = torch.cat([round_randomly(value.repeat(1), step) for step in range(4000)])
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(value.item(), abs=3 * 2**-7 * 0.46 / 4000**0.5)
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("nan")])
    assert torch.equal(round_randomly(exact.clone(), 1)[:5], exact[:5])


def test_a_weight_that_was_set_to_zero_stays_a_number() -> None:
    weight = nn.Parameter(torch.full((64, 64), 0.05, dtype=torch.bfloat16))
    optimizer = torch_adamw(weight)
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with torch.no_grad():
            weight.zero_()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.isfinite(weight).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_filled_weights_round_to_what_they_were_and_move_by_their_updates(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    loaded = torch.randn(200, 300).to(dtype).float()
    loaded[3] = 0
    weight = loaded.clone()
    fill_in(weight, 7, dtype)
    assert torch.equal(weight.to(dtype).float(), loaded)
    assert torch.equal(weight[3], loaded[3])
    assert (weight != loaded).float().mean() > 0.99
    update = 0.04 * (torch.nextafter(loaded.abs().to(dtype), torch.tensor(9.0, dtype=dtype)).float() - loaded.abs())
    assert torch.equal((loaded + update).to(dtype).float(), loaded), "without the bits below nothing moves"
    moved = (weight + update).to(dtype).float() - loaded
    assert moved.sum().item() == pytest.approx(update.sum().item(), rel=0.1)
    between = torch.randn(40)
    fill_in(kept := between.clone(), 0, dtype)
    assert torch.equal(kept, between), "weights that are no numbers of the dtype have their own bits"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_bf16_model_under_autocast_is_the_same_once_filled(family: str, tmp_path: Path) -> None:
    model = half_checkpoint(tmp_path, family, tie_word_embeddings=False).float()
    use_experts(model)  # transformers' own multiply in fp32 under autocast
    frozen = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0].requires_grad_(False)
    before, ids = copy.deepcopy(model.state_dict()), torch.arange(40).view(2, 20)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(ids).logits
        choose.fill_in(model, "bf16-mixed")
        assert torch.equal(model(ids).logits, expected)
    same = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    kept = {n for n, p in model.named_parameters() if p.ndim == 1 or any(w in n for w in ("embed", "wte", "wpe"))}
    kept |= {n for n, p in model.named_parameters() if not p.requires_grad}
    assert same == kept
    assert any(p.ndim > 1 for p in frozen.parameters())


OTHER_READERS = ("lfm2", "mamba", "rwkv", "jamba", "ernie4_5_moe")  # convolutions, scans, mixing, fp32 routers
UNRUNNABLE = ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family in OTHER_READERS else [pytest.mark.slow, pytest.mark.nightly])
     for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if family not in {*EXCLUDED, *UNRUNNABLE}],
)  # fmt: skip
def test_no_family_reads_what_is_filled_in_full(family: str) -> None:
    """Layers other than linear ones read weights in fp32, and these have to stay."""
    model = build_family(config_of(Variant(family, {"tie_word_embeddings": False})))
    use_experts(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())
    ids = torch.arange(40).view(2, 20) % model.config.get_text_config().vocab_size
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        choose.fill_in(model, "bf16-mixed")
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_tied_embeddings_round_to_what_they_were(tmp_path: Path) -> None:
    """Lookups of a table that is the output layer, too, change by half of bf16's distance at most."""
    model = half_checkpoint(tmp_path, tie_word_embeddings=True).float()
    table = model.get_input_embeddings().weight
    before = table.detach().clone()
    choose.fill_in(model, "bf16-mixed")
    assert model.get_output_embeddings().weight is table
    assert not torch.equal(table, before)
    assert torch.equal(table.bfloat16().float(), before)
    assert ((table - before).abs() <= before.abs() * 2**-8).all()


def test_mixed_precision_trains_a_bf16_checkpoint_in_small_steps(tmp_path: Path, corpus: Path) -> None:
    """Four updates of 1e-5 move products by as much as in fp32, though weights of 0.2 are 1e-3 apart in bfloat16."""
    start = half_checkpoint(tmp_path / "base", tie_word_embeddings=False).float().state_dict()
    moved = {}
    for precision in ("32-true", "bf16-mixed"):
        argv = [f"model.name_or_path={tmp_path / 'base'}", f"data.path={corpus}", f"run.dir={tmp_path / precision}"]
        ended = run("train", *SHORT, *argv, f"trainer.precision={precision}", "optimizer.lr=1e-5", "schedule=constant")
        assert ended.code == 0
        assert ("random bits below" in " ".join(ended.out.split())) == (precision == "bf16-mixed")
        end = load_file(tmp_path / precision / "export" / "model.safetensors")
        moved[precision] = {
            name: end[name].bfloat16().float() - start[name] if precision == "bf16-mixed" else end[name] - start[name]
            for name in end
        }
    linear = [name for name in start if name.endswith("proj.weight") or name == "lm_head.weight"]
    full, mixed = (torch.cat([moved[p][name].flatten() for name in linear]) for p in moved)
    assert (mixed != 0).float().mean() < 0.2
    assert (mixed * full.sign()).sum().item() == pytest.approx(full.abs().sum().item(), rel=0.2)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 16), (torch.float16, 13)])
def test_first_rests_are_spread_over_what_rounding_cuts_off(dtype: torch.dtype, bits: int) -> None:
    """Uniform over the numbers that round to the weight, and others for each parameter of a list."""
    weights = torch.ones(300, 200, dtype=dtype)
    rests = first_rest(weights, 0)
    assert (rests.shape, rests.dtype) == (weights.shape, torch.int16)
    values, edge = rests.double().flatten(), 2 ** (bits - 1)
    assert values.min() >= 1 - edge
    assert values.max() < edge
    counts = torch.histc(values, bins=16, min=-edge, max=edge)
    assert (counts / len(values) - 1 / 16).abs().max() < 0.005
    assert abs(torch.corrcoef(torch.stack([values[::2], values[1::2]]))[0, 1]) < 0.02
    assert torch.equal(first_rest(weights, 0), rests)
    assert (first_rest(weights, 1) == rests).double().mean() < 0.01
    assert torch.equal(first_rest(weights.float(), 0, dtype), rests), "as for weights kept in float32"
