"""`lmtrain.estimate`: its numbers are what a run needs, its advice fits, and it allocates nothing itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import memory as benchmark
import pytest
from transformers import AutoModelForCausalLM

from inprocess import message, run
from lmtrain.config import compose as rules
from lmtrain.planning import estimation
from lmtrain.terminal import time_in_words
from support import thinned
from tiny_pretrained import save_pretrained

LARGE = [
    "model=llama_7b",
    "tokenizer=gpt2",
    "trainer.devices=8",
    "data.global_batch_size=64",
    "data.micro_batch_size=8",
    "optimizer=adamw",
]


# A child's ru_maxrss starts at its parent's; VmHWM is the child's own.
ESTIMATE = """
import sys
from pathlib import Path
from lmtrain import estimate

code = estimate.main(sys.argv[1:])
print("KiB at most:", Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from Linux's /proc")
def test_seven_billion_parameters_in_little_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ESTIMATE, *LARGE, "estimate.device=h100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("KiB at most: ")[1]) < 2**20
    assert "6,888,361,984 parameters" in done.stdout
    assert "does not fit" in done.stdout
    for strategy in ("ddp", "fsdp", "fsdp_tp", "deepspeed 2", "deepspeed 3"):
        assert re.search(rf"^ {strategy} .*(fits|too large)", done.stdout, flags=re.MULTILINE), strategy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "mib"), [("16", 256), ("h100", 1280), ("h200", 2048)])
def test_larger_cards_hold_more_logits(device: str, mib: int) -> None:
    """Logits are counted as a run on that card would hold them; the card needn't be in this machine."""
    config = rules.check(rules.compose([*LARGE, "data.micro_batch_size=32", f"estimate.device={device}"]))
    estimation.resolve(config)
    assert estimation.memory(estimation.build(config), config)["logits"] == mib * 2**20


@pytest.mark.parametrize("device", thinned(["h100", "40", "24"], 3))
def test_what_is_advised_fits(device: str) -> None:
    """The printed overrides fit when they are typed: at most three ways, the fastest first."""
    model = [
        "model=gpt_xl",
        "tokenizer=gpt2",
        "data.global_batch_size=64",
        "data.micro_batch_size=64",
        "optimizer=adamw",
    ]
    ended = run("estimate", *model, f"estimate.device={device}", "trainer.devices=1")
    assert ended.code == 0, ended.err
    ways = re.findall(r"^  (\S.*?)   \(a step takes ([\d.]+)", ended.out, flags=re.MULTILINE)
    assert 1 <= len(ways) <= 3
    assert [float(slower) for _, slower in ways] == sorted(float(slower) for _, slower in ways)
    for overrides, _ in ways:
        again = run("estimate", *model, f"estimate.device={device}", "trainer.devices=1", *overrides.split())
        assert again.code == 0, again.err
        assert "\nfits: " in again.out


def test_time_and_what_is_refused() -> None:
    steps = ["trainer.max_steps=1000", "data.global_batch_size=8", "data.seq_len=256"]
    ended = run("estimate", *steps, "estimate.tokens_per_s=1000", "estimate.device=24")
    assert f"{time_in_words(8 * 256)} (estimate.tokens_per_s)" in ended.out
    assert "h100" in message(run("estimate", "estimate.device=abacus").err)
    refused = run("estimate", "trainer.devices=3", "data.global_batch_size=8", "estimate.device=24")
    assert refused.code == 2
    assert "does not split" in message(refused.err)
    assert "set model.vocab_size" in message(run("estimate", "tokenizer=char", "estimate.device=24").err)


def test_a_prompt_is_read_once_for_its_completions() -> None:
    """Of GRPO a row is a prompt with group_size completions, each with a prompt of its own only in padded rows."""
    words = ["objective=grpo", "data=prompts_jsonl", "data.path=p.jsonl", "tokenizer=bytes", "data.seq_len=64",
             "data.max_prompt_length=50", "objective.group_size=4", "objective.max_new_tokens=10",
             "trainer.accelerator=cpu", "data.global_batch_size=8", "data.micro_batch_size=2",
             "trainer.max_steps=3"]  # fmt: skip
    activations = {}
    for attention, row in (("auto", 50 + 4 * 10), ("sdpa", 4 * (50 + 10))):
        config = rules.check(rules.compose([*words, f"model.attention={attention}"]))
        estimation.resolve(config)
        model = estimation.build(config)
        facts = dict(estimation.rows(model, config, estimation.device_of(config)))
        assert facts["step"] == f"8 rows x {row} = {8 * row:,} tokens"
        activations[row] = estimation.memory(model, config)["activations"]
    assert activations[240] / activations[90] == 240 / 90


def test_it_counts_the_checkpoints_that_are_kept_for_good() -> None:
    words = ["model=gpt_small", "tokenizer=gpt2", "trainer.accelerator=cpu", "trainer.max_steps=1000",
             "trainer.save_every_n_steps=40", "checkpoint.keep_every=100", "checkpoint.keep_last=2",
             "checkpoint.keep_best=1"]  # fmt: skip
    done = run("estimate", *words)
    assert "up to 8 kept" in done.out, done.err  # of steps 200, 400, ..., 1000 besides the last two and the best


def test_it_counts_what_the_plan_of_a_run_counts(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    common = [
        "data=text",
        f"data.path={corpus}",
        "tokenizer=bytes",
        "trainer.precision=32-true",
        "trainer.accelerator=cpu",
        "model.num_hidden_layers=2",
        "data.global_batch_size=4",
        "data.micro_batch_size=4",
    ]
    quick = ["trainer.max_steps=1", "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0"]
    done = run("train", *common, *quick, "logger=none", "export.enabled=false", f"run.dir={tmp_path / 'run'}")
    planned = re.search(r"memory +about ([\d.]+ [GM]iB)", done.out)
    assert planned is not None, done.out + done.err
    config = rules.check(rules.compose(common))
    estimation.resolve(config)
    size = sum(estimation.memory(estimation.build(config), config).values())
    from lmtrain.run.plan_costs import gib

    assert gib(size) == planned[1]


def test_a_base_of_4_bits_is_counted_as_it_lies(tmp_path: Path) -> None:
    """Weights take half a byte each plus scales, LoRA fp32; two devices have half each, and what is gathered."""
    pytest.importorskip("bitsandbytes")
    base = save_pretrained(tmp_path / "base", hidden_size=64, intermediate_size=128)
    config = rules.check(
        rules.compose(
            ["model=pretrained", f"model.name_or_path={base}", "tokenizer=bytes", "peft=qlora", "peft.r=4",
             "optimizer=adamw", "trainer.strategy=fsdp", "trainer.devices=2", "trainer.precision=32-true",
             "trainer.accelerator=cpu", "data.seq_len=32"]
        )
    )  # fmt: skip
    estimation.resolve(config)
    found = estimation.memory(estimation.build(config), config)
    weights = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    lora = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))  # rank 4, on q and o, k and v, and the three of the MLP
    block = weights // 2 + weights // 64 + 4 * 7 + 4 * (lora + 2 * 64)
    words, norm = (
        4 * 257 * 64,
        4 * 64,
    )  # embeddings are gathered for the lookup only, the output layer together with two blocks
    assert found["parameters"] == (2 * block + 2 * words + norm) // 2 + norm + words + 2 * block
    assert found["optimizer"] == 2 * lora * 8 // 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), [("moe", "ddp"), ("qwen3", "fsdp"), ("memory", "zero3")])
def test_within_15_percent_of_what_a_run_holds(model: str, strategy: str, tmp_path: Path) -> None:
    """The estimate is within 15 % of the kernel's peak for a rank, minus the peak with a model of almost no size."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the kernel's peak of a process can't be asked again: {error}")
    (tmp_path / "text.txt").write_text("What one device holds, and how it falls with their number. " * 500)
    (found,) = benchmark.compare(tmp_path, [model], strategy, 2, rows=2, seq_len=128)
    config = rules.check(
        rules.compose(benchmark.settings(tmp_path, strategy, 2, benchmark.MODELS[model].large, 2, 128))
    )
    estimation.resolve(config)
    said = sum(estimation.memory(estimation.build(config), config).values()) / 2**20
    print(f"{model}, {strategy} x 2: estimated {said:,.0f} MiB, measured {found.measured_mib:,.0f} MiB")
    assert said == pytest.approx(found.measured_mib, rel=0.15)


def test_a_teacher_counts_with_all_its_weights(tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(save_pretrained(tmp_path / "teacher", "llama", hidden_size=96))
    words = ["objective=distill", f"objective.teacher={tmp_path / 'teacher'}", "model=llama_nano", "data=chat_jsonl",
             "tokenizer=hub", f"tokenizer.name_or_path={tmp_path / 'teacher'}", "data.seq_len=32"]  # fmt: skip
    config = rules.check(rules.compose(words))
    estimation.resolve(config)
    parts = estimation.memory(estimation.build(config), config)
    assert parts["other models"] == 4 * sum(p.numel() for p in teacher.parameters())
