"""trainer.precision=fp8: which layers multiply in 8 bits, what they compute, and where it is refused.

CPUs have no 8-bit products, so torchao emulates them with the same rounding and an fp32 product.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from helpers_models import VOCAB, tiny
from inprocess import Ended, message, run, stops_at, train_tiny
from lmtrain.config.batch import Stages
from lmtrain.config.compose import check, compose
from lmtrain.config.schema import Config
from lmtrain.data.loaders import StepDataset
from lmtrain.distributed import devices
from lmtrain.errors import FINISHED, PREEMPTED, UserError
from lmtrain.models import flops, fp8
from lmtrain.run import build
from lmtrain.run_folder import folder as run_dir
from support import EXPORT, TINY, rows

float8 = pytest.importorskip("torchao.float8")
FP8 = fp8.Fp8()
# The first two feed-forward layers are wide enough to gain; the last one and attention's layers are not.
WIDE = ["model=llama_nano", "model.num_key_value_heads=2", "model.intermediate_size=1040"]
RUN = [*WIDE, EXPORT, "optimizer=adamw", "trainer.precision=fp8", "export.dtype=float32"]
KINDS = ("gate_proj", "up_proj")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fp8.recipe
    monkeypatch.setattr(fp8, "why_not", lambda trainer: None)
    monkeypatch.setattr(fp8, "recipe", lambda config: dataclasses.replace(real(config), emulate=True))
    tensorwise = float8._auto_filter_for_recipe("tensorwise", [])  # layers for rowwise are too wide for a test
    monkeypatch.setattr(float8, "_auto_filter_for_recipe", lambda recipe, names: tensorwise)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def fp8_config(*overrides: str) -> Config:
    config = check(compose(["trainer.precision=fp8", *overrides]))
    config.trainer.accelerator = "cuda"
    return config


def shapes(family: str, **changes: Any) -> Any:
    """Builds a model on the meta device, without weights."""
    with torch.device("meta"):
        return tiny(family, **changes)


LLAMA = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 8192}
TENSORWISE = {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # k_proj and v_proj have only 512 outputs
ROWWISE = {"gate_proj", "up_proj"}


@pytest.mark.parametrize(
    ("recipe", "kinds", "factor"),
    [("tensorwise", TENSORWISE, 6), ("rowwise", ROWWISE, 6), ("rowwise_with_gw_hp", ROWWISE, 4)],
)
def test_layers_that_gain_are_converted(recipe: str, kinds: set[str], factor: int, gpu: None) -> None:
    model = shapes("llama", **LLAMA)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    config = fp8_config(f"trainer.fp8_recipe={recipe}", "data.seq_len=256")
    FP8.change_model(model, config)
    assert {name.rpartition(".")[2] for name in fp8.converted(model)} == kinds
    assert len(fp8.converted(model)) == 2 * len(kinds)
    assert list(model.state_dict()) == keys
    assert all(parameter is before[name] for name, parameter in model.named_parameters())

    q, kv, inner = 2048 * 2048, 2048 * 512, 2048 * 8192
    inside = 2 * factor * (2 * inner if kinds == ROWWISE else 3 * inner + 2 * q)
    attention = 12 * 2 * 2048 * 256
    share = inside / (6 * (2 * (3 * inner + 2 * q + 2 * kv) + 2048 * VOCAB) + attention)
    words = fp8.describe(model, config)
    assert words.startswith(f"{recipe}, {2 * len(kinds)} of 14 linear layers of the blocks: ")
    assert f", {share:.0%} of the FLOPs; in bf16: " in words
    assert set(words.rpartition("in bf16: ")[2].partition(", where")[0].split(", ")) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} - kinds  # fmt: skip

    FP8.restore_model(model)
    assert not fp8.converted(model)
    assert {type(m) for m in fp8.linear_layers(model).values()} == {nn.Linear}
    assert flops.parameter_counts(model)[0] == sum(p.numel() for p in before.values())


def test_routers_and_adapters_are_left_in_bf16(gpu: None) -> None:
    experts = shapes("qwen3_moe", hidden_size=2048, num_attention_heads=16, head_dim=128, num_experts=2048)
    FP8.change_model(experts, fp8_config())
    assert {name.rpartition(".")[2] for name in fp8.converted(experts)} == {"q_proj", "o_proj"}

    adapted = shapes("llama", **LLAMA)
    get_peft_model(adapted, LoraConfig(r=2048, target_modules=["q_proj"]))
    FP8.change_model(adapted, fp8_config())
    assert {name.partition("layers.0.")[2] for name in fp8.converted(adapted) if "layers.0." in name} == {
        "self_attn.q_proj.base_layer", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}  # fmt: skip


def test_only_micro_batches_of_other_sizes_are_padded() -> None:
    padded = lambda *overrides: fp8.recipe(fp8_config(*overrides)).pad_inner_dim  # noqa: E731
    assert not padded("data.seq_len=128")
    assert padded("data.seq_len=120")
    assert padded("data.seq_len=128", "data.packing=off")
    assert padded("data.seq_len=128", "data.curriculum={by: length, start_length: 8, steps: 10}")
    assert padded("objective=sft", "data=chat_jsonl", "data.path=x", "model=pretrained", "model.name_or_path=x",
                  "data.seq_len=128")  # fmt: skip


def built(corpus: Path, folder: Path, *overrides: str) -> build.Run:
    config = check(compose([*TINY, *RUN, "data=text", f"data.path={corpus}", "trainer.max_steps=6",
                            "data.micro_batch_size=6", f"run.dir={folder}", *overrides]))  # fmt: skip
    devices.resolve_auto(config)
    return build.build(config, run_dir.open_run(config), Console(quiet=True), started=0.0)


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in rows(folder / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_run_is_a_plain_loop_over_torchaos_layers(recipe: str, corpus: Path, tmp_path: Path, emulated: None) -> None:
    plain = copy.deepcopy(built(corpus, tmp_path / "bf16", "trainer.precision=bf16-mixed").objective.model)
    start = {name: p.detach().clone() for name, p in plain.named_parameters()}
    options = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(plain, module_filter_fn=lambda _, name: name.endswith(KINDS), config=options)
    ours = built(corpus, tmp_path / "fp8", f"trainer.fp8_recipe={recipe}")
    ours.trainer.fit(ours.objective, datamodule=ours.datamodule)

    matrices, vectors = ([p for p in plain.parameters() if (p.ndim >= 2) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)
    steps = StepDataset(ours.corpus.train, seed=ours.config.seed, sizes=Stages.constant(6), micro_batch_size=6,
                        max_epochs=1, rank=0, world_size=1)  # fmt: skip
    expected = []
    for step, row in enumerate(r for r in rows(ours.dir.metrics) if "train/loss" in r):
        (batch,) = steps[step]["micro_batches"]
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(**batch).loss_sum / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = losses(tmp_path / "fp8")
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    # Sums depend on the CPU in their last bit. Rounding to 8 bits can turn that into a step of the 8-bit grid, and
    # AdamW's updates follow the gradient's sign. Measured over six steps: a relative error of 1.4e-5 in a loss, and of
    # 0.003 in a tensor's change since the start; with bf16 products the converted layers would be off by 0.07.
    assert found == pytest.approx(expected, rel=5e-5)
    trained = dict(ours.objective.model.named_parameters())
    for name, p in plain.named_parameters():
        assert (trained[name] - p).norm() < 0.01 * (p - start[name]).norm(), name


def test_losses_stay_near_those_of_bf16(corpus: Path, tmp_path: Path, emulated: None) -> None:
    for precision in ("bf16-mixed", "fp8"):
        run_ = built(corpus, tmp_path / precision, f"trainer.precision={precision}", "trainer.max_steps=20")
        run_.trainer.fit(run_.objective, datamodule=run_.datamodule)
    bf16, eight = (losses(tmp_path / name) for name in ("bf16-mixed", "fp8"))
    assert eight != bf16
    assert eight == pytest.approx(bf16, abs=0.02)
    assert eight[-1] < eight[0] - 0.5


def trained(corpus: Path, folder: Path, *overrides: str) -> Ended:
    ended = train_tiny(corpus, *RUN, "callbacks=ema", "callbacks.ema.decay=0.5", f"run.dir={folder}", *overrides)
    assert ended.code in (FINISHED, PREEMPTED), ended.err
    return ended


def test_resumed_bit_for_bit_and_exported_as_ever(corpus: Path, tmp_path: Path, emulated: None) -> None:
    ended = trained(corpus, tmp_path / "whole", "trainer.max_steps=4")
    words = " ".join(ended.out.replace("│", "").split())
    assert "fp8 tensorwise, 4 of 14 linear layers of the blocks: gate_proj, up_proj, " in words
    assert "in bf16: q_proj, k_proj, v_proj, o_proj, down_proj, where 8 bits gain nothing" in words

    assert trained(corpus, tmp_path / "parts", "trainer.max_steps=4", *stops_at(2)).code == PREEMPTED
    trained(corpus, tmp_path / "parts", "trainer.max_steps=4", "run.resume=auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (load_file(tmp_path / name / "export/model.safetensors") for name in ("whole", "parts"))
    assert {name.rpartition(".")[2] for name in whole} == {"weight"}
    assert all(torch.equal(whole[name], parts[name]) and whole[name].dtype == torch.float32 for name in whole)

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/export")
    assert {type(m) for m in fp8.linear_layers(exported).values()} == {nn.Linear}
    assert run("export", f"run_dir={tmp_path / 'whole'}", "export.dtype=float32").code == 0  # from the checkpoint
    again = load_file(tmp_path / "whole/export/model.safetensors")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert run("generate", f"run_dir={tmp_path / 'whole'}", "--prompt", "a", "generate.max_new_tokens=2").code == 0


REFUSED = {
    (
        "trainer.strategy=fsdp_tp",
    ): "trainer.strategy=fsdp_tp does not go with trainer.precision=fp8: they split layers in "
    "ways that fp8 does not support. Set trainer.strategy=fsdp or ddp, or trainer.precision=bf16-mixed",
    ("trainer.strategy=deepspeed",): "trainer.strategy=deepspeed does not go with",
    (
        "peft=qlora",
        "model=pretrained",
        "model.name_or_path=x",
        "data.seq_len=64",
    ): "peft.quantization=nf4 does not go with",
    (
        "objective=dpo",
        "data=preference_jsonl",
        "data.path=x",
        "data.seq_len=64",
    ): "objective.reference=auto does not go with",
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.items(), ids=lambda o: o[0] if isinstance(o, tuple) else "")
def test_what_was_never_tried_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as error:
        fp8_config(*overrides)
    assert words in str(error.value)


def test_a_machine_without_it_is_refused_before_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not read").mkdir()
    ended = train_tiny(tmp_path / "not read", *RUN, f"run.dir={tmp_path / 'run'}")
    assert ended.code == 2
    assert message(ended.err) == (
        "trainer.precision=fp8: a CPU does not multiply in 8 bits: set trainer.precision=bf16-mixed"
    )
    config = fp8_config()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(UserError, match=r"needs a GPU of compute capability 8\.9 or newer \(here 8\.0\): set "):
        FP8.check_machine(config)
    monkeypatch.setattr(fp8.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'torchao is not installed: pip install "lmtrain\[fp8\]", or set trainer'):
        FP8.check_machine(config)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "the blocks of GPT2LMHeadModel have no nn.Linear, which is what torchao converts"),
        ("llama", "none of the 14 linear layers of the blocks gains by it, of which the largest has 32 inputs and 48 "),
    ],
)
def test_a_model_that_gains_nothing_is_refused(family: str, words: str, gpu: None) -> None:
    with pytest.raises(UserError) as error:
        FP8.change_model(tiny(family), fp8_config())
    assert words in str(error.value)
    assert str(error.value).endswith(": set trainer.precision=bf16-mixed")
