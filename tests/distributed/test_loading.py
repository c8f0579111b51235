"""While a model loads, a node holds it about once in host memory, however many ranks it has."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from strategy_runs import DPO_LORA, LORA, SFT, Runs, names_of
from transformers import AutoModelForCausalLM

from chats import write_chats, write_rows
from support import TINY
from tiny_pretrained import save_pretrained

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
         "max_position_embeddings": 256}  # fmt: skip
COMMON = ["data.global_batch_size=2", "data.micro_batch_size=1", "trainer.max_steps=1", "trainer.devices=2",
          "trainer.strategy=fsdp", "run.allow_target=[mishaps]", "export.enabled=false", "data.seq_len=32",
          "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0",
          "trainer.save_every_n_steps=null"]  # fmt: skip
SCRATCH = ["data=text", "model=llama_nano", *(f"model.{key}={value}" for key, value in SHAPE.items())]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_pretrained(tmp_path_factory.mktemp("llama"), **SHAPE)
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    return folder


def ranks_of(pid: int) -> list[int]:
    """Returns the process ids of the ranks that a run has started, or of the run itself if it has none."""
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        found = []
    return found or [pid]


def anonymous_bytes(pid: int) -> int:
    """Returns a process's host memory that is not backed by files; shared pages count proportionally."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def most_while_loading(folder: Path, settings: list[str]) -> int:
    """Returns the most bytes that the ranks of a run held together before their first step."""
    marker = folder / "loaded"
    callback = f"callbacks.extra=[{{_target_: mishaps.WaitsWhenLoaded,marker: {marker}}}]"
    # Freed memory goes back to the system at once, as a real model's large tensors do: glibc keeps blocks under 32 MiB.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lmtrain.train", *names_of([*TINY, *COMMON, *settings]), callback]
    command.append(f"run.dir={folder / 'run'}")
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    most = 0
    while parent.poll() is None and not marker.exists():
        began = time.monotonic()
        held = sum(map(anonymous_bytes, ranks_of(parent.pid)))
        if time.monotonic() - began < 0.1:  # otherwise the ranks were measured at different moments
            most = max(most, held)
        time.sleep(0.005)
    most = max(most, sum(map(anonymous_bytes, ranks_of(parent.pid))))  # now they wait
    marker.unlink(missing_ok=True)
    output, _ = parent.communicate(timeout=600)
    assert parent.returncode == 0, output
    return most


@pytest.mark.parametrize(
    "task",
    [
        pytest.param("scratch", marks=pytest.mark.nightly),
        "pretrained",
        pytest.param("lora", marks=pytest.mark.nightly),  # the base is loaded as for qlora, without quantising
        "qlora",
    ],
)
def test_a_node_holds_the_model_once(task: str, llama: Path, corpus: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs /proc/PID/smaps_rollup")
    text = f"data.path={corpus}"
    small = save_pretrained(tmp_path / "small_llama", **{**SHAPE, "hidden_size": 24, "intermediate_size": 32})
    chats = write_chats(tmp_path / "chats.jsonl", 8)
    sft = [
        "objective=sft",
        "data=chat_jsonl",
        "data.chat_template=vicuna",
        f"data.path={chats}",
        "peft=lora",
        "data.seq_len=256",
    ]
    runs = {"scratch": ([*SCRATCH, text], [*SCRATCH, text, "model.hidden_size=24", "model.intermediate_size=32"])}
    for name, data in (("pretrained", ["data=text", text]), ("lora", sft), ("qlora", [*sft, "peft=qlora"])):
        runs[name] = tuple([*data, "model=pretrained", f"model.name_or_path={path}"] for path in (llama, small))  # type: ignore[assignment]
    most = []
    for name, settings in zip(("large", "small"), runs[task], strict=True):
        (tmp_path / name).mkdir()
        most.append(most_while_loading(tmp_path / name, settings))
    weights = 4 * sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(llama).parameters())
    assert weights > 250e6
    print(f"{task}: {(most[0] - most[1]) / weights:.2f} times the model")
    # Each rank reads its rows of a pretrained model and holds nothing but its shards. 4-bit weights take an eighth.
    assert most[0] - most[1] < {"pretrained": 1.25, "qlora": 1.0}.get(task, 1.5) * weights


def test_ranks_that_resume_do_not_each_read_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """Under ddp a rank holds weights and two moments; a second copy of all three while loading would make that six."""
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs /proc/PID/smaps_rollup")
    most = []
    for name, shape in (("large", []), ("small", ["model.hidden_size=24", "model.intermediate_size=32"])):
        (tmp_path / name).mkdir()
        settings = [*SCRATCH, f"data.path={corpus}", *shape, "optimizer=adamw", "trainer.strategy=ddp"]
        most_while_loading(tmp_path / name, settings)
        most.append(most_while_loading(tmp_path / name, [*settings, "trainer.max_steps=2", "run.resume=auto"]))
    weights = next((tmp_path / "large" / "run" / "checkpoints").glob("step_*1/model.pt")).stat().st_size
    print(f"resumed on two ranks: {(most[0] - most[1]) / weights:.2f} times the model")
    assert most[0] - most[1] < 2 * 3.5 * weights


def test_every_kind_of_model_is_loaded_as_by_one_process(tmp_path: Path) -> None:
    """Rank 1 builds each model without weights: growing embeddings, tied ones, and adapters of several kinds."""
    r = Runs(tmp_path)
    sft = [*SFT, f"data.path={write_chats(tmp_path / 'chats.jsonl', 40)}", "model=pretrained"]
    untied, tied = (
        f"model.name_or_path={save_pretrained(tmp_path / name, max_position_embeddings=512, **options)}"
        for name, options in (("untied", {}), ("tied", {"tie_word_embeddings": True}))
    )
    lora = [*LORA, sft[-2], untied]
    r.one("first", *lora, "trainer.max_steps=2")
    tokens = 'tokenizer.add_tokens=["<|a|>","<|b|>"]'
    tasks = {
        "plain": [*sft, untied],  # under fsdp both ranks read their rows of the files, as for plain_tied and gpt2
        "plain_tied": [*sft, tied],
        "grown": [*sft, untied, tokens],
        "grown_tied": [*sft, tied, tokens],
        "lora_tokens": [*lora, tokens],
        "lora_embeddings": [*lora, tied, "peft.modules_to_save=[embed_tokens]"],
        "dora": [*lora, "peft.use_dora=true"],
        "pissa": [*lora, "peft.init_weights=pissa"],
        "continued": [*lora, f"peft.adapter={r.folder / 'first' / 'export'}"],
        "gpt2": [*sft, f"model.name_or_path={save_pretrained(tmp_path / 'gpt2_base', 'gpt2', n_positions=512)}"],
        "dpo_continued": [*DPO_LORA, f"data.path={write_rows(tmp_path / 'pairs.jsonl', 'preference_jsonl', 40)}",
                          untied, f"peft.adapter={r.folder / 'first' / 'export'}"],
    }  # fmt: skip
    for task, settings in tasks.items():
        short = [s for s in settings if s != "tokenizer=bytes"]  # the model's own tokenizer is the same
        short += ["trainer.max_steps=4", "trainer.val_check_interval=4"]
        r.one(task, *short)
        for strategy in ("ddp", "fsdp"):
            r.two(f"{task}-{strategy}", *short, f"trainer.strategy={strategy}")
    r.launch()
    for task in tasks:
        for strategy in ("ddp", "fsdp"):
            r.compare(f"{task}-{strategy}", task)
